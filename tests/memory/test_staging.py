"""Pageable copies: through pinned chunks, off the loop, in the order of their streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, DeviceBuffer, DriverError, Operation, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.lowlevel import resources_of
from aiocuda.memory._staging import CHUNK_BYTES, LEAST_CHUNK_BYTES, MOST_CHUNKS, SLAB_BYTES, SMALL_BYTES, chunk_bytes
from tests.helpers import AFFINE, Latch, Peer, block_until, open_peer, quickly, refusal, until

pytestmark = pytest.mark.asyncio

AWKWARD = [
    1,
    2,
    SMALL_BYTES - 1,
    SMALL_BYTES,
    SMALL_BYTES + 1,
    LEAST_CHUNK_BYTES - 1,
    LEAST_CHUNK_BYTES,
    LEAST_CHUNK_BYTES + 1,
    9 << 20,
]


def noise(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def quick() -> Peer:
    """A host with transfers that take next to no time."""
    return Peer(HostDriver(bandwidth=1e11, latency=0))


@pytest.mark.parametrize("nbytes", AWKWARD)
async def test_there_and_back(stream: Stream, nbytes: int) -> None:
    given = noise(nbytes)
    buffer = await stream.upload(given)
    assert np.array_equal(await stream.download(buffer), given)
    out = np.zeros(nbytes + 2, np.uint8)
    await stream.download(buffer, out[1:-1])  # at an odd address, and not one byte more
    assert np.array_equal(out[1:-1], given)
    assert (out[0], out[-1]) == (0, 0)
    await stream.copy(buffer, given[::-1].copy())
    assert np.array_equal(await stream.download(buffer), given[::-1])


async def test_before_any_memory_is_pinned(stream: Stream) -> None:
    """The first copies of a device come before its ring is ready."""
    given = noise(1000)
    buffers = [stream.upload(given + index) for index in range(20)]
    for index, operation in enumerate(buffers):
        assert np.array_equal(await stream.download(await operation), given + index)


async def test_more_small_copies_than_there_are_small_buffers(stream: Stream, latch: Latch) -> None:
    count = 3 * SLAB_BYTES // SMALL_BYTES
    buffers = [await stream.upload(np.full(100, index, np.uint16)) for index in range(count)]
    latch.hold(stream)
    await latch.held()
    operations: list[Operation[Any]] = [stream.download(buffer) for buffer in buffers]
    latch.release()
    for index, result in enumerate(await quickly(aiocuda.gather(*operations))):
        assert (result == index).all()


@pytest.mark.slow
async def test_many_copies_share_the_chunk_buffers(device: Device) -> None:
    """More streams, and more chunks wanted, than there are chunks."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(device.stream()) for _ in range(MOST_CHUNKS + 4)]
        given = [noise(2 * LEAST_CHUNK_BYTES + 1000 * index, index) for index in range(len(streams))]

        async def round_trip(stream: Stream, array: npt.NDArray[np.uint8]) -> bool:
            buffer = stream.empty_like(array)
            stream.copy(buffer, array)
            return np.array_equal(await stream.download(buffer), array)

        trips = map(round_trip, streams, given)
        assert all(await quickly(asyncio.gather(*trips)))


@pytest.mark.slow
async def test_held_streams_leave_chunks_for_the_others(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    async with device.stream() as third:
        given = noise(10 << 20)
        held: list[Operation[Any]] = []
        for each in (stream, other):
            latch.hold(each)
            await latch.held()
            held.append(each.upload(noise(40 << 20, 1)))  # each wants ten chunks
        buffer = await quickly(third.upload(given))
        assert np.array_equal(await quickly(third.download(buffer)), given)
        assert not any(operation.done() for operation in held)
        latch.release()
        for operation in held:
            assert np.array_equal(
                await quickly(operation.stream.download(await quickly(operation))), noise(40 << 20, 1)
            )


async def test_nothing_overtakes_a_staged_copy(stream: Stream) -> None:
    """Later launches, copies and fills see its bytes, and it sees those of earlier ones."""
    count = LEAST_CHUNK_BYTES // 4 + 1000
    given = np.arange(count, dtype=np.uint32)
    buffer = stream.empty(count, np.uint32)
    stream.fill(buffer, 7)
    before = stream.download(buffer)
    stream.copy(buffer, given)
    stream.launch(AFFINE, 8, 128, buffer, count, 3, 1)
    middle = stream.download(buffer)
    stream.fill(buffer, 9)
    after = stream.download(buffer)
    assert (await before == 7).all()
    assert np.array_equal(await middle, given * 3 + 1)
    assert (await after == 9).all()


async def test_download_right_after_an_upload_in_one_piece() -> None:
    """Chunks that come free while a whole batch is resolved are none of that batch."""
    async with open_peer(quick()) as (peer, device):
        stream = device.stream()
        old = await stream.upload(noise(14 * LEAST_CHUNK_BYTES, 1))
        new = stream.empty_like(old)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            up = stream.copy(new, noise(14 * LEAST_CHUNK_BYTES, 2))
            await until(lambda: up.state == "submitted", "all chunks with the stream")
            down = stream.download(old)
            synchronize = asyncio.create_task(asyncio.to_thread(peer.inner.stream_synchronize, stream._queue.handle))
            latch.release()
            block_until(lambda: peer.inner.stream_query(stream._queue.handle), "the uploads")
        assert np.array_equal(await quickly(down), noise(14 * LEAST_CHUNK_BYTES, 1))
        await synchronize


async def test_loop_turns_while_bytes_move(stream: Stream) -> None:
    given = noise(64 << 20)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    buffer = await stream.upload(given)
    out = await stream.download(buffer)
    counting.cancel()
    assert turns > 50
    assert np.array_equal(out, given)


# Left half-way


def held(
    latch: Latch, stream: Stream, direction: str, buffer: DeviceBuffer, given: npt.NDArray[Any], out: npt.NDArray[Any]
) -> Operation[Any]:
    """A large copy after a held kernel."""
    latch.hold(stream)
    return stream.copy(buffer, given[::-1].copy()) if direction == "upload" else stream.download(buffer, out)


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_cancelled_in_the_middle(stream: Stream, latch: Latch, direction: str) -> None:
    given = noise(20 << 20)
    buffer = await stream.upload(given)
    out = np.zeros_like(given)
    operation = held(latch, stream, direction, buffer, given, out)
    waiter = asyncio.create_task(operation.wait())
    await latch.held()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    del given
    gc.collect()
    latch.release()
    await quickly(operation)  # it runs all the same
    expected = noise(20 << 20)
    if direction == "upload":
        out, expected = await stream.download(buffer), expected[::-1]
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_abandoned_in_the_middle(stream: Stream, latch: Latch, direction: str) -> None:
    given = noise(20 << 20)
    buffer = await stream.upload(given)
    out = np.zeros_like(given)
    operation = held(latch, stream, direction, buffer, given, out)
    await latch.held()
    assert operation.state in ("staging", "submitted")
    assert operation.abandon()
    with pytest.raises(ClosedError):
        await operation
    latch.release()
    after = await quickly(stream.download(buffer))
    assert np.array_equal(after, given[::-1] if direction == "upload" else given)
    assert direction == "upload" or not out.any()
    again = await stream.download(buffer, out)
    assert np.array_equal(again, after)


async def test_device_left_by_an_exception_in_the_middle() -> None:
    """Operations on the host are withdrawn; submitted ones keep their memory until they have passed."""
    with Peer() as peer:
        with pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver) as device:
                stream = device.stream()
                with Latch(device) as latch:
                    latch.hold(stream)
                    await latch.held()
                    operation = stream.upload(noise(100 << 20))
                    await until(lambda: peer.calls["upload"] >= 10, "some chunks with the stream")
                    assert operation.state == "staging"
                    del operation
                    gc.collect()
                    asyncio.get_running_loop().call_later(0.06, latch.release)  # while the device is being left
                    raise ZeroDivisionError
        assert peer.fault is None
        assert device.statistics().in_flight == 0
        assert peer.calls["pin"] == peer.calls["unpin"]


async def test_no_memory_can_be_pinned() -> None:
    with Peer() as peer:
        peer.refuse("pin", times=1000)
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            with pytest.raises(DriverError):
                await quickly(stream.upload(noise(1000)))
            with pytest.raises(DriverError):
                await quickly(stream.upload(noise(LEAST_CHUNK_BYTES + 1)))
            del peer.before["pin"]
            given = noise(1000)
            assert np.array_equal(await quickly(stream.download(await quickly(stream.upload(given)))), given)


async def test_only_some_memory_can_be_pinned() -> None:
    with Peer() as peer:
        granted = iter(range(3))

        def most(*arguments: object) -> None:
            if next(granted, None) is None:
                raise refusal()

        peer.before["pin"] = most
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream, other = device.stream(), device.stream()
            given = noise(40 << 20)
            buffers = await quickly(aiocuda.gather(stream.upload(given), other.upload(given)))
            for buffer in buffers:
                assert np.array_equal(await quickly(stream.download(buffer)), given)


# Where nothing may wait in front


async def test_pageable_copy_on_an_imported_stream() -> None:
    async with open_peer(max_in_flight=4) as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(noise(1 << 20))
        await stream.synchronize()
        imported = aiocuda.Stream.from_handle(device, peer.inner.stream_handle(stream._queue.handle))
        for verb in (
            lambda: imported.copy(buffer, noise(1 << 20)),
            lambda: imported.download(buffer),
        ):
            with pytest.raises(BusyError, match=r"device\.pinned"):
                verb()
        small = imported.empty(100, np.uint8)
        assert (await imported.copy(small, bytes(100))) is None
        with Latch(device) as latch:
            latch.hold(
                stream
            )  # the kernel is loaded and the words are pinned, which an imported stream cannot wait for
            await latch.held()
            latch.release()
            await stream.synchronize()
            latch.hold(imported)
            await latch.held()
            fills = [imported.fill(small, 1) for _ in range(3)]
            for _ in range(200):  # more often than there are cells
                with pytest.raises(BusyError, match="await what it depends on"):
                    imported.copy(small, bytes(100))
            latch.release()
            await quickly(aiocuda.gather(*fills))
        states = {stream.upload(noise(10)).state for _ in range(3)}
        assert "staging" not in states  # no cell was lost
        await stream.synchronize()
        await imported.aclose()


@pytest.mark.parametrize("nbytes", [1, 2 << 20, (32 << 20) + 5, 1 << 30])
async def test_chunks_are_small_at_both_ends_and_cover_all(nbytes: int) -> None:
    chunks: list[int] = []
    while sum(chunks) < nbytes:
        chunks.append(chunk_bytes(sum(chunks), nbytes - sum(chunks)))
    assert sum(chunks) == nbytes
    assert max(chunks) <= CHUNK_BYTES
    assert max(chunks[0], chunks[-1]) <= LEAST_CHUNK_BYTES
    assert all(chunk >= LEAST_CHUNK_BYTES for chunk in chunks[:-1])
    if nbytes >= 1 << 30:
        assert chunks[len(chunks) // 2] == CHUNK_BYTES
        assert len(chunks) < 1.2 * nbytes / CHUNK_BYTES


@pytest.mark.parametrize("error", [refusal, KeyboardInterrupt], ids=["refusal", "Ctrl-C"])
async def test_refused_small_upload_returns_its_staging_buffer_and_its_memory(error: Any) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        for _ in range(3):  # until the slab is locked
            await quickly(stream.upload(noise(100)).wait())
        staging = resources_of(device).loop_states.here().staging
        await until(lambda: staging.small, "the slab")
        free = len(staging.small)
        peer.refuse("upload", error=error)
        with contextlib.suppress(DriverError, KeyboardInterrupt):
            await quickly(stream.upload(noise(100)).wait())
        with contextlib.suppress(aiocuda.SkippedError):  # after Ctrl-C, which fails later work until a task is told
            await quickly(stream.synchronize())
        assert len(staging.small) == free
        gc.collect()
        await until(lambda: device.memory.statistics().live_bytes == 0, "the free of the memory")
        given = noise(100, 1)
        assert np.array_equal(await quickly(stream.download(await stream.upload(given)).wait()), given)


async def test_small_upload_on_a_failed_stream_is_skipped_and_returns_its_staging_buffer() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(noise(100))
        staging = resources_of(device).loop_states.here().staging
        await until(lambda: staging.slab.locked, "the slab")
        await stream.upload(noise(100))
        await until(lambda: staging.small, "its small buffer")
        free = len(staging.small)
        peer.refuse("fill")
        failed, skipped = stream.fill(buffer, 1), stream.upload(noise(100))
        with pytest.raises(DriverError):
            await quickly(failed.wait())
        with pytest.raises(aiocuda.SkippedError):
            await quickly(skipped.wait())
        assert len(staging.small) == free
        assert np.array_equal(await stream.download(await stream.upload(noise(100))), noise(100))


async def test_result_of_a_small_upload_does_not_hold_itself(stream: Stream) -> None:
    for _ in range(3):
        await quickly(stream.upload(noise(100)).wait())
    gc.disable()
    try:
        operation = stream.upload(noise(100))
        buffer = weakref.ref(await quickly(operation.wait()))
        del operation
        assert buffer() is None
    finally:
        gc.enable()


async def test_ctrl_c_while_an_event_is_recorded_after_a_chunk() -> None:
    """The stream has accepted the chunk, so the copy goes on: the operations behind it waited for ever."""
    async with open_peer(quick()) as (peer, device):
        stream = device.stream()
        given = noise(9 << 20)
        buffer, out = await stream.upload(given), np.zeros_like(given)
        await stream.download(buffer)  # later downloads find chunk buffers that are locked
        peer.refuse("event_record", error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.copy(out, buffer)
        await quickly(stream.synchronize())
        assert np.array_equal(out, given)
