"""What goes wrong in a graph, on its way to the driver and on the device."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    Kernel,
    SkippedError,
    Stream,
    UnsupportedError,
)
from aiocuda.driver.host import HostDriver
from tests.graph.kit import N, affine, read
from tests.helpers import TRAP, Latch, open_peer, quickly, refusal

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("verb", ["graph_launch", "graph_update"])
async def test_launch_that_the_driver_refuses_fails_and_the_stream_goes_on(verb: str) -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.fill(buffer, 0))
        async with stream.capture() as graph:
            digit = affine(stream, buffer, 10, 1)
            second = affine(stream, buffer, 10, 1)
        graph.update(digit, buffer, N, 10, 2)
        graph.update(second, buffer, N, 10, 3)
        peer.refuse(verb)
        failed, skipped = graph.launch(stream), graph.launch(stream)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(failed)
        with pytest.raises(SkippedError):
            await quickly(skipped)
        await quickly(graph.launch(stream))
        assert await read(stream, buffer) == 23


async def test_graph_that_cannot_be_built_fails_every_launch() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.synchronize())
        peer.refuse("graph_build")
        with stream.capture() as graph:
            stream.fill(buffer, 1)
        early = graph.launch(stream)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(early)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(graph)
        with pytest.raises(DriverError, match="does not take this"):
            graph.launch(stream)
        with pytest.raises(DriverError, match="does not take this"):
            peer.refuse("graph_build")
            async with stream.capture():
                pass
        await quickly(stream.fill(buffer, 2))


async def test_kernel_without_a_host_implementation_fails_at_the_end_of_the_block(
    stream: Stream, device: Device
) -> None:
    if device.driver.wants_image:
        return
    kernel = Kernel("twinless", source="__global__ void twinless() {}")
    with pytest.raises(UnsupportedError, match="twinless"):
        async with stream.capture():
            stream.launch(kernel, 1, 1)


async def test_memory_that_cannot_be_locked_fails_the_launch() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(5 << 20, np.uint8)
        await quickly(stream.synchronize())

        def refuse_this(address: int, nbytes: int) -> None:
            if nbytes > 5 << 20:  # and no region of the library's own
                raise refusal()

        peer.before["pin"] = refuse_this
        pinned = device.pinned(5 << 20, np.uint8)
        with stream.capture() as graph:
            stream.copy(buffer, pinned)
        with pytest.raises(DriverError, match="does not take this"):
            await quickly(graph)
        assert peer.calls["graph_build"] == 0


async def test_graph_waits_for_memory_that_is_being_locked() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint8)
        await quickly(stream.synchronize())
        with peer.holding_jobs():
            pinned = device.pinned(N, np.uint8)
            pinned[:] = 5
            with stream.capture() as graph:
                stream.copy(buffer, pinned)
            launch = graph.launch(stream)
        await quickly(launch)
        assert await read(stream, buffer) == 5


async def test_fault_in_a_launched_graph_reaches_every_waiter() -> None:
    driver = HostDriver()
    with pytest.raises(DeviceFault, match="on purpose"):
        async with aiocuda.open_device(driver=driver) as device:
            stream, other = device.stream(), device.stream()
            buffer = stream.empty(N, np.uint32)
            async with stream.capture() as graph:
                stream.fill(buffer, 1)
                stream.launch(TRAP, 1, 1)
                stream.fill(buffer, 2)
            with Latch(device) as latch:
                latch.hold(other)
                elsewhere = other.fill(buffer, 3)
                launches = [graph.launch(stream) for _ in range(3)]
                for operation in (*launches, elsewhere):
                    with pytest.raises(DeviceFault, match="on purpose"):
                        await quickly(operation)
            assert device.statistics().in_flight == 0
            with pytest.raises(DeviceFault):
                graph.launch(stream)
            with pytest.raises(DeviceFault):
                with stream.capture():
                    pass
            graph.close()
            del graph
            gc.collect()
            raise driver.fault  # type: ignore[misc]  # it is there
    assert driver.statistics()["graphs"] == 1  # the device's own end takes it


async def test_cancelled_wait_for_a_launch_changes_nothing_else(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(N, np.uint32)
    async with stream.capture() as graph:
        stream.fill(buffer, 6)
    latch.hold(stream)
    launch = graph.launch(stream)
    waits = [asyncio.create_task(launch.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    latch.release()
    await quickly(waits[1])
    assert await read(stream, buffer) == 6


async def test_abandoned_launch_runs_and_holds_what_it_uses(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(N, np.uint32)
    async with stream.capture() as graph:
        stream.fill(buffer, 6)
    latch.hold(stream)
    launch = graph.launch(stream)
    assert launch.abandon()
    with pytest.raises(ClosedError):
        await quickly(launch)
    latch.release()
    assert await read(stream, buffer) == 6
