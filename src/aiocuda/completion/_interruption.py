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
    """Brings the queue of a stream in order after a refused call, or after Ctrl-C between two lines of `Ring`.

    An operation is put into ``pending`` before its first driver call, and removed from it before its first waiter is
    woken. So an operation that was interrupted is the newest of the queue, the one whose turn it is (the oldest), or
    the head of the host queue. Its ``submitted_at`` is above 0.0 if the stream has accepted it.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: Ring) -> None:
        self._queue: Callable[[], Ring] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it

    def end_call(self, operation: StreamOperation[Any], error: BaseException, lease: Lease | None) -> bool:
        """Handle an error that `Ring.submit` or a `BoundCall` has caught: a refused call, a refused record, or Ctrl-C.

        Return True if the operation fails with the error, which is an `Exception`. Return False for Ctrl-C, which the
        caller raises again: if it were raised here, it would hold this frame, which holds it. Only the Ctrl-C in a
        `RecordRefused` is raised here, because the caller has only the wrapper.

        Parameters
        ----------
        error
            A `RecordRefused` says that the stream has accepted the work, but no event after it; its reason counts.
        lease
            The event that a `BoundCall` took for the operation. It is given back if the operation has not got it.
        """
        queue, reason = self._queue(), error
        if isinstance(error, RecordRefused):
            operation.submitted_at = queue.driver.now()  # accepted
            reason = error.error
        if lease is not None and operation.lease is None:
            operation.return_lease(lease)
        if isinstance(reason, Exception):
            queue.rare.fail(operation, reason)
            return True
        self._end_submit(operation)
        if reason is not error:  # from a `RecordRefused`
            raise reason
        return False

    def _end_submit(self, operation: StreamOperation[Any]) -> None:
        """Handle Ctrl-C during the driver calls of an operation.

        If the driver call has returned, the stream has accepted the operation, which only lacks its event: do nothing,
        `StreamQueue.record_late` records it. If not, the device may do the work or not: the operation fails. It counts
        as accepted, so that it gets a late event, too, until which its memory is held.
        """
        queue = self._queue()
        if operation.submitted_at <= 0.0 and queue.pending and queue.pending[-1] is operation:
            operation.submitted_at = queue.driver.now()
            error = DriverError(
                f"{operation} was interrupted on its way to the device, which may do it or not", code=0, call="Ctrl-C"
            )
            queue.rare.fail(operation, error)

    def put_back(self, operation: StreamOperation[Any]) -> None:
        """Put an operation that `HostQueue.pump` has removed back at the head, if `Ring.submit` has not got to it."""
        queue = self._queue()
        # If accepted, it may be in `pending` no longer: it may have finished in its own hook.
        if operation.submitted_at <= 0.0 and operation not in queue.pending:
            queue.on_host.appendleft(operation)

    def end_resolve(self, operation: StreamOperation[Any], error: BaseException) -> bool:
        """End a pass of `Ring._resolve` after an error in the turn of an operation: a fault, or Ctrl-C.

        Return True for a fault, which has then failed everything. Otherwise finish the operation if it has left the
        queue, and return False: the caller raises ``error`` again.
        """
        queue = self._queue()
        if isinstance(error, DeviceFault):
            queue.rare.report_fault(operation, error)
            return True
        queue.reactor_hot.resolved += self.finish(operation)
        return False

    def finish(self, operation: StreamOperation[Any]) -> bool:
        """Finish an operation after Ctrl-C in its turn. Return whether the caller has to count it as resolved.

        If the operation has left the queue, no later pass would finish it.
        """
        queue = self._queue()
        if queue.pending and queue.pending[0] is operation:
            return False  # it has not left: the next pass resolves it
        try:
            queue.rare.reports.resolved(operation)
        finally:  # also after a second Ctrl-C
            counts = self._finish_reported(operation)
        return counts

    def _finish_reported(self, operation: StreamOperation[Any]) -> bool:
        """Do what `Ring._resolve` has not done yet: event, memory, state, waiters. Return as `finish`."""
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
