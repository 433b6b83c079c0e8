"""Task factories of programs, which make the tasks of the library, too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["each_factory", "factory_of_tasks"]


class _FactoryError(Exception):
    pass


def _wraps(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """As that of Sentry, which measures each task."""

    async def wrapper() -> Any:
        return await work

    return asyncio.Task(wrapper(), loop=loop, **options)


class _Future(asyncio.Future[Any]):
    """What asyncio asks of a factory: an object like a future. Python 3.13 gives it a name."""

    def set_name(self, name: object) -> None:
        """Ignore the name."""


def _returns_a_future(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> _Future:
    future = _Future(loop=loop)
    task = asyncio.Task(work, loop=loop)

    def ended(task: asyncio.Task[Any]) -> None:
        if future.done():
            return
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    task.add_done_callback(ended)
    future.add_done_callback(lambda _: task.cancel())
    return future


def _takes_no_keywords(loop: asyncio.AbstractEventLoop, work: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop)


def _raises(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    raise _FactoryError


def _closes(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    work.close()
    raise _FactoryError


_FACTORIES: dict[str, Callable[..., Any]] = {
    "returns a future": _returns_a_future, "wraps": _wraps, "takes no keywords": _takes_no_keywords, "raises": _raises,
    "closes and raises": _closes,
}  # fmt: skip
if sys.version_info >= (3, 12):
    _FACTORIES["eager"] = asyncio.eager_task_factory

each_factory = pytest.mark.parametrize("factory", _FACTORIES)


@contextlib.contextmanager
def factory_of_tasks(name: str) -> Iterator[None]:
    """A block in which a factory makes the tasks of the running loop. Afterwards, each of its failures was reported."""
    loop = asyncio.get_running_loop()
    made, reports = 0, []
    before, handler = loop.get_task_factory(), loop.get_exception_handler()

    def factory(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return _FACTORIES[name](*args, **options)

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), _FactoryError):
            reports.append(context["message"])
        else:
            loop.default_exception_handler(context)

    loop.set_task_factory(factory)
    loop.set_exception_handler(report)
    try:
        yield
    finally:
        loop.set_task_factory(before)
        loop.set_exception_handler(handler)
    assert len(reports) == (made if "raises" in name else 0)
    assert all(each.startswith("aiocuda: the task factory of the loop has failed") for each in reports)
