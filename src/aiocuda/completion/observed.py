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
        operation._start = start
    if call is not None:
        call(*arguments)
    lease = operation._lease or leases.take(timing=instrument.timing)
    lane._driver.event_record(lease.handle, lane.handle)
    operation._lease = lease
    instrument.on_submit(operation)


def report(lane: Lane, operation: Operation[Any]) -> None:
    """The operation is about to finish: tell the instrument, while its events still hold."""
    start, end = operation._start, operation._lease
    operation._start = None
    instrument = lane.hub.instrument
    if instrument is not None:
        if start is not None and end is not None and end.timing:
            instrument.on_resolve(operation, start.handle, end.handle)
        else:
            instrument.on_resolve(operation, 0, 0)
    if start is not None:
        lane.hub.leases.give(start)
