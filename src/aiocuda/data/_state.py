"""Which batches of an epoch were delivered: `Progress` counts them, `LoaderState` is the position as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from ..errors import InvalidArgumentError, InvalidTypeError
from ._options import LoaderOptions
from ._sampler import EMPTY_DIGEST, SampledOrder
from ._sources import Order, Shuffle

__all__ = ["LoaderState", "Progress", "merged"]

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
    sampler
        The digest of the indices of a sampler before the position; None without one.
    """

    epoch: int = 0
    position: int = 0
    batches: int = 0
    ahead: tuple[int, ...] = ()
    samples: int | None = None
    shuffle: tuple[int, int | None] | None = None
    sampler: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary for `json.dumps`."""
        found = {
            "version": _VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "batches": self.batches,
            "ahead": _ranges(self.ahead),
            "samples": self.samples,
            "shuffle": None if self.shuffle is None else list(self.shuffle),
        }
        return found if self.sampler is None else {**found, "sampler": self.sampler}

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
            sampler = state.get("sampler")  # only a state of a sampler has it
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the loader's state {dict(state)!r} is incomplete: {_CURE}") from error
        ends = [each for one in ranges for each in one]
        for number in (epoch, position, batches, *ends, *(each for each in (samples, window) if each is not None)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InvalidArgumentError(f"the loader's state has {number!r} where a count belongs: {_CURE}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidArgumentError(f"the loader's state has the seed {seed!r}: {_CURE}")
        if not isinstance(sampler, str | None):
            raise InvalidArgumentError(f"the loader's state has the digest {sampler!r}: {_CURE}")
        ahead = tuple(number for begin, end in ranges for number in range(begin, end))
        return cls(epoch, position, batches, ahead, samples, None if shuffle is None else (seed, window), sampler)

    def check_source(self, options: LoaderOptions) -> None:
        """Raise `InvalidArgumentError` unless a loader with these options can go on at the position."""
        own, sampler = _key_of(options.shuffle), None if options.sampler is None else EMPTY_DIGEST
        if self.samples != options.samples:
            raise InvalidArgumentError(
                f"this state belongs to a source of {_count(self.samples)}, and the loader's has "
                f"{_count(options.samples)}: the position would mean other samples",
                samples=self.samples,
            )
        if sampler is None and self.samples is not None and self.position > self.samples:
            raise InvalidArgumentError(
                f"this state has the position {self.position}, and an epoch of the source ends at {self.samples}: "
                f"{_CURE}",
                position=self.position,
            )
        if self.shuffle != own or (self.sampler is None) != (sampler is None):
            made = "without shuffle" if self.shuffle is None else f"with shuffle={_order(self.shuffle)}"
            made = made if self.sampler is None else "with its sampler="
            raise InvalidArgumentError(
                f"this state belongs to {_order(self.shuffle, self.sampler)}, and the loader has "
                f"{_order(own, sampler)}: make the loader {made}",
                shuffle=self.shuffle,
            )
        if self.ahead and self.batches * options.batch_size * options.shard[1] != self.position:
            raise InvalidArgumentError(
                "this state was taken with ordered=False, and batches after the position were delivered, too: it can "
                "be loaded with the same batch size and world size only",
                ahead=self.ahead,
            )


class Progress:
    """Which epoch a loader is in, and which of its batches were delivered.

    Batches may be delivered out of order. The position is that after the longest sequence of delivered batches; those
    after it are counted one by one.
    """

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._epoch = 0  # that runs, or ran last, or begins next
        self._position = 0
        self._batches = 0
        self._ends: dict[int, int] = {}  # the position after each batch that was delivered ahead, by its number
        self._ahead: set[int] = set()  # numbers of those that a loaded state has named: their ends are not known
        #: Before the newest batch: its number, the position, the batches, and the ends of those that it has counted.
        self._before: tuple[int, int, int, dict[int, int | None]] = (0, 0, 0, {})
        self._is_loaded = False  # a state was loaded, and its epoch has not begun
        self._has_begun = False
        self._digest = EMPTY_DIGEST  # of the sampler's indices before the position, while `_sampled` is None
        self._sampled: SampledOrder | None = None  # of the epoch that runs, or ran last

    def coming(self, number: int | None) -> tuple[int, int]:
        """Return the number of the epoch that begins, by default of the next one, and the position where it begins."""
        if number is None:
            number = self._epoch + (self._has_begun and not self._is_loaded)
        return number, self._position if self._is_loaded and number == self._epoch else 0

    def begin(self, number: int, sampled: SampledOrder | None = None) -> tuple[Order, frozenset[int]]:
        """Begin an epoch. Return its order, and the batches that it leaves out.

        Raises
        ------
        InvalidArgumentError
            The loaded state belongs to another order of the sampler.
        """
        resumes = self._is_loaded and number == self._epoch
        if resumes and sampled is not None and sampled.digest(self._position) != self._digest:
            raise InvalidArgumentError(
                f"sampler= gives other indices for the {self._position} samples of epoch {number} that were delivered "
                "than it gave when the state was saved: seed it by the epoch, for example in set_epoch(n)",
                epoch=number,
            )
        if not resumes:
            self._set(LoaderState(epoch=number))
        self._is_loaded = False
        self._has_begun = True
        self._sampled = sampled
        order = self._options.order(self._epoch, self._position, self._batches, sampled)
        return order, frozenset(self._ahead)

    def delivered(self, number: int, end: int) -> None:
        """Count a delivered batch."""
        counted: dict[int, int | None] = {}
        self._before = number, self._position, self._batches, counted
        self._ends[number] = end
        size = self._options.batch_size * self._options.shard[1]
        while self._batches in self._ends or self._batches in self._ahead:
            counted[self._batches] = known = self._ends.pop(self._batches, None)
            self._ahead.discard(self._batches)
            self._position = self._position + size if known is None else known
            self._batches += 1

    def take_back(self) -> None:
        """The newest batch did not reach the program: it is delivered again."""
        number, self._position, self._batches, counted = self._before
        for each, end in counted.items():
            if end is None:
                self._ahead.add(each)
            else:
                self._ends[each] = end
        del self._ends[number]

    def end_epoch(self) -> None:
        """The epoch has ended: the next one begins at its start."""
        self._set(LoaderState(epoch=self._epoch + 1))
        self._has_begun = False

    def state(self) -> LoaderState:
        """Return the state after the delivered batches."""
        digest = self._digest if self._sampled is None else self._sampled.digest(self._position)
        return LoaderState(
            epoch=self._epoch,
            position=self._position,
            batches=self._batches,
            ahead=tuple(sorted({*self._ends, *self._ahead})),
            samples=self._options.samples,
            shuffle=_key_of(self._options.shuffle),
            sampler=None if self._options.sampler is None else digest,
        )

    def load(self, state: LoaderState) -> None:
        """Go on after the batches of a state."""
        state.check_source(self._options)
        self._set(state)
        self._is_loaded = True

    def _set(self, state: LoaderState) -> None:
        self._epoch, self._position, self._batches = state.epoch, state.position, state.batches
        self._ends.clear()
        self._ahead = set(state.ahead)
        self._digest, self._sampled = state.sampler or EMPTY_DIGEST, None


def merged(states: Iterable[Any]) -> LoaderState:
    """Return the one state of all ranks.

    Raises
    ------
    InvalidArgumentError
        There is none, or they are not equal: the ranks have delivered different numbers of batches, or have different
        sources or orders.
    InvalidTypeError
        It is one state, and no list of them.
    """
    if isinstance(states, Mapping):
        raise InvalidTypeError("merge_state_dicts takes the states of all ranks, and this is one: pass a list")
    every = [LoaderState.of(state) for state in states]
    if not every:
        raise InvalidArgumentError("there is no state to merge: pass the state of each rank")
    for rank, state in enumerate(every):
        if state != every[0]:
            raise InvalidArgumentError(_difference(every[0], rank, state), rank=rank)
    return every[0]


def _difference(first: LoaderState, rank: int, state: LoaderState) -> str:
    """Return what is different in the states of rank 0 and another rank, with the cure."""
    who = f"ranks 0 and {rank}"
    if first.samples != state.samples:
        return (
            f"the sources of {who} have {_count(first.samples)} and {_count(state.samples)}: give every rank the whole "
            "source, since shard= takes each rank's samples from it"
        )
    orders = _order(first.shuffle, first.sampler), _order(state.shuffle, state.sampler)
    if orders[0] != orders[1]:
        return (
            f"the orders of {who} are {orders[0]} and {orders[1]}: give every rank the same, since shard= takes each "
            "rank's samples from the order of all"
        )
    if (first.epoch, first.position) == (state.epoch, state.position) and first.sampler != state.sampler:
        return (
            f"the samplers of {who} have given different orders for epoch {state.epoch}: seed them alike, since shard= "
            "takes each rank's samples from the order of all"
        )
    return (
        f"the states of {who} differ: epoch {first.epoch}, position {first.position} after {first.batches} batches, "
        f"and epoch {state.epoch}, position {state.position} after {state.batches}; save the states of all ranks after "
        "the same batch"
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


def _key_of(shuffle: Shuffle | None) -> tuple[int, int | None] | None:
    """Return what a state says of an order: `LoaderState.shuffle`."""
    return None if shuffle is None else (shuffle.seed, shuffle.window)


def _count(samples: int | None) -> str:
    return "unknown length" if samples is None else f"{samples} samples"


def _order(shuffle: tuple[int, int | None] | None, sampler: str | None = None) -> str:
    if sampler is not None:
        return "the order of a sampler"
    return "the order of the source" if shuffle is None else f"Shuffle(seed={shuffle[0]}, window={shuffle[1]})"
