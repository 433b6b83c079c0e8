"""BatcherStatistics: a snapshot of a `MicroBatcher`; BatcherMeter: its counters."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

from .._base._mistakes import figures, lacks
from .._base._percentiles import mean_p50_p99
from ._admission import BatchTimes
from ._requests import Request

__all__ = ["BatcherMeter", "BatcherStatistics"]

#: Requests whose waiting times are remembered.
REMEMBERED = 1024


@figures
@lacks
@dataclasses.dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """A snapshot of a `MicroBatcher`. Times are in seconds; counts are since the batcher was made.

    Attributes
    ----------
    accepted
        Requests that were accepted. Each is counted in one of ``answered``, ``failed``, ``cancelled`` and
        ``missed_deadlines`` once it has its outcome.
    queued, running
        Requests that wait, and requests in running batches that have no outcome yet.
    batches
        Batches that have ended.
    sizes
        The number of batches by their number of items: ``{1: 4, 32: 7}`` for 4 batches of 1 item and 7 of 32.
    fill
        Their average weight as a share of ``max_batch_size``; 0 before the first.
    answered, failed
        Requests that got a result; and those that got an exception: of the function, a fault, or `ClosedError`.
    cancelled
        Requests that were cancelled, in the queue or in a batch.
    overloaded, refused
        Requests that were not accepted: because the queue was full; because they would have missed their deadline.
        ``accepted`` does not count them.
    missed_deadlines
        Accepted requests whose deadline passed, in the queue or in a batch.
    wait_p50_s, wait_p99_s
        Median and 99th percentile of the time from the call of ``submit`` to the beginning of the batch, over the last
        1 024 requests; 0 before the first.
    predicted_s
        By bucket, the predicted time of a batch: the average plus twice the average deviation. The first batch of a
        bucket does not count: after it the time is None. Without ``buckets=``, the buckets are powers of two, and
        ``max_batch_size``.
    actual_s
        By bucket, the time of the last batch.
    rate
        Requests per second that batches like the recent ones serve. If these were not full, full batches may serve
        more. 0 before the first is measured: the first batch of a bucket does not count.
    results_copied
        Results of which a part was in the slot's memory, and was copied.
    blocks_replaced
        Blocks of memory that something still held when the next batch came. The slots got other ones.
    """

    accepted: int
    queued: int
    running: int
    batches: int
    sizes: dict[int, int]
    fill: float
    answered: int
    failed: int
    cancelled: int
    overloaded: int
    refused: int
    missed_deadlines: int
    wait_p50_s: float
    wait_p99_s: float
    predicted_s: dict[int, float | None]
    actual_s: dict[int, float]
    rate: float
    results_copied: int = 0
    blocks_replaced: int = 0


class BatcherMeter:
    """The counters of a batcher. Its attributes are those of `BatcherStatistics`; the batcher counts them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: Counter[int] = Counter()
        self._weight = 0
        self._waits: deque[float] = deque(maxlen=REMEMBERED)
        self.answered = self.failed = self.cancelled = 0
        self.overloaded = self.refused = self.missed_deadlines = 0
        self.results_copied = self.blocks_replaced = 0

    def begin(self, requests: Sequence[Request], now: float) -> None:
        """Count the requests of a batch that was formed."""
        for request in requests:
            self._waits.append(now - request.arrived)

    def end(self, size: int, weight: int) -> None:
        """Count a batch that has ended."""
        self._sizes[size] += 1
        self._weight += weight

    def snapshot(self, accepted: int, queued: int, running: int, times: BatchTimes) -> BatcherStatistics:
        """Return the statistics."""
        batches = self._sizes.total()
        _, wait_p50, wait_p99 = mean_p50_p99(self._waits)
        by_bucket = times.by_bucket
        return BatcherStatistics(
            accepted=accepted,
            queued=queued,
            running=running,
            batches=batches,
            sizes=dict(sorted(self._sizes.items())),
            fill=self._weight / (batches * self._limit) if batches else 0.0,
            answered=self.answered,
            failed=self.failed,
            cancelled=self.cancelled,
            overloaded=self.overloaded,
            refused=self.refused,
            missed_deadlines=self.missed_deadlines,
            wait_p50_s=wait_p50,
            wait_p99_s=wait_p99,
            predicted_s={bucket: predicted for bucket, (predicted, _) in by_bucket.items()},
            actual_s={bucket: last for bucket, (_, last) in by_bucket.items()},
            rate=times.rate,
            results_copied=self.results_copied,
            blocks_replaced=self.blocks_replaced,
        )
