"""Changes: tasks that wait for another state of any replica."""

from __future__ import annotations

import asyncio

from .._base._wakeups import Waiters, Wakes, wake_future

__all__ = ["Changes"]


class Changes:
    """Tasks that wait for another state of any replica."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wakes = Wakes.of(loop)
        self._waiters: Waiters[asyncio.Future[None]] = Waiters()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self) -> None:
        """Wait for the next change."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        """Wake all tasks, at most 256 in one iteration of the loop."""
        woken, self._waiters = self._waiters, Waiters()
        self._wakes.wake_all(woken, wake_future)
