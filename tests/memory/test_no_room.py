"""No room: an error with sizes after a trim and one retry, nothing lost, and the next allocation works (P17, P24)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import DeviceFault, DeviceOutOfMemory
from aiocuda.device._resources import resources_of
from aiocuda.driver.cuda import CudaDriver
from aiocuda.driver.host import HostDriver
from aiocuda.memory import FailingResource, LimitResource, SizeClassResource
from tests.helpers import TRAP, Latch, Peer, block_until, open_peer, refusal

pytestmark = pytest.mark.asyncio

MIB = 1 << 20


def small() -> Peer:
    """A device of 8 MiB."""
    return Peer(HostDriver(memory=8 * MIB))


@pytest.mark.parametrize("verb", ["empty", "empty_like", "upload"])
async def test_sizes_are_told_and_nothing_is_lost(verb: str) -> None:
    async with open_peer(small()) as (peer, device):
        stream = device.stream()
        kept = [stream.empty(2 * MIB, np.uint8) for _ in range(3)]
        call: dict[str, Any] = {
            "empty": lambda: stream.empty(4 * MIB, np.uint8),
            "empty_like": lambda: stream.empty_like(np.empty(4 * MIB, np.uint8)),
            "upload": lambda: stream.upload(np.empty(4 * MIB, np.uint8)),
        }
        for _ in range(3):
            peer.calls.clear()
            with pytest.raises(
                DeviceOutOfMemory, match=r"no room for 4,194,304 .* await operations that use some"
            ) as caught:
                call[verb]()
            error = caught.value
            assert (error.requested, error.live, error.reserved, error.free) == (4 * MIB, 6 * MIB, 6 * MIB, 2 * MIB)
            assert (peer.calls["allocate"], peer.calls["pool_trim"], peer.calls["deallocate"]) == (2, 1, 0)
            assert device.memory.statistics().live_bytes == 6 * MIB
        kept.pop().free()
        again = stream.empty(4 * MIB, np.uint8)
        assert (await stream.download(again)).nbytes == 4 * MIB


async def test_what_adaptors_keep_makes_room() -> None:
    """Cached in other classes and for other streams, all of the device: the trim gives it back."""
    async with open_peer(small()) as (peer, device):
        streams = [device.stream() for _ in range(2)]
        sizes = device.memory.use(SizeClassResource)
        for stream in streams:
            for buffer in [stream.empty(MIB, np.uint8) for _ in range(4)]:
                buffer.free()
            await stream.synchronize()
        assert sizes.kept_bytes == 8 * MIB
        refused = peer.calls["pool_trim"]
        large = streams[0].empty(8 * MIB, np.uint8)
        assert (sizes.kept_bytes, peer.calls["pool_trim"]) == (0, refused + 1)
        large.free()


async def test_a_limit_is_named_in_the_error() -> None:
    async with open_peer(small()) as (_, device):
        stream = device.stream()
        device.memory.use(lambda upstream: LimitResource(upstream, MIB))
        cure = "pass the limit of 1,048,576: free buffers, or raise the limit$"
        with pytest.raises(DeviceOutOfMemory, match=cure) as caught:
            stream.empty(MIB + 1, np.uint8)
        assert caught.value.__dict__["limit"] == MIB
        assert (caught.value.requested, caught.value.live, caught.value.free) == (MIB + 1, 0, 8 * MIB)


async def test_another_error_is_raised_unchanged_and_the_call_not_repeated() -> None:
    async with open_peer(small()) as (peer, device):
        stream = device.stream()
        device.memory.use(lambda upstream: FailingResource(upstream, allocations={1}, error=refusal))
        with pytest.raises(type(refusal())):
            stream.empty(10)
        assert (peer.calls["pool_trim"], peer.calls["allocate"]) == (0, 0)
        stream.empty(10).free()


async def test_caller_gets_the_error_of_a_failed_trim() -> None:
    async with open_peer(small()) as (peer, device):
        stream = device.stream()
        peer.refuse("pool_trim")
        with pytest.raises(type(refusal())):
            stream.empty(9 * MIB, np.uint8)
        stream.empty(8 * MIB, np.uint8).free()
        peer.refuse("pool_trim")
        with pytest.raises(type(refusal())):
            await device.memory.trim()
        assert await device.memory.trim() >= 0


async def test_an_interrupt_between_allocation_and_use_loses_nothing() -> None:
    """P24: what is allocated when Ctrl-C comes goes back by itself."""
    async with open_peer(small()) as (peer, device):
        stream = device.stream()
        await stream.synchronize()
        peer.refuse("event_record", error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.empty(4 * MIB, np.uint8)
        await stream.synchronize()
        device.memory.sweep(resources_of(device).loop_states.here().reactor)
        assert device.memory.statistics().live_bytes == 0
        stream.empty(8 * MIB, np.uint8).free()


async def test_nothing_that_may_block_is_called_on_the_loop_but_that_trim() -> None:
    """And nothing ever synchronises: counted, with all ways to make memory and to give it back."""
    blocking = (
        "stream_synchronize pool_trim pinned_allocate pinned_deallocate pin unpin managed_deallocate compile load"
    ).split()
    async with open_peer() as (peer, device):
        here = threading.get_ident()
        on_loop: list[str] = []
        for verb in blocking:
            peer.before[verb] = lambda *arguments, verb=verb: (
                on_loop.append(verb) if threading.get_ident() == here else None
            )
        device.memory.use(SizeClassResource)
        stream, other = device.stream(), device.stream()
        buffers = [await stream.upload(np.ones(1000, np.float32)) for _ in range(8)]
        pinned = await device.pinned(5000)
        for index, buffer in enumerate(buffers):
            other.fill(buffer, 1)
            buffer.free((None, stream, other)[index % 3])
        await other.upload(np.ones(3 << 20, np.float32))
        pinned.free()
        unified = device.unified(1000)
        await stream.fill(unified, 1)
        unified.free()
        del buffers, buffer, unified
        await device.memory.trim()
        await stream.aclose()
        await device.drain()
        await device.aclose()
        assert peer.calls["pool_trim"] == 2  # the program's, and that of the end
        assert on_loop == []
        assert peer.calls["stream_synchronize"] == 0


async def test_after_a_fault_it_is_the_fault() -> None:
    async with open_peer(small()) as (peer, device):
        stream = device.stream()
        device.memory.use(SizeClassResource)
        buffer = stream.empty(10)
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)
        calls = peer.calls.total()
        for use in (lambda: stream.empty(10), lambda: buffer.free()):
            with pytest.raises(DeviceFault):
                use()
        with pytest.raises(DeviceFault):
            await device.memory.trim()
        assert device.memory.statistics().reserved_bytes == 0
        assert peer.calls.total() == calls


async def test_lack_of_room_looks_at_all_freed_blocks() -> None:
    """Otherwise an allocation looks at a few of those that waited for work on the host."""
    async with open_peer(small(), max_in_flight=2) as (_, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            for _ in range(100):
                buffer = stream.empty(MIB >> 4, np.uint8)
                stream.fill(buffer, 1)
                buffer.free()
            with pytest.raises(DeviceOutOfMemory):
                stream.empty(6 * MIB, np.uint8)
        block_until(lambda: (stream._queue.poll(), stream._queue.idle)[1], "the stream's end")  # no tick in between
        stream.empty(6 * MIB, np.uint8).free()


@pytest.mark.parametrize("name", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_closed_device_keeps_nothing_in_the_pool_of_its_driver(name: str) -> None:
    """The driver goes on: other libraries of the process, and other processes, get the memory."""
    driver = HostDriver() if name == "host" else CudaDriver.get()
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        await stream.upload(np.ones(64 * MIB, np.uint8))
        assert driver.pool_reserved(0) >= 64 * MIB
    async with aiocuda.open_device(driver=driver):
        assert driver.pool_reserved(0) < 64 * MIB
    if name == "host":
        driver.close()
