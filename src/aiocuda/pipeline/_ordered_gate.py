"""OrderedGate: who comes first, goes first."""

from __future__ import annotations

import asyncio

__all__ = ["OrderedGate"]


class OrderedGate:
    """Lets numbers pass one at a time, in order: 0, 1, 2 …, whatever order they arrive in.

    Every number leaves once, whether it entered or not: one that never comes would hold up all behind it.
    """

    __slots__ = ("_gone", "_next", "_waiting")

    def __init__(self) -> None:
        self._next = 0
        self._gone: set[int] = set()  # left before their turn
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def enter(self, number: int) -> None:
        """Wait until all smaller numbers have left."""
        while number != self._next:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[number] = turn
            try:
                await turn
            finally:
                self._waiting.pop(number, None)

    def leave(self, number: int) -> None:
        """Done, or not coming."""
        self._gone.add(number)
        while self._next in self._gone:
            self._gone.discard(self._next)
            self._next += 1
        turn = self._waiting.get(self._next)
        if turn is not None and not turn.done():
            turn.set_result(None)
