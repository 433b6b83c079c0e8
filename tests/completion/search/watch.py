"""Watch: one loop with its producers, and who waits there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from aiocuda._loop_state import LoopState
from aiocuda.completion._reactor import Reactor
from aiocuda.completion._stream_queue import StreamOperation, StreamQueue
from tests.completion.search.machine import ScriptedLoop

if TYPE_CHECKING:
    from tests.completion.search.wakes import Wakes

__all__ = ["Item", "Watch", "name_of", "task_of"]


class Item:
    """Something to be done, and somebody who waits for it."""

    __slots__ = ("calls", "name", "operation", "outcome", "task", "told")

    def __init__(self, name: str) -> None:
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self.operation: StreamOperation[Any] | None = None
        self.outcome = ""
        self.calls = False  # there is a callback, too
        self.told = 0

    @property
    def waits(self) -> bool:
        """Is there somebody who is yet to be told?"""
        return self.task is not None and (not self.task.done() or (self.calls and not self.told))


class Watch:
    """One loop, its reactor, and its producers with their items."""

    def __init__(self, wakes: Wakes, first: int, producers: int, items: int) -> None:
        self.loop: ScriptedLoop = cast("Any", ScriptedLoop)(wakes.violations, wakes.machine.now)
        self.loop.inside(lambda: self._open(wakes, first, producers, items))

    def _open(self, wakes: Wakes, first: int, producers: int, items: int) -> None:
        self.reactor = Reactor(wakes.device_state, self.loop)
        self.queues: list[StreamQueue] = []
        self.items: list[list[Item]] = []
        self.loop_state = LoopState(self.reactor, cast("Any", None))
        for number in range(first, first + producers):
            letter = "ABCD"[number]
            queue = StreamQueue(self.reactor, wakes.machine.open(number), letter)
            self.queues.append(queue)
            self.loop_state.queues[queue] = None
            self.items.append([Item(f"{letter}{index + 1}") for index in range(items)])
        wakes.device_state.stream_opened(producers)

    def waiting(self) -> list[Item]:
        """With somebody who is yet to be told; where the loop is closed, there is nobody."""
        return [] if self.loop.is_closed() else [item for items in self.items for item in items if item.waits]


def name_of(handle: asyncio.Handle) -> str:
    """Of a callback: of whose task it is, or what it is called."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    if handle.cancelled():
        return "nothing"
    task = task_of(handle)
    return str(callback.__name__) if task is None else f"{task.get_name()}'s waiter"


def task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """Whose step it is."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, asyncio.Task) else None
