"""Failing: what becomes of an operation that the driver refused, and of all behind it.

These functions are methods of `StreamQueue`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import AiocudaError, DeviceFault, DriverError, SkippedError
from ._failure import Failure, Spoiled
from ._host_queue import forget_call
from ._operation import ABANDONED, DONE, FAILED, STEP, SUBMITTED, Operation

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._stream_queue import StreamQueue

__all__ = ["fail", "interrupted", "lose", "named", "skip", "spoil", "unrecorded"]


def fail(queue: StreamQueue, operation: Operation[Any], error: Exception) -> None:
    """What the driver answered to a submission is the operation's failure, and of all behind it."""
    if isinstance(error, DeviceFault):
        queue._driver.blame(queue.named(operation))
        queue.reactor.fault(error)
        return
    if isinstance(error, AiocudaError):
        error.__traceback__ = None  # its frames hold the operation, and the memory that it was about to use
    entries = queue.host_queue.entries
    step = operation.kind is STEP and operation._land is not None  # of a copy
    copy = entries.popleft() if entries and step else None
    failure = Spoiled(error, queue.loop, repr(copy) if copy is not None else queue.named(operation)).failure()
    queue.spoil(operation, error, failure)
    if copy is not None:
        forget_call(copy)
        queue.spoil(copy, error, failure)
    queue.host_queue.skip_all(failure)


def skip(queue: StreamQueue, operation: Operation[Any], failure: Failure) -> None:
    """Put an operation that will not run in its place, so that it fails in order."""
    spoiled = failure.spoiled
    error = SkippedError(f"{operation!r} was not run: {spoiled.where} failed before it: {spoiled.error}")
    error.__cause__ = spoiled.error
    queue.spoil(operation, error, failure)


def lose(queue: StreamQueue, operation: Operation[Any], fault: DeviceFault, failure: Failure) -> None:
    """The device has faulted: it fails, wherever it stood. Where Ctrl-C has come in between, the others are told."""
    if operation._state == ABANDONED:
        operation._abandoned = False
    elif operation._state < DONE:
        operation._failure = failure
        operation._value = fault
        operation._state = FAILED
        queue.reactor.failed += operation.kind is not STEP
    operation._tell_out_of_turn()


def named(queue: StreamQueue, operation: Operation[Any]) -> str:
    """What an error calls it: a chunk by its copy, a marker of ours by what stands before it. Nobody enqueued those."""
    if operation.kind is not STEP:
        return repr(operation)
    pending = list(queue.pending)
    at = pending.index(operation) if operation in pending else len(pending)
    if operation._land is None:
        others = reversed(pending[:at])
    else:
        others = iter([*pending[at:], *queue.host_queue.entries])
    found = next((other for other in others if other.kind is not STEP), None)
    return f"the work of {queue.name}" if found is None else repr(found)


def spoil(queue: StreamQueue, operation: Operation[Any], error: Exception, failure: Failure) -> None:
    """Put an operation in its place with what it fails with there; nothing behind it runs."""
    pending = queue.pending
    if not queue.active:
        queue.reactor.activate(queue)
    if not pending or pending[-1] is not operation:
        pending.append(operation)
    if operation._state < DONE:
        operation._state = SUBMITTED
    operation._failure = failure
    operation._value = error
    queue.spoiled = failure.spoiled
    queue.told_at = queue.enqueued  # once it has been read, who waits for it waits for nothing in front of it
    queue.attend()


def unrecorded(queue: StreamQueue, operation: Operation[Any], lease: Lease) -> None:
    """The operation's event could not be recorded, and says nothing about it: `_recorded_late` takes another."""
    operation._lease = None
    if not lease.lent:
        queue.device_state.leases.give(lease)


def interrupted(queue: StreamQueue, operation: Operation[Any]) -> None:
    """Ctrl-C has come while it was being submitted.

    If its call has returned, the device has it, and it only lacks its event. If not, nobody knows: then it has
    failed, and what it holds is held until an event recorded from now on has passed.
    """
    if not operation._submitted and queue.pending and queue.pending[-1] is operation:
        operation._submitted = queue._now()
        error = DriverError(
            f"{operation!r} was interrupted on its way to the device, which may do it or not", code=0, call="Ctrl-C"
        )
        queue.fail(operation, error)
