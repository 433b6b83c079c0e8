"""Streams: rows A1 to A6 of docs/reference/features.md, on every driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, DriverError, Event, Operation, SkippedError, Stream
from aiocuda.driver.host import HostDriver
from tests.helpers import AFFINE, Latch, block_until, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_priorities_are_mapped_clamped_and_readable_back(device: Device) -> None:
    """A1: high, normal and low lie in the device's own range; a level outside it is clamped."""
    driver = device.driver
    least, greatest = driver.priority_range(device.index)
    levels = []
    for priority in ("low", "normal", "high"):
        async with device.stream(priority=priority) as stream:
            assert stream.priority == priority
            levels.append(driver.stream_priority(stream._queue.handle))
    assert (levels[0], levels[2]) == (least, greatest)
    assert levels == sorted(levels, reverse=True)
    beyond = driver.stream_create(device.index, greatest - 100)
    assert driver.stream_priority(beyond) == greatest
    driver.stream_destroy(beyond)


async def test_each_copy_and_fill_is_an_awaitable(device: Device) -> None:
    """A2: host to device, device to host, within the device, and a fill."""
    there = np.arange(1000, dtype=np.int32)
    back = np.zeros_like(there)
    async with device.stream() as stream:
        one, other = stream.empty_like(there), stream.empty_like(there)
        operations = [
            stream.copy(one, there),
            stream.copy(other, one),
            stream.copy(back, other),
            stream.fill(one, -1),
        ]
        assert all(isinstance(operation, Operation) for operation in operations)
        assert await aiocuda.gather(*operations) == [None] * 4
        assert np.array_equal(back, there)
        assert np.array_equal(await stream.download(one), np.full_like(there, -1))


async def check_peer_copy(driver: HostDriver | str) -> None:
    content = np.arange(1000, dtype=np.int32)
    async with (
        aiocuda.open_device(0, driver=driver) as near,  # type: ignore[arg-type]  # a name or a driver
        aiocuda.open_device(1, driver=driver) as far,  # type: ignore[arg-type]
        near.stream() as here,
        far.stream() as there,
    ):
        source = await here.upload(content)
        target = there.empty_like(source)
        await quickly(here.copy(target, source))
        assert np.array_equal(await there.download(target), content)


async def test_copy_from_one_device_to_another() -> None:
    """A2: peer to peer."""
    driver = HostDriver(devices=2)
    try:
        await check_peer_copy(driver)
    finally:
        driver.close()


@pytest.mark.gpu(2)
async def test_copy_from_one_gpu_to_another() -> None:
    """A2: peer to peer."""
    await check_peer_copy("cuda")


async def test_prefetch_goes_in_stream_order(device: Device, latch: Latch) -> None:
    """A3: managed memory to the device and back to the host, each after the work enqueued before."""
    async with device.stream() as stream:
        buffer = device.unified(256, np.uint32)
        buffer.array[:] = 5
        await stream.launch(
            AFFINE, 1, 256, buffer, 256, 1, 0
        )  # loaded in advance: loading may wait for the held kernel
        latch.hold(stream)
        there = stream.prefetch(buffer, "device")
        stream.launch(AFFINE, 1, 256, buffer, 256, 3, 1)
        back = stream.prefetch(buffer, to="host")
        await latch.held()
        assert not there.done()
        assert not back.done()
        latch.release()
        assert await aiocuda.gather(there, back) == [None, None]
        assert (buffer.array == 16).all()


async def test_callback_runs_once_after_all_earlier_work(device: Device, latch: Latch) -> None:
    """A4: on the event loop's own thread, with the operation."""
    calls: list[tuple[Operation[None], int]] = []
    async with device.stream() as stream:
        latch.hold(stream)
        fill = stream.fill(stream.empty(8), 1)
        operation = stream.add_callback(lambda operation: calls.append((operation, threading.get_ident())))
        await latch.held()
        assert not calls
        latch.release()
        await until(lambda: calls, "the callback")
        assert fill.done()
        await stream.synchronize()
    assert calls == [(operation, threading.get_ident())]


async def test_callback_runs_also_when_work_failed_or_was_abandoned() -> None:
    """A4: exactly once in both cases."""
    ended: list[str] = []
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(8)
        peer.refuse("fill")
        refused = stream.fill(buffer, 1)
        behind = stream.add_callback(lambda operation: ended.append(operation.state))
        with pytest.raises(DriverError):
            await refused
        with pytest.raises(SkippedError):
            await behind
        with Latch(device) as latch:
            latch.hold(stream)
            dropped = stream.add_callback(lambda operation: ended.append(operation.state))
            assert dropped.abandon()
            with pytest.raises(ClosedError):
                await dropped
        await stream.synchronize()
    assert ended == ["failed", "abandoned"]


async def test_statistics_of_a_stream(device: Device) -> None:
    """A5: counts and bytes by kind and direction, latencies, and peak memory."""
    async with device.stream() as stream:
        assert stream.statistics().operations == 0
        first = await stream.upload(np.ones(1000, np.uint32))
        second = stream.empty_like(first)
        await stream.copy(second, first)
        await stream.fill(second, 2)
        await stream.launch(AFFINE, 1, 256, second, 1000, 3, 1)
        await stream.download(second[:500])
        second.free()
        await stream.synchronize()
        found = stream.statistics()
    assert (found.uploads, found.copies, found.fills, found.launches, found.downloads) == (1, 1, 1, 1, 1)
    assert (found.bytes_uploaded, found.bytes_copied, found.bytes_downloaded) == (4000, 4000, 2000)
    assert found.operations == 6
    assert 0 < found.p50_ms <= found.p99_ms
    assert found.average_ms > 0
    assert (found.live_bytes, found.peak_bytes) == (4000, 8000)


def by_operation(stream: Stream) -> Operation[None]:
    return stream.synchronize()


def by_event(stream: Stream) -> Event:
    return stream.record()


def by_stream(stream: Stream) -> Stream:
    return stream


@pytest.mark.parametrize("point", [by_operation, by_event, by_stream])
async def test_stream_waits_on_the_device_without_the_host(
    device: Device, latch: Latch, point: Callable[[Stream], Operation[None] | Event | Stream]
) -> None:
    """A6: for an operation, an event or another stream; the loop does not turn from the release to the end."""
    async with device.stream() as before, device.stream() as behind:
        buffer = await before.upload(np.zeros(8, np.uint32))
        await before.launch(AFFINE, 1, 32, buffer, 8, 1, 0)
        latch.hold(before)
        before.fill(buffer, 20)
        behind.wait(point(before))
        last = behind.launch(AFFINE, 1, 32, buffer, 8, 2, 2)
        await latch.held()
        await asyncio.sleep(0)
        assert not last.done()
        assert not device.driver.stream_query(behind._queue.handle)
        latch.release()
        block_until(lambda: device.driver.stream_query(behind._queue.handle), "the stream that waits")
        assert (await behind.download(buffer) == 42).all()
