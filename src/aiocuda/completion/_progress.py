"""Progress: the states of operations, marks in the order of a stream, and the work that a stream has left.

A *marker* is an operation whose event stands for all earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import Context
from itertools import islice
from typing import Any

from .._base._wakeups import Callback
from .._core import ABANDONED, INSTANT, Operation, Ring, State, StreamOperation, nothing
from ..errors import InvalidTypeError

__all__ = ["TRANSITIONS", "StreamLoad", "check_awaited", "enqueue_mark", "when_accepted", "when_passed"]

#: The states that can follow each state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING, State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.STAGING: frozenset({State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.SUBMITTED: frozenset({State.LANDING, State.DONE, State.FAILED, State.ABANDONED}),
    State.LANDING: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}

#: Predictions that are added for one stream, at most; the other operations count as their average. A stream may have
#: 400 in flight, and a choice between 32 such streams must not take a millisecond.
MOST_LOOKED_AT = 64

#: Seconds for an operation without a prediction. If all are unknown, the number of operations decides.
UNKNOWN_SECONDS = 1e-3


def check_awaited(thing: object, role: str) -> None:
    """Raise `InvalidTypeError` if ``thing``, which the error calls ``role``, is an operation instead of its result."""
    if isinstance(thing, Operation):
        raise InvalidTypeError(
            f"{role} is an Operation: await it first, and pass its result. It is {thing!r}"
        ) from None


def enqueue_mark(queue: Ring, kind: str) -> StreamOperation[None]:
    """Enqueue an operation that does nothing: it is done when all earlier work of the stream is."""
    return queue.enqueue(kind, INSTANT, nothing, ())


def when_accepted(queue: Ring, function: Callable[[Ring], object], context: Context) -> None:
    """Call ``function(queue)`` on the loop when the stream has accepted all that is on the host now, or has failed.

    ``report`` is the driver call of a marker, for the first case, and a waiter of it, for a marker that is skipped.
    """
    marker = queue.marker()
    called = False

    def report(_: object = None) -> None:
        nonlocal called
        if not called:
            called = True
            marker.waiters = None  # so that the reactor does not wait for the marker
            queue.loop.call_soon(function, queue, context=context)

    marker.add_waiter(Callback(report, context))
    queue.rare.host_queue.put(marker, report, ())


def when_passed(
    operation: StreamOperation[Any], function: Callable[[StreamOperation[Any]], object], context: Context
) -> None:
    """Call ``function(operation)`` when the device is done with the operation.

    If it was abandoned before this call, the argument is a marker behind it. If it is abandoned afterwards, the
    function is called at that moment, and ``operation.is_settled`` may still be False.
    """
    queue = operation.queue
    if operation.status == ABANDONED and not operation.is_settled and queue.driver.fault is None:
        operation = _mark_after(queue, operation)  # after a fault no marker would end
    operation.follow(function, context)


def _mark_after(queue: Ring, operation: StreamOperation[Any]) -> StreamOperation[Any]:
    """Return a marker that comes after an abandoned operation."""
    if not any(entry is operation for entry in queue.on_host):
        return queue.submit_marker()
    marker = queue.marker()  # behind it on the host, too: a submitted marker would overtake it
    queue.rare.host_queue.put(marker, None, ())
    return marker


class StreamLoad:
    """The work that one stream has left, for a choice between streams (`aiocuda.pool`)."""

    __slots__ = ("_queue",)

    def __init__(self, queue: Ring) -> None:
        self._queue = queue

    @property
    def idle(self) -> bool:
        """True if the device has finished all operations of the stream. Queries the device if no task waits for it."""
        queue = self._queue
        if queue.unmarked_wait_at == queue.enqueued and queue.poison is None and not queue.reactor_hot.faulted:
            queue.end()  # the last work is a wait that no operation represents: only a marker shows when it is over
        if queue.pending and not queue.watch.attended:  # otherwise the reactor will soon resolve the operations
            queue.poll()
        return queue.idle

    @property
    def ended_at(self) -> float:
        """The driver's time at which the last timed operation was resolved."""
        return self._queue.last_resolved

    def seconds_left(self, now: float) -> float:
        """Return the predicted seconds until all operations are done, at a time of the driver; 0.0 if it is idle."""
        if self.idle:
            return 0.0
        queue = self._queue
        pending = queue.pending
        total = _sum(pending, len(pending)) + _sum(queue.on_host, len(queue.on_host))
        if pending:
            head = pending[0]
            expected = _seconds(head)
            taken = now - max(head.submitted_at, queue.last_resolved)
            # An operation that has exceeded its prediction is expected to take as long again as the excess.
            total += abs(expected - max(taken, 0.0)) - expected
        return total


def _sum(operations: Iterable[StreamOperation[Any]], count: int) -> float:
    total = sum(map(_seconds, islice(operations, MOST_LOOKED_AT)))
    return total if count <= MOST_LOOKED_AT else total * count / MOST_LOOKED_AT


def _seconds(operation: StreamOperation[Any]) -> float:
    """Return the predicted duration of an operation."""
    estimate = operation.estimate
    seconds = None if estimate is None else estimate.seconds
    return UNKNOWN_SECONDS if seconds is None else seconds
