"""HostFunctions: the nodes of a coordinator that call a function on the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._base._tasks import start_task
from .._base._user_code import LEAVES_LOOP
from ._scheduled_node import OPEN, ScheduledNode

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["HostFunctions"]


class HostFunctions:
    """Runs each host function in a task: a coroutine function on the event loop, a plain function on a worker thread.

    Attributes
    ----------
    tasks : set
        The tasks of the functions that run.
    """

    __slots__ = ("_scheduler", "tasks")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tasks: set[asyncio.Task[None]] = set()

    def assign(
        self, node: ScheduledNode[Any], function: Callable[..., Any], args: tuple[Any, ...], is_coroutine: bool
    ) -> None:
        """Let a node call a function instead of submitting an operation."""
        scheduler = self._scheduler

        async def run() -> None:
            task = asyncio.current_task()
            is_added = self._add(task)  # by an eager task, which runs before `start` adds it
            try:
                node.value = await (function(*args) if is_coroutine else self._offload(function, args))
            except BaseException as error:
                if asyncio.current_task(scheduler.loop) is not task:
                    raise  # the loop is closed, and Python closes this coroutine
                scheduler.fail(node, error, raised=True)
                scheduler.advance()
                if isinstance(error, (asyncio.CancelledError, *LEAVES_LOOP)):
                    raise
            else:
                scheduler.substitute(node)
                scheduler.advance()
            finally:
                if is_added:
                    self._discard(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._discard(task)
            if not task.cancelled():
                task.exception()  # the exception has left the loop; asyncio must not report it again
            elif node.phase < OPEN:  # cancelled before its first step: the function was not called
                scheduler.fail(node, asyncio.CancelledError())
                scheduler.advance()

        def start(_: object) -> None:
            task = start_task(run, name=node.name)
            self._add(task)
            task.add_done_callback(ended)

        node.work = start

    def _add(self, task: asyncio.Task[Any] | None) -> bool:
        """Note that the task runs a function. Return False if that is known."""
        if task is None or task in self.tasks:
            return False
        self.tasks.add(task)
        self._scheduler.resources.functions.add(task)
        return True

    def _discard(self, task: asyncio.Task[Any] | None) -> None:
        self.tasks.discard(task)
        self._scheduler.resources.functions.discard(task)

    async def _offload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a plain function on a worker thread; also while the device closes."""
        loop_state = self._scheduler.resources.loop_state(while_closing=True)
        return await loop_state.offload(function, *args)

    def cancel(self) -> None:
        """Cancel the functions that run."""
        for task in self.tasks:
            task.cancel()
