"""Lending: a stream of ours in the hands of another library, for as long as a block lasts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from .._device_resources import resources_of
from ..completion._stream_queue import StreamQueue

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["lend"]


@contextlib.asynccontextmanager
async def lend(device: Device, queue: StreamQueue) -> AsyncIterator[int]:
    """Give the device all that still waits on the host, then CUDA's handle to others."""
    queue.check()
    while queue.host_queue.entries:
        await queue.flush()  # and again, if somebody has enqueued meanwhile
        queue.check()
    try:
        with queue.lending():
            yield queue.device_state.driver.stream_handle(queue.handle)
    finally:
        queue.check_loop()
        if queue.ended:
            resources_of(device).streams.loan_ended(queue)
        else:
            fault = device.driver.fault
            if fault is not None:  # then the driver is asked nothing
                raise fault.again()
            queue.refuse_captured()
            queue.submit_marker()  # what others have enqueued is waited for, like our own
