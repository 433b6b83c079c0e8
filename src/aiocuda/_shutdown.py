"""Finish: what must be done to its end, and what the interpreter's exit gives to devices that are still at work."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import time
import weakref
from collections.abc import Collection, Coroutine
from typing import Any, Literal, Protocol, TypeVar

from ._types import Place
from .errors import DrainTimeoutWarning

__all__ = ["Patience", "all_ended", "at_exit", "hurried", "to_the_end", "wait_at_most", "warn_of_the_rest"]

T = TypeVar("T")


async def to_the_end(work: asyncio.Task[T] | Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half-way: a cancellation is raised when it is done.

    It is raised even if the work has failed; asyncio then reports that failure as one that nobody has asked for.
    """
    # Not `ensure_future`: without a running loop, in a generator that is collected, it takes one that never runs.
    task = work if isinstance(work, asyncio.Task) else asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    with _shield():
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    _note(task)
    if cancelled is not None:
        raise cancelled
    return task.result()


async def wait_at_most(
    seconds: float, work: Coroutine[Any, Any, object]
) -> tuple[Literal["done", "late", "interrupted"], asyncio.CancelledError | None]:
    """Give work that must not stop half-way so many seconds, whatever is cancelled: how did it end, was this cancelled?

    Whoever is told of a cancellation raises it when he has done what the end needs of him. Work whose time is up is
    cancelled. After a second Ctrl-C it gets no time.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    began = loop.time()
    deadline = began if hurried() else began + seconds
    cancelled: asyncio.CancelledError | None = None
    with _shield():
        while not task.done() and loop.time() < deadline:
            try:
                await asyncio.wait({task}, timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
    _note(task)
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


async def all_ended(tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> set[asyncio.Task[Any]]:
    """Wait until all have ended: by themselves, for so many seconds, then by cancellation. Those that were cancelled.

    Where this wait is cancelled, they are at once.
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
            with _shield():
                await asyncio.gather(*tasks, return_exceptions=True)
    return late


def _shield() -> contextlib.AbstractContextManager[object]:
    """A block in which no anyio scope cancels the current task; `asyncio.Task.cancel` still does.

    A cancelled scope cancels its tasks again in every iteration of the loop, until they leave it. A wait that goes on
    in spite of that would use a whole core. After the block, the scope cancels the task at its next wait.
    """
    scope: Any = getattr(sys.modules.get("anyio"), "CancelScope", None)  # without anyio there is no such scope
    if scope is None or asyncio.current_task() is None:
        return contextlib.nullcontext()
    shield: contextlib.AbstractContextManager[object] = scope(shield=True)
    return shield


def warn_of_the_rest(device: str, unfinished: int, limit: str) -> None:
    """Say that a device was left at work: after its time, or, without one, because of Ctrl-C."""
    Place.of_caller().warn(
        f"{device}: {unfinished} operation{'s' * (unfinished != 1)} did not finish "
        f"{limit or 'before the wait was interrupted'}, or threads did not; the memory that they may still touch stays "
        "allocated",
        DrainTimeoutWarning,
    )


#: Tasks of which the loop's own end cancelled what they waited for here.
_hurried: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()


def _note(work: asyncio.Task[Any]) -> None:
    """Nobody but us knows this task: only what cancels all tasks of the loop cancels it."""
    waiting = asyncio.current_task()
    if work.cancelled() and waiting is not None:
        _hurried.add(waiting)


def hurried() -> bool:
    """Is the running task to end at once, because of a second Ctrl-C?

    It comes as a `KeyboardInterrupt` into a task that the first one has cancelled, or it ends the loop, which cancels
    all tasks, and with them what this one waits for.
    """
    task = asyncio.current_task()
    if task is None:
        return False
    return task in _hurried or (isinstance(sys.exc_info()[1], KeyboardInterrupt) and task.cancelling() > 0)


class Drained(Protocol):
    """A device, as the end of the process sees it."""

    drain_timeout: float
    closed: bool

    def _unfinished(self) -> bool: ...


class Patience:
    """Seconds that the ends of a device and of what works on it may take, where an exception or a cancellation ends it.

    From `begin` on all of them share ``drain_timeout``: those of a context's parts, and the device's own.
    """

    def __init__(self, device: Drained) -> None:
        self._device = weakref.proxy(device)
        self._deadline: float | None = None

    def begin(self) -> None:
        """The device or its context is being left."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._device.drain_timeout

    def left(self) -> float:
        """What is left of it; enough for one look if nothing is."""
        if self._deadline is None:
            return float(self._device.drain_timeout)
        return max(0.001, self._deadline - asyncio.get_running_loop().time())


_open: weakref.WeakSet[Drained] = weakref.WeakSet()


def at_exit(device: Drained) -> None:
    """Give the device's work its time before the interpreter goes. One hook for all devices."""
    if not _open:
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)
    _open.add(device)


def _drain_all() -> None:
    """No loop runs any more, so this one place may block: until the work is done, its time is up, or Ctrl-C."""
    began = time.monotonic()
    try:
        for device in list(_open):
            while not device.closed and device._unfinished():
                if time.monotonic() - began > device.drain_timeout:
                    break
                time.sleep(0.001)  # noqa: TID251 - no loop runs any more
    except KeyboardInterrupt:
        return  # whoever waits for the exit has had enough, and the exit code stays
