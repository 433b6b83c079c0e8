"""A client of the device: one event loop, its producers, and the tasks that wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from aiocuda._core import Ring, StreamOperation
from aiocuda.completion._reactor import Reactor
from aiocuda.completion._stream_queue import new_queue
from aiocuda.device._loop_state import LoopState
from tests.completion.search.scripted import ScriptedLoop

if TYPE_CHECKING:
    from tests.completion.search.wakeup_system import WakeupSystem

__all__ = ["Client", "Item", "name_of", "task_of"]


class Item:
    """A piece of work, and the task that waits for it."""

    __slots__ = ("has_callback", "name", "notified", "operation", "outcome", "task")

    def __init__(self, name: str) -> None:
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self.operation: StreamOperation[Any] | None = None
        self.outcome = ""
        self.has_callback = False  # in addition to the task
        self.notified = 0

    @property
    def waits(self) -> bool:
        """True if the task or the callback has not been notified yet."""
        return self.task is not None and (not self.task.done() or (self.has_callback and not self.notified))


class Client:
    """One event loop, its reactor, and its producers with their items."""

    def __init__(self, system: WakeupSystem, first: int, producers: int, items: int) -> None:
        self.loop: ScriptedLoop = cast("Any", ScriptedLoop)(system.violations, system.driver.now)
        self.loop.inside(lambda: self._open(system, first, producers, items))

    def _open(self, system: WakeupSystem, first: int, producers: int, items: int) -> None:
        self.reactor = Reactor(system.device_state, self.loop)
        self.queues: list[Ring] = []
        self.items: list[list[Item]] = []
        self.loop_state = LoopState(self.reactor, cast("Any", None))
        for number in range(first, first + producers):
            letter = "ABCD"[number]
            queue = new_queue(self.reactor, system.driver.open(number), letter)
            self.queues.append(queue)
            self.loop_state.queues[queue] = None
            self.items.append([Item(f"{letter}{index + 1}") for index in range(items)])
        system.device_state.stream_opened(producers)

    def waiting(self) -> list[Item]:
        """Return the items with a task or callback that has not been notified; none if the loop is closed."""
        return [] if self.loop.is_closed() else [item for items in self.items for item in items if item.waits]


def name_of(handle: asyncio.Handle) -> str:
    """Return the name of a callback: of the task that it continues, or of its function."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    if handle.cancelled():
        return "nothing"
    task = task_of(handle)
    return str(callback.__name__) if task is None else f"{task.get_name()}'s waiter"


def task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """Return the task that a callback continues, if any."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, asyncio.Task) else None
