"""Place: one stream of a pool, as strategies see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from .._types import Priority
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from ..stream import Stream
from ._workload import Workload

__all__ = ["Place", "seconds_left"]

#: Operations of a stream that are looked at, at most; what stands behind them counts as their average. A stream may
#: have 400 in flight, and a choice between 32 such streams must not take a millisecond.
MOST_LOOKED_AT = 64

#: What an operation counts as long as nothing is known of its kind: then the number of operations decides.
UNKNOWN_SECONDS = 1e-3


class Place:
    """A stream of a pool.

    Attributes
    ----------
    number : int
        Which of the pool's streams, in the order of their making; never used twice.
    stream : Stream
    workload : str or None
        What it is kept for, if a strategy has said so.
    leases : int
        How many leases share it, or the one that has it alone.
    exclusive : bool
        Has one lease it alone?
    """

    __slots__ = ("awaited", "claimed", "exclusive", "holders", "leases", "number", "stream", "used_at", "workload")

    def __init__(self, number: int, stream: Stream, workload: Workload | None) -> None:
        self.number = number
        self.stream = stream
        self.workload = workload
        self.leases = 0
        self.exclusive = False
        #: The tasks whose blocks the leases are, as far as that is known, each with the number of its leases.
        self.holders: dict[asyncio.Task[Any], int] = {}
        self.claimed = False  # somebody waits to have it alone: nobody new may share it
        self.awaited: Operation[Any] | None = None  # whose end is told to whoever waits for an idle stream
        self.used_at = 0.0

    def held_by(self, task: asyncio.Task[Any]) -> None:
        """A block of the task has one more lease."""
        self.holders[task] = self.holders.get(task, 0) + 1

    def left_by(self, task: asyncio.Task[Any]) -> None:
        """A block of the task has one lease less."""
        left = self.holders.pop(task) - 1
        if left:
            self.holders[task] = left

    @property
    def priority(self) -> Priority:
        """The stream's."""
        return self.stream.priority

    @property
    def idle(self) -> bool:
        """Is the device done with all that the stream was given? Where nobody waits for that, it is asked."""
        queue = self.stream._queue
        if queue.unmarked_wait_at == queue.enqueued and queue.poison is None and not queue.reactor.faulted:
            queue.end()  # it was told to wait, at a barrier, and nothing says when that is over: this does
        if queue.pending and not queue.attended:  # where somebody does, the loop is told soon, without a query of ours
            queue.poll()
        return queue.idle

    def when_idle(self, tell: Callable[[Operation[Any]], object]) -> None:
        """Call it, once, when all is done that the stream has been given so far; not while it is leased."""
        tail = None if self.leases else self.stream.tail
        if tail is not None and tail is not self.awaited:
            self.awaited = tail
            tail.add_done_callback(tell)

    def seconds_left(self) -> float:
        """Predicted seconds until all that the stream was given is done; 0.0 if it is."""
        return 0.0 if self.idle else seconds_left(self.stream._queue)

    def __repr__(self) -> str:
        held = "leased exclusively" if self.exclusive else f"{self.leases} leases"
        return f"<Place {self.number} {self.stream.name}: {held}>"


def seconds_left(queue: StreamQueue) -> float:
    """Predicted seconds of a queue's unfinished operations, less what the first of them has been at it already."""
    pending = queue.pending
    total = _sum(pending, len(pending)) + _sum(queue.host_queue.entries, len(queue.host_queue.entries))
    if pending:
        head = pending[0]
        expected = _seconds(head)
        taken = queue.driver.now() - max(head.submitted_at, queue.last_resolved)
        # What has outlived its prediction is as likely to take as long again.
        total += abs(expected - max(taken, 0.0)) - expected
    return total


def _sum(operations: Iterable[Operation[Any]], count: int) -> float:
    total = sum(map(_seconds, islice(operations, MOST_LOOKED_AT)))
    return total if count <= MOST_LOOKED_AT else total * count / MOST_LOOKED_AT


def _seconds(operation: Operation[Any]) -> float:
    estimate = operation.estimate
    seconds = None if estimate is None else estimate.seconds
    return UNKNOWN_SECONDS if seconds is None else seconds
