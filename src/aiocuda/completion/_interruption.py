"""Interruption: ends a submission or a resolution that was refused, or interrupted by Ctrl-C."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._core import ABANDONED, DONE, FAILED, INTERNAL
from ..driver.protocol import RecordRefused
from ..errors import DeviceFault, DriverError

if TYPE_CHECKING:
    from .._core import Lease
    from ._stream_operation import StreamOperation
    from ._stream_queue import StreamQueue

__all__ = ["Interruption"]


class Interruption:
    """What has to be done when Ctrl-C comes between two lines of the queue of a stream.

    Each operation is in its place before its first driver call, and out of it before its first waiter is woken. So an
    operation that was interrupted is the newest of the queue, the one whose turn it is, or the head of the host queue.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: StreamQueue) -> None:
        self._queue: Callable[[], StreamQueue] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it

    def end_submit(self, operation: StreamOperation[Any]) -> None:
        """Handle Ctrl-C during `Ring.submit`.

        If the driver call has returned, the stream has accepted the operation, which only lacks its event. If not, the
        result of the call is unknown: the operation fails, and its memory is held until an event recorded from now on.
        """
        queue = self._queue()
        if operation.submitted_at <= 0.0 and queue.pending and queue.pending[-1] is operation:
            operation.submitted_at = queue.driver.now()
            error = DriverError(
                f"{operation} was interrupted on its way to the device, which may do it or not", code=0, call="Ctrl-C"
            )
            queue.fail(operation, error)

    def end_recorded_call(self, operation: StreamOperation[Any], error: BaseException, lease: Lease | None) -> None:
        """Handle an error of `BoundCall` as `submit` does: a refused call, a refused record, or Ctrl-C."""
        queue = self._queue()
        if isinstance(error, RecordRefused):
            operation.submitted_at = queue.driver.now()
            error = error.error
        if lease is not None and operation.lease is None:
            queue.return_lease(operation, lease)
        if isinstance(error, Exception):
            queue.fail(operation, error)
            return
        self.end_submit(operation)
        raise error

    def put_back(self, operation: StreamOperation[Any]) -> None:
        """Put the oldest entry of the host queue back if it was not in its place in the stream."""
        queue = self._queue()
        if operation.submitted_at <= 0.0 and operation not in queue.pending:  # it may have finished in its own hook
            queue.on_host.appendleft(operation)

    def end_resolve(self, operation: StreamOperation[Any], error: BaseException) -> int:
        """End a pass of `Ring._resolve` that was interrupted in the turn of an operation: by a fault, or by Ctrl-C."""
        queue = self._queue()
        if isinstance(error, DeviceFault):
            return queue.report_fault(operation, error)
        queue.reactor.resolved += self.finish(operation)
        raise error

    def finish(self, operation: StreamOperation[Any]) -> bool:
        """Finish an operation after Ctrl-C in its turn. Return whether it counts as resolved.

        If the operation has left the queue, no later pass would finish it.
        """
        queue = self._queue()
        if queue.pending and queue.pending[0] is operation:
            return False
        try:
            queue.reports.resolved(operation)
        finally:  # also after a second Ctrl-C
            counts = self._finish_reported(operation)
        return counts

    def _finish_reported(self, operation: StreamOperation[Any]) -> bool:
        """Do the rest of `finish`."""
        queue, extra, counts = self._queue(), operation.extra, False
        if operation.lease is not None:
            queue.return_lease(operation, operation.lease)
        operation.keep = None
        operation.call_on_settled()
        if extra is not None and operation.status == ABANDONED:
            extra.detached = False
        elif operation.status < DONE:
            if extra is not None and extra.failure is not None:
                queue.reactor.failed += operation.kind is not INTERNAL
                operation.status = FAILED
            else:
                operation.status = DONE
                counts = operation.kind is not INTERNAL
        operation.wake_waiters()
        return counts
