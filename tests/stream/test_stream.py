"""Streams: closing, waiting for each other, callbacks, what they count."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
from typing import Any, cast

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, DriverError, InvalidTypeError, Operation, SkippedError, Stream
from tests.helpers import AFFINE, SAXPY, TRAP, Latch, Peer, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


async def test_repr_and_properties(device: Device, stream: Stream) -> None:
    assert stream.name == "left"
    assert stream.device is device
    assert stream.priority == "normal"
    assert not stream.closed
    assert repr(stream) == f"<Stream left on {device.name}: 0 unfinished>"
    operation = stream.fill(stream.empty(4), 1)
    assert "unfinished" in repr(stream)
    await operation
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="belongs to this process"):
            attempt(stream)


async def test_streams_get_different_names(device: Device) -> None:
    async with device.stream() as one, device.stream() as two:
        assert one.name != two.name


# Closing


async def test_closing_waits_for_its_work(device: Device, latch: Latch) -> None:
    stream = device.stream()
    latch.hold(stream)
    last = stream.fill(stream.empty(4), 1)
    await latch.held()
    closing = asyncio.create_task(stream.aclose())
    await turns()
    assert not closing.done()
    latch.release()
    await quickly(closing)
    assert stream.closed
    assert last.done()
    assert repr(stream).endswith(": closed>")


async def test_nothing_works_after_closing() -> None:
    async with open_peer() as (peer, device):
        other = device.stream()
        async with device.stream() as stream:
            buffer = await stream.upload(np.zeros(4, np.float32))
            await stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, buffer)
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            fresh = other.empty(4)  # its first use in another stream waits for the allocation
            calls = peer.calls.copy()
            for verb in (
                lambda: stream.empty(4),
                lambda: stream.upload(np.zeros(4)),
                lambda: stream.copy(buffer, np.zeros(4, np.float32)),
                lambda: stream.download(buffer),
                lambda: stream.fill(fresh, 1),
                lambda: stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, fresh),
                lambda: stream.record(),
                lambda: stream.wait(other),
                lambda: stream.synchronize(),
                lambda: stream.add_callback(print),
                lambda: buffer.free(stream),
            ):
                with pytest.raises(ClosedError, match="has been closed"):
                    verb()
            with pytest.raises(ClosedError):
                async with stream:
                    pass
            with pytest.raises(ClosedError):
                async with stream.lend():
                    pass
            assert set(peer.calls - calls) <= {"event_query", "now"}
            latch.release()
        await stream.aclose()
        buffer.free()  # but its buffers live on


async def test_closing_twice_and_concurrently() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            closing = [asyncio.create_task(stream.aclose()) for _ in range(3)]
            await latch.held()
            latch.release()
            await quickly(asyncio.gather(*closing))
        await stream.aclose()
        assert peer.calls["stream_destroy"] == 1


async def test_what_is_enqueued_while_it_closes_is_refused(device: Device, latch: Latch) -> None:
    stream = device.stream()
    latch.hold(stream)
    await latch.held()
    closing, second = asyncio.create_task(stream.aclose()), asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    assert stream.closed
    with pytest.raises(ClosedError):
        stream.synchronize()
    await turns()
    assert not closing.done()
    assert not second.done()
    latch.release()
    await quickly(asyncio.gather(closing, second))


async def test_closing_while_its_device_is_closed() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        stream.synchronize()
        await quickly(asyncio.gather(stream.aclose(), device.aclose()))
        assert (stream.closed, device.closed) == (True, True)


async def test_closing_with_an_unread_failure() -> None:
    async with open_peer() as (peer, device):
        with pytest.raises(DriverError):
            async with device.stream() as stream:
                peer.refuse("fill")
                failing = stream.fill(stream.empty(4), 1)
        assert isinstance(failing.exception(), DriverError)


async def test_closing_after_a_fault_hangs_nowhere_and_hides_nothing() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            with pytest.raises(aiocuda.DeviceFault):
                async with device.stream() as stream:
                    await quickly(stream.launch(TRAP, 1, 1))
            assert stream.closed


async def test_buffers_outlive_their_stream(device: Device, other: Stream) -> None:
    async with device.stream() as stream:
        buffer = await stream.upload(np.arange(10, dtype=np.float32))
    assert np.array_equal(await other.download(buffer), np.arange(10))
    buffer.free()
    del stream
    gc.collect()


# Waiting for each other


@pytest.mark.parametrize("kind", ["operation", "event", "stream"])
async def test_wait_orders_the_device_and_not_the_host(
    device: Device, stream: Stream, other: Stream, latch: Latch, kind: str
) -> None:
    buffer = await stream.upload(np.zeros(4, np.float32))
    latch.hold(stream)
    operation = stream.fill(buffer, 5)
    event = stream.record()
    await latch.held()
    wait = other.wait(cast("Stream", {"operation": operation, "event": event, "stream": stream}[kind]))
    result = other.download(buffer)
    assert (wait.kind, wait.state) == ("wait", "submitted")
    await turns()
    assert not wait.done()
    async with device.stream() as third:
        assert await quickly(third.synchronize()) is None  # tasks that do not wait continue
    latch.release()
    assert (await quickly(result) == 5).all()
    assert wait.done()


async def test_wait_for_what_is_done(stream: Stream, other: Stream) -> None:
    operation = stream.synchronize()
    event = stream.record()
    await event
    for thing in (operation, event, stream):
        assert await quickly(other.wait(thing)) is None
    assert await quickly(stream.wait(stream)) is None
    assert await quickly(stream.wait(stream.synchronize())) is None


async def test_wait_for_a_stream_takes_what_it_has_now(stream: Stream, other: Stream, latch: Latch) -> None:
    stream.synchronize()
    wait = other.wait(stream)
    latch.hold(stream)
    await latch.held()
    assert await quickly(wait) is None
    latch.release()


async def test_wait_for_an_abandoned_operation_keeps_the_order(stream: Stream, other: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.zeros(4, np.float32))
    latch.hold(stream)
    fill = stream.fill(buffer, 5)
    fill.abandon()
    other.wait(fill)
    result = other.download(buffer)
    await latch.held()
    await turns()
    assert not result.done()
    latch.release()
    assert (await quickly(result) == 5).all()


@pytest.mark.parametrize("thing", [None, 7, "stream", [], np.zeros(1)], ids=str)
async def test_wait_for_something_else(stream: Stream, thing: Any) -> None:
    with pytest.raises(InvalidTypeError, match="an operation, an event or a stream"):
        stream.wait(thing)


async def test_circle_of_streams(device: Device, stream: Stream, other: Stream) -> None:
    """Each waits for the other's earlier work, round after round: no deadlock, and the right order."""
    async with device.stream() as third:
        streams = (stream, other, third)
        buffer = await stream.upload(np.zeros(1, np.uint32))
        expected = 0
        for index in range(300):
            on = streams[index % 3]
            on.wait(streams[(index - 1) % 3])
            on.launch(AFFINE, 1, 1, buffer, 1, 3, index)
            expected = (expected * 3 + index) % 2**32
        assert (await quickly(streams[299 % 3].download(buffer)))[0] == expected


# Callbacks


async def test_callback_when_all_so_far_has_finished(stream: Stream, latch: Latch) -> None:
    called: list[Operation[None]] = []
    latch.hold(stream)
    before = stream.fill(stream.empty(4), 1)
    operation = stream.add_callback(called.append)
    await latch.held()
    await turns()
    assert not called
    latch.release()
    await quickly(operation)
    await asyncio.sleep(0)
    assert called == [operation]
    assert before.done()


async def test_callback_runs_in_the_callers_context(stream: Stream) -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number")
    seen: list[int] = []
    number.set(1)
    stream.add_callback(lambda _: seen.append(number.get()))
    context = contextvars.copy_context()
    context.run(number.set, 2)
    last = stream.add_callback(lambda _: seen.append(number.get()), context=context)
    number.set(3)
    await last
    await until(lambda: len(seen) == 2, "the callbacks")
    assert seen == [1, 2]


async def test_callback_though_the_work_failed() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        called: list[Operation[None]] = []
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        operation = stream.add_callback(called.append)
        await until(lambda: called, "the callback")
        assert called == [operation]
        assert isinstance(operation.exception(), SkippedError)
        assert isinstance(failing.exception(), DriverError)


# Counts


async def test_statistics(device: Device, stream: Stream, other: Stream) -> None:
    array = np.zeros(100, np.float32)
    x = await stream.upload(array)
    y = stream.empty_like(x)
    await stream.copy(y, x)
    await stream.fill(y, 1)
    for _ in range(3):
        await stream.launch(SAXPY, 1, 100, 100, 1.0, x, y)
    await stream.download(y)
    await stream.copy(array, y)
    statistics = stream.statistics()
    assert statistics.operations == 8
    assert (statistics.uploads, statistics.bytes_uploaded) == (1, 400)
    assert (statistics.downloads, statistics.bytes_downloaded) == (2, 800)
    assert (statistics.copies, statistics.bytes_copied) == (1, 400)
    assert (statistics.fills, statistics.launches) == (1, 3)
    assert 0 < statistics.p50_ms <= statistics.p99_ms
    assert statistics.average_ms > 0
    assert (statistics.live_bytes, statistics.peak_bytes) == (800, 800)
    assert other.statistics().operations == 0
    assert other.statistics().average_ms == 0


async def test_staged_copy_counts_as_one(device: Device, stream: Stream) -> None:
    before = device.statistics()
    buffer = await stream.upload(np.zeros(9 << 20, np.uint8))
    await stream.download(buffer)
    await device.drain()
    after = device.statistics()
    assert stream.statistics().operations == 2
    assert (after.submitted - before.submitted, after.resolved - before.resolved) == (2, 2)
