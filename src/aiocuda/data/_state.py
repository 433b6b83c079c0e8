"""The state of a loader: a position in the order of an epoch, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from ..errors import InvalidArgumentError, InvalidTypeError
from ._order import Shuffle

__all__ = ["LoaderState", "merged"]

_VERSION = 1
_CURE = "it must come from state_dict() of a loader of this version of aiocuda"


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderState:
    """A position in the global order of an epoch: all batches before it were delivered.

    Attributes
    ----------
    epoch
    position
        The number of samples, of all ranks together, that were delivered.
    batches
        The number of batches that each rank has delivered in this epoch.
    ahead
        Numbers of batches after the position that were delivered, too: ``ordered=False`` delivers them as they come.
    samples
        The number of samples of the source; None for a stream.
    shuffle
        (seed, window) of the order; None without one.
    """

    epoch: int = 0
    position: int = 0
    batches: int = 0
    ahead: tuple[int, ...] = ()
    samples: int | None = None
    shuffle: tuple[int, int | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary for `json.dumps`."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "batches": self.batches,
            "ahead": _ranges(self.ahead),
            "samples": self.samples,
            "shuffle": None if self.shuffle is None else list(self.shuffle),
        }

    @classmethod
    def of(cls, state: Any) -> Self:
        """Return the state of a dictionary. Raise if it is none that `to_dict` has returned."""
        if not isinstance(state, Mapping):
            raise InvalidTypeError(f"the state of a loader is a dictionary, not {type(state).__name__}: {_CURE}")
        if state.get("version") != _VERSION:
            raise InvalidArgumentError(f"a loader's state of version {state.get('version')!r}: {_CURE}")
        try:
            epoch, position, batches = state["epoch"], state["position"], state["batches"]
            ranges = [(begin, end) for begin, end in state["ahead"]]
            samples, shuffle = state["samples"], state["shuffle"]
            seed, window = (0, None) if shuffle is None else shuffle
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the loader's state {dict(state)!r} is incomplete: {_CURE}") from error
        ends = [each for one in ranges for each in one]
        for number in (epoch, position, batches, *ends, *(each for each in (samples, window) if each is not None)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InvalidArgumentError(f"the loader's state has {number!r} where a count belongs: {_CURE}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidArgumentError(f"the loader's state has the seed {seed!r}: {_CURE}")
        ahead = tuple(number for begin, end in ranges for number in range(begin, end))
        return cls(epoch, position, batches, ahead, samples, None if shuffle is None else (seed, window))

    def check_source(self, samples: int | None, shuffle: Shuffle | None, world: int, batch_size: int) -> None:
        """Raise `InvalidArgumentError` unless a loader over this source can go on at the position."""
        own = None if shuffle is None else (shuffle.seed, shuffle.window)
        if self.samples != samples:
            raise InvalidArgumentError(
                f"this state belongs to a source of {_count(self.samples)}, and the loader's has {_count(samples)}: "
                "the position would mean other samples",
                samples=self.samples,
            )
        if self.shuffle != own:
            made = "without shuffle" if self.shuffle is None else f"with shuffle={_order(self.shuffle)}"
            raise InvalidArgumentError(
                f"this state belongs to {_order(self.shuffle)}, and the loader has {_order(own)}: "
                f"make the loader {made}",
                shuffle=self.shuffle,
            )
        if self.ahead and self.batches * batch_size * world != self.position:
            raise InvalidArgumentError(
                "this state was taken with ordered=False, and batches after the position were delivered, too: it can "
                "be loaded with the same batch size and world size only",
                ahead=self.ahead,
            )


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as ranges ``[begin, end]``: while one batch is late, many others may be delivered."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] = number + 1
        else:
            found.append([number, number + 1])
    return found


def merged(states: Iterable[Any]) -> LoaderState:
    """Return the one state of all ranks.

    Raises
    ------
    InvalidArgumentError
        There is none, or they are not equal: the ranks have delivered different numbers of batches.
    """
    every = [LoaderState.of(state) for state in states]
    if not every:
        raise InvalidArgumentError("there is no state to merge: pass the state of each rank")
    for rank, state in enumerate(every):
        if state != every[0]:
            raise InvalidArgumentError(
                f"the states of ranks 0 and {rank} differ: epoch {every[0].epoch}, position {every[0].position} and "
                f"epoch {state.epoch}, position {state.position}; save the states of all ranks after the same batch",
                rank=rank,
            )
    return every[0]


def _count(samples: int | None) -> str:
    return "unknown length" if samples is None else f"{samples} samples"


def _order(shuffle: tuple[int, int | None] | None) -> str:
    return "the order of the source" if shuffle is None else f"Shuffle(seed={shuffle[0]}, window={shuffle[1]})"
