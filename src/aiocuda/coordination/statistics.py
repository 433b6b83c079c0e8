"""Statistics: what a coordinator has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .node import ABANDONED, DONE, FAILED, SKIPPED

if TYPE_CHECKING:
    from .flow import Flow

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


def statistics_of(flow: Flow) -> CoordinatorStatistics:
    """A snapshot."""
    from .flow import SAMPLED

    flow.sweep()
    ended = flow.ended
    return CoordinatorStatistics(
        registered=flow.registered,
        waiting=flow.registered - sum(ended) - flow.in_flight - len(flow.lingering),
        in_flight=flow.in_flight,
        done=ended[DONE],
        failed=ended[FAILED],
        skipped=ended[SKIPPED],
        abandoned=ended[ABANDONED],
        by_kind=dict(flow.kinds),
        average_overhead=max(0.0, flow.overhead * (SAMPLED + 1) / flow.registered) if flow.registered else 0.0,
        deadlocks=flow.watch.found,
    )
