"""Calls of functions that may block, on a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["off_loop"]

T = TypeVar("T")


async def off_loop(work: Callable[[], T]) -> T:
    """Run a function that may block on a new daemon thread. Only for calls that need no driver."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 - raised in the event loop
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop needs no result
                raise

    threading.Thread(target=run, name="aiocuda-open", daemon=True).start()
    return await future
