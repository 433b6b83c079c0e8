"""Marks: places in the order of a stream, for packages that follow its progress."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from .._base._wakeups import Callback
from .._core import ABANDONED, INSTANT, StreamOperation, nothing

if TYPE_CHECKING:
    from .._core import Ring

__all__ = ["enqueue_mark", "when_accepted", "when_passed"]


def enqueue_mark(queue: Ring, kind: str) -> StreamOperation[None]:
    """Enqueue an operation that does nothing: it is done when all earlier work of the stream is."""
    return queue.enqueue(kind, INSTANT, nothing, ())


def when_accepted(queue: Ring, function: Callable[[Ring], object], context: Context) -> None:
    """Call a function on the loop when the stream has accepted all that is on the host now, or has failed."""
    marker = queue.marker()
    called = False

    def call(_: object = None) -> None:
        nonlocal called
        if not called:
            called = True
            marker.waiters = None
            queue.loop.call_soon(function, queue, context=context)

    marker.add_waiter(Callback(call, context))
    queue.rare.host_queue.put(marker, call, ())


def when_passed(
    operation: StreamOperation[Any], function: Callable[[StreamOperation[Any]], object], context: Context
) -> None:
    """Call a function when the device is done with an operation. An abandoned operation finishes before that."""
    queue = operation.queue
    if operation.status == ABANDONED and not operation.is_settled and queue.driver.fault is None:
        operation = _mark_after(queue, operation)
    operation.follow(function, context)


def _mark_after(queue: Ring, operation: StreamOperation[Any]) -> StreamOperation[Any]:
    """Return a marker that comes after an abandoned operation."""
    if not any(entry is operation for entry in queue.on_host):
        return queue.submit_marker()
    marker = queue.marker()  # a submitted one would overtake it
    queue.rare.host_queue.put(marker, None, ())
    return marker
