"""BoundCall: work that a stream repeats, with everything bound that does not change."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..driver.protocol import native_call
from ._calls import COMPILED, copy_context, new_object, next_id
from ._native import Native
from ._state import IN_CALL, SUBMITTED
from ._stream_operation import StreamOperation

if TYPE_CHECKING:
    from ..driver.protocol import RecordedCall
    from ._estimate import Estimate
    from ._ring import Ring

__all__ = ["BoundCall"]


class BoundCall:
    """Work that a stream repeats. `enqueue` does the same as `Ring.submit` for the usual case, with fewer calls.

    Parameters
    ----------
    kind
        The kind of its operations.
    estimate
        Of their duration.
    call
        The work and the record of an event, as one call of the driver.
    unrecorded
        ``unrecorded(values)`` is the work alone, for everything unusual, which goes to `Ring.submit`.
    """

    __slots__ = ("_after_wait", "_call", "_native", "_unrecorded", "estimate", "kind", "queue")

    def __init__(
        self, queue: Ring, kind: str, estimate: Estimate, call: RecordedCall,
        unrecorded: Callable[[Sequence[Any]], object],
    ) -> None:  # fmt: skip
        self.queue = queue
        self.kind = kind
        self.estimate = estimate
        self._after_wait = estimate.after_wait
        self._call = call
        native = native_call(call) if COMPILED else None
        self._native = None if native is None else Native(native)
        self._unrecorded = unrecorded

    def enqueue(self, values: Sequence[Any], keep: object, label: str | None = None) -> StreamOperation[Any]:
        """Enqueue the work with these arguments. ``keep`` is held until the operation has finished."""
        queue = self.queue
        hot = queue.device_hot
        listeners = hot.listeners
        pending = queue.pending
        if (
            queue.obstacles
            or queue.on_host
            or _get_running_loop() is not queue.loop
            or len(pending) >= hot.limit
            or (listeners is not None and listeners.timing)
        ):
            return queue.enqueue_unusual(self.kind, self.estimate, keep, self._unrecorded, values, label)
        # The same as `new_operation`, without its call.
        operation: StreamOperation[Any] = new_object(StreamOperation) if COMPILED else StreamOperation()
        operation.id = number = next_id()
        operation.kind = self.kind
        operation.queue = queue
        if queue.after_wait:
            queue.after_wait = False
            operation.estimate = self._after_wait
        else:
            operation.estimate = self.estimate
        operation.keep = keep
        operation.status = SUBMITTED
        operation.lease = operation.waiters = operation.value = operation.extra = lease = None
        operation.submitted_at = IN_CALL
        operation.context = copy_context()
        if label is not None:
            operation.own_label = label
        try:
            # The operation is in its place before the driver call: an interrupt loses nothing.
            queue.enqueued += 1
            queue.newest_id = number  # first: a signal handler may enqueue between the two lines
            pending.append(operation)
            idle = hot.idle_leases
            lease = idle.pop() if idle else queue.device_state.leases.take()
            at = queue.now()
            if self._native is None or not self._native.enqueue(values, lease):
                self._call(values, lease.handle)
            operation.submitted_at = at
            operation.lease = lease  # not earlier: a stream of another thread may wait for the event
            lease = None  # it is the operation's now, which may be resolved in a hook
            if queue.newest_id != number:
                queue.move_to_end(operation)
            if listeners is not None and listeners.submit:
                queue.rare.submitted(listeners.submit, operation)
        except BaseException as error:
            if not queue.rare.end_call(operation, error, lease):
                raise
        return operation
