"""Workload: the kind of work of a lease, and a record of the durations of each kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from .._base._mistakes import figures
from .._base._percentiles import mean_p50_p99
from ..completion import KINDS, Operation
from ..device import Event
from ..errors import InvalidArgumentError, InvalidTypeError
from ..kernels import Kernel

__all__ = ["Workload", "WorkloadRecord", "WorkloadStatistics", "classify", "combine"]

Workload: TypeAlias = Literal["compute", "memory", "mixed", "coordination"]

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

#: Kinds of operations that have a workload of their own.
_KINDS: dict[str, Workload] = {
    name: workload for workload in WORKLOADS for name, kind in KINDS.items() if kind.workload == workload
}

#: Durations kept for each workload.
MOST_KEPT = 512


def classify(what: Any) -> Workload:
    """Return the workload of an operation, or of several together.

    Parameters
    ----------
    what
        A `Kernel`: compute. An `Operation`, or the name of its kind: a kind that computes, such as ``"launch"``, is
        compute; one that moves or sets bytes, such as ``"upload"`` or ``"fill"``, is memory; one that only orders
        others, such as ``"wait"``, is coordination. An `Event`: coordination. The name of a workload: that workload.
        An iterable of these: their common workload, or mixed; coordination is ignored if there is another workload.
        Another string is an `InvalidArgumentError`, another object an `InvalidTypeError`.
    """
    if isinstance(what, Kernel):
        return "compute"
    if isinstance(what, Operation):
        return _KINDS.get(what.kind, "coordination")
    if isinstance(what, Event):
        return "coordination"
    if isinstance(what, str):
        found = what if what in WORKLOADS else _KINDS.get(what)
        if found is None:
            raise InvalidArgumentError(
                f"{what!r} is no workload and no kind of operation: use one of {', '.join(WORKLOADS)}, or "
                f"{', '.join(_KINDS)}",
                workload=what,
            )
        return found
    if isinstance(what, Iterable) and not isinstance(what, (bytes, np.ndarray)):
        return combine({classify(part) for part in what})
    raise InvalidTypeError(
        f"a workload is found from a kernel, an operation, the name of a kind, or several of these, not from {what!r}"
    )


def combine(parts: set[Workload]) -> Workload:
    """Return the workload of several parts; it changes the set."""
    parts.discard("coordination")
    if not parts:
        return "coordination"
    return parts.pop() if len(parts) == 1 else "mixed"


@figures
class WorkloadStatistics(NamedTuple):
    """Durations of the leases of one workload, from the start of a lease to the end of its last operation."""

    leases: int  #: number of leases with all operations ended
    seconds: float  #: sum of their durations
    average_ms: float  #: mean of their durations
    p50_ms: float  #: percentiles of the durations of the last 512 leases
    p99_ms: float


class WorkloadRecord:
    """The durations of the leases of each workload."""

    __slots__ = ("_counts", "_last", "_seconds")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all durations."""
        self._counts = dict.fromkeys(WORKLOADS, 0)
        self._seconds = dict.fromkeys(WORKLOADS, 0.0)
        self._last: dict[Workload, deque[float]] = {}  # of the workloads with leases

    def add(self, workload: Workload, seconds: float) -> None:
        """Add the duration of a lease."""
        self._counts[workload] += 1
        self._seconds[workload] += seconds
        last = self._last.get(workload)
        if last is None:
            last = self._last[workload] = deque(maxlen=MOST_KEPT)
        last.append(seconds)

    def count(self, *workloads: Workload) -> int:
        """Return the number of leases recorded for these workloads."""
        return sum(self._counts[workload] for workload in workloads)

    def seconds(self, workload: Workload) -> float:
        """Return the sum of the durations for a workload."""
        return self._seconds[workload]

    def statistics(self) -> Mapping[Workload, WorkloadStatistics]:
        """Return the figures of each workload that has a recorded lease."""
        found = {}
        for workload in WORKLOADS:
            count, seconds = self._counts[workload], self._seconds[workload]
            if count:
                _, p50, p99 = (value * 1e3 for value in mean_p50_p99(self._last[workload]))
                found[workload] = WorkloadStatistics(count, seconds, seconds / count * 1e3, p50, p99)
        return found
