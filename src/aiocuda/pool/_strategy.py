"""Strategy: which stream of a pool a lease gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from .._types import Priority
from ..errors import InvalidArgumentError, InvalidTypeError
from ._place import Place
from ._workload import Workload

__all__ = [
    "LoadBalanced",
    "NewStream",
    "Offer",
    "PriorityFirst",
    "RoundRobin",
    "Strategy",
    "StrategyName",
    "WorkloadSplit",
    "as_strategy",
]

StrategyName: TypeAlias = Literal["round_robin", "load_balanced", "priority", "workload"]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a strategy chooses for, and from.

    Attributes
    ----------
    workload
        What the lease is for; None if nobody has said.
    priority
        ``"high"``, ``"normal"`` or ``"low"``.
    streams
        All streams of the pool.
    free
        Those that this lease may get.
    minimum, maximum
        The pool's limits.
    """

    workload: Workload | None
    priority: Priority
    streams: Sequence[Place]
    free: Sequence[Place]
    minimum: int
    maximum: int

    @property
    def room(self) -> int:
        """How many streams may be made."""
        return self.maximum - len(self.streams)


class NewStream(NamedTuple):
    """The choice of a stream that is to be made. The pool makes it only if there is `Offer.room`."""

    priority: Priority = "normal"
    workload: Workload | None = None  #: what it is to be kept for


class Strategy(Protocol):
    """Chooses among a pool's streams. Called on the loop for every lease; it must return at once."""

    @property
    def name(self) -> str:
        """How it shows in reports."""

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """One of ``offer.free``, a new stream, or None: the lease waits until a stream comes back.

        Waiting leases of the same workload and priority are one queue. When a stream comes back the strategy is asked
        for the first one, then for the next one, until it answers None: then it is not asked for the others.
        """


def _load(place: Place) -> tuple[float, int, int]:
    """What comes first by this has the least to do. Of idle ones the oldest: the others may be given up."""
    return place.seconds_left(), place.leases, place.number


def _least(places: Sequence[Place]) -> Place:
    return min(places, key=_load)


def _unused(places: Sequence[Place]) -> Place | None:
    """One that is idle and that nobody has, if there is one."""
    for place in places:
        if not place.leases and place.idle:
            return place
    return None


class RoundRobin:
    """One stream after the other, whatever they have to do. A stream is made when all that there are are in use."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = -1

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """The next in turn."""
        if offer.room and (len(offer.streams) < offer.minimum or _unused(offer.free) is None):
            return NewStream()
        if not offer.free:
            return None
        later = [place for place in offer.free if place.number > self._last]
        chosen = min(later or offer.free, key=lambda place: place.number)
        self._last = chosen.number
        return chosen


class LoadBalanced:
    """The stream with the least to do: in predicted seconds of what it was given and is not done with."""

    name = "load_balanced"

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """The least loaded."""
        best = _least(offer.free) if offer.free else None
        if offer.room and (best is None or best.leases or not best.idle):
            return NewStream()
        return best


class PriorityFirst:
    """Streams for each priority: high work never stands behind other work in its stream, and goes first on the device.

    A quarter of the pool, at least one stream, is kept for ``"high"`` and lent to nobody else. Of each priority's
    streams the least loaded is chosen.
    """

    name = "priority"

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """The least loaded of the priority's streams."""
        priority = offer.priority
        own = [place for place in offer.free if place.priority == priority]
        best = _least(own) if own else None
        if best is not None and not best.leases and best.idle:
            return best
        kept = max(1, offer.maximum // 4) if offer.maximum > 1 else 0
        high = sum(place.priority == "high" for place in offer.streams)
        room = min(offer.room, kept - high) if priority == "high" and kept else offer.room - max(0, kept - high)
        if room > 0:
            return NewStream(priority)
        if best is not None:
            return best
        others = [place for place in offer.free if priority == "high" or place.priority != "high"]
        if others:
            return _least(others)
        # All others are held by somebody alone: wait for one, unless the high ones are all that there is.
        only_high = high == len(offer.streams)
        return _least(offer.free) if offer.free and only_high else None


class WorkloadSplit:
    """Copies go to streams of their own, so that no kernel stands behind a copy that waits for its engine.

    However many streams have copies, they go one after the other through one engine for each direction. So a few
    streams are enough for them; kernels get the least loaded of the others, or an idle one of these.

    Parameters
    ----------
    memory_streams
        How many streams are for copies: one for each direction, unless told otherwise.
    """

    def __init__(self, memory_streams: int = 2) -> None:
        if isinstance(memory_streams, bool) or not isinstance(memory_streams, int):
            raise InvalidTypeError(f"memory_streams is an integer, not {memory_streams!r}")
        if memory_streams < 1:
            raise InvalidArgumentError(f"memory_streams is 1 or more, and this is {memory_streams}")
        self.memory_streams = memory_streams

    @property
    def name(self) -> str:
        """With how many streams it keeps for copies."""
        return "workload" if self.memory_streams == 2 else f"workload, {self.memory_streams} for copies"

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """The least loaded of the workload's streams."""
        kept = min(self.memory_streams, offer.maximum - 1)
        memory = [place for place in offer.streams if place.workload == "memory"]
        lacking = max(0, kept - len(memory))
        if offer.workload == "memory":
            own, room, purpose = [place for place in offer.free if place in memory], min(offer.room, lacking), "memory"
        else:
            own, room, purpose = [place for place in offer.free if place not in memory], offer.room - lacking, "compute"
        idle = _unused(own)
        if idle is not None:
            return idle
        if room > 0:
            return NewStream(workload="memory" if purpose == "memory" else "compute")
        idle = _unused(offer.free)
        if idle is not None and (purpose != "memory" or not own):
            return idle
        if own:
            return _least(own)
        return _least(offer.free) if offer.free else None


_NAMED: dict[str, type[RoundRobin | LoadBalanced | PriorityFirst | WorkloadSplit]] = {
    "round_robin": RoundRobin,
    "load_balanced": LoadBalanced,
    "priority": PriorityFirst,
    "workload": WorkloadSplit,
}


def as_strategy(strategy: StrategyName | Strategy) -> Strategy:
    """A strategy by its name, or one of the caller's own."""
    if isinstance(strategy, str):
        if strategy not in _NAMED:
            raise InvalidArgumentError(
                f"no strategy is called {strategy!r}; there are {', '.join(_NAMED)}", strategy=strategy
            )
        return _NAMED[strategy]()
    if isinstance(strategy, type) or not callable(getattr(strategy, "choose", None)):
        raise InvalidTypeError(f"a strategy is a name, or an object with name and choose(offer), not {strategy!r}")
    return strategy
