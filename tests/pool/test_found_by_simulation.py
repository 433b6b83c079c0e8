"""Bugs in pools and waits that random programs on the simulated driver found, each with its shortest steps.

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
    """Run it on a device of a simulated driver without random decisions."""
    driver = SimulatedDriver(None, upsets=upsets)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []


def test_failed_acquire_wakes_the_next_waiter() -> None:
    """A task that was woken by a return, and then failed to create an event, did not wake the next task."""

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


def test_event_that_cannot_be_recorded_again_is_still_lent() -> None:
    """It had returned its CUDA event and got no new one: neither `release` nor garbage collection informed the pool."""

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


def test_closed_loop_does_not_keep_waiting_tasks_alive() -> None:
    """The record of waits kept the task alive, and so its events, streams and buffers."""
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
