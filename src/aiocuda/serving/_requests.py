"""Request: one item that waits for its batch, and the future of its outcome. RequestQueue: the waiting requests."""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from .._base._wakeups import MOST_WOKEN
from ..completion import Outcome
from ..coordination import PRIORITIES, ReadyQueue

__all__ = ["Request", "RequestQueue"]


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
    arrived : float
        The loop's time of the call.
    deadline : float or None
        Seconds from the call.
    future : asyncio.Future or None
        Done when the request has its outcome. None soon after that: the traceback of a failed batch refers to its
        requests, and would refer to itself through the exception of their futures.
    label : str or None
        The label of the caller, see `aiocuda.label`.
    context : contextvars.Context or None
        The context variables of the caller, for the listeners of the device; None if no listener has a hook.
    waited : float or None
        Seconds until its batch was formed; None before that.
    batch : int or None
        The number of its batch; None before the batch begins.
    outcome : str
        What has become of it, unless its future is cancelled.
    """

    __slots__ = ("arrived", "batch", "context", "deadline", "future", "id", "item", "label", "outcome", "rank",
                 "waited", "weight")  # fmt: skip

    def __init__(
        self, number: int, item: Any, weight: int, rank: int, arrived: float, deadline: float | None,
        future: asyncio.Future[Any], label: str | None, context: contextvars.Context | None,
    ) -> None:  # fmt: skip
        self.id = number
        self.item = item
        self.weight = weight
        self.rank = rank
        self.arrived = arrived
        self.deadline = deadline
        self.future: asyncio.Future[Any] | None = future
        self.label = label
        self.context = context
        self.waited: float | None = None
        self.batch: int | None = None
        self.outcome: Outcome = "answered"

    @property
    def done(self) -> bool:
        """True if it has an outcome, or its await was cancelled."""
        return self.future is None or self.future.done()

    def waits(self, now: float) -> bool:
        """True if it has no outcome and its deadline has not passed."""
        future, deadline = self.future, self.deadline
        return future is not None and not future.done() and (deadline is None or now < self.arrived + deadline)

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
        self.outcome = outcome
        return True


class RequestQueue:
    """The waiting requests: by priority, and within a priority in the order of arrival.

    A request that was overtaken 64 times rises one priority: see `ReadyQueue`.

    Attributes
    ----------
    weight : int
        The weight of all requests; 0 if there is none.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._by_priority: ReadyQueue[Request] = ReadyQueue()
        self._by_arrival: OrderedDict[Request, None] = OrderedDict()  # a dict would look for its first entry
        self._weights = [0] * len(PRIORITIES)
        self.weight = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_arrival)

    @property
    def earliest(self) -> Request:
        """The request that arrived first. The queue is not empty."""
        return next(iter(self._by_arrival))

    def weight_before(self, rank: int) -> int:
        """Return the weight of the requests that are served before a new one of this rank."""
        return sum(self._weights[: rank + 1])

    def add(self, request: Request) -> None:
        """Add a request: the last of its priority."""
        self._by_arrival[request] = None
        self._by_priority.push(request)
        self._weights[request.rank] += request.weight
        self.weight += request.weight

    def remove(self, request: Request) -> bool:
        """Remove a request that no batch shall serve. Return False if it is not in the queue."""
        if request not in self._by_arrival:
            return False
        del self._by_arrival[request]
        self._by_priority.remove(request)
        self._weights[request.rank] -= request.weight
        self.weight -= request.weight
        return True

    def take(self, limit: int, now: float) -> tuple[list[Request], int]:
        """Remove the requests of the next batch; return these, and their weight.

        The batch weighs at most ``limit``. A request that does not fit ends it: no later one is served before that.
        Requests that have an outcome, and those that have expired, are in no batch: `Deadlines` fails the latter. After
        256 of them it returns, with no request if none of the others was before them.
        """
        taken: list[Request] = []
        weight = dropped = 0
        while self.weight and dropped < MOST_WOKEN:
            request = self._by_priority.first
            served = request.waits(now)
            if served and weight + request.weight > limit:
                break
            self.remove(request)
            if served:
                weight += request.weight
                taken.append(request)
                if self.weight:
                    self._count_overtaking(request)
            else:
                dropped += 1
        return taken, weight

    def _count_overtaking(self, request: Request) -> None:
        """Count that a request is served before those that wait."""
        for risen in self._by_priority.served(request):
            self._weights[risen.rank + 1] -= risen.weight
            self._weights[risen.rank] += risen.weight

    def take_all(self) -> list[Request]:
        """Remove and return all requests."""
        taken = list(self._by_arrival)
        self._clear()
        return taken
