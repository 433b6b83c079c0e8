"""ClusterStatistics and ReplicaStatistics: snapshots of a cluster and its replicas. What is measured of calls."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Literal, TypeAlias

from .._base._average import Average
from .._base._mistakes import figures, lacks
from .._base._percentiles import mean_p50_p99

__all__ = ["CallMeter", "ClusterStatistics", "MethodTimes", "ReplicaState", "ReplicaStatistics"]

#: Latencies that are remembered for each replica.
REMEMBERED = 1024

ReplicaState: TypeAlias = Literal["starting", "running", "restarting", "stopped"]


@figures
@lacks
@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """A snapshot of one replica. Counts are since the cluster was opened."""

    index: int
    state: ReplicaState  #: ``"stopped"``: it has reached the limit of its restarts, or the cluster is closed
    epoch: int  #: 1 for the first process, and one more for each restart
    calls: int  #: calls that were sent to it
    answered: int  #: calls whose method returned
    failed: int  #: calls whose method raised
    lost: int  #: calls that it was running when it was lost
    in_flight: int  #: calls that it is running
    latency_p50_s: float  #: from sending a call to its reply, over the last 1 024; 0 before the first
    latency_p99_s: float
    restarts: int  #: processes that were started in place of a lost one
    last_loss: str | None  #: why the replica was lost the last time


@figures
@lacks
@dataclasses.dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """A snapshot of a cluster."""

    replicas: tuple[ReplicaStatistics, ...]
    waiting: int  #: calls that wait for a replica to be restarted
    retries: int  #: calls that went to another replica because theirs was lost


class CallMeter:
    """The counters of one replica. Its attributes are those of `ReplicaStatistics`."""

    def __init__(self) -> None:
        self.calls = self.answered = self.failed = self.lost = self.in_flight = 0
        self._latencies: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """A call is sent."""
        self.calls += 1
        self.in_flight += 1

    def end(self) -> None:
        """A call has ended, with or without a reply."""
        self.in_flight -= 1

    def lose(self) -> None:
        """Count a call that was lost with its replica."""
        self.lost += 1

    def reply(self, seconds: float, *, failed: bool) -> None:
        """Count a call that was answered, or has failed, and the time from sending it to its reply."""
        self._latencies.append(seconds)
        if failed:
            self.failed += 1
        else:
            self.answered += 1

    def percentiles(self) -> tuple[float, float]:
        """Return the median and the 99th percentile of the latencies."""
        return mean_p50_p99(self._latencies)[1:]


class MethodTimes:
    """The predicted time of a call, by object and method: the moving average of the measured times."""

    def __init__(self) -> None:
        self._averages: dict[tuple[int, str], Average] = {}

    def predicted(self, number: int, method: str) -> float:
        """Return seconds. A method that was not measured has the mean of the others; 1 s if there are none."""
        known = self._averages.get((number, method))
        if known is not None:
            return known.mean
        return sum(each.mean for each in self._averages.values()) / len(self._averages) if self._averages else 1.0

    def note(self, number: int, method: str, seconds: float) -> None:
        """Note the measured time of a call."""
        known = self._averages.get((number, method))
        if known is None:
            self._averages[number, method] = Average(seconds)
        else:
            known.add(seconds)

    def forget(self, number: int) -> None:
        """Forget an object."""
        self._averages = {key: average for key, average in self._averages.items() if key[0] != number}
