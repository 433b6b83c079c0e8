"""Tasks of the library, made by any task factory of the program."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["start_task"]

T = TypeVar("T")


def start_task(
    function: Callable[..., Coroutine[Any, Any, T]],
    *args: Any,
    name: str | None = None,
    context: contextvars.Context | None = None,
    group: asyncio.TaskGroup | None = None,
) -> asyncio.Task[T]:
    """Return a new task of the running loop that runs a coroutine function.

    The program's task factory makes the task. It may be any: it gets a coroutine that has not begun, and no keywords.
    If it raises, the loop's exception handler gets the error, and the task is made without it: the object whose work
    this is has accepted the work, and goes on.

    Parameters
    ----------
    function, *args
        A coroutine function, which is called again if the factory fails, and its arguments.
    name
        The name of the task.
    context
        The task runs in a copy of it; None copies the current context.
    group
        The task group of the task.
    """
    loop = asyncio.get_running_loop()
    create = loop.create_task if group is None else group.create_task
    work = function(*args)
    try:
        task = create(work) if context is None else context.copy().run(create, work)
    except Exception as error:  # noqa: BLE001 - reported
        work.close()  # the factory may have used it
        task = _start_without_factory(
            functools.partial(start_task, function, *args, context=context, group=group), error
        )
    # If the factory has wrapped it, and the task is cancelled before its first step, `work` never begins. `get_coro` of
    # an eager task that has ended crashes Python 3.12. A factory may return a future, which has neither method.
    if not task.done() and hasattr(task, "get_coro") and task.get_coro() is not work:
        task.add_done_callback(lambda _: work.close())
    if name is not None and hasattr(task, "set_name"):
        task.set_name(name)
    return task


def _start_without_factory(start: Callable[[], asyncio.Task[T]], error: Exception) -> asyncio.Task[T]:
    """Start a task without the task factory, which has failed. Raise ``error`` if there is none."""
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    if factory is None:
        raise error  # the loop or the group has ended
    loop.set_task_factory(None)
    try:
        task = start()
    finally:
        loop.set_task_factory(factory)
    message = "aiocuda: the task factory of the loop has failed: a task was made without it"
    loop.call_exception_handler({"message": message, "exception": error, "task": task})
    return task
