"""A `TripleBuffer` with buffers of its own, and its slots without waits: `advance`, and the slots by their states."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    Device,
    DeviceFault,
    InvalidArgumentError,
    Operation,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
    StaleHandleError,
    Stream,
    TripleBuffer,
    WrongLoopError,
)
from aiocuda.errors import DeviceOutOfMemory, NoEventLoopError
from aiocuda.testing import Upset
from tests.helpers import Latch, in_thread, open_peer, quickly, until
from tests.pipeline.virtual import in_virtual_time, kernel

BUFFERS: Any = {"x": (4, np.uint32), "y": ((2, 2), "f8")}

NBYTES = 3 * (16 + 32)


def taken(ring: TripleBuffer, item: Any = None) -> Slot:
    """Take a slot."""
    slot = ring.upload_slot(item)
    assert slot is not None
    return slot


async def failing(stream: Stream) -> Operation[Any]:
    """Return an operation that has failed, and whose failure nothing has read."""

    def fail() -> None:
        raise ZeroDivisionError

    operation = stream.submit(fail)
    await until(operation.done)
    return operation


def live_bytes(device: Device) -> int:
    return device.memory.statistics().live_bytes


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_slots_are_taken_without_a_wait() -> None:
    """I9"""
    ring = TripleBuffer(2)
    assert len(ring) == 2
    first, second = taken(ring, "a"), taken(ring, "b")
    assert (first.item, second.item, ring.states, ring.busy) == ("a", "b", ("uploading", "uploading"), 2)
    assert ring.upload_slot() is None
    assert (ring.compute_slot(), ring.download_slot()) == (None, None)
    ring.release(first)
    assert ring.upload_slot("c") is first


@pytest.mark.asyncio
async def test_oldest_slot_of_a_state_is_found() -> None:
    """I9: the one that was taken first, whatever its number is."""
    ring = TripleBuffer(3)
    slots = [taken(ring) for _ in range(3)]
    ring.release(slots[0])
    slots.append(slots.pop(0))
    assert taken(ring) is slots[-1]
    for state, find in (("processing", ring.compute_slot), ("downloading", ring.download_slot)):
        for slot in reversed(slots):
            slot.enter(state)  # type: ignore[arg-type]
            assert find() is slot
        assert find() is slots[0]
    ring.release(slots[0])
    assert ring.download_slot() is slots[1]


@pytest.mark.asyncio
async def test_slot_moves_on_when_all_its_operations_have_ended(stream: Stream, other: Stream, latch: Latch) -> None:
    """I9"""
    ring = TripleBuffer()
    slot = taken(ring)
    states = []
    for state in ("uploading", "processing", "downloading"):
        latch.hold(other)
        slot.enter(state, until=[stream.synchronize(), other.synchronize()])
        await quickly(stream.synchronize())
        ring.advance()
        states.append(slot.state)
        latch.release()
        await quickly(other.synchronize())
        ring.advance()
        states.append(slot.state)
        ring.advance()  # it has no operation: nothing happens
    assert states == ["uploading", "processing", "processing", "downloading", "downloading", "free"]
    assert (ring.busy, slot.item) == (0, None)


@pytest.mark.asyncio
async def test_states_that_were_entered_ahead_end_together(stream: Stream) -> None:
    ring = TripleBuffer(1)
    slot = taken(ring)
    slot.enter("uploading", until=stream.synchronize())
    slot.enter("processing", until=stream.synchronize())
    await quickly(stream.synchronize())
    ring.advance()
    assert ring.states == ("downloading",)


@pytest.mark.asyncio
async def test_waiter_gets_the_slot_that_becomes_free(stream: Stream) -> None:
    ring = TripleBuffer(1)
    slot = taken(ring)
    waiting = asyncio.create_task(ring.acquire("next"))
    await asyncio.sleep(0)
    slot.enter("processing")
    slot.enter("downloading", until=stream.synchronize())
    await quickly(stream.synchronize())
    ring.advance()
    assert await quickly(waiting) is slot
    assert (slot.item, slot.state) == ("next", "uploading")


@pytest.mark.asyncio
async def test_slot_of_a_block_becomes_free_at_its_end(stream: Stream) -> None:
    ring = TripleBuffer(1)
    async with ring.slot() as slot:
        slot.enter("downloading", until=stream.synchronize())
        await quickly(stream.synchronize())
        ring.advance()
        assert ring.states == ("downloading",)
        slot.enter("downloading", until=await failing(stream))
        with pytest.raises(ZeroDivisionError):
            ring.advance()
        ring.advance()
        assert ring.states == ("downloading",)
    assert ring.states == ("free",)


@pytest.mark.asyncio
async def test_state_that_a_node_ends(device: Device) -> None:
    ring, gate = TripleBuffer(1), asyncio.Event()
    slot = taken(ring)
    async with AsyncCoordinator(device) as coordinator:
        slot.enter("uploading", until=coordinator.host(gate.wait))
        await asyncio.sleep(0)
        ring.advance()
        assert ring.states == ("uploading",)
        gate.set()
        await quickly(coordinator.drain())
        ring.advance()
        assert ring.states == ("processing",)


@pytest.mark.asyncio
async def test_pipeline_moves_its_own_slots(device: Device) -> None:
    seen: list[Any] = []

    def compute(slot: Slot) -> Operation[None]:
        ring = pipeline.ring
        ring.advance()
        seen.append((ring.compute_slot(), len(ring)))
        return slot.stream.synchronize()

    async with Pipeline(device, [Stage("compute", compute)], depth=2) as pipeline:
        await quickly(pipeline.execute_iteration(1))
        assert [(slot.number, depth) for slot, depth in seen] == [(0, 2)]
        async with pipeline.ring:
            pass
        await pipeline.ring.aclose()
        await quickly(pipeline.execute_iteration(2))  # it owns no memory: both do nothing


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_failed_operation_frees_its_slot_and_is_raised_once(stream: Stream, other: Stream, latch: Latch) -> None:
    """I9"""
    ring = TripleBuffer(2)
    fails, passes = taken(ring), taken(ring)
    latch.hold(other)
    fails.enter("uploading", until=[await failing(stream), other.synchronize()])
    passes.enter("uploading")
    ring.advance()
    assert ring.states == ("uploading", "uploading")  # the other operation may use the memory
    latch.release()
    await quickly(other.synchronize())
    passes.enter("uploading", until=other.synchronize())
    await quickly(other.synchronize())
    with pytest.raises(ZeroDivisionError) as caught:
        ring.advance()
    assert caught.value.__notes__[-1] == "in slot 0 of a triple buffer, which was uploading"
    assert ring.states == ("free", "processing")
    ring.advance()


@pytest.mark.asyncio
async def test_failures_of_several_slots_are_a_group(stream: Stream, other: Stream) -> None:
    ring = TripleBuffer(2)
    for each in (stream, other):
        slot = taken(ring)
        slot.enter("uploading", until=await failing(each))
        slot.enter("processing", until=each.synchronize())  # skipped: only its cause counts
    await until(lambda: stream.tail is None and other.tail is None)
    with pytest.raises(ExceptionGroup, match="2 slots of a triple buffer failed") as caught:
        ring.advance()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, ZeroDivisionError]
    assert ring.states == ("free", "free")


@pytest.mark.asyncio
async def test_skipped_operation_is_a_failure(stream: Stream) -> None:
    ring = TripleBuffer(1)
    first = await failing(stream)
    taken(ring).enter("uploading", until=stream.synchronize())
    await until(lambda: stream.tail is None)
    with pytest.raises(SkippedError):
        ring.advance()
    assert isinstance(first.exception(), ZeroDivisionError)
    assert ring.states == ("free",)


@pytest.mark.asyncio
async def test_exception_that_is_no_error_is_raised(stream: Stream) -> None:
    class Stop(BaseException):
        pass

    async def stop() -> None:
        raise Stop

    ring = TripleBuffer(1)
    with contextlib.suppress(Stop):
        async with AsyncCoordinator(stream.device) as coordinator:
            node = coordinator.host(stop)
            taken(ring).enter("uploading", until=node)
            with contextlib.suppress(Stop):
                await quickly(node)
    with pytest.raises(Stop):
        ring.advance()
    assert ring.states == ("free",)


@pytest.mark.asyncio
async def test_abandoned_operation_keeps_its_slot_until_the_device_is_done(stream: Stream, latch: Latch) -> None:
    ring = TripleBuffer(1)
    slot = taken(ring)
    latch.hold(stream)
    operation = stream.synchronize()
    slot.enter("uploading", until=operation)
    await latch.held()
    operation.abandon()
    ring.advance()
    assert ring.busy == 1
    latch.release()
    await quickly(operation.settle())
    with pytest.raises(ClosedError, match="was abandoned"):
        ring.advance()
    assert ring.busy == 0


@pytest.mark.parametrize("launch", [1, 2])
@pytest.mark.parametrize("state", ["uploading", "processing", "downloading"])
def test_device_fault_in_each_state(state: Any, launch: int) -> None:
    """It is raised once for all slots, and the end of the ring neither hangs nor calls the driver."""

    async def main(device: Device) -> None:
        async with TripleBuffer(2, buffers=BUFFERS, device=device) as ring, device.stream() as stream:
            for _ in range(2):
                slot = taken(ring)
                slot.enter(state, until=stream.launch(kernel(1), 1, 1, 0))
            with contextlib.suppress(DeviceFault):
                await stream.synchronize()
            with pytest.raises(DeviceFault):
                ring.advance()
            assert ring.states == ("free", "free")
            ring.advance()

    with contextlib.suppress(DeviceFault):
        in_virtual_time(main, upsets=[Upset("fault", launch)])


# -- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_slots_have_their_buffers_from_the_beginning(device: Device, stream: Stream) -> None:
    """I9: and need no stream for them."""
    before = live_bytes(device)
    async with TripleBuffer(buffers=BUFFERS, device=device) as ring:
        assert live_bytes(device) == before + NBYTES
        slots = [taken(ring) for _ in range(3)]
        found = [slot.buffer("x") for slot in slots]
        assert len({buffer.address for buffer in found}) == 3
        assert slots[0].buffer("x", 4, np.uint32) is slots[0].buffer("x", (4,), "u4") is found[0]
        assert slots[0].buffer("y", [2, 2], "f8").shape == (2, 2)
        ring.release(slots[0])
        ring.free_buffers()
        slots[0].free_buffers()
        assert taken(ring).buffer("x") is found[0]
        with pytest.raises(aiocuda.BusyError, match="no stream"):
            slots[0].pinned("x", 4)
        slots[0].stream = stream
        slots[0].pinned("x", 4)
        assert live_bytes(device) == before + NBYTES
    await until(lambda: live_bytes(device) == before, "the memory going back")


@pytest.mark.asyncio
async def test_buffer_that_the_program_has_freed_is_named(device: Device) -> None:
    async with TripleBuffer(buffers=BUFFERS, device=device) as ring:
        slot = taken(ring)
        slot.buffer("x").free()
        with pytest.raises(StaleHandleError, match="has freed the buffer 'x'"):
            slot.buffer("x")


@pytest.mark.asyncio
async def test_memory_that_does_not_suffice_leaves_nothing() -> None:
    async with open_peer() as (peer, device):
        streams, calls = device.statistics().streams, itertools.count()

        def fail(*_: object) -> None:
            if next(calls) > 2:
                raise DeviceOutOfMemory("no room")

        peer.before["allocate"] = fail
        with pytest.raises(DeviceOutOfMemory, match="no room"):
            TripleBuffer(buffers=BUFFERS, device=device)
        del peer.before["allocate"]
        async with device.stream() as stream:
            await until(lambda: stream.empty(0) is not None and live_bytes(device) == 0, "the memory going back")
        await until(lambda: device.statistics().streams == streams, "the stream being closed")


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_end_waits_for_the_operations_of_the_slots(device: Device, stream: Stream, latch: Latch) -> None:
    ring = TripleBuffer(buffers=BUFFERS, device=device)
    slot = taken(ring)
    latch.hold(stream)
    slot.enter("uploading", until=stream.fill(slot.buffer("x"), 1))
    closing = asyncio.create_task(ring.aclose())
    await latch.held()
    assert not closing.done()
    assert slot.buffer("x").shape == (4,)  # the accepted work may need it
    for refused in (ring.upload_slot, ring.compute_slot, ring.download_slot, ring.advance):
        with pytest.raises(ClosedError, match="this triple buffer has been closed: make another one"):
            refused()
    latch.release()
    await quickly(closing)
    with pytest.raises(ClosedError, match="this triple buffer"):
        slot.buffer("x")
    ring.release(slot)
    assert (len(ring), ring.depth, ring.states) == (3, 3, ("free",) * 3)


@pytest.mark.parametrize("how", ["exception", "timeout"])
@pytest.mark.asyncio
async def test_ring_that_is_left_frees_behind_its_operations(
    device: Device, stream: Stream, latch: Latch, how: str
) -> None:
    """It does not wait. The operation may be of another library, and name no buffer."""
    ring = TripleBuffer(1, buffers=BUFFERS, device=device)
    before = live_bytes(device)
    slot = taken(ring)
    latch.hold(stream)
    slot.enter("uploading", until=stream.synchronize())
    await latch.held()
    with contextlib.suppress(ZeroDivisionError, TimeoutError):
        if how == "exception":
            async with ring:
                raise ZeroDivisionError
        async with asyncio.timeout(0.01):
            await ring.aclose()
    with pytest.raises(ClosedError):
        slot.buffer("x")
    latch.release()
    await quickly(stream.synchronize())
    await until(lambda: live_bytes(device) == before - 48, "the memory going back")


def test_memory_is_freed_behind_the_uses_on_the_device() -> None:
    """The simulated driver finds a use after the free."""

    async def main(device: Device) -> None:
        for leaves in (False, True):
            async with device.stream() as stream:
                with contextlib.suppress(ZeroDivisionError):
                    async with TripleBuffer(buffers=BUFFERS, device=device) as ring:
                        stream.launch(kernel(5), 1, 1, 0)
                        stream.fill(taken(ring).buffer("x"), 1)  # which no slot names
                        if leaves:
                            raise ZeroDivisionError
        await device.drain()
        assert live_bytes(device) == 0

    in_virtual_time(main)


@pytest.mark.asyncio
async def test_end_waits_for_nodes(device: Device) -> None:
    gate = asyncio.Event()
    async with AsyncCoordinator(device) as coordinator:
        async with TripleBuffer(1, buffers=BUFFERS, device=device) as ring:
            slot = taken(ring)
            ended = coordinator.host(gate.wait)
            upload = coordinator.upload(np.arange(4), after=ended)
            slot.enter("uploading", until=[ended, upload])
            closing = asyncio.create_task(ring.aclose())
            await asyncio.sleep(0)
            assert not closing.done()
            gate.set()
            await quickly(closing)
            assert upload.done()


@pytest.mark.asyncio
async def test_waiters_are_told_of_the_end(device: Device) -> None:
    ring = TripleBuffer(1, buffers=BUFFERS, device=device)
    slot = taken(ring)
    waiting = [asyncio.create_task(ring.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(ring.aclose())
    await asyncio.sleep(0)
    waiting[1].cancel()  # it has been refused, and has not run yet
    await quickly(asyncio.wait(waiting))
    assert waiting[1].cancelled()
    for task in (waiting[0], waiting[2]):
        assert isinstance(task.exception(), ClosedError)
    await quickly(closing)
    ring.release(slot)
    with pytest.raises(ClosedError):
        await ring.acquire()


@pytest.mark.asyncio
async def test_end_reads_no_failure(device: Device, stream: Stream) -> None:
    """So it is raised, or reported, elsewhere."""
    async with TripleBuffer(1, buffers=BUFFERS, device=device) as ring:
        taken(ring).enter("uploading", until=await failing(stream))
    with pytest.raises(SkippedError):
        await quickly(stream.synchronize())


@pytest.mark.asyncio
async def test_ring_belongs_to_its_loop(device: Device) -> None:
    async def elsewhere() -> str:
        for use in (ring.upload_slot, ring.compute_slot, ring.download_slot, ring.advance):
            with pytest.raises(WrongLoopError):
                use()
        for call in (ring.acquire, ring.aclose):
            with pytest.raises(WrongLoopError):
                await call()
        return "refused"

    async with TripleBuffer(buffers=BUFFERS, device=device) as ring:
        assert await asyncio.to_thread(in_thread, elsewhere) == "refused"
        assert ring.upload_slot() is not None


@pytest.mark.asyncio
async def test_slots_need_a_loop() -> None:
    ring = TripleBuffer()

    def alone() -> None:
        for use in (ring.upload_slot, ring.compute_slot, ring.advance):
            with pytest.raises(NoEventLoopError):
                use()

    await asyncio.to_thread(alone)


@pytest.mark.asyncio
async def test_ring_ends_with_its_device() -> None:
    async with aiocuda.open_device(driver="host") as device:
        ring = TripleBuffer(buffers=BUFFERS, device=device)
        slot = taken(ring)
        buffer = slot.buffer("x")
    with pytest.raises(StaleHandleError):
        _ = buffer.address
    with pytest.raises(ClosedError):
        await ring.__aenter__()
    await ring.aclose()
    with pytest.raises(ClosedError):
        slot.buffer("x")


@pytest.mark.asyncio
async def test_bad_buffers_open_no_stream(device: Device) -> None:
    streams = device.statistics().streams
    for wrong in ({}, {"x": 4}, {"x": (-1, "f4")}, {"x": (4, "q9")}, {7: (4, "f4")}):
        with pytest.raises((InvalidArgumentError, aiocuda.InvalidTypeError)):
            TripleBuffer(buffers=wrong, device=device)  # type: ignore[arg-type]
    assert device.statistics().streams == streams
