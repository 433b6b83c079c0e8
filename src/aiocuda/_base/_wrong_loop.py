"""The errors for an object that is used outside of its event loop, or outside of its process."""

from __future__ import annotations

import asyncio
import os
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import TypeAlias

from ..errors import AiocudaError, ClosedError, ForkedProcessError, NoEventLoopError, WrongLoopError

__all__ = ["WrongLoop", "wrong_loop"]

#: Returns the error: of the loop and the name of the object, of the cure and the process.
WrongLoop: TypeAlias = Callable[[asyncio.AbstractEventLoop | None, str, str, int], AiocudaError]


def wrong_loop(
    loop: asyncio.AbstractEventLoop | None, what: str, cure: str, process: int | None = None
) -> AiocudaError:
    """Return the error for the use of ``what`` outside of its loop, or outside of its process.

    None is no loop yet, and any process.
    """
    if process is not None and os.getpid() != process:
        return ForkedProcessError(f"{what} belongs to the parent process: make one in the child, or use spawn")
    if loop is not None and loop.is_closed():
        return ClosedError(f"the event loop of {what} has been closed: {cure}")
    if _get_running_loop() is None:
        return NoEventLoopError(
            f"{what} needs its running event loop: call from a coroutine, under asyncio.run(main()), or from a test "
            "that is `async def`; "
            "from another thread, hand that coroutine over by asyncio.run_coroutine_threadsafe(work(), loop)"
        )
    return WrongLoopError(f"{what} belongs to another event loop: {cure}")
