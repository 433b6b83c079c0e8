"""StreamLoad: how much work a stream has left."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from .._core import Ring, StreamOperation

__all__ = ["StreamLoad"]

#: Predictions that are added for one stream, at most; the other operations count as their average. A stream may have
#: 400 in flight, and a choice between 32 such streams must not take a millisecond.
MOST_LOOKED_AT = 64

#: Seconds for an operation without a prediction. If all are unknown, the number of operations decides.
UNKNOWN_SECONDS = 1e-3


class StreamLoad:
    """The work that one stream has left, for a choice between streams."""

    __slots__ = ("_queue",)

    def __init__(self, queue: Ring) -> None:
        self._queue = queue

    @property
    def idle(self) -> bool:
        """True if the device has finished all operations of the stream. Queries the device if no task waits for it."""
        queue = self._queue
        if queue.unmarked_wait_at == queue.enqueued and queue.poison is None and not queue.reactor_hot.faulted:
            queue.end()  # the stream waits at a barrier; only a new event after that wait shows when it is over
        if queue.pending and not queue.watch.attended:  # otherwise the reactor will soon resolve the operations
            queue.poll()
        return queue.idle

    @property
    def ended_at(self) -> float:
        """The driver's time at which the last timed operation was resolved."""
        return self._queue.last_resolved

    def seconds_left(self, now: float) -> float:
        """Return the predicted seconds until all operations are done, at a time of the driver; 0.0 if it is idle."""
        if self.idle:
            return 0.0
        queue = self._queue
        pending = queue.pending
        total = _sum(pending, len(pending)) + _sum(queue.on_host, len(queue.on_host))
        if pending:
            head = pending[0]
            expected = _seconds(head)
            taken = now - max(head.submitted_at, queue.last_resolved)
            # An operation that has exceeded its prediction is expected to take as long again as the excess.
            total += abs(expected - max(taken, 0.0)) - expected
        return total


def _sum(operations: Iterable[StreamOperation[Any]], count: int) -> float:
    total = sum(map(_seconds, islice(operations, MOST_LOOKED_AT)))
    return total if count <= MOST_LOOKED_AT else total * count / MOST_LOOKED_AT


def _seconds(operation: StreamOperation[Any]) -> float:
    estimate = operation.estimate
    seconds = None if estimate is None else estimate.seconds
    return UNKNOWN_SECONDS if seconds is None else seconds
