"""A free that names a stream which is closed before the free can be enqueued."""

from __future__ import annotations

import numpy as np
import pytest

import aiocuda
from aiocuda.driver.simulated import SimulatedDriver
from tests.helpers import Latch, until

pytestmark = pytest.mark.asyncio


async def test_free_in_a_stream_that_is_then_closed_waits_for_its_work() -> None:
    """P16: the free waits, on the device, for what a closed stream has accepted."""
    driver = SimulatedDriver(None)
    async with aiocuda.open_device(driver=driver) as device:
        home, named = device.stream(), device.stream()
        buffer = home.empty(5 << 20, np.uint8)
        await home.fill(buffer, 1)
        live = device.memory.statistics().live_bytes
        with Latch(device, seconds=1e5) as latch:
            latch.hold(named)
            await latch.held()
            named.fill(buffer, 2)  # runs only when the latch is released
            staged = home.download(buffer)  # chunk by chunk, so that the last of it is still on the host
            assert staged.state != "submitted"
            buffer.free(named)
            with pytest.raises(ZeroDivisionError):
                async with named:
                    raise ZeroDivisionError
            await staged
            await until(lambda: device.memory.statistics().live_bytes < live, "the free")
            assert driver.violations == []
        await device.drain()
    assert driver.violations == []
    assert driver.fault is None
