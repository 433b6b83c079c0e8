"""What random programs on the simulated driver found in memory, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import CleanupWarning, Device, InvalidArgumentError
from aiocuda.device._resources import resources_of
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.memory import FailingResource
from aiocuda.testing import SimulatedLoop
from tests.helpers import SPIN
from tests.memory.others import handle, sweep

#: Nanoseconds of a kernel that is long beside everything else.
LONG = 10_000_000


def simulated(main: Callable[[Device], Awaitable[None]]) -> SimulatedDriver:
    """Run it on a device of a driver that decides nothing by chance. The driver, which saw no rule broken."""
    driver = SimulatedDriver(None)

    async def opened() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await device.load(SPIN)
            await main(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())
    assert driver.violations == []
    return driver


def test_dropped_memory_waits_for_the_consumer_of_its_capsule() -> None:
    """Its owner dropped it, then its consumer, which had work on it in its stream: a finaliser freed it at once."""

    async def main(device: Device) -> None:
        async with device.stream() as ours, device.stream() as theirs:
            buffer = ours.empty(16, np.uint32)
            await ours.fill(buffer, 1)
            async with theirs.lend() as handle:
                capsule = buffer.__dlpack__(stream=handle)
                busy = theirs.launch(SPIN, 1, 1, LONG)
                device.driver.fill(theirs._queue.handle, buffer.address, bytes(4), 16)
            del buffer, capsule
            sweep(ours)
            assert device.memory.live_bytes
            await busy
            await theirs.synchronize()
            sweep(ours)
            assert not device.memory.live_bytes

    simulated(main)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_memory_that_is_refused_at_the_end_keeps_no_other_one(times: int) -> None:
    """Closing the device ended at the first refusal: other buffers, and the device's own stream, stayed.

    Where only the second free succeeded, the failure of the first one was not reported. There was no third, and an
    adaptor and the driver below it may refuse once each.
    """
    held: list[aiocuda.DeviceBuffer] = []
    told: list[Any] = []

    async def main(device: Device) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        device.memory.use(lambda upstream: FailingResource(upstream, deallocations=range(1, 1 + times)))
        async with device.stream() as stream:
            held.extend(stream.empty(1024) for _ in range(3))

    if times < 3:
        driver = simulated(main)
    else:
        with pytest.warns(CleanupWarning, match="stays allocated: 4,096 bytes were refused"):
            driver = simulated(main)
    assert driver._memory._pools[0].used == (4096 if times == 3 else 0)
    assert driver.statistics()["streams"] == 0
    assert [message.partition(" freed; ")[2] for message in told] == ["the free is repeated later"]


@pytest.mark.parametrize("refused", [False, True])
def test_allocation_without_an_event_is_freed_immediately(refused: bool) -> None:
    """It was handed out, and freed at the end in a stream that could not wait for it.

    Where the free was refused, the caller got that error, and the error of the event was lost.
    """
    driver = SimulatedDriver(None, upsets=[Upset("refuse", 1, "event_record", code=1)])

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            device.memory.use(lambda upstream: FailingResource(upstream, deallocations={1} if refused else ()))
            with pytest.raises(InvalidArgumentError):
                stream.empty(16)
            sweep(stream)
            assert not device.memory.live_bytes
            await stream.fill(stream.empty(16), 1)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert driver.violations == []


def test_memory_that_outlives_its_device_has_no_stream_made_for_it() -> None:
    """The watchdog found it among what finalisers leave, and made a stream to free it in, which stayed."""

    async def main(device: Device) -> None:
        memory, reactor = device.memory, resources_of(device).open_reactor()
        async with device.stream() as stream:
            buffer = await stream.upload(np.zeros(4))
        await device.aclose()
        del buffer
        assert memory.dropped
        memory.sweep(reactor)
        assert not memory.dropped
        assert memory._own_stream is None

    simulated(main)


def test_capsule_released_between_drain_and_close_leaves_no_event() -> None:
    """The watchdog took it back then, by an event that nothing waited for, and the closed device did not destroy it."""

    async def main(device: Device) -> None:
        stream, consumer = device.stream(), device.stream()
        buffer = await stream.upload(np.zeros(4))
        capsule = buffer.__dlpack__(stream=handle(consumer))
        device._refuse()
        await device._drain()
        del buffer, capsule
        sweep(stream)
        await device._release("done")

    driver = simulated(main)
    assert driver.statistics()["events"] == 0
    assert driver.statistics()["streams"] == 0


def test_capsule_that_outlives_its_device_asks_no_stream_how_far_it_is() -> None:
    """The watchdog took it back once the device had been closed, by an event that was never destroyed."""

    async def main(device: Device) -> None:
        memory, reactor, driver = device.memory, resources_of(device).open_reactor(), device.driver
        theirs = driver.stream_create(0, 0)
        async with device.stream() as ours:
            capsule = ours.empty(16, np.uint32).__dlpack__(stream=driver.stream_handle(theirs))
        with pytest.warns(CleanupWarning, match="because other libraries hold them"):
            await device.aclose()
        del capsule
        memory.sweep(reactor)
        driver.stream_destroy(theirs)

    driver = simulated(main)
    assert driver.statistics()["events"] == driver.statistics()["streams"] == 0
