"""The queue of requests that wait for a stream of a pool: by priority, then in order of arrival."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from .._base._deadlock import waiting
from .._base._types import Priority
from .._base._wakeups import Waiters
from ._place import Place
from ._workload import Workload

__all__ = ["RANKS", "Request", "RequestQueue", "waiting_for_lease"]

#: Requests with a smaller rank are served first.
RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}

#: Rank, workload, exclusive, needs_idle of a request. Requests of the same kind can use the same streams.
Kind: TypeAlias = "tuple[int, Workload | None, bool, bool]"


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request for one lease."""

    workload: Workload | None
    priority: Priority
    exclusive: bool
    needs_idle: bool  #: True if only a stream without unfinished operations will do
    has_timeout: bool = False  #: True if the request ends by itself after some time
    future: asyncio.Future[Place] | None = None  #: while it is in the queue
    number: int = 0  #: order of arrival

    @property
    def kind(self) -> Kind:
        """Everything that decides which streams it can use."""
        return RANKS[self.priority], self.workload, self.exclusive, self.needs_idle


class RequestQueue:
    """The requests that wait for a stream.

    `serve` gives a stream to a request before its task wakes up, so that no later request can take the stream first.

    There is one queue for each kind of request. If the first request of a kind gets no stream, the kind is declined:
    it is not tried again until `retry_all`. So when a stream comes back, the pool tries each kind, not each request.
    """

    __slots__ = ("_declined", "_kinds", "_numbers")

    def __init__(self) -> None:
        self._kinds: dict[Kind, Waiters[Request]] = {}  # none of them is empty
        self._declined: dict[Kind, None] = {}
        self._numbers = itertools.count()

    def add(self, request: Request) -> asyncio.Future[Place]:
        """Add a request; the result of the returned future will be its stream.

        If no request was `undecided`, the caller has just found no stream for this one, so its kind is declined.
        """
        if not self.undecided:
            self.decline(request)
        future = request.future = asyncio.get_running_loop().create_future()
        request.number = next(self._numbers)
        queue = self._kinds.get(request.kind)
        if queue is None:
            queue = self._kinds[request.kind] = Waiters()
        queue.add(request)
        return future

    def discard(self, request: Request) -> None:
        """Remove a request. Do nothing if it was served or refused before."""
        queue = self._kinds.get(request.kind)
        if queue is not None and queue.discard(request) and not queue:
            del self._kinds[request.kind]

    def first(self) -> Request | None:
        """Return the request to serve next, by priority and arrival; None if all kinds are declined."""
        heads = [queue.first for kind, queue in self._kinds.items() if kind not in self._declined]
        return min(heads, key=_order, default=None)

    def decline(self, request: Request) -> None:
        """Record that there is no stream for requests of this kind at present."""
        self._declined[request.kind] = None

    def retry_all(self) -> None:
        """Try all kinds again: a stream may have become available."""
        self._declined.clear()

    @property
    def undecided(self) -> bool:
        """True if a request of a kind that is not declined waits."""
        return any(kind not in self._declined for kind in self._kinds)

    def serve(self, request: Request, place: Place) -> None:
        """Give a stream to a request."""
        self.discard(request)
        assert request.future is not None
        request.future.set_result(place)

    def refuse(self, request: Request, error: BaseException) -> None:
        """Fail a request."""
        self.discard(request)
        if request.future is not None and not request.future.done():
            request.future.set_exception(error)

    def reserve(self, places: Sequence[Place]) -> list[Place]:
        """Reserve one stream for each exclusive request; return the streams that are not leased exclusively.

        The reserved streams come first in the list. A reserved stream gets no further shared leases.
        """
        wanted = sum(len(queue) for (_, _, exclusive, _), queue in self._kinds.items() if exclusive)
        shared = [place for place in places if not place.exclusive]
        shared.sort(key=lambda place: (not place.reserved, place.leases, place.number))
        for index, place in enumerate(shared):
            place.reserved = index < wanted
        return shared

    @property
    def wants_idle(self) -> bool:
        """True if a request waits for an idle stream."""
        return any(needs_idle for _, _, _, needs_idle in self._kinds)

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))


def _order(request: Request) -> tuple[int, int]:
    return RANKS[request.priority], request.number


def waiting_for_lease(
    request: Request, future: asyncio.Future[Place], places: Sequence[Place], maximum: int, pool: object
) -> AbstractContextManager[None]:
    """Declare, for deadlock detection, that the current task waits for a lease, and which tasks could return one.

    The wait can end if it has a timeout, if the pool can grow, or if all tasks that hold some stream can go on.
    """

    def can_end(stuck: Collection[asyncio.Task[Any]]) -> bool:
        if request.has_timeout or len(places) < maximum:
            return True
        return any(not any(holder in stuck for holder in place.holders) for place in places)

    def what() -> str:
        holders = dict.fromkeys(holder.get_name() for place in places for holder in place.holders)
        kind = "an exclusive" if request.exclusive else "a shared"
        return f"{kind} lease of {pool!r}, held by {', '.join(holders) or 'no known task'}"

    return waiting(what, future, can_end)
