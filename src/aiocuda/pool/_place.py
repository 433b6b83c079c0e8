"""Place: one stream of a pool, as strategies see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from .._base._types import Priority
from ..completion._stream_queue import StreamOperation, StreamQueue, stream_queue
from ..stream import Stream
from ._workload import Workload

__all__ = ["Place"]

#: Predictions that are added for one stream, at most; the other operations count as their average. A stream may have
#: 400 in flight, and a choice between 32 such streams must not take a millisecond.
MOST_LOOKED_AT = 64

#: Seconds for an operation without a prediction. If all are unknown, the number of operations decides.
UNKNOWN_SECONDS = 1e-3


class Place:
    """A stream of a pool."""

    __slots__ = ("_watched_tail", "exclusive", "holders", "leases", "number", "queue", "reserved", "stream", "used_at",
                 "workload")  # fmt: skip

    def __init__(self, number: int, stream: Stream, workload: Workload | None) -> None:
        self.number = number  #: of the stream in its pool, in order of creation; never used twice
        self.stream = stream
        self.workload = workload  #: the workload that the stream is reserved for, if the strategy has chosen one
        self.leases = 0  #: number of leases that use the stream
        self.exclusive = False  #: True if one exclusive lease uses the stream
        # The others are for the pool only.
        self.queue = stream_queue(stream)
        self.reserved = False  # for an exclusive request, so that no new lease may share it
        self.holders: dict[asyncio.Task[Any], int] = {}  # tasks whose blocks hold the leases, with their number
        self.used_at = 0.0  # when the last lease ended
        self._watched_tail: StreamOperation[Any] | None = None  # the operation that has the callback of `when_idle`

    def add_holder(self, task: asyncio.Task[Any]) -> None:
        """Record that a block of the task holds a lease."""
        self.holders[task] = self.holders.get(task, 0) + 1

    def remove_holder(self, task: asyncio.Task[Any]) -> None:
        """Record that a block of the task holds one lease less."""
        left = self.holders.pop(task) - 1
        if left:
            self.holders[task] = left

    @property
    def priority(self) -> Priority:
        """The priority of the stream."""
        return self.stream.priority

    @property
    def idle(self) -> bool:
        """True if the device has finished all operations of the stream. Queries the device if no task waits for it."""
        queue = self.queue
        if queue.unmarked_wait_at == queue.enqueued and queue.poison is None and not queue.reactor.faulted:
            queue.end()  # the stream waits at a barrier; only a new event after that wait shows when it is over
        if queue.pending and not queue.attended:  # otherwise the reactor will soon resolve the operations
            queue.poll()
        return queue.idle

    def when_idle(self, callback: Callable[[StreamOperation[Any]], object]) -> None:
        """Call the callback once when all present operations are done. Do nothing while the stream is leased."""
        tail = None if self.leases else self.queue.tail()
        if tail is not None and tail is not self._watched_tail:
            self._watched_tail = tail
            tail.add_done_callback(callback)

    def seconds_left(self) -> float:
        """Return the predicted seconds until all operations of the stream are done; 0.0 if it is idle."""
        return 0.0 if self.idle else _seconds_left(self.queue, self.stream.device.driver.now())

    def __repr__(self) -> str:
        held = "leased exclusively" if self.exclusive else f"{self.leases} leases"
        return f"<Place {self.number} {self.stream.name}: {held}>"


def _seconds_left(queue: StreamQueue, now: float) -> float:
    """Return the predicted seconds of a queue's unfinished operations, less the time since the first one began."""
    pending = queue.pending
    total = _sum(pending, len(pending)) + _sum(queue.host_queue.entries, len(queue.host_queue.entries))
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
