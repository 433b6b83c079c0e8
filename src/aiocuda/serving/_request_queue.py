"""RequestQueue: the waiting requests, in the order in which they are served."""

from __future__ import annotations

from collections.abc import Iterator

from .._base._wakeups import Waiters
from ..coordination._node import PRIORITIES
from ..coordination._ready_queue import ReadyQueue
from ._request import Request

__all__ = ["RequestQueue"]


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
