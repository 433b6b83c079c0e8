"""Observed: what is done more while somebody listens, a timing event in front of each operation and one behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..instrument import Instrument
from .operation import Operation

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["forget", "report", "submit"]


def submit(
    lane: Lane,
    instrument: Instrument,
    operation: Operation[Any],
    call: Callable[..., object] | None,
    arguments: tuple[Any, ...],
) -> None:
    """What `Lane.submit` does, with timing events if the instrument wants them."""
    leases = lane.hub.leases
    now = lane._now()
    timing = instrument.timing
    if timing:
        start = leases.take(timing=True)
        try:
            lane._record(start.handle)
        except BaseException:
            leases.give(start)
            raise
        lane.hub.starts[operation.id] = start
    if call is not None:
        call(*arguments)
    operation._submitted = now
    lease = operation._lease or leases.take(timing=timing)
    try:
        lane._record(lease.handle)
    except BaseException:
        lane.unrecorded(operation, lease)
        raise
    operation._lease = lease
    _tell(lane, instrument, instrument.on_submit, operation)


def report(lane: Lane, operation: Operation[Any]) -> None:
    """The operation is about to finish: tell the instrument, while its events still hold."""
    hub = lane.hub
    start, end, instrument = hub.starts.pop(operation.id, None), operation._lease, hub.instrument
    if instrument is None:
        pass  # it has stopped listening meanwhile
    elif start is not None and end is not None and end.timing:
        _tell(lane, instrument, instrument.on_resolve, operation, start.handle, end.handle)
    else:
        _tell(lane, instrument, instrument.on_resolve, operation, 0, 0)
    if start is not None:
        hub.leases.give(start)


def forget(lane: Lane, operation: Operation[Any]) -> None:
    """The operation has passed, and nobody is left to be told of it: the event in front of it goes back."""
    start = lane.hub.starts.pop(operation.id, None)
    if start is not None:
        lane.hub.leases.give(start)


def _tell(lane: Lane, instrument: Instrument, hook: Callable[..., object], *arguments: object) -> None:
    """Call a hook. An exception of it fails no operation: it ends the listening, and the loop's handler gets it."""
    try:
        hook(*arguments)
    except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
        if lane.hub.instrument is instrument:
            lane.hub.instrument = None
        lane.reactor.tell(f"{instrument!r} failed, and listens no more", error)
