"""Strategies: how a pool chooses the stream of a lease, and `StreamPool.optimize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from .._base._checks import check_integer
from .._base._types import Priority
from ..errors import InvalidArgumentError, InvalidTypeError
from ._place import Place
from ._workload import Workload, WorkloadRecord

__all__ = [
    "LoadBalanced", "NewStream", "Offer", "Optimisation", "PriorityFirst", "RoundRobin", "Strategy", "StrategyName",
    "WorkloadSplit", "advise", "as_strategy",
]  # fmt: skip

StrategyName: TypeAlias = Literal["round_robin", "load_balanced", "priority", "workload"]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A request for a lease, and the streams that can serve it: the argument of `Strategy.choose`."""

    workload: Workload | None  #: the workload that the lease is requested for; None if the request names none
    priority: Priority
    streams: Sequence[Place]  #: all streams of the pool
    free: Sequence[Place]  #: the streams that this lease may use
    minimum: int  #: the pool's limits for the number of streams
    maximum: int

    @property
    def room(self) -> int:
        """Number of streams that the pool may still create."""
        return self.maximum - len(self.streams)


class NewStream(NamedTuple):
    """The choice to create a stream. The pool creates it only if there is `Offer.room`."""

    priority: Priority = "normal"
    workload: Workload | None = None  #: the workload that the stream is reserved for


class Strategy(Protocol):
    """Chooses a stream for each lease. Called on the event loop; it must not block."""

    @property
    def name(self) -> str:
        """The name shown in reports."""

    def choose(self, offer: Offer) -> Place | NewStream | None:
        """Return one of ``offer.free``, a `NewStream`, or None to let the request wait for the next return.

        Requests of the same workload and priority wait in one queue. When a stream comes back, the pool calls `choose`
        for the first of them, then for the next one, until the result is None.
        """


def _load(place: Place) -> tuple[float, int, int]:
    """Sort key: predicted seconds, leases, age. The oldest idle stream comes first, so that others can be closed."""
    return place.seconds_left(), place.leases, place.number


def _least(places: Sequence[Place]) -> Place:
    return min(places, key=_load)


def _unused(places: Sequence[Place]) -> Place | None:
    """Return the first stream that is idle and not leased, if there is one."""
    for place in places:
        if not place.leases and place.idle:
            return place
    return None


class RoundRobin:
    """Uses the streams in turn, whatever their load. Creates a stream if all present ones are in use."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = -1

    def choose(self, offer: Offer) -> Place | NewStream | None:
        if offer.room and (len(offer.streams) < offer.minimum or _unused(offer.free) is None):
            return NewStream()
        if not offer.free:
            return None
        later = [place for place in offer.free if place.number > self._last]
        chosen = min(later or offer.free, key=lambda place: place.number)
        self._last = chosen.number
        return chosen


class LoadBalanced:
    """Chooses the stream with the shortest predicted time of unfinished operations."""

    __slots__ = ()

    name = "load_balanced"

    def choose(self, offer: Offer) -> Place | NewStream | None:
        best = _least(offer.free) if offer.free else None
        if offer.room and (best is None or best.leases or not best.idle):
            return NewStream()
        return best


class PriorityFirst:
    """Separate streams for each priority, so that high-priority work never waits for other work in its stream.

    CUDA also gives streams of high priority precedence on the device. A quarter of the pool, at least one stream, is
    reserved for ``"high"``. Of the streams of a priority, the least loaded is chosen.
    """

    name = "priority"

    def choose(self, offer: Offer) -> Place | NewStream | None:
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
        # All others are leased exclusively: wait for one, unless all streams have high priority.
        only_high = high == len(offer.streams)
        return _least(offer.free) if offer.free and only_high else None


class WorkloadSplit:
    """Reserves streams for copies, so that no kernel waits in its stream for a copy.

    There is one copy engine for each direction, which does one copy at a time. So a few streams are enough for copies.
    Kernels get the least loaded of the other streams, or an idle stream of those for copies. The default number of
    ``memory_streams`` is one for each direction.
    """

    def __init__(self, memory_streams: int = 2) -> None:
        check_integer(memory_streams, "memory_streams")
        if memory_streams < 1:
            raise InvalidArgumentError(f"memory_streams is 1 or more, and this is {memory_streams}")
        self.memory_streams = memory_streams

    @property
    def name(self) -> str:
        """``"workload"``, with the number of streams for copies if it is not 2."""
        return "workload" if self.memory_streams == 2 else f"workload, {self.memory_streams} for copies"

    def choose(self, offer: Offer) -> Place | NewStream | None:
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
    """Return the strategy of this name, or the object itself if it is a strategy."""
    if isinstance(strategy, str):
        if strategy not in _NAMED:
            raise InvalidArgumentError(
                f"no strategy is called {strategy!r}; there are {', '.join(_NAMED)}", strategy=strategy
            )
        return _NAMED[strategy]()
    if isinstance(strategy, type) or not callable(getattr(strategy, "choose", None)):
        raise InvalidTypeError(f"a strategy is a name, or an object with name and choose(offer), not {strategy!r}")
    return strategy


#: Below this number of recorded leases for copies or for kernels, `advise` changes nothing.
LEAST_RECORDED = 32


class Optimisation(NamedTuple):
    """The result of `aiocuda.StreamPool.optimize`: the strategies, and the recorded times that decided."""

    before: str  #: name of the strategy before
    after: str  #: name of the strategy after
    memory_seconds: float  #: sum of the durations of leases for copies
    compute_seconds: float  #: sum of the durations of leases for kernels


def advise(strategy: Strategy, record: WorkloadRecord, prioritised: bool) -> tuple[Strategy, Optimisation]:
    """Return the strategy that fits the recorded durations, and a report. It may be the present strategy.

    Leases for both copies and kernels do not count: their time cannot be divided.
    """
    memory, compute = record.seconds("memory"), record.seconds("compute")
    after = strategy
    enough = record.count("memory", "compute") >= LEAST_RECORDED
    if enough and not prioritised and isinstance(strategy, (RoundRobin, LoadBalanced, WorkloadSplit)):
        wanted = WorkloadSplit if memory > compute else LoadBalanced
        if not isinstance(strategy, wanted):
            after = wanted()
    return after, Optimisation(strategy.name, after.name, memory, compute)
