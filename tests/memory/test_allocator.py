"""Allocation and free: in the order of streams, and never while the memory is in use."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Operation, StaleHandleError, Stream, WrongLoopError
from aiocuda.device._resources import resources_of
from aiocuda.memory import Adaptor, LimitResource, StatisticsResource
from tests.helpers import AFFINE, PATIENCE, SAXPY, Latch, Reports, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def swept(device: Device, live: int) -> None:
    """Everything but so many bytes has come back. Finalisers leave memory to the next enqueue or tick."""

    async def tick() -> bool:
        async with device.stream() as stream:
            stream.empty(1).free()
        return device.memory.statistics().live_bytes == live

    deadline = asyncio.get_running_loop().time() + PATIENCE
    while asyncio.get_running_loop().time() < deadline:
        if await tick():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{device.memory.statistics().live_bytes} bytes are live, not {live}")


async def test_statistics(device: Device, stream: Stream) -> None:
    before = device.memory.statistics()
    assert (before.live_bytes, before.by_class) == (0, {})
    buffers = [stream.empty(size, np.uint8) for size in (100, 128, 129, 1 << 20)]
    statistics = device.memory.statistics()
    assert statistics.live_bytes == statistics.peak_bytes == 100 + 128 + 129 + (1 << 20)
    assert statistics.by_class == {128: 228, 256: 129, 1 << 20: 1 << 20}
    assert statistics.reserved_bytes >= statistics.live_bytes
    assert 0 <= statistics.fragmentation <= 1
    assert stream.statistics().live_bytes == statistics.live_bytes
    for buffer in buffers:
        buffer.free()
    after = device.memory.statistics()
    assert (after.live_bytes, after.peak_bytes, after.by_class) == (0, statistics.peak_bytes, {})
    assert (stream.statistics().live_bytes, stream.statistics().peak_bytes) == (0, statistics.live_bytes)


async def test_free_follows_the_work_that_uses_it(stream: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.arange(1000, dtype=np.float32))
    latch.hold(stream)
    operation = stream.download(buffer)
    buffer.free()
    reused = stream.empty(1000)  # may be the same memory: in stream order that is fine
    stream.fill(reused, -1)
    await latch.held()
    latch.release()
    assert np.array_equal(await quickly(operation), np.arange(1000))


@pytest.mark.parametrize("where", ["its own", "the user's", "a third"])
async def test_free_waits_on_the_device_for_every_stream_that_used_it(
    device: Device, stream: Stream, other: Stream, latch: Latch, where: str
) -> None:
    async with device.stream() as third:
        buffer = await stream.upload(np.arange(1000, dtype=np.float32))
        latch.hold(other)
        operation = other.download(buffer)
        buffer.free({"its own": None, "the user's": other, "a third": third}[where])
        fresh = [each.empty(1000) for each in (stream, third)]
        await latch.held()
        for each, memory in zip((stream, third), fresh, strict=True):
            if each is not other:
                each.fill(memory, -1)
        latch.release()
        assert np.array_equal(await quickly(operation), np.arange(1000))
        await aiocuda.gather(stream.synchronize(), third.synchronize())


async def test_free_though_its_own_stream_is_closed(device: Device, other: Stream, latch: Latch) -> None:
    async with device.stream() as stream:
        buffer = await stream.upload(np.arange(1000, dtype=np.float32))
    latch.hold(other)
    operation = other.download(buffer)
    await latch.held()
    buffer.free()
    async with device.stream() as third:
        fresh = third.empty(1000)
        await quickly(third.fill(fresh, -1))
        latch.release()
        assert np.array_equal(await quickly(operation), np.arange(1000))
        await quickly(other.synchronize())
        assert device.driver.fault is None


async def test_free_while_its_user_is_still_on_the_host() -> None:
    async with open_peer(max_in_flight=4) as (_, device):
        stream, other = device.stream(), device.stream()
        with Latch(device) as latch:
            buffer = await stream.upload(np.arange(1000, dtype=np.float32))
            latch.hold(other)
            await latch.held()
            for _ in range(6):
                other.synchronize()
            operation = other.download(buffer)
            assert operation.state == "queued"
            buffer.free()
            assert device.memory.statistics().live_bytes == 4000  # not yet
            latch.release()
            assert np.array_equal(await quickly(operation), np.arange(1000))
        await other.synchronize()
        await until(lambda: device.memory.statistics().live_bytes == 0 or stream.empty(1).free(), "the memory")


async def test_memory_of_a_busy_stream_is_dropped_before_it_was_there(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    """Allocated after work, dropped immediately: it must not be freed where the allocation has not happened yet."""
    latch.hold(stream)
    await latch.held()
    for _ in range(5):
        stream.empty(1000)
    gc.collect()
    await quickly(other.fill(other.empty(4), 1))
    ticks = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")
    await quickly(other.fill(other.empty(4), 1))
    assert device.driver.fault is None
    latch.release()
    await quickly(stream.synchronize())
    assert device.driver.fault is None


async def test_memory_of_a_busy_stream_is_freed_on_another(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    latch.hold(stream)
    await latch.held()
    buffer = stream.empty(1000)
    buffer.free(other)
    behind = other.fill(other.empty(4), 1)  # waits for the allocation, as the free does
    latch.release()
    await quickly(behind)
    assert device.driver.fault is None


async def test_first_use_on_another_stream_waits_for_the_allocation(
    stream: Stream, other: Stream, latch: Latch
) -> None:
    latch.hold(stream)
    await latch.held()
    buffer = stream.empty(1000)
    operation = other.fill(buffer, 3)
    assert not operation.done()
    latch.release()
    await quickly(operation)
    assert (await quickly(other.download(buffer)) == 3).all()


async def test_dropped_buffer_comes_back_by_itself(device: Device, stream: Stream) -> None:
    buffer = await stream.upload(np.zeros(1000, np.float32))
    await stream.fill(buffer, 1)
    del buffer
    await swept(device, 0)


async def test_dropped_buffer_on_an_idle_device_is_not_counted(device: Device, stream: Stream) -> None:
    """No tick sweeps there: reading the statistics does."""
    kept, dropped, managed = stream.empty(100, np.uint8), stream.empty(1000, np.uint8), device.unified(500, np.uint8)
    await stream.fill(dropped, 1)
    await until(
        lambda: resources_of(device).loop_states.here().reactor._watchdog is None, "the last tick of the watchdog"
    )
    assert device.memory.statistics().live_bytes == 1600
    assert stream.statistics().live_bytes == 1100
    del dropped
    before = await asyncio.to_thread(device.memory.statistics)  # which gives nothing back: no loop of the device's
    assert before.live_bytes == 1600
    assert stream.statistics().live_bytes == 100
    managed.free()
    statistics = device.memory.statistics()
    assert (statistics.live_bytes, statistics.by_class) == (100, {128: 100})
    kept.free()


async def test_what_the_driver_does_not_take_back_is_no_failure_of_who_looks() -> None:
    async with open_peer() as (peer, device):
        device.memory.use(Adaptor)  # without the free lists
        stream = device.stream()
        buffer = stream.empty(1000, np.uint8)
        await stream.fill(buffer, 1)
        await until(
            lambda: resources_of(device).loop_states.here().reactor._watchdog is None, "the last tick of the watchdog"
        )
        del buffer
        peer.refuse("deallocate")
        with Reports() as reports:
            assert device.memory.statistics().live_bytes == 1000  # it is still there
        assert [type(failure) for failure in reports.failures] == [aiocuda.DriverError]
        assert device.memory.statistics().live_bytes == 0
    assert device.memory.statistics().live_bytes == 0


@pytest.mark.parametrize("how", ["upload", "download", "pinned upload", "pinned download", "launch", "copy"])
async def test_nothing_holds_itself(device: Device, stream: Stream, how: str) -> None:
    """Without the garbage collector: a service that uploads in a loop must not wait for its next full collection."""
    pinned = await device.pinned(1000)
    pinned[:] = 1
    gc.collect()
    gc.disable()
    try:
        buffer = await stream.upload(pinned if how == "pinned upload" else np.zeros(1000, np.float32))
        if how == "download":
            result = weakref.ref(await stream.download(buffer))
            assert result() is None
        elif how == "pinned download":
            await stream.download(buffer, pinned)
            alive = weakref.ref(pinned)
            del pinned
            assert alive() is None
        elif how == "launch":
            await stream.launch(SAXPY, 1, 32, 1000, 2.0, buffer, buffer)
        elif how == "copy":
            await stream.copy(buffer[:500], buffer[500:])
        alive_buffer = weakref.ref(buffer)
        del buffer
        assert alive_buffer() is None
        await swept(device, 0)
    finally:
        gc.enable()


async def test_only_the_user_holds_the_result(stream: Stream) -> None:
    """Neither by the device that watches over targets, nor by the buffer that it came from."""
    buffer = await stream.upload(np.zeros(1000, np.float32))
    results = [weakref.ref(await stream.download(buffer)) for _ in range(20)]
    gc.collect()
    assert [result() for result in results] == [None] * 20


async def test_long_lived_buffer_forgets_streams_that_came_and_went(device: Device) -> None:
    async with device.stream() as home:
        buffer = await home.upload(np.zeros(4, np.float32))
        for _ in range(50):
            async with device.stream() as stream:
                await stream.fill(buffer, 1)
        assert len(buffer._block.uses) < 20


async def test_operation_under_way_holds_its_buffers(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    x, y = stream.empty(1000), stream.empty(1000)
    stream.fill(x, 2)
    stream.fill(y, 3)
    stream.launch(SAXPY, 1, 32, 1000, 2.0, x, y)
    operation = stream.download(y)
    del x, y
    gc.collect()
    await latch.held()
    async with device.stream() as third:
        await third.fill(third.empty(1000), -1)
    latch.release()
    assert (await quickly(operation) == 7).all()


async def test_kernels_on_two_streams_meet_in_one_buffer(stream: Stream, other: Stream) -> None:
    buffer = await stream.upload(np.arange(64, dtype=np.uint32))
    operations: list[Operation[Any]] = []
    expected = np.arange(64, dtype=np.uint32)
    for index in range(10):
        on, off = (stream, other) if index % 2 else (other, stream)
        on.wait(off.record())
        operations.append(on.launch(AFFINE, 1, 64, buffer, 64, 3, index))
        expected = expected * 3 + index
    await aiocuda.gather(*operations)
    assert np.array_equal(await stream.download(buffer), expected)


async def test_double_free(stream: Stream) -> None:
    buffer = stream.empty(4)
    buffer.free()
    with pytest.raises(StaleHandleError, match="has been freed"):
        buffer.free()


async def test_free_in_another_loop() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = stream.empty(1000)
        with Latch(device) as latch:
            latch.hold(stream)
            stream.fill(buffer, 1)
            await latch.held()

            async def elsewhere() -> None:
                with pytest.raises(WrongLoopError, match="free the buffer there, or name a stream of this loop"):
                    buffer.free()
                async with device.stream() as mine:
                    buffer.free(mine)  # waits, on the device, for what is under way
                    fill = mine.fill(mine.empty(4), 1)
                    assert not fill.done()
                    latch.release()
                    await quickly(fill)

            await asyncio.to_thread(in_thread, elsewhere)
        await stream.synchronize()
        assert device.driver.fault is None


async def test_allocation_retries_once_after_a_trim() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        refused = iter([True, False])

        def full(*arguments: object) -> None:
            if next(refused, False):
                raise aiocuda.DeviceOutOfMemory("no room", requested=1, free=0, live=0, reserved=0)

        peer.before["allocate"] = full
        assert stream.empty(4).nbytes == 16
        assert (peer.calls["allocate"], peer.calls["pool_trim"]) == (2, 1)


async def test_managed_memory_is_freed_off_the_loop(stream: Stream, device: Device, latch: Latch) -> None:
    """``cuMemFree`` waits until the device is idle; the loop does not."""
    buffers = [device.unified(1000) for _ in range(3)]
    await stream.fill(buffers[0], 1)
    latch.hold(stream)
    stream.fill(buffers[1], 2)
    await latch.held()
    for buffer in buffers[:2]:
        buffer.free()
    del buffers, buffer
    for _ in range(100):
        await asyncio.sleep(0.001)
    latch.release()  # raises if the loop has waited until the latch ended by itself
    await stream.synchronize()
    await swept(device, 0)


@pytest.mark.parametrize("adapted", [False, True], ids=["free lists", "adaptors"])
async def test_loops_of_several_threads_count_every_byte(adapted: bool) -> None:
    """Also on free-threaded Python, where another thread may run within a ``+=``."""
    async with open_peer() as (_, device):
        if adapted:
            limit = device.memory.use(lambda upstream: LimitResource(upstream, 1 << 30))
            counts = device.memory.use(StatisticsResource)

        async def churn() -> None:
            async with device.stream() as stream:
                for _ in range(500):
                    for buffer in [stream.empty(100, np.uint8) for _ in range(4)]:
                        buffer.free()

        await asyncio.gather(*(asyncio.to_thread(in_thread, churn) for _ in range(4)))
        await swept(device, 0)
        if adapted:
            assert limit.live_bytes == counts.statistics().live_bytes == 0
