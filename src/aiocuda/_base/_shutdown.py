"""Shutdown: awaiting work that a cancellation must not interrupt, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import weakref
from collections.abc import Collection, Coroutine
from typing import Any, Literal, TypeVar

from ._coroutine import coroutine_of
from ._tasks import start_task

__all__ = [
    "DRAIN_TIMEOUT", "DrainDeadline", "end_now", "end_tasks", "finish_shielded", "finish_within", "must_end_now",
    "note_cancelled", "shield", "unlimited",
]  # fmt: skip

T = TypeVar("T")

#: Seconds for which an object that is left by an exception waits for the work that it has accepted.
DRAIN_TIMEOUT = 5.0


def unlimited() -> float:
    """Return infinity: the drain of the object has a limit of its own."""
    return math.inf


async def finish_shielded(work: asyncio.Task[T] | Coroutine[Any, Any, T]) -> T:
    """Await ``work``, shielded from cancellation. A cancellation meanwhile is raised when the work has ended.

    It is raised even if the work has failed; asyncio then reports that failure as never retrieved.
    """
    # Not `ensure_future`: without a running loop, in a generator that is collected, it uses a loop that never runs.
    task = work if isinstance(work, asyncio.Task) else _task_of(work)
    cancelled: asyncio.CancelledError | None = None
    with shield():
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    note_cancelled(task)
    if cancelled is not None:
        raise cancelled
    return task.result()


async def finish_within(
    seconds: float, work: Coroutine[Any, Any, object]
) -> tuple[Literal["done", "late", "interrupted"], asyncio.CancelledError | None]:
    """Await ``work`` for at most ``seconds``, shielded from cancellation; return (outcome, pending cancellation).

    The caller raises the pending cancellation when it has finished its own part of the shutdown. Work that exceeds its
    time is cancelled. After a second Ctrl-C it gets no time.
    """
    loop = asyncio.get_running_loop()
    task = _task_of(work)
    began = loop.time()
    deadline = began if must_end_now() else began + seconds
    cancelled: asyncio.CancelledError | None = None
    with shield():
        while not task.done() and loop.time() < deadline:
            try:
                await asyncio.wait({task}, timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
    note_cancelled(task)
    if not task.done() or task.cancelled():
        task.cancel()
        return "interrupted" if loop.time() < began + seconds else "late", cancelled
    failure = task.exception()
    if failure is None:
        return "done", cancelled
    if cancelled is None:
        raise failure
    loop.call_exception_handler({"message": "aiocuda: an end failed while it was cancelled", "exception": failure})
    raise cancelled


def _task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task that awaits the work."""
    task = start_task(coroutine_of, work)
    task.add_done_callback(lambda _: work.close())  # cancelled before its first step, the task has not awaited it
    return task


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> set[asyncio.Task[Any]]:
    """Wait until all tasks have ended; cancel those that need more than ``seconds``. Return the cancelled tasks.

    If this wait is cancelled, they are cancelled at once.
    """
    late = set(tasks)
    try:
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
    finally:
        for task in tasks:
            if task in late:
                task.cancel()
        if late:
            with shield():
                await asyncio.gather(*tasks, return_exceptions=True)
    return late


def shield() -> contextlib.AbstractContextManager[object]:
    """Return a block in which no anyio scope cancels the current task; `asyncio.Task.cancel` still does.

    A cancelled scope cancels its tasks in every iteration of the loop, until they leave the scope. A task that keeps
    waiting in spite of that would use a whole core. After the block, the scope cancels the task at its next wait.
    """
    scope: Any = getattr(sys.modules.get("anyio"), "CancelScope", None)  # None if the program does not use anyio
    if scope is None or asyncio.current_task() is None:
        return contextlib.nullcontext()
    block: contextlib.AbstractContextManager[object] = scope(shield=True)
    return block


#: Tasks whose awaited work was cancelled by the end of the event loop.
_must_end_now: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


def note_cancelled(work: asyncio.Task[Any]) -> None:
    """Note that the loop is ending if the work was cancelled, and this task, too: the end of a loop cancels all."""
    waiting = asyncio.current_task()
    if work.cancelled() and waiting is not None and waiting.cancelling():
        _must_end_now.add(waiting)


def end_now(task: asyncio.Task[Any]) -> None:
    """Let `must_end_now` be True in this task, too. The running task has to end at once, and waits for it."""
    _must_end_now.add(task)


def must_end_now() -> bool:
    """True if the running task has to end at once, because of a second Ctrl-C.

    That is a `KeyboardInterrupt` in a task that the first Ctrl-C has cancelled; or it ends the loop, which cancels all
    tasks, also the work that this task awaits.
    """
    task = asyncio.current_task()
    if task is None:
        return False
    return task in _must_end_now or (isinstance(sys.exc_info()[1], KeyboardInterrupt) and task.cancelling() > 0)


class DrainDeadline:
    """The time that a shutdown may take after an exception or a cancellation: ``timeout`` seconds.

    That is `Device.drain_timeout`. From `begin` on, the parts of a context and the device's own shutdown share it.
    """

    __slots__ = ("_deadline", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._deadline: float | None = None

    def begin(self) -> None:
        """Start the time, when the device or its context is left."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self.timeout

    def left(self) -> float:
        """Return the seconds that are left, at least 1 ms: enough to look once at what is unfinished."""
        if self._deadline is None:
            return float(self.timeout)
        return max(0.001, self._deadline - asyncio.get_running_loop().time())
