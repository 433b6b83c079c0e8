"""`described`: a run that shows what its picture describes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["described"]

T = TypeVar("T")

ATTEMPTS = 10


def described(record: Callable[[], Coroutine[Any, Any, T]], is_right: Callable[[T], bool]) -> T:
    """Return the first run for which ``is_right`` returns True. On a busy machine, a task may be late in some runs.

    Raises
    ------
    RuntimeError
        No run is right: the library, or the picture, has changed.
    """
    for _ in range(ATTEMPTS):
        run = asyncio.run(record())
        if is_right(run):
            return run
    raise RuntimeError(f"none of {ATTEMPTS} runs shows what the picture describes; the last one: {run!r}")
