"""Observed: what is done more while somebody listens, a timing event in front of each operation and one behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..instrument import Instrument
from .operation import Operation

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["report", "submit"]


def submit(
    lane: Lane,
    instrument: Instrument,
    operation: Operation[Any],
    call: Callable[..., object] | None,
    arguments: tuple[Any, ...],
) -> None:
    """What `Lane.submit` does, with timing events if the instrument wants them."""
    leases = lane.hub.leases
    if instrument.timing:
        start = leases.take(timing=True)
        lane._driver.event_record(start.handle, lane.handle)
        lane.hub.starts[operation.id] = start
    if call is not None:
        call(*arguments)
    lease = operation._lease or leases.take(timing=instrument.timing)
    lane._driver.event_record(lease.handle, lane.handle)
    operation._lease = lease
    instrument.on_submit(operation)


def report(lane: Lane, instrument: Instrument | None, operation: Operation[Any]) -> None:
    """The operation is about to finish: tell the instrument, while its events still hold."""
    start, end = lane.hub.starts.pop(operation.id, None), operation._lease
    if instrument is None:
        pass  # it has stopped listening meanwhile
    elif start is not None and end is not None and end.timing:
        instrument.on_resolve(operation, start.handle, end.handle)
    else:
        instrument.on_resolve(operation, 0, 0)
    if start is not None:
        lane.hub.leases.give(start)
