"""Interruption: ends a submission or a resolution that was refused, or interrupted by Ctrl-C."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._core import ABANDONED, DONE, FAILED, INTERNAL
from ..driver.protocol import RecordRefused
from ..errors import DeviceFault, DriverError

if TYPE_CHECKING:
    from .._core import Lease, Ring, StreamOperation

__all__ = ["Interruption"]


class Interruption:
    """What has to be done when Ctrl-C comes between two lines of the queue of a stream.

    Each operation is in its place before its first driver call, and out of it before its first waiter is woken. So an
    operation that was interrupted is the newest of the queue, the one whose turn it is, or the head of the host queue.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: Ring) -> None:
        self._queue: Callable[[], Ring] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it

    def end_call(self, operation: StreamOperation[Any], error: BaseException, lease: Lease | None) -> bool:
        """Handle an error of `Ring.submit` or of a `BoundCall`: a refused call, a refused record, or Ctrl-C.

        Return whether the operation fails with the error; the caller raises others. (Raised here, the error would hold
        this frame, which holds the error.)

        Parameters
        ----------
        lease
            The event that the operation would have got.
        """
        queue, reason = self._queue(), error
        if isinstance(error, RecordRefused):
            operation.submitted_at = queue.driver.now()
            reason = error.error
        if lease is not None and operation.lease is None:
            operation.return_lease(lease)
        if isinstance(reason, Exception):
            queue.rare.fail(operation, reason)
            return True
        self._end_submit(operation)
        if reason is not error:
            raise reason
        return False

    def _end_submit(self, operation: StreamOperation[Any]) -> None:
        """Handle Ctrl-C during the driver calls of an operation.

        If the driver call has returned, the stream has accepted the operation, which only lacks its event. If not, the
        result of the call is unknown: the operation fails, and its memory is held until an event recorded from now on.
        """
        queue = self._queue()
        if operation.submitted_at <= 0.0 and queue.pending and queue.pending[-1] is operation:
            operation.submitted_at = queue.driver.now()
            error = DriverError(
                f"{operation} was interrupted on its way to the device, which may do it or not", code=0, call="Ctrl-C"
            )
            queue.rare.fail(operation, error)

    def put_back(self, operation: StreamOperation[Any]) -> None:
        """Put the oldest entry of the host queue back if it was not in its place in the stream."""
        queue = self._queue()
        if operation.submitted_at <= 0.0 and operation not in queue.pending:  # it may have finished in its own hook
            queue.on_host.appendleft(operation)

    def end_resolve(self, operation: StreamOperation[Any], error: BaseException) -> bool:
        """End a pass of `Ring._resolve` that was interrupted in the turn of an operation: by a fault, or by Ctrl-C.

        Return whether it was a fault, which has failed everything; the caller raises other errors.
        """
        queue = self._queue()
        if isinstance(error, DeviceFault):
            queue.rare.report_fault(operation, error)
            return True
        queue.reactor_hot.resolved += self.finish(operation)
        return False

    def finish(self, operation: StreamOperation[Any]) -> bool:
        """Finish an operation after Ctrl-C in its turn. Return whether it counts as resolved.

        If the operation has left the queue, no later pass would finish it.
        """
        queue = self._queue()
        if queue.pending and queue.pending[0] is operation:
            return False
        try:
            queue.rare.reports.resolved(operation)
        finally:  # also after a second Ctrl-C
            counts = self._finish_reported(operation)
        return counts

    def _finish_reported(self, operation: StreamOperation[Any]) -> bool:
        """Do the rest of `finish`."""
        queue, extra, counts = self._queue(), operation.extra, False
        if operation.lease is not None:
            operation.return_lease(operation.lease)
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
