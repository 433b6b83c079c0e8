"""Turn: counts the work that awaits do without suspension in one turn of the loop."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, current_task
from collections.abc import Callable
from typing import Any

__all__ = ["Turn"]

#: Limits for awaits that return without suspension, one after another: their number, and their seconds. Where the host
#: is slower than the device, each item of a pipeline is done when it is awaited: 64 items took 10 ms.
MOST_IMMEDIATE = 64
IMMEDIATE_SECONDS = 0.001


class Turn:
    """Counts the work that awaits do without suspension in one turn of the loop, so that the turn ends.

    Attributes
    ----------
    immediate : int
        Awaits of unfinished operations that have returned without suspension, by all tasks.
    inlined : int
        Operations that awaits have resolved.
    """

    __slots__ = ("_awaits", "_loop", "_now", "_since", "_task", "_task_since", "immediate", "inlined")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._since = 0.0
        self._task: asyncio.Task[Any] | None = None  # that has awaited a finished operation last
        self._task_since = 0.0
        self._awaits = 0  # of finished operations, by that task, one after another
        self.immediate = 0
        self.inlined = 0

    def is_over(self) -> bool:
        """Count an await that has found its operation done. Return whether it has to yield to the loop."""
        now = self._now()
        if not self.immediate:
            self._since = now
            self._loop.call_soon(self._next)
        self.immediate += 1
        return self.immediate > MOST_IMMEDIATE or now - self._since > IMMEDIATE_SECONDS

    def is_over_for_task(self) -> bool:
        """Count an await of a finished operation. Return whether the running task has to yield to the loop.

        Each task is counted by itself: `asyncio.gather` awaits each operation by a task of its own.
        """
        if _get_running_loop() is not self._loop:
            return False  # a finished operation may be awaited on another loop
        task = current_task(self._loop)
        if task is None:
            return False  # a coroutine that is stepped by hand
        now = self._now()
        if task is self._task:
            self._awaits += 1
            return self._awaits > MOST_IMMEDIATE or now - self._task_since > IMMEDIATE_SECONDS
        if self._task is None:
            self._loop.call_soon(self._forget_task)
        self._task, self._task_since, self._awaits = task, now, 1
        return False

    def has_inlined(self, resolved: int) -> None:
        """Count operations that an await has resolved."""
        if not self.inlined:
            self._loop.call_soon(self._next)
        self.inlined += resolved

    def _next(self) -> None:
        self.immediate = self.inlined = 0

    def _forget_task(self) -> None:
        self._task = None
