"""Observed: what is done more while somebody listens, a timing event in front of each operation and one behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._instrument import Instrument
from ._operation import Operation

if TYPE_CHECKING:
    from ._stream_queue import StreamQueue

__all__ = ["forget", "report", "submit"]


def submit(
    queue: StreamQueue,
    instrument: Instrument,
    operation: Operation[Any],
    call: Callable[..., object] | None,
    arguments: tuple[Any, ...],
) -> None:
    """What `StreamQueue.submit` does, with timing events if the instrument wants them."""
    leases = queue.device_state.leases
    now = queue._now()
    timing = instrument.timing
    if timing:
        start = leases.take(timing=True)
        try:
            queue._record(start.handle)
        except BaseException:
            leases.give(start)
            raise
        queue.device_state.starts[operation.id] = start
    if call is not None:
        call(*arguments)
    operation._submitted = now
    lease = operation._lease or leases.take(timing=timing)
    try:
        queue._record(lease.handle)
    except BaseException:
        queue.unrecorded(operation, lease)
        raise
    operation._lease = lease
    _tell(queue, instrument, instrument.on_submit, operation)


def report(queue: StreamQueue, operation: Operation[Any]) -> None:
    """The operation is about to finish: tell the instrument, while its events still hold."""
    device_state = queue.device_state
    start, end, instrument = device_state.starts.pop(operation.id, None), operation._lease, device_state.instrument
    if instrument is None:
        pass  # it has stopped listening meanwhile
    elif start is not None and end is not None and end.timing:
        _tell(queue, instrument, instrument.on_resolve, operation, start.handle, end.handle)
    else:
        _tell(queue, instrument, instrument.on_resolve, operation, 0, 0)
    if start is not None:
        device_state.leases.give(start)


def forget(queue: StreamQueue, operation: Operation[Any]) -> None:
    """The operation has passed, and nobody is left to be told of it: the event in front of it goes back."""
    start = queue.device_state.starts.pop(operation.id, None)
    if start is not None:
        queue.device_state.leases.give(start)


def _tell(queue: StreamQueue, instrument: Instrument, hook: Callable[..., object], *arguments: object) -> None:
    """Call a hook. An exception of it fails no operation: it ends the listening, and the loop's handler gets it."""
    try:
        hook(*arguments)
    except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
        if queue.device_state.instrument is instrument:
            queue.device_state.instrument = None
        queue.reactor.tell(f"{instrument!r} failed, and listens no more", error)
