"""Freed memory serves its own stream again: no driver call, no event; within limits, and not for other streams."""

from __future__ import annotations

import numpy as np
import pytest

from aiocuda import Device, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.memory import Adaptor
from aiocuda.memory._supply import LARGEST_KEPT, MOST_KEPT
from tests.helpers import Latch, Peer, open_peer, quickly

pytestmark = pytest.mark.asyncio

MIB = 1 << 20


async def test_freed_memory_serves_its_stream_without_the_driver_and_an_event() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        first = stream.empty(1000)
        await stream.fill(first, 1)
        address = first.address
        first.free()
        peer.calls.clear()
        assert not stream._queue.pending
        for size in (1000, 990, 1000):  # 990 × 4 bytes are in the class of 4 000 bytes
            buffer = stream.empty(size)
            assert buffer.address == address
            buffer.free()
        assert not stream._queue.pending
        assert not peer.calls


async def test_another_stream_gets_other_memory() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(1000)
        address = buffer.address
        buffer.free()
        peer.calls.clear()
        assert other.empty(1000).address != address
        assert peer.calls["allocate"] == 1


async def test_reused_memory_is_ordered_for_other_streams(device: Device, stream: Stream, other: Stream) -> None:
    """The work before the free is unfinished: another stream that uses the memory again waits for that work."""
    with Latch(device) as latch:
        latch.hold(stream)
        await latch.held()
        buffer = stream.empty(1000)
        stream.fill(buffer, 1)
        buffer.free()
        again = stream.empty(1000)
        filled = other.fill(again, 2)
        latch.release()
        await quickly(filled)
        assert (await stream.download(again) == 2).all()


async def test_large_blocks_go_back_to_the_pool() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        for nbytes, calls in ((LARGEST_KEPT, 0), (LARGEST_KEPT + 1, 1)):
            buffer = stream.empty(nbytes, np.uint8)
            peer.calls.clear()
            buffer.free()
            assert peer.calls["deallocate"] == calls


async def test_each_class_keeps_so_many_bytes_and_no_more() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffers = [stream.empty(LARGEST_KEPT, np.uint8) for _ in range(MOST_KEPT // LARGEST_KEPT + 3)]
        peer.calls.clear()
        for buffer in buffers:
            buffer.free()
        assert peer.calls["deallocate"] == 3


async def test_trim_and_the_end_of_the_stream_give_back_all() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        for each in (stream, stream, other):
            buffers = [each.empty(1000), each.empty(70000)]
            await each.synchronize()
            for buffer in buffers:
                buffer.free()
        peer.calls.clear()
        await stream.aclose()
        assert peer.calls["deallocate"] == 2
        assert await device.memory.trim() > 0
        assert (peer.calls["deallocate"], peer.calls["pool_trim"]) == (4, 1)
        await other.synchronize()
        assert device.memory.statistics().reserved_bytes == 0


async def test_memory_that_is_kept_for_one_stream_makes_room_for_another() -> None:
    async with open_peer(Peer(HostDriver(memory=8 * MIB))) as (_, device):
        stream, other = device.stream(), device.stream()
        for buffer in [stream.empty(MIB, np.uint8) for _ in range(4)]:
            buffer.free()
        await stream.synchronize()
        assert other.empty(8 * MIB, np.uint8).nbytes == 8 * MIB


async def test_memory_of_the_free_lists_goes_back_there_beside_an_adaptor() -> None:
    """An adaptor is in use from the second buffer on. Both buffers return to where they came from."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        before = stream.empty(1000)
        resource = device.memory.resource
        device.memory.use(Adaptor)
        after = stream.empty(1000)
        peer.calls.clear()
        after.free()
        assert peer.calls["deallocate"] == 1
        address = before.address
        before.free()
        device.memory.use(lambda _: resource)
        assert stream.empty(1000).address == address
        assert peer.calls["deallocate"] == 1
