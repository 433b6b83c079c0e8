"""Line: the requests that wait for a stream, by priority, then in the order of their coming."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from .._deadlock import waiting
from .._types import Priority
from .._wakeups import Waiters
from ._place import Place
from ._workload import Workload

__all__ = ["RANKS", "Line", "Request", "holding_up"]

#: A smaller rank goes first.
RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}


#: What a request asks for: rank, workload, exclusive, idle. Requests of one kind can use the same streams.
Kind: TypeAlias = "tuple[int, Workload | None, bool, bool]"


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One lease that somebody asks for."""

    workload: Workload | None
    priority: Priority
    exclusive: bool
    idle: bool  #: only a stream that has nothing to do
    timed: bool = False  #: he leaves by himself after a while
    turn: asyncio.Future[Place] | None = None  #: while he waits
    number: int = 0  #: in the order of their coming

    @property
    def kind(self) -> Kind:
        """What it asks for."""
        return RANKS[self.priority], self.workload, self.exclusive, self.idle


class Line:
    """The requests that wait. Each is handed its place: no later request can take it before the task wakes.

    Requests of one kind stand in one queue. Once the first one of a kind has been declined, the kind is passed over
    until `offer_again`. So a stream that comes back costs a look at each kind, and not at each request.
    """

    __slots__ = ("_declined", "_kinds", "_numbers")

    def __init__(self) -> None:
        self._kinds: dict[Kind, Waiters[Request]] = {}  # none of them empty
        self._declined: set[Kind] = set()
        self._numbers = itertools.count()

    def join(self, request: Request) -> asyncio.Future[Place]:
        """Stand in line; the future brings a place.

        Where no request is undecided, there was none for this one a moment ago.
        """
        if not self.undecided:
            self.decline(request)
        turn = request.turn = asyncio.get_running_loop().create_future()
        request.number = next(self._numbers)
        queue = self._kinds.get(request.kind)
        if queue is None:
            queue = self._kinds[request.kind] = Waiters()
        queue.add(request)
        return turn

    def leave(self, request: Request) -> None:
        """Wait no longer. A request that was served meanwhile has left already."""
        queue = self._kinds.get(request.kind)
        if queue is not None and queue.discard(request) and not queue:
            del self._kinds[request.kind]

    def first(self) -> Request | None:
        """The request that is served next: by priority, then first come first served. None if all are declined."""
        heads = [queue.first for kind, queue in self._kinds.items() if kind not in self._declined]
        return min(heads, key=_order, default=None)

    def decline(self, request: Request) -> None:
        """There is no place for requests of this kind now."""
        self._declined.add(request.kind)

    def offer_again(self) -> None:
        """Something has changed: there may be a place for any kind."""
        self._declined.clear()

    @property
    def undecided(self) -> bool:
        """Is a request about to be served, or declined?"""
        return any(kind not in self._declined for kind in self._kinds)

    def serve(self, request: Request, place: Place) -> None:
        """Hand a place over."""
        self.leave(request)
        assert request.turn is not None
        request.turn.set_result(place)

    def refuse(self, request: Request, error: BaseException) -> None:
        """Tell him that he waits in vain."""
        self.leave(request)
        if request.turn is not None and not request.turn.done():
            request.turn.set_exception(error)

    def claim(self, places: Sequence[Place]) -> list[Place]:
        """Claim a stream for each exclusive request; the streams that nobody has alone, the claimed ones first."""
        alone = sum(len(queue) for (_, _, exclusive, _), queue in self._kinds.items() if exclusive)
        shared = [place for place in places if not place.exclusive]
        shared.sort(key=lambda place: (not place.claimed, place.leases, place.number))
        for index, place in enumerate(shared):
            place.claimed = index < alone
        return shared

    @property
    def wants_idle(self) -> bool:
        """Is one of them for an idle stream?"""
        return any(idle for _, _, _, idle in self._kinds)

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))


def _order(request: Request) -> tuple[int, int]:
    return RANKS[request.priority], request.number


def holding_up(
    request: Request, turn: asyncio.Future[Place], places: Sequence[Place], maximum: int, pool: object
) -> AbstractContextManager[None]:
    """Whom a request waits for: a stream comes free when none of those who hold it waits in vain."""

    def can_end(stuck: Collection[asyncio.Task[Any]]) -> bool:
        if request.timed or len(places) < maximum:
            return True
        return any(not any(holder in stuck for holder in place.holders) for place in places)

    def what() -> str:
        holders = dict.fromkeys(holder.get_name() for place in places for holder in place.holders)
        alone = "an exclusive" if request.exclusive else "a shared"
        return f"{alone} lease of {pool!r}, held by {', '.join(holders) or 'nobody known'}"

    return waiting(what, turn, can_end)
