"""OrderedGate: a gate that numbered callers pass in order."""

from __future__ import annotations

import asyncio

__all__ = ["OrderedGate"]


class OrderedGate:
    """A gate that numbers pass one at a time, in order: 0, 1, 2 …, whatever order they arrive in.

    Each number must leave once, even if it has not entered: a number that does not leave blocks all later ones.
    """

    __slots__ = ("_left_early", "_next", "_waiters")

    def __init__(self) -> None:
        self._next = 0
        self._left_early: set[int] = set()  # before all smaller numbers had left
        self._waiters: dict[int, asyncio.Future[None]] = {}

    async def enter(self, number: int) -> None:
        """Wait until all smaller numbers have left."""
        while number != self._next:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[number] = waiter
            try:
                await waiter
            finally:
                self._waiters.pop(number, None)

    def leave(self, number: int) -> None:
        """Let the next number enter, when all smaller numbers have left, too."""
        self._left_early.add(number)
        while self._next in self._left_early:
            self._left_early.discard(self._next)
            self._next += 1
        waiter = self._waiters.get(self._next)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
