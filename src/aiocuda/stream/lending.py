"""Lending: a stream of ours in the hands of another library, for as long as a block lasts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..completion.lane import Lane
from ..completion.shared import lent, refuse_captured
from . import closing

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["lend"]


@contextlib.asynccontextmanager
async def lend(device: Device, lane: Lane) -> AsyncIterator[int]:
    """Give the device all that still waits on the host, then CUDA's handle to others."""
    lane.check()
    while lane.queue.entries:
        await lane.flush()  # and again, if somebody has enqueued meanwhile
        lane.check()
    try:
        with lent(lane):
            yield lane.hub.driver.stream_handle(lane.handle)
    finally:
        lane.check_loop()
        if lane.ended:
            closing.returned(device, lane)
        else:
            fault = device.driver.fault
            if fault is not None:  # then the driver is asked nothing
                raise fault.again()
            refuse_captured(lane)
            lane.mark()  # what others have enqueued is waited for, like our own
