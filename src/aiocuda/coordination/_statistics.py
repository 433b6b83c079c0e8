"""Statistics: what a coordinator has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ._node import ABANDONED, DONE, FAILED, SKIPPED

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["CoordinatorStatistics", "statistics_of"]


class CoordinatorStatistics(NamedTuple):
    """Figures of a coordinator since it was made.

    Attributes
    ----------
    registered
        Operations, of all kinds.
    waiting, in_flight
        Not given to a stream yet; given, and not known to have passed.
    done, failed, skipped, abandoned
        How the others ended.
    by_kind
        Registered operations by kind.
    average_overhead
        Host seconds per operation that the coordinator took, beside the stream's own enqueue.
    deadlocks
        `DeadlockError` found.
    """

    registered: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    skipped: int
    abandoned: int
    by_kind: Mapping[str, int]
    average_overhead: float
    deadlocks: int


def statistics_of(scheduler: Scheduler) -> CoordinatorStatistics:
    """A snapshot."""
    from ._scheduler import SAMPLED

    scheduler.sweep()
    ended = scheduler.ended
    return CoordinatorStatistics(
        registered=scheduler.registered,
        waiting=scheduler.registered - sum(ended) - scheduler.in_flight - len(scheduler.lingering),
        in_flight=scheduler.in_flight,
        done=ended[DONE],
        failed=ended[FAILED],
        skipped=ended[SKIPPED],
        abandoned=ended[ABANDONED],
        by_kind=dict(scheduler.kinds),
        average_overhead=max(0.0, scheduler.overhead * (SAMPLED + 1) / scheduler.registered)
        if scheduler.registered
        else 0.0,
        deadlocks=scheduler.watch.found,
    )
