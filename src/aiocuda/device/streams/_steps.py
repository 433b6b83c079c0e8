"""The begin and the end of a coroutine's step that uses another library on a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ..._base._shutdown import finish_shielded
from ...completion._queue import Queue, own_queue
from ...errors import BusyError

__all__ = ["end_step", "flushed"]


def flushed(queue: Queue) -> Awaitable[object] | None:
    """Return an awaitable that is done when the device has all work that is on the host now; None if there is none.

    A cancellation of the wait is raised when the wait ends: another library must not overtake that work.
    """
    # Not until the host queue is empty: other tasks may go on to fill it. Their later work may come later.
    return finish_shielded(own_queue(queue).rare.flush()) if queue.on_host else None


def end_step(queue: Queue) -> None:
    """Note that a coroutine has enqueued work of another library, so that later waits include it.

    Raise `BusyError` if that library captures the stream: other tasks would enqueue on it.
    """
    own = own_queue(queue)
    if asyncio._get_running_loop() is not own.loop or own.ended or own.driver.fault is not None:
        return
    if own.rare.is_captured():
        raise BusyError(
            f"{own.name} is being captured into a graph, and other tasks would enqueue on it: end the capture before "
            "the await"
        )
    own.rare.mark_end()
