"""Stream-ordered memory: the rows G of docs/reference/features.md that hold."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiocuda import Device, DeviceOutOfMemory
from aiocuda.driver.host import HostDriver
from tests.helpers import Latch, Peer, open_peer, quickly

pytestmark = pytest.mark.asyncio


async def test_allocate_and_free_in_stream_order_wait_for_nothing(device: Device, latch: Latch) -> None:
    """G1: while the stream is held, memory is made, used and given back."""
    async with device.stream() as stream, device.stream() as other:
        latch.hold(stream)
        await latch.held()
        live = device.memory.statistics().live_bytes
        for value in range(8):
            buffer = stream.empty(1 << 20, np.uint8)
            stream.fill(buffer, value)
            buffer.free()
        assert device.memory.statistics().live_bytes == live
        last = await quickly(other.upload(np.arange(4)))  # and no other task waits
        assert not device.driver.stream_query(stream._queue.handle)
        latch.release()
        assert (await stream.download(last)).sum() == 6


async def test_free_waits_on_the_device_for_every_stream_that_used_it(device: Device, latch: Latch) -> None:
    """G3: a buffer is freed in one stream while another will read it; its memory is reused only after the read."""
    content = np.arange(1 << 18, dtype=np.uint32)
    out = np.zeros_like(content)
    async with device.stream() as home, device.stream() as reader:
        buffer = await home.upload(content)
        other = reader.empty_like(buffer)
        latch.hold(reader)
        await latch.held()
        reader.copy(other, buffer)
        buffer.free()
        heir = home.empty_like(other)
        home.fill(heir, 0)
        latch.release()
        await quickly(reader.download(other, out))
    assert np.array_equal(out, content)


async def test_no_room_is_an_error_with_sizes_and_leaves_everything_usable(device: Device) -> None:
    """G5: nothing leaks, and the next allocation works."""
    async with device.stream() as stream:
        kept = await stream.upload(np.arange(1000))
        before = device.memory.statistics().live_bytes
        wanted = device.properties.total_memory + 1
        with pytest.raises(DeviceOutOfMemory, match=f"{wanted:,} bytes") as caught:
            stream.empty(wanted, np.uint8)
        assert caught.value.requested == wanted
        assert caught.value.live == before
        assert caught.value.free <= device.properties.total_memory
        assert device.memory.statistics().live_bytes == before
        assert (await stream.download(stream.empty_like(kept))).shape == kept.shape
        assert (await stream.download(kept)).sum() == 499_500


async def test_out_of_memory_is_raised_after_a_trim_and_one_retry() -> None:
    """G5: exactly one of each."""
    async with open_peer(Peer(HostDriver(memory=1 << 20))) as (peer, device), device.stream() as stream:
        peer.calls.clear()
        with pytest.raises(DeviceOutOfMemory):
            stream.empty(2 << 20, np.uint8)
        assert (peer.calls["allocate"], peer.calls["pool_trim"]) == (2, 1)
        await stream.fill(stream.empty(1 << 19, np.uint8), 1)


async def test_pinned_memory_is_locked_off_the_loop_and_never_twice() -> None:
    """G6: the buffer exists immediately, a worker locks its memory, and released memory is reused."""
    threads: list[int] = []
    async with open_peer() as (peer, device), device.stream() as stream:
        await stream.upload(np.ones(1 << 20, np.uint8))  # the staging ring has its chunks
        peer.before["pin"] = lambda *arguments: threads.append(threading.get_ident())
        first = device.pinned(3 << 20, np.uint8)
        first[:] = 7
        buffer = await stream.upload(first)  # waits by itself until the memory is locked
        address = first.address
        first.free()
        second = device.pinned((1 << 20, 3), np.uint8)
        assert second.address == address
        assert (await stream.download(buffer, second.reshape(-1)) == 7).all()
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert (peer.calls["pinned_allocate"], peer.calls["pinned_deallocate"]) == (0, 0)


async def test_one_call_frees_the_buffers_of_a_stream_in_its_order(device: Device, latch: Latch) -> None:
    """G7: while another stream uses one of them; without waiting, and the stream goes on."""
    content = np.arange(1 << 18, dtype=np.uint32)
    out = np.zeros_like(content)
    async with device.stream() as home, device.stream() as reader:
        buffers = [await home.upload(content), home.empty(8), home.empty_like(content)]
        other = reader.empty_like(content)
        latch.hold(reader)
        await latch.held()
        reader.copy(other, buffers[0])
        assert device.memory.free_all(home) == sum(buffer.nbytes for buffer in buffers)
        assert all(buffer.freed for buffer in buffers)
        heirs = [home.empty_like(other) for _ in range(2)]
        for heir in heirs:
            home.fill(heir, 0)
        latch.release()
        await quickly(reader.download(other, out))
    assert np.array_equal(out, content)
