"""begin_task: tasks under any task factory of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["begin_task"]

T = TypeVar("T")


def begin_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task of the running loop for a coroutine.

    If the task factory of the program raises, the coroutine is closed: Python would warn that it was never awaited.
    """
    try:
        return asyncio.get_running_loop().create_task(work)
    except BaseException:
        work.close()
        raise
