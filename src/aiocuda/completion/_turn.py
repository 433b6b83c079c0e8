"""Turn: what awaits that did not suspend have done in one turn of the loop, so that it comes to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Turn"]

#: Awaits that may return at once, one after another, before one of them lets the loop turn; and for how long they may.
#: Where the host is slower than the device, a pipeline's items are done whenever they are asked for: 64 took 10 ms.
MOST_IMMEDIATE = 64
IMMEDIATE_SECONDS = 0.001


class Turn:
    """One turn of a loop, and then the next."""

    __slots__ = ("_loop", "_now", "_since", "immediate", "inlined")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._since = 0.0
        self.immediate = 0  # awaits that have returned at once
        self.inlined = 0  # operations that awaits have resolved

    def is_over(self) -> bool:
        """An await returns without suspension: is it time to let the loop turn?"""
        now = self._now()
        if not self.immediate:
            self._since = now
            self._loop.call_soon(self._next)
        self.immediate += 1
        return self.immediate > MOST_IMMEDIATE or now - self._since > IMMEDIATE_SECONDS

    def has_inlined(self, resolved: int) -> None:
        """An await has resolved so many."""
        if not self.inlined:
            self._loop.call_soon(self._next)
        self.inlined += resolved

    def _next(self) -> None:
        self.immediate = self.inlined = 0
