"""Injected failures, by plan or by seed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from ...errors import InvalidArgumentError, InvalidTypeError
from .._codes import FAULTS
from ._choices import SeededChoices

__all__ = ["REFUSABLE", "Upset", "UpsetKind", "Upsets"]

UpsetKind: TypeAlias = Literal["refuse", "fault", "slow", "lose", "delay", "repeat"]

#: Codes with which the seed refuses a call: faults, after which no call succeeds, and errors that end only that call.
_STICKY = (700, 719, 716, 999)
_CLEAN = (1, 2, 400, 801, 802)

#: The methods that may be refused. Methods that release something never are.
REFUSABLE = frozenset(
    (
        *("advise", "allocate", "notifier", "compile", "copy", "copy_peer", "device_count", "device_open", "download"),
        *("event_create", "event_elapsed_ms", "event_query", "event_record", "fill", "launch", "launcher", "load"),
        *("graph_build", "graph_launch", "graph_update", "managed_allocate", "managed_attributes", "memory_info"),
        *("pin", "pinned_allocate", "pool_reserved", "pool_trim", "prefetch"),
        *("priority_range", "ring", "stream_capturing", "stream_create", "stream_default", "stream_handle"),
        *("stream_has_handle", "stream_import", "stream_priority", "stream_query", "stream_synchronize"),
        *("stream_wait", "upload"),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Upset:
    """One injected failure of the simulated driver. It happens once.

    ==========  ========================================================================================
    ``refuse``  the ``nth`` call of the method ``verb`` (of any method if that is None) fails with
                ``code``. A code that is a fault (700, 719 …) is latched, and every later call fails
                with it; 2 is out of memory
    ``fault``   the ``nth`` command to end faults with ``code``; the next query detects it
    ``slow``    the ``nth`` command takes ``seconds`` more
    ``lose``    the ``nth`` notification never arrives
    ``delay``   the ``nth`` notification arrives ``seconds`` later
    ``repeat``  the ``nth`` notification arrives twice
    ==========  ========================================================================================

    Parameters
    ----------
    kind
        The kind of failure, as in the table.
    nth
        The call, command or notification that fails, counted from 1.
    verb
        For ``refuse``: a method of `aiocuda.driver.protocol.Driver`, such as ``"event_record"``. The call of a launcher
        is ``"launch"``, that of a notifier ``"ring"``. Methods that release something are never refused.
    code
        A ``CUresult``.
    seconds
        For ``slow`` and ``delay``.
    """

    kind: UpsetKind
    nth: int = 1
    verb: str | None = None
    code: int = 700
    seconds: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(UpsetKind):
            raise InvalidArgumentError(f"no upset is called {self.kind!r}; there are {', '.join(get_args(UpsetKind))}")
        for name, value, kinds in (
            ("nth", self.nth, int),
            ("code", self.code, int),
            ("seconds", self.seconds, (int, float)),
        ):
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InvalidTypeError(f"{name}={value!r} must be {'a number' if name == 'seconds' else 'an int'}")
        if self.nth < 1 or self.code < 1 or not self.seconds >= 0:
            raise InvalidArgumentError(f"{self!r}: nth and code are at least 1, and seconds at least 0")
        if self.verb is not None and self.kind != "refuse":
            raise InvalidArgumentError(f"verb={self.verb!r} is for 'refuse'; {self.kind!r} takes no method name")
        if self.verb is not None and not (isinstance(self.verb, str) and self.verb in REFUSABLE):
            raise InvalidArgumentError(f"{self.verb!r} is not a method that can be refused; use {sorted(REFUSABLE)}")
        if self.kind == "fault" and self.code not in FAULTS:
            raise InvalidArgumentError(f"code={self.code} is no fault of a command; use one of {sorted(FAULTS)}")


class Upsets:
    """The planned upsets of one driver, with the number of events until each is due."""

    __slots__ = ("_left", "happened")

    def __init__(self, planned: Iterable[Upset] = ()) -> None:
        if not isinstance(planned, Iterable):
            raise InvalidTypeError(f"upsets are a sequence of Upset, not {planned!r}")
        #: By kind: each upset, and the number of matching calls, commands or notifications until it is due.
        self._left: dict[UpsetKind, list[tuple[Upset, list[int]]]] = {}
        for upset in planned:
            if not isinstance(upset, Upset):
                raise InvalidTypeError(f"upsets are a sequence of Upset, and one of them is {upset!r}")
            self._left.setdefault(upset.kind, []).append((upset, [upset.nth]))
        #: The number of upsets that have happened, by kind and code.
        self.happened: Counter[str] = Counter()

    @property
    def planned(self) -> list[Upset]:
        """The upsets that have not happened yet."""
        return [upset for planned in self._left.values() for upset, _ in planned]

    @classmethod
    def drawn(cls, choices: SeededChoices) -> Upsets:
        """Return upsets chosen by the seed: none in half of all cases, else one to three."""
        planned: list[Upset] = []
        if choices.once_in(2):
            planned += [_drawn(choices) for _ in range(1 + choices.below(3))]
        return cls(planned)

    def due(self, kind: UpsetKind, verb: str | None = None) -> Upset | None:
        """Count a call, command or notification. Return the upset that is due at it, or None."""
        planned = self._left.get(kind)
        if not planned:
            return None
        due: Upset | None = None
        for upset, left in planned:
            if upset.verb is None or upset.verb == verb:
                left[0] -= 1
                if left[0] == 0 and due is None:
                    due = upset
        if due is not None:
            self._left[kind] = [each for each in planned if each[1][0] > 0]
            self.happened[f"{kind} {due.code}" if kind in ("refuse", "fault") else kind] += 1
        return due


def _drawn(choices: SeededChoices) -> Upset:
    kind: UpsetKind = ("refuse", "refuse", "fault", "slow", "lose", "delay", "repeat")[choices.below(7)]
    if kind == "refuse":
        if choices.below(4) == 0:
            return Upset("refuse", 1 + choices.below(400), code=_STICKY[choices.below(len(_STICKY))])
        verb = ("allocate", "upload", "download", "copy", "fill", "launch", "event_record", "stream_wait", "ring")[
            choices.below(9)
        ]
        return Upset("refuse", 1 + choices.below(12), verb, _CLEAN[choices.below(len(_CLEAN))])
    if kind == "fault":
        return Upset("fault", 1 + choices.below(60), code=_STICKY[choices.below(len(_STICKY))])
    return Upset(kind, 1 + choices.below(20), seconds=choices.between(100_000, 200_000_000) / 1e9)
