"""Place: one stream of a pool, as strategies see it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from .._base._types import Priority
from ..lowlevel import StreamLoad, StreamOperation, queue_of, when_passed
from ..stream import Stream
from ._workload import Workload

__all__ = ["Place"]


class Place:
    """A stream of a pool."""

    __slots__ = ("_watched_tail", "exclusive", "holders", "leases", "load", "number", "queue", "reserved", "stream",
                 "used_at", "workload")  # fmt: skip

    def __init__(self, number: int, stream: Stream, workload: Workload | None) -> None:
        self.number = number  #: of the stream in its pool, in order of creation; never used twice
        self.stream = stream
        self.workload = workload  #: the workload that the stream is reserved for, if the strategy has chosen one
        self.leases = 0  #: number of leases that use the stream
        self.exclusive = False  #: True if one exclusive lease uses the stream
        # The others are for the pool only.
        self.queue = queue_of(stream)
        self.load = StreamLoad(self.queue)
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
        return self.load.idle

    def when_idle(self, callback: Callable[[StreamOperation[Any]], object]) -> None:
        """Call the callback once when all present operations are done. Do nothing while the stream is leased."""
        tail = None if self.leases else self.queue.tail()
        if tail is not None and tail is not self._watched_tail:
            self._watched_tail = tail

            def passed(operation: StreamOperation[Any]) -> None:
                self._watched_tail = None  # if it was abandoned, the callback has to watch the same operation again
                callback(operation)

            when_passed(tail, passed, contextvars.copy_context())

    def seconds_left(self) -> float:
        """Return the predicted seconds until all operations of the stream are done; 0.0 if it is idle."""
        return self.load.seconds_left(self.stream.device.driver.now())

    def __repr__(self) -> str:
        held = "leased exclusively" if self.exclusive else f"{self.leases} leases"
        return f"<Place {self.number} {self.stream.name}: {held}>"
