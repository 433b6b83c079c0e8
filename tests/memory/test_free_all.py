"""`device.memory.free_all(stream)`: which buffers it frees, in which order, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceBuffer,
    DeviceFault,
    DriverError,
    InvalidTypeError,
    Stage,
    StaleHandleError,
    Stream,
    StreamPool,
    WrongDeviceError,
    WrongLoopError,
)
from aiocuda.data import DataLoader
from aiocuda.driver.host import HostDriver
from aiocuda.memory import TrackingResource
from tests.helpers import TRAP, Latch, device, in_thread, open_peer, quickly, stream, until
from tests.memory.others import Producer

__all__ = ["device", "stream"]

pytestmark = pytest.mark.asyncio


async def _made(stream: Stream) -> list[DeviceBuffer]:
    """Return a buffer of each method that makes one."""
    return [
        stream.empty(4),
        stream.empty_like(np.zeros(8)),
        await stream.upload(np.zeros(16)),
        await stream.upload(np.zeros(100_000)),  # in chunks
    ]


async def test_what_the_program_allocated_is_freed_and_counted(device: Device, stream: Stream) -> None:
    made = await _made(stream)
    view, gone = made[1][2:], stream.empty(4)
    gone.free()
    other = device.stream()
    theirs = other.empty(4)
    assert device.memory.free_all(stream) == 16 + 64 + 128 + 800_000
    assert all(buffer.freed for buffer in [*made, view])
    assert not theirs.freed
    assert stream.statistics().live_bytes == 0
    assert device.memory.free_all(stream) == 0
    with pytest.raises(StaleHandleError, match="has been freed"):
        stream.fill(view, 1)
    with pytest.raises(StaleHandleError):
        made[0].free()
    later = stream.empty(4)
    await stream.fill(later, 1)
    assert device.memory.free_all(stream) == later.nbytes
    await other.aclose()


async def test_free_takes_place_after_the_work_of_each_stream() -> None:
    """The second stream still uses the buffer: its free waits for it on the device."""
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        buffer = stream.empty(4)
        await stream.fill(buffer, 1)
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            used = other.fill(buffer, 2)
            before = peer.calls["stream_wait"]
            assert device.memory.free_all(stream) == 16
            assert peer.calls["stream_wait"] == before + 1
            assert not used.done()
            behind = stream.synchronize()
            await asyncio.sleep(0.01)
            assert not behind.done()
            latch.release()
            await quickly(behind)
        await used


async def test_upload_that_is_under_way(device: Device, stream: Stream) -> None:
    operation = stream.upload(np.zeros(5_000_000))
    assert device.memory.free_all(stream) == 40_000_000
    assert (await quickly(operation)).freed
    await until(lambda: device.memory.statistics().live_bytes == 0, "the free")


async def test_lease_frees_only_what_it_has_allocated(device: Device) -> None:
    async with StreamPool(device, maximum=1) as pool, pool.stream() as one, pool.stream() as two:
        first, second = one.empty(4), await two.upload(np.zeros(4))
        assert device.memory.free_all(two) == 32
        assert (first.freed, second.freed) == (False, True)
        assert device.memory.free_all(one) == 16
        one.release()
        with pytest.raises(StaleHandleError, match="has ended"):
            device.memory.free_all(one)


async def test_memory_of_others_stays(device: Device, stream: Stream) -> None:
    """Slots of pipelines, loaders, coordinators and graphs; what a stage allocates itself is the program's."""
    kept: list[DeviceBuffer] = []
    freed: list[int] = []

    def stage(slot: Any) -> Any:
        mine = slot.stream.empty(4)
        kept.append(slot.buffer("x", 4))
        freed.append(device.memory.free_all(slot.stream))
        assert mine.freed
        return slot.stream.fill(kept[-1], 1)

    async with aiocuda.Pipeline(device, [Stage("one", stage)]) as pipeline:
        await pipeline.execute_iteration(None)
        assert freed == [16]
        assert not kept[0].freed
    async with aiocuda.AsyncCoordinator(device) as coordinator:
        nodes = [coordinator.upload(np.zeros(4)), coordinator.upload(np.zeros(4), stream=stream)]
        buffers = [await node for node in nodes]
        assert device.memory.free_all(coordinator.upload_stream) == device.memory.free_all(stream) == 0
        assert not any(buffer.freed for buffer in buffers)
    samples = np.zeros((8, 4), np.float32)
    async with DataLoader(device, samples, fields={"x": ((4,), "f4")}, batch_size=4) as loader:
        async for batch in loader:
            device.memory.free_all(stream)
            assert (await stream.download(batch["x"])).shape == (4, 4)
    one, two = stream.empty(4), stream.empty(4)
    with stream.capture() as graph:
        stream.fill(one, 1)
    assert device.memory.free_all(stream) == 16
    assert (one.freed, two.freed) == (False, True)
    await graph.launch(stream)
    graph.close()
    assert device.memory.free_all(stream) == 16


@pytest.mark.parametrize("how", ["hold", "interface"])
async def test_exported_buffer_refuses_the_whole_call(device: Device, stream: Stream, how: str) -> None:
    one, two = stream.empty(4), stream.empty(4)
    await stream.synchronize()
    exports = device.memory.exports
    if how == "hold":
        export = exports.hold(two)
        with pytest.raises(BusyError, match="held by another library: drop its array"):
            device.memory.free_all(stream)
        exports.let_go(export)
    else:
        exports.interface(two)
        with pytest.raises(BusyError, match=r"__cuda_array_interface__.*buffer\.free"):
            device.memory.free_all(stream)
        two.free()
    assert not one.freed
    assert device.memory.free_all(stream) == (32 if how == "hold" else 16)


async def test_what_is_refused(device: Device, stream: Stream) -> None:
    buffer = stream.empty(4)
    for thing in (7, None, device, buffer):
        with pytest.raises(InvalidTypeError, match=r"free_all takes an aiocuda\.Stream"):
            device.memory.free_all(thing)  # type: ignore[arg-type]  # that is the point
    closed = device.stream(name="gone")
    await closed.aclose()
    with pytest.raises(ClosedError, match="gone"):
        device.memory.free_all(closed)
    with stream.capture():
        stream.fill(buffer, 1)
        with pytest.raises(BusyError, match="being captured"):
            device.memory.free_all(stream)

    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            device.memory.free_all(stream)

    await asyncio.to_thread(in_thread, elsewhere)
    assert not buffer.freed


@pytest.fixture
def two_gpus() -> Iterator[HostDriver]:
    driver = HostDriver(devices=2)
    yield driver
    driver.close()


async def test_stream_of_another_device(two_gpus: HostDriver) -> None:
    async with aiocuda.open_device(0, driver=two_gpus) as one, aiocuda.open_device(1, driver=two_gpus) as two:
        async with two.stream() as stream:
            buffer = stream.empty(4)
            with pytest.raises(WrongDeviceError, match=r"stream\.device\.memory\.free_all"):
                one.memory.free_all(stream)
            assert not buffer.freed


async def test_refused_free_keeps_the_rest_for_the_next_call(device: Device, stream: Stream) -> None:
    class Refusing(TrackingResource):
        refuses = 1

        def deallocate(self, address: int, nbytes: int, stream: int) -> None:
            if self.refuses:
                self.refuses -= 1
                raise DriverError("not now", code=1, call="cuMemFreeAsync")
            super().deallocate(address, nbytes, stream)

    device.memory.use(Refusing)
    buffers = [stream.empty(4), stream.empty(4)]
    with pytest.raises(DriverError, match="not now"):
        device.memory.free_all(stream)
    assert not any(buffer.freed for buffer in buffers)
    assert device.memory.free_all(stream) == 32


async def test_after_a_fault() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with pytest.raises(DeviceFault):
            await quickly(stream.launch(TRAP, 1, 1))
        with pytest.raises(DeviceFault):
            device.memory.free_all(stream)
        assert not buffer.freed


async def test_dropped_buffers_are_freed_as_before_and_not_remembered(device: Device, stream: Stream) -> None:
    """The list of a stream does not grow with the number of allocations, only with that of live buffers."""
    make: list[Callable[[], Any]] = [lambda: stream.empty(4), lambda: stream.upload(np.zeros(4)).wait()]
    for call in make:
        for _ in range(1000):
            made = call()
            if asyncio.iscoroutine(made):
                await made
            del made
        assert len(stream._allocations) <= 65
    buffers = [stream.empty(4) for _ in range(1000)]
    assert device.memory.free_all(stream) == 16_000
    assert all(buffer.freed for buffer in buffers)


async def test_array_that_another_library_has_dropped_holds_nothing(device: Device, stream: Stream) -> None:
    async with device.stream() as other:
        for _ in range(3):
            buffer = await stream.upload(np.zeros(4, np.float32))
            array = other.adopt(Producer(buffer))
            await other.fill(array, 1)
            del array
            assert device.memory.free_all(stream) == 16
            assert buffer.freed
