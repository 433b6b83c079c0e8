"""What is to go wrong, by plan or by seed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from ...errors import InvalidArgumentError, InvalidTypeError
from .._codes import FAULTS
from ._chance import Chance

__all__ = ["VERBS", "Upset", "UpsetKind", "Upsets"]

UpsetKind: TypeAlias = Literal["refuse", "fault", "slow", "lose", "delay", "repeat"]

#: What a call may be refused with: sticky ones, which end everything, and clean ones.
_STICKY = (700, 719, 716, 999)
_CLEAN = (1, 2, 400, 801, 802)

#: What may be refused: every verb that asks CUDA for something. What gives something back never is.
VERBS = frozenset(
    (
        *("advise", "allocate", "notifier", "compile", "copy", "copy_peer", "device_count", "device_open", "download"),
        *("event_create", "event_elapsed_ms", "event_query", "event_record", "fill", "launch", "launcher", "load"),
        *("graph_build", "graph_launch", "graph_update"),
        *(
            "managed_allocate",
            "managed_attributes",
            "memory_info",
            "pin",
            "pinned_allocate",
            "pool_reserved",
            "pool_trim",
            "prefetch",
        ),
        *("priority_range", "ring", "stream_capturing", "stream_create", "stream_default", "stream_handle"),
        *("stream_has_handle", "stream_import", "stream_priority", "stream_query", "stream_synchronize"),
        *("stream_wait", "upload"),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Upset:
    """One thing that goes wrong, once.

    ==========  ========================================================================================
    ``refuse``  the ``nth`` call of ``verb`` (of any, where that is None) answers ``code``. A code that
                is a fault (700, 719 …) is latched, and every later call answers the same; 2 is out of
                memory
    ``fault``   the ``nth`` command to end faults with ``code``, seen by nobody before the next query
    ``slow``    the ``nth`` command takes ``seconds`` more
    ``lose``    the ``nth`` notification never comes
    ``delay``   the ``nth`` notification comes ``seconds`` later
    ``repeat``  the ``nth`` notification comes twice
    ==========  ========================================================================================

    Parameters
    ----------
    kind
        What goes wrong.
    nth
        When, counted from 1.
    verb
        A verb of the driver, as in `aiocuda.driver.protocol`: ``"event_record"``; for ``refuse``. A launcher's call is
        ``"launch"``, a notifier's is ``"ring"``. What gives something back is never refused.
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
            raise InvalidArgumentError(f"verb={self.verb!r} is for 'refuse'; {self.kind!r} happens to no verb")
        if self.verb is not None and not (isinstance(self.verb, str) and self.verb in VERBS):
            raise InvalidArgumentError(f"{self.verb!r} is no verb that can be refused; there are {sorted(VERBS)}")
        if self.kind == "fault" and self.code not in FAULTS:
            raise InvalidArgumentError(f"code={self.code} is no fault of a command; those are {sorted(FAULTS)}")


class Upsets:
    """Counts what happens, and says when something is to go wrong."""

    __slots__ = ("_left", "happened")

    def __init__(self, planned: Iterable[Upset] = ()) -> None:
        if not isinstance(planned, Iterable):
            raise InvalidTypeError(f"upsets are a sequence of Upset, not {planned!r}")
        #: By kind: each upset, and how often what it waits for is still to happen.
        self._left: dict[UpsetKind, list[tuple[Upset, list[int]]]] = {}
        for upset in planned:
            if not isinstance(upset, Upset):
                raise InvalidTypeError(f"upsets are a sequence of Upset, and one of them is {upset!r}")
            self._left.setdefault(upset.kind, []).append((upset, [upset.nth]))
        #: How often each of them came about.
        self.happened: Counter[str] = Counter()

    @property
    def planned(self) -> list[Upset]:
        """What has not gone wrong yet."""
        return [upset for planned in self._left.values() for upset, _ in planned]

    @classmethod
    def drawn(cls, chance: Chance) -> Upsets:
        """Some, none in half of all cases."""
        planned: list[Upset] = []
        if chance.once_in(2):
            planned += [_drawn(chance) for _ in range(1 + chance.below(3))]
        return cls(planned)

    def due(self, kind: UpsetKind, verb: str | None = None) -> Upset | None:
        """It happens once more: does it go wrong this time?"""
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


def _drawn(chance: Chance) -> Upset:
    kind: UpsetKind = ("refuse", "refuse", "fault", "slow", "lose", "delay", "repeat")[chance.below(7)]
    if kind == "refuse":
        if chance.below(4) == 0:
            return Upset("refuse", 1 + chance.below(400), code=_STICKY[chance.below(len(_STICKY))])
        verb = ("allocate", "upload", "download", "copy", "fill", "launch", "event_record", "stream_wait", "ring")[
            chance.below(9)
        ]
        return Upset("refuse", 1 + chance.below(12), verb, _CLEAN[chance.below(len(_CLEAN))])
    if kind == "fault":
        return Upset("fault", 1 + chance.below(60), code=_STICKY[chance.below(len(_STICKY))])
    return Upset(kind, 1 + chance.below(20), seconds=chance.between(100_000, 200_000_000) / 1e9)
