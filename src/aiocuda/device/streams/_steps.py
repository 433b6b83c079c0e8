"""The begin and the end of a coroutine's step that uses another library on a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ..._base._shutdown import finish_shielded
from ..._core import Ring
from ...errors import BusyError

__all__ = ["end_step", "flushed"]


def flushed(queue: Ring) -> Awaitable[object] | None:
    """Return an awaitable that is done when the device has all work that is on the host now; None if there is none.

    A cancellation of the wait is raised when the wait ends: another library must not overtake that work.
    """
    # Not until the host queue is empty: other tasks may go on to fill it. Their later work may come later.
    return finish_shielded(queue.rare.flush()) if queue.on_host else None


def end_step(queue: Ring) -> None:
    """Note that a coroutine has enqueued work of another library, so that later waits include it.

    Raise `BusyError` if that library captures the stream: other tasks would enqueue on it.
    """
    if asyncio._get_running_loop() is not queue.loop or queue.ended or queue.driver.fault is not None:
        return
    if queue.rare.is_captured():
        raise BusyError(
            f"{queue.name} is being captured into a graph, and other tasks would enqueue on it: end the capture before "
            "the await"
        )
    queue.rare.mark_end()
