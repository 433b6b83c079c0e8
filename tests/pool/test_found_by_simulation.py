"""What random programs on the simulated driver found in pools and waits, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

import aiocuda
from aiocuda import Device, DeviceOutOfMemory, EventPool, StreamBarrier
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import SimulatedLoop


def simulated(main: Callable[[Device], Awaitable[None]], *upsets: Upset) -> None:
    """Run it on a device of a driver that decides nothing by chance."""
    driver = SimulatedDriver(None, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []


def test_place_in_line_that_brings_no_event_goes_to_the_next() -> None:
    """Who was woken by a return and then got no event from the driver kept it from all behind him."""

    async def main(device: Device) -> None:
        pool = EventPool(device, 1)
        held = pool.acquire_nowait()
        waiting = [asyncio.ensure_future(pool.acquire(timing=timing)) for timing in (True, False)]
        await asyncio.sleep(0)
        pool.release(held)
        with pytest.raises(DeviceOutOfMemory):
            await waiting[0]  # of the other kind, which has to be made
        pool.release(await waiting[1])

    simulated(main, Upset("refuse", 2, "event_create", code=2))


def test_event_that_cannot_be_recorded_again_is_still_on_loan() -> None:
    """It had given its CUDA event back, and got no other one: neither `release` nor its end told the pool."""

    async def main(device: Device) -> None:
        pool = EventPool(device, 1)
        async with device.stream() as stream:
            event = await pool.acquire(timing=True)
            await stream.record(event=event)
            with pytest.raises(DeviceOutOfMemory):
                stream.record(event=event)
            assert event.done()
            pool.release(event)
        assert pool.statistics().lent == 0

    simulated(main, Upset("refuse", 2, "event_create", code=2))


def test_who_waits_is_not_held_when_his_loop_has_gone() -> None:
    """The record of who waits for whom held the task, and by it all that it had: events, streams, buffers."""
    loop = SimulatedLoop()

    async def party(barrier: StreamBarrier) -> None:
        await barrier.wait()

    barrier = StreamBarrier(2)
    task = loop.create_task(party(barrier))
    loop.call_later(1e-3, loop.stop)
    loop.run_forever()
    loop.close()
    gone = weakref.ref(task)
    del task, barrier, loop
    gc.collect()
    assert gone() is None
