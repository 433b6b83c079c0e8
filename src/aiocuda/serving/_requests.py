"""Request: one item that waits for its batch, and the future of its outcome. RequestQueue: the waiting requests."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from typing import Any

from .._base._wakeups import Waiters
from ..completion import Outcome
from ..coordination._node import PRIORITIES
from ..coordination._ready_queue import ReadyQueue

__all__ = ["Request", "RequestQueue", "RequestRecord"]


class RequestRecord:
    """The facts of a request for the hooks ``on_batch`` and ``on_outcome`` of a device's listeners.

    Attributes
    ----------
    context : contextvars.Context
        The context variables of the caller.
    waited : float or None
        Seconds until its batch was formed; None before that.
    batch : int or None
        The number of its batch; None before the batch begins.
    outcome : str
        What has become of it, unless its future is cancelled.
    """

    __slots__ = ("batch", "context", "outcome", "waited")

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.waited: float | None = None
        self.batch: int | None = None
        self.outcome: Outcome = "answered"

    def formed(self, waited: float) -> None:
        """Its batch was formed, after so many seconds."""
        self.waited = waited

    def began(self, batch: int) -> None:
        """The function is called for the batch of this number."""
        self.batch = batch

    def failed(self, outcome: Outcome) -> None:
        """It has this outcome, and no result."""
        self.outcome = outcome


class Request:
    """One item and the future of its outcome. A request has exactly one outcome: the first one.

    Attributes
    ----------
    id : int
        Increases with each request of the batcher.
    item
    weight : int
    rank : int
        The index of its priority; lower after it has risen.
    overtakings : int
        A counter of `aiocuda.coordination._ready_queue.ReadyQueue`.
    arrived : float
        The loop's time of the call.
    deadline : float or None
        Seconds from the call.
    future : asyncio.Future or None
        Done when the request has its outcome. None soon after that: the traceback of a failed batch refers to its
        requests, and would refer to itself through the exception of their futures.
    label : str or None
        The label of the caller, see `aiocuda.label`.
    record : RequestRecord or None
        The facts for the listeners of the device; None if no listener has a hook.
    """

    __slots__ = ("_timer", "arrived", "deadline", "future", "id", "item", "label", "overtakings", "rank", "record",
                 "weight")  # fmt: skip

    def __init__(
        self, number: int, item: Any, weight: int, rank: int, arrived: float, deadline: float | None,
        future: asyncio.Future[Any], label: str | None = None, record: RequestRecord | None = None,
    ) -> None:  # fmt: skip
        self.id = number
        self.item = item
        self.weight = weight
        self.rank = rank
        self.overtakings = 0
        self.arrived = arrived
        self.deadline = deadline
        self.future: asyncio.Future[Any] | None = future
        self.label = label
        self.record = record
        self._timer: asyncio.TimerHandle | None = None  # expires the request at its deadline

    @property
    def done(self) -> bool:
        """True if it has an outcome, or its await was cancelled."""
        return self.future is None or self.future.done()

    def has_expired(self, now: float) -> bool:
        """True if its deadline has passed."""
        return self.deadline is not None and now >= self.arrived + self.deadline

    def expire_by(self, timer: asyncio.TimerHandle) -> None:
        """Have a timer that expires the request at its deadline."""
        self._timer = timer

    def end(self) -> None:
        """Release the future and the timer: the request has its outcome."""
        self.future = None
        if self._timer is not None:
            self._timer.cancel()

    def resolve(self, result: Any) -> bool:
        """Set the result; False if the request has another outcome already."""
        future = self.future
        if future is None or future.done():
            return False
        future.set_result(result)
        return True

    def fail(self, error: BaseException, outcome: Outcome = "failed") -> bool:
        """Set the error; False if the request has another outcome already."""
        future = self.future
        if future is None or future.done():
            return False
        future.set_exception(error)
        if self.record is not None:
            self.record.failed(outcome)
        return True


class RequestQueue:
    """The waiting requests: by priority, and within a priority in the order of arrival.

    A request that was overtaken 64 times rises one priority: see `ReadyQueue`.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._by_priority: ReadyQueue[Request] = ReadyQueue()
        self._by_arrival: Waiters[Request] = Waiters()
        self._weights = [0] * len(PRIORITIES)

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_arrival)

    def __contains__(self, request: Request) -> bool:
        return request in self._by_arrival

    @property
    def weight(self) -> int:
        """The weight of all requests."""
        return sum(self._weights)

    @property
    def earliest(self) -> Request:
        """The request that arrived first. The queue is not empty."""
        return self._by_arrival.first

    def weight_before(self, rank: int) -> int:
        """Return the weight of the requests that are served before a new one of this rank."""
        return sum(self._weights[: rank + 1])

    def add(self, request: Request) -> None:
        """Add a request: the last of its priority."""
        self._by_arrival.add(request)
        self._by_priority.push(request)
        self._weights[request.rank] += request.weight

    def remove(self, request: Request) -> bool:
        """Remove a request that no batch shall serve. Return False if it is not in the queue."""
        if not self._by_arrival.discard(request):
            return False
        self._by_priority.remove(request)
        self._weights[request.rank] -= request.weight
        return True

    def take(self, limit: int, now: float) -> tuple[list[Request], list[Request]]:
        """Remove the requests of the next batch; return these, and requests that have expired.

        The batch weighs at most ``limit``. A request that does not fit ends it: no later one is served before that.
        Requests that have an outcome, and those that have expired, are in no batch.
        """
        taken: list[Request] = []
        expired: list[Request] = []
        while len(self):
            request = self._by_priority.first
            served = not request.done and not request.has_expired(now)
            if served and request.weight > limit:
                break
            self.remove(request)
            if served:
                limit -= request.weight
                taken.append(request)
                for risen in self._by_priority.served(request):
                    self._weights[risen.rank + 1] -= risen.weight
                    self._weights[risen.rank] += risen.weight
            elif not request.done:
                expired.append(request)
        return taken, expired

    def take_all(self) -> list[Request]:
        """Remove and return all requests."""
        taken = list(self._by_arrival)
        self._clear()
        return taken
