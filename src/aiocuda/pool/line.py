"""Line: who waits for a stream, by priority, then in the order of their coming."""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import insort

from ..types import Priority
from .place import Place
from .workload import Workload

__all__ = ["RANKS", "Line", "Request"]

#: A smaller rank goes first.
RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One lease that somebody asks for."""

    workload: Workload | None
    priority: Priority
    exclusive: bool
    idle: bool  #: only a stream that has nothing to do
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

    def refuse(self, request: Request, error: Exception) -> None:
        """Tell him that he waits in vain."""
        self.waiting.remove(request)
        if request.turn is not None and not request.turn.done():
            request.turn.set_exception(error)

    def __len__(self) -> int:
        return len(self.waiting)
