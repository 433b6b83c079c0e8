"""What a stream pool tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ._workload import Workload, WorkloadStatistics

__all__ = ["StreamPoolStatistics"]


class StreamPoolStatistics(NamedTuple):
    """Figures of a stream pool.

    Attributes
    ----------
    strategy
        Its name.
    minimum, maximum
        The limits.
    streams, peak
        How many there are, and the most that there were.
    made, closed
        How often the pool has grown and shrunk by one.
    leases, exclusive
        Leases under way, and how many of those are exclusive.
    waiting
        Who waits for one.
    leased, waited
        Leases so far, and how many of them had to wait.
    utilisation
        Streams that are leased or have work to do ÷ maximum, 0-1.
    workloads
        Of the leases whose work has ended, by workload.
    """

    strategy: str
    minimum: int
    maximum: int
    streams: int
    peak: int
    made: int
    closed: int
    leases: int
    exclusive: int
    waiting: int
    leased: int
    waited: int
    utilisation: float
    workloads: Mapping[Workload, WorkloadStatistics]
