"""Line: who waits for a stream, by priority, then in the order of their coming."""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import insort
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..types import Priority
from ..waiting import waiting
from .place import Place
from .workload import Workload

__all__ = ["RANKS", "Line", "Request", "holding_up"]

#: A smaller rank goes first.
RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One lease that somebody asks for."""

    workload: Workload | None
    priority: Priority
    exclusive: bool
    idle: bool  #: only a stream that has nothing to do
    timed: bool = False  #: he leaves by himself after a while
    turn: asyncio.Future[Place] | None = None  #: while he waits

    @property
    def rank(self) -> int:
        """Of the priority."""
        return RANKS[self.priority]


class Line:
    """Those who wait. Each gets his place handed over: nobody can snatch it between his turn and his waking."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Request] = []

    def join(self, request: Request) -> asyncio.Future[Place]:
        """Stand in line; the future brings a place."""
        turn = request.turn = asyncio.get_running_loop().create_future()
        insort(self.waiting, request, key=lambda other: other.rank)
        return turn

    def leave(self, request: Request) -> None:
        """Wait no longer. Whoever was served meanwhile has left already."""
        if request in self.waiting:
            self.waiting.remove(request)

    def serve(self, request: Request, place: Place) -> None:
        """Hand a place over."""
        self.waiting.remove(request)
        assert request.turn is not None
        request.turn.set_result(place)

    def refuse(self, request: Request, error: BaseException) -> None:
        """Tell him that he waits in vain."""
        self.waiting.remove(request)
        if request.turn is not None and not request.turn.done():
            request.turn.set_exception(error)

    def __len__(self) -> int:
        return len(self.waiting)


def holding_up(
    request: Request, turn: asyncio.Future[Place], places: Sequence[Place], maximum: int, pool: str
) -> AbstractContextManager[None]:
    """Whom a request waits for: a stream comes free when none of those who hold it waits in vain."""

    def can_end(stuck: Collection[asyncio.Task[Any]]) -> bool:
        if request.timed or len(places) < maximum:
            return True
        return any(not any(holder in stuck for holder in place.holders) for place in places)

    holders = dict.fromkeys(holder.get_name() for place in places for holder in place.holders)
    alone = "an exclusive" if request.exclusive else "a shared"
    return waiting(f"{alone} lease of {pool}, held by {', '.join(holders) or 'nobody known'}", turn, can_end)
