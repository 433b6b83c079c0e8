"""Call a function on an event loop from any thread, and wait for its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["call_on_loop"]

T = TypeVar("T")


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], timeout: float) -> tuple[T, float | None]:
    """Call a function on a loop, and return its result and the seconds until the loop has begun it.

    On the loop itself, and while the loop does not run, the function is called here; the seconds are None then.

    Raises
    ------
    TimeoutError
        The loop has not called the function within the time. It will not call it later.
    Exception
        The exception of the function.
    """
    if asyncio._get_running_loop() is loop or not loop.is_running():
        return function(), None
    answer: concurrent.futures.Future[tuple[T, float]] = concurrent.futures.Future()
    began = time.monotonic()

    def answer_here() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        lag = time.monotonic() - began
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)
        except BaseException:  # Ctrl-C leaves the loop
            answer.set_exception(TimeoutError("the event loop was interrupted"))
            raise
        else:
            answer.set_result((result, lag))

    try:
        loop.call_soon_threadsafe(answer_here)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return function(), None
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        answer.cancel()
        raise
