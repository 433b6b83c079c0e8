"""Workload: what kind of work is given to a stream, and how long each kind took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from .._event import Event
from ..completion._operation import Operation
from ..errors import InvalidArgumentError, InvalidTypeError
from ..kernels import Kernel
from ..stream import Stream

__all__ = ["Record", "Workload", "WorkloadStatistics", "classify", "classify_use"]

Workload: TypeAlias = Literal["compute", "memory", "mixed", "coordination"]

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

#: Kinds of operations. What is not here has to do with order alone.
_KINDS: dict[str, Workload] = {
    "launch": "compute",
    **dict.fromkeys(("upload", "download", "copy", "fill", "prefetch"), "memory"),
    **dict.fromkeys(("wait", "record", "synchronize", "callback", "barrier"), "coordination"),
}

#: Times kept of each workload.
MOST_KEPT = 512


def classify(what: Any) -> Workload:
    """The workload of something that a stream is to be given.

    Parameters
    ----------
    what
        A `Kernel`: compute. An `Operation`, or the name of its kind: ``"launch"`` is compute; ``"upload"``,
        ``"download"``, ``"copy"``, ``"fill"`` and ``"prefetch"`` are memory; ``"wait"``, ``"record"``,
        ``"synchronize"``, ``"callback"`` and ``"barrier"`` are coordination, as is an `Event`. The name of a workload:
        that one. Several of these: what they have in common, coordination apart, or mixed.

    Raises
    ------
    InvalidArgumentError
        No kind of operation and no workload has this name.
    InvalidTypeError
        It is none of these.
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
                f"{what!r} is no workload and no kind of operation: say one of {', '.join(WORKLOADS)}, or "
                f"{', '.join(_KINDS)}",
                workload=what,
            )
        return found
    if isinstance(what, Iterable) and not isinstance(what, (bytes, np.ndarray)):
        return _together({classify(part) for part in what})
    raise InvalidTypeError(
        f"a workload is found from a kernel, an operation, the name of a kind, or several of these, not from {what!r}"
    )


def classify_use(stream: Stream) -> Workload:
    """The workload of what went through a face of a stream."""
    transfers = stream._transfers
    parts: set[Workload] = set()
    if stream._launches.launches:
        parts.add("compute")
    if transfers.uploads or transfers.downloads or transfers.copies or transfers.fills:
        parts.add("memory")
    return _together(parts)


def _together(parts: set[Workload]) -> Workload:
    parts.discard("coordination")
    if not parts:
        return "coordination"
    return parts.pop() if len(parts) == 1 else "mixed"


class WorkloadStatistics(NamedTuple):
    """Leases of one workload whose work has ended. Times run from the lease's beginning to the end of its work.

    Attributes
    ----------
    leases
        How many.
    seconds
        Of all of them together.
    average_ms, p50_ms, p99_ms
        Of one; percentiles of the last 512.
    """

    leases: int
    seconds: float
    average_ms: float
    p50_ms: float
    p99_ms: float


class Record:
    """How long the leases of each workload took."""

    __slots__ = ("_counts", "_last", "_seconds")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._counts = dict.fromkeys(WORKLOADS, 0)
        self._seconds = dict.fromkeys(WORKLOADS, 0.0)
        self._last: dict[Workload, deque[float]] = {workload: deque(maxlen=MOST_KEPT) for workload in WORKLOADS}

    def add(self, workload: Workload, seconds: float) -> None:
        """The work of a lease has ended."""
        self._counts[workload] += 1
        self._seconds[workload] += seconds
        self._last[workload].append(seconds)

    def count(self, *workloads: Workload) -> int:
        """Leases recorded of these workloads."""
        return sum(self._counts[workload] for workload in workloads)

    def seconds(self, workload: Workload) -> float:
        """Of all leases of a workload together."""
        return self._seconds[workload]

    def statistics(self) -> Mapping[Workload, WorkloadStatistics]:
        """Of each workload that was recorded."""
        found = {}
        for workload in WORKLOADS:
            count, seconds = self._counts[workload], self._seconds[workload]
            if count:
                p50, p99 = (float(value) * 1e3 for value in np.percentile(list(self._last[workload]), (50, 99)))
                found[workload] = WorkloadStatistics(count, seconds, seconds / count * 1e3, p50, p99)
        return found
