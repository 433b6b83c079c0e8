"""Pumps: submits operations of streams that waited for each other on the host, one stream after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .._core import Ring

__all__ = ["MOST_AT_ONCE", "Pumps"]

#: Streams that are pumped in one iteration of the loop: each of them may submit up to `MOST_PER_PUMP` operations.
MOST_AT_ONCE: Final = 128


class Pumps:
    """The streams of one event loop whose oldest operation on the host waited for one that is submitted now.

    Two streams may wait for each other in turn, thousands of times. So a stream does not pump another one directly,
    which would be as many nested calls: it adds that stream to a list, and the outermost call works through the list.
    """

    __slots__ = ("_is_pumping", "_is_scheduled", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Ring] = []  # the next one is the last
        self._is_pumping = False
        self._is_scheduled = False

    def pump(self, queues: Iterable[Ring]) -> None:
        """Pump these streams, now or, inside a call of this method, when the outermost one gets to them."""
        self._waiting.extend(reversed(tuple(queues)))  # those that this stream pumps come before the others
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            for _ in range(MOST_AT_ONCE):
                if not self._waiting:
                    break
                queue = self._waiting.pop()
                queue.rare.pump()
                queue.attend()
        finally:
            self._is_pumping = False
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._is_scheduled = False
        self.pump(())
