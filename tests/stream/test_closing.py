"""Leaving a stream: by its end, by an exception, by a cancellation."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, ClosedError, Device, DeviceFault, Kernel, Operation, SkippedError, Stream
from aiocuda.device._resources import resources_of
from aiocuda.device.streams import _stream
from aiocuda.memory._staging import SMALL_BYTES
from tests.helpers import LATCH, TRAP, Latch, Peer, Reports, jobs_done, open_peer, quickly, until, until_gone

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def few() -> AsyncIterator[tuple[Peer, Device, Stream]]:
    """A device whose streams accept two operations at a time, and one of its streams."""
    async with open_peer(max_in_flight=2) as (peer, device), device.stream() as keeper:
        yield peer, device, keeper


async def test_timeout_ends_the_wait_immediately(device: Device) -> None:
    device.drain_timeout = LATCH  # a longer wait lets the latch end by itself, which is an error
    with Latch(device) as latch:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), device.stream() as stream:
                await latch.hold(stream)
        assert stream.closed
        assert latch.running <= 1
        with pytest.raises(ClosedError):
            stream.synchronize()


async def test_what_it_has_accepted_runs_and_is_answered() -> None:
    async with open_peer() as (peer, device):
        keeper = device.stream()
        await jobs_done(device)  # without small buffers of staging memory, a download waits on the host
        buffer, out = keeper.empty(4), np.zeros(4, np.float32)
        await keeper.fill(buffer, 1)
        with Latch(device) as latch:
            with pytest.raises(ZeroDivisionError):
                async with device.stream() as stream:
                    latch.hold(stream)
                    await latch.held()
                    fill = stream.fill(buffer, 7)
                    download = stream.download(buffer, out)
                    raise ZeroDivisionError
            waiter = asyncio.create_task(download.wait())
            streams = device.statistics().streams
            assert peer.calls["stream_destroy"] == 0
            assert not fill.done()
            with pytest.raises(BusyError):
                keeper.download(buffer, out)  # still borrowed
            latch.release()
            assert await quickly(waiter) is out
        assert fill.done()
        assert (out == 7).all()
        await until(lambda: peer.calls["stream_destroy"] == 1, "its stream to be destroyed")
        assert device.statistics().streams == streams - 1
        assert device.statistics().in_flight == 0
        assert (await keeper.download(buffer, out) == 7).all()


async def test_what_is_on_the_host_is_withdrawn(few: tuple[Peer, Device, Stream]) -> None:
    peer, device, keeper = few
    buffer = keeper.empty(4)
    await keeper.fill(buffer, 1)
    with Latch(device) as latch, Reports() as reports:
        with pytest.raises(ZeroDivisionError):
            async with device.stream() as stream:
                latch.hold(stream)
                await latch.held()
                accepted = stream.synchronize()
                withdrawn = [stream.fill(buffer, 9) for _ in range(8)]
                assert withdrawn[0].state == "queued"
                raise ZeroDivisionError
        for operation in withdrawn:
            with pytest.raises(ClosedError):
                await operation
        fills = peer.calls["fill"]
        latch.release()
        await quickly(accepted)
        assert peer.calls["fill"] == fills
        await until(lambda: peer.calls["stream_destroy"] == 1, "its stream to be destroyed")
        assert (await keeper.download(buffer) == 1).all()
        assert device.statistics().in_flight == 0
        del withdrawn, operation
        gc.collect()
        assert not reports.contexts


async def test_who_waits_elsewhere_for_what_was_withdrawn_is_skipped(few: tuple[Peer, Device, Stream]) -> None:
    """And does not run as if it had been done."""
    _, device, other = few
    buffer = other.empty(4)
    await other.fill(buffer, 1)
    with Latch(device) as latch:
        with pytest.raises(ZeroDivisionError):
            async with device.stream() as stream:
                latch.hold(stream)
                await latch.held()
                stream.synchronize()
                queued = stream.fill(buffer, 9)
                other.wait(queued)
                behind = other.fill(buffer, 2)
                raise ZeroDivisionError
        with pytest.raises(SkippedError, match="was left by an exception"):
            await quickly(behind)
        latch.release()
    assert (await other.download(buffer) == 1).all()


async def test_cells_and_events_of_what_was_withdrawn_come_back(few: tuple[Peer, Device, Stream]) -> None:
    _, device, keeper = few
    await keeper.upload(np.zeros(1 << 20))  # the slab is locked from now on
    buffers = resources_of(device).loop_states.here().staging
    small = list(iter(buffers.take_small, None))
    for each in small:  # all of them have been cut from the slab
        buffers.return_small(each)
    free = len(small)
    leases = resources_of(device).device_state.leases
    for _ in range(3):
        with Latch(device) as latch:
            with pytest.raises(ZeroDivisionError):
                async with device.stream() as stream:
                    latch.hold(stream)
                    await latch.held()
                    buffer = stream.empty(SMALL_BYTES // 4)
                    array = np.zeros(SMALL_BYTES // 4, np.float32)
                    for _ in range(20):
                        stream.copy(buffer, array)
                        stream.record()
                        stream.download(buffer)
                    assert len(buffers.small) < free
                    raise ZeroDivisionError
            latch.release()
        await until(lambda: len(buffers.small) == free, "the small buffers to come back")
        await device.drain()
    del buffer
    assert leases.created - leases.idle <= 1
    assert len(resources_of(device).loop_states.here().queues) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["upload", "download"])
async def test_leaving_in_the_middle_of_a_large_copy(device: Device, other: Stream, verb: str) -> None:
    array = np.full(96 << 20, 7, np.uint8)
    buffer = await other.upload(array)
    held: list[weakref.ref[Any]] = []
    for _ in range(3):
        target = np.zeros(96 << 20, np.uint8)
        held.append(weakref.ref(target))
        with pytest.raises(ZeroDivisionError):
            async with device.stream() as stream:
                operation: Operation[Any] = (
                    stream.copy(target, buffer)
                    if verb == "download"
                    else stream.copy(stream.empty_like(target), target)
                )
                await until(lambda: stream._queue.pending, "its first chunk")
                raise ZeroDivisionError
        with pytest.raises(ClosedError):
            await quickly(operation)
        await operation.settle()
        before = target.copy()
        await device.drain()
        assert (target == before).all()  # no thread writes it any more
        assert (await other.download(buffer) == array).all()
        del target, operation
    await until_gone(held)


async def test_the_devices_deadline_holds_for_a_stream_inside() -> None:
    with Peer() as peer:
        latch: Latch | None = None
        with pytest.warns(aiocuda.DrainTimeoutWarning), pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver) as device:
                device.drain_timeout = 0.05
                latch = Latch(device)
                async with device.stream() as stream:
                    latch.hold(stream)
                    await latch.held()
                    raise ZeroDivisionError
        assert latch is not None
        latch.release()  # raises if the device has waited for the end of the latch


async def test_the_device_waits_for_a_stream_that_was_left() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            with Latch(device) as latch:
                with pytest.raises(ZeroDivisionError):
                    async with device.stream() as stream:
                        latch.hold(stream)
                        await latch.held()
                        last = stream.synchronize()
                        raise ZeroDivisionError
                closing = asyncio.create_task(device.aclose())
                await latch.held()
                assert not closing.done()
                latch.release()
                await quickly(closing)
        assert last.done()
        assert peer.calls["stream_destroy"] == peer.calls["stream_create"]


async def test_a_close_that_is_cancelled_leaves(device: Device) -> None:
    stream = device.stream()
    with Latch(device) as latch:
        last = latch.hold(stream)
        closing = asyncio.create_task(stream.aclose())
        await latch.held()
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await quickly(closing)
        assert stream.closed
        await stream.aclose()
        latch.release()
        await quickly(last)
    await until(
        lambda: stream._queue not in resources_of(device).loop_states.here().queues, "its stream to be destroyed"
    )


async def test_a_lent_stream_is_left_by_the_exception_itself() -> None:
    async with open_peer() as (peer, device):
        with Latch(device) as latch:
            async with device.stream() as first:  # the latch's kernel is loaded, and its words are pinned
                latch.hold(first)
                await latch.held()
                latch.release()
            with pytest.raises(ZeroDivisionError):
                async with device.stream() as stream:
                    loan = stream.lend()
                    handle = await loan.__aenter__()
                    borrower = Stream.from_handle(device, handle)
                    raise ZeroDivisionError
            last = latch.hold(borrower)
            await latch.held()
            await loan.__aexit__(None, None, None)
            assert peer.calls["stream_destroy"] == 1  # the first one's
            latch.release()
            await quickly(last)
            await borrower.aclose()
            await until(lambda: peer.calls["stream_destroy"] == 3, "its stream to be destroyed")
            assert stream.closed


async def test_leaving_after_a_fault() -> None:
    async with open_peer() as (_, device):
        with pytest.raises(DeviceFault):
            async with device.stream() as stream:
                operations = [stream.launch(TRAP, 1, 1), *(stream.synchronize() for _ in range(3))]
                await operations[-1]
        for operation in operations:
            assert isinstance(operation.exception(), DeviceFault)


async def test_fault_after_a_stream_was_left() -> None:
    async with open_peer() as (_, device):
        other = device.stream()
        with Latch(device) as latch:
            with pytest.raises(ZeroDivisionError):
                async with device.stream() as stream:
                    latch.hold(stream)
                    await latch.held()
                    last = stream.synchronize()
                    raise ZeroDivisionError
            waiter = asyncio.create_task(last.wait())
            with pytest.raises(DeviceFault):
                await quickly(other.launch(TRAP, 1, 1))
            with pytest.raises(DeviceFault):
                await quickly(waiter)


async def test_leaving_again_and_again_grows_nothing(device: Device, other: Stream) -> None:
    buffer = await other.upload(np.zeros(4, np.float32))

    async def leave() -> None:
        async with device.stream() as stream:
            stream.fill(buffer, 1)
            raise ZeroDivisionError

    def grown() -> tuple[int, ...]:
        statistics = device.statistics()
        return statistics.streams, statistics.events, len(resources_of(device).loop_states.here().queues)

    async def many(make: Callable[[], Any]) -> None:
        for _ in range(50):
            with pytest.raises(ZeroDivisionError):
                await make()
        await device.drain()
        await until(lambda: device.statistics().streams == 1, "the streams to be destroyed")

    await many(leave)
    before = grown()
    await many(leave)
    assert grown() == before


@pytest.mark.parametrize("nbytes", [400, 1 << 20])
async def test_what_was_allocated_for_a_copy_that_was_withdrawn(few: tuple[Peer, Device, Stream], nbytes: int) -> None:
    """The free is ordered after the allocation, which the stream has accepted."""
    peer, device, keeper = few
    kernel = Kernel("fresh", source="__global__ void fresh(int n);", host=lambda n: None)
    before = device.memory.statistics().live_bytes
    for _ in range(3):
        with peer.holding_jobs(), pytest.raises(ZeroDivisionError):
            async with device.stream() as stream:
                stream.launch(kernel, 1, 1, 1)
                stream.upload(np.zeros(nbytes, np.uint8))  # waits on the host for the kernel
                stream.fill(stream.empty(100), 1)
                raise ZeroDivisionError
        kernel = Kernel("fresh", source="__global__ void fresh(int n);", host=lambda n: None)
    await device.drain()
    await quickly(keeper.synchronize())
    gc.collect()
    device.memory.sweep(resources_of(device).loop_states.here().reactor)
    device.memory.sweep(resources_of(device).loop_states.here().reactor)
    assert peer.fault is None
    assert device.memory.statistics().live_bytes == before


async def test_finaliser_at_the_exit_uses_no_name_of_its_module(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In free-threaded Python, a module may be cleared before the last stream is collected."""
    left = [device.stream()]
    queue = left[0]._queue
    with monkeypatch.context() as cleared:
        for name in [name for name, value in vars(_stream).items() if not name.startswith("__") and value is not None]:
            cleared.setattr(_stream, name, None)
        left.clear()
        gc.collect()
    queue.rare.refuse()
