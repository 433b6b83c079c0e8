"""Pinned memory that is not locked yet, or cannot be: what uses it waits for that, or fails with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceBuffer, DeviceOutOfMemory, DriverError, Operation, PinnedBuffer, SkippedError, Stream
from aiocuda.device._resources import resources_of
from aiocuda.memory._staging import CHUNK_BYTES
from tests.helpers import SAXPY, Peer, jobs_done, open_peer, quickly

pytestmark = pytest.mark.asyncio


async def test_used_before_it_is_locked() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.upload(np.zeros(4))
        with peer.holding_jobs():
            pinned = device.pinned(100)
            pinned[:] = 5
            buffer = stream.empty(100)
            operation = stream.copy(buffer, pinned)
            waiter = asyncio.ensure_future(_await(pinned))
            await asyncio.sleep(0)
            assert operation.state == "queued"
            assert not waiter.done()
        assert await quickly(waiter) is pinned
        await quickly(operation)
        assert (await stream.download(buffer) == 5).all()


async def _await(pinned: PinnedBuffer) -> PinnedBuffer:
    return await pinned


async def test_cannot_be_locked() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.upload(np.zeros(4))
        await jobs_done(device)  # the lock of the staging memory would be refused
        peer.refuse("pin")
        pinned = device.pinned(100)
        with pytest.raises(DriverError):
            await quickly(_await(pinned))
        with pytest.raises(DriverError):
            await quickly(_await(pinned))


#: Each enqueues one operation with memory that cannot be locked.
USES: list[Callable[[Stream, DeviceBuffer, PinnedBuffer], Operation[Any]]] = [
    lambda stream, buffer, pinned: stream.copy(buffer, pinned),
    lambda stream, buffer, pinned: stream.upload(pinned),
    lambda stream, buffer, pinned: stream.download(buffer, pinned),
    lambda stream, buffer, pinned: stream.launch(SAXPY, 1, 128, 100, 1.0, pinned, buffer),
]


@pytest.mark.parametrize("use", USES, ids=["copy", "upload", "download", "launch"])
@pytest.mark.parametrize("known", [False, True], ids=["not yet known", "known"])
async def test_operation_fails_with_what_the_lock_failed_with(use: Any, known: bool) -> None:
    """Whether that is known when it is enqueued or not. It is the operation that cannot be done, no other before it."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.ones(100, np.float32))
        await stream.launch(SAXPY, 1, 128, 100, 0.0, buffer, buffer)
        calls = peer.calls.copy()
        enqueued = stream.statistics().operations
        await jobs_done(device)
        peer.refuse("pin", error=lambda: DeviceOutOfMemory("no pages", requested=400))
        with peer.holding_jobs():
            pinned = device.pinned(100)
            if not known:
                operation = use(stream, buffer, pinned)
        if known:
            with pytest.raises(DeviceOutOfMemory):
                await quickly(_await(pinned))
            operation = use(stream, buffer, pinned)
        behind = stream.fill(buffer, 3)
        with pytest.raises(DeviceOutOfMemory, match="no pages") as caught:
            await quickly(operation)
        assert caught.value.requested == 400
        with pytest.raises(SkippedError) as skipped:
            await quickly(behind)
        assert isinstance(skipped.value.__cause__, DeviceOutOfMemory)
        for _ in range(2):  # nor does it ever reach the device later
            with pytest.raises(DeviceOutOfMemory):
                await quickly(use(stream, buffer, pinned))
        used = peer.calls - calls
        assert not used.keys() & {"upload", "download", "launch", "fill"}
        assert stream.statistics().operations == enqueued + 4
        assert (await stream.download(buffer) == 1).all()


@contextlib.asynccontextmanager
async def open_stream(loaded: bool) -> AsyncIterator[tuple[Peer, Device, Stream]]:
    """With the kernel there, or to be loaded."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.upload(np.zeros(4))
        if loaded:
            await asyncio.to_thread(SAXPY.load, peer.driver, 0)
        yield peer, device, stream


@pytest.mark.parametrize("loaded", [False, True])
async def test_launch_waits_until_all_its_memory_is_locked(loaded: bool) -> None:
    async with open_stream(loaded) as (peer, device, stream):
        with peer.holding_jobs():
            x, y = device.pinned(100), device.pinned(100)
            x[:], y[:] = 1, 2
            operation = stream.launch(SAXPY, 1, 128, 100, 3.0, x, y)
            again = stream.launch(SAXPY, 1, 128, 100, 1.0, x, y)
            await asyncio.sleep(0)
            assert (operation.state, again.state) == ("queued", "queued")
            assert not peer.calls["launch"]
        await quickly(again)
        assert (y == 6).all()
        calls = peer.calls["offload"]
        assert stream.launch(SAXPY, 1, 128, 100, 1.0, x, y).state == "submitted"
        assert peer.calls["offload"] == calls


@pytest.mark.parametrize("loaded", [False, True])
async def test_launch_of_which_one_buffer_cannot_be_locked(loaded: bool) -> None:
    async with open_stream(loaded) as (peer, device, stream):
        x = device.pinned(100)
        await x
        await jobs_done(device)
        peer.refuse("pin")
        with pytest.raises(DriverError):
            await quickly(stream.launch(SAXPY, 1, 128, 100, 3.0, x, device.pinned(100)))
        x[:] = 1
        await quickly(stream.launch(SAXPY, 1, 128, 100, 3.0, x, x))
        assert (x == 4).all()


async def test_memory_that_could_not_be_locked_goes_with_its_array() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.upload(np.zeros(4))
        before = len(resources_of(device).pinned_pool._regions)
        await jobs_done(device)
        for _ in range(5):
            peer.refuse("pin")
            pinned = device.pinned(1 << 20)
            with pytest.raises(DriverError):
                await quickly(_await(pinned))
            pinned[:] = 1  # as an array it is as good as any
            assert (pinned == 1).all()
            del pinned
        assert len(resources_of(device).pinned_pool._regions) == before
        assert (await device.pinned(1 << 20)).nbytes == 4 << 20
        assert len(resources_of(device).pinned_pool._regions) == before + 1


async def test_chunk_that_could_not_be_locked_is_forgotten() -> None:
    """Each copy asks for chunks anew: what could not be locked for one must not pile up."""
    with Peer() as peer:

        def refuse(address: int, nbytes: int) -> None:
            if nbytes == CHUNK_BYTES:
                raise DeviceOutOfMemory("no pages", requested=nbytes)

        peer.before["pin"] = refuse
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            regions = resources_of(device).loop_states.here().staging.chunks
            for _ in range(3):
                with pytest.raises(DeviceOutOfMemory):
                    await quickly(stream.upload(np.zeros(1 << 20)))
            assert not regions
            peer.before.clear()
            await quickly(stream.upload(np.zeros(1 << 20)))
            assert regions
