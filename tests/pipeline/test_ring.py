from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import InvalidArgumentError, InvalidTypeError, Slot, StaleHandleError, Stream, TripleBuffer, WrongLoopError
from aiocuda.pipeline import PipelineRing
from aiocuda.pipeline._slot import TRANSITIONS, SlotState
from tests.helpers import Latch, in_thread, quickly, turns, until

pytestmark = pytest.mark.asyncio


class Progress:
    """An item that is always processing."""

    state: SlotState = "processing"

    def result(self, stage: str) -> None: ...

    def note_replaced(self, blocks: int) -> None: ...


async def test_a_slot_goes_round() -> None:
    """I1"""
    ring = TripleBuffer()
    assert ring.depth == 3
    assert ring.states == ("free", "free", "free")
    slot = await ring.acquire("item")
    assert (slot.item, slot.state, ring.busy) == ("item", "uploading", 1)
    slot.enter("processing")
    assert ring.states == ("processing", "free", "free")
    slot.enter("downloading")
    assert slot.state == "downloading"
    ring.release(slot)
    assert (slot.item, slot.state, ring.busy, ring.peak_busy) == (None, "free", 0, 1)


@pytest.mark.parametrize("before", TRANSITIONS)
@pytest.mark.parametrize("after", TRANSITIONS)
async def test_only_the_steps_of_the_table_are_taken(before: SlotState, after: SlotState) -> None:
    slot = Slot(0)
    if before != "free":
        slot.enter("uploading")
        slot.enter(before)
    if after != "free" and after in TRANSITIONS[before]:
        slot.enter(after)
        assert slot.state == after
    else:
        with pytest.raises(InvalidArgumentError, match=f"that is {before} cannot become '{after}'"):
            slot.enter(after)
        assert slot.state == before


async def test_states_follow_the_device(stream: Stream, other: Stream, latch: Latch) -> None:
    """I1: what was enqueued ahead counts when the device comes to it."""
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    latch.hold(stream)
    up = stream.synchronize()
    other.wait(up)
    slot.enter("uploading", up)
    slot.enter("processing", [other.synchronize()])
    slot.enter("downloading", other.synchronize())
    await latch.held()
    assert slot.state == "uploading"
    latch.release()
    await quickly(up)
    assert slot.state in ("processing", "downloading")
    await quickly(other.synchronize())
    assert slot.state == "downloading"


async def test_a_state_ends_with_operations_and_events(stream: Stream, other: Stream, latch: Latch) -> None:
    """I1"""
    makers: list[Callable[[], Any]] = [
        lambda: stream.record(),
        lambda: [stream.synchronize(), other.record()],
        lambda: (work for work in (other.synchronize(), stream.record())),
    ]
    for make in makers:
        slot = Slot(0)
        latch.hold(stream)
        slot.enter("uploading", until=make())
        slot.enter("processing")
        await latch.held()
        states = [slot.state]
        latch.release()
        await quickly(stream.synchronize())
        await quickly(other.synchronize())
        assert [*states, slot.state] == ["uploading", "processing"]


@pytest.mark.parametrize("several", [False, True])
async def test_a_state_ends_with_a_node(device: aiocuda.Device, several: bool) -> None:
    """I1"""
    gate, slot = asyncio.Event(), Slot(0)
    async with aiocuda.AsyncCoordinator(device) as coordinator:
        node = coordinator.host(gate.wait)
        slot.enter("uploading", until=[node] if several else node)
        slot.enter("processing")
        states = [slot.state]
        gate.set()
        await quickly(node)
        assert [*states, slot.state] == ["uploading", "processing"]


async def test_an_event_that_is_recorded_again_still_ends_the_state(stream: Stream, latch: Latch) -> None:
    slot = Slot(0)
    event = stream.record()
    slot.enter("uploading", until=event)
    slot.enter("processing")
    await quickly(event)
    latch.hold(stream)
    stream.record(event=event)
    assert slot.state == "processing"


async def test_what_cannot_end_a_state_is_refused_and_changes_nothing(stream: Stream) -> None:
    event = stream.record()
    event.release()

    def broken() -> Any:
        yield stream.synchronize()
        raise ZeroDivisionError("in the middle")

    wrong: list[tuple[Any, type[Exception], str]] = [
        (7, InvalidTypeError, "operations, nodes or events, not 7"),
        (None, InvalidTypeError, "not None"),
        ("processing", InvalidTypeError, "not 'processing'"),
        ([stream.synchronize(), 7], InvalidTypeError, "not with 7"),
        (stream, InvalidTypeError, "not <Stream"),
        (event, StaleHandleError, "released"),
        (broken(), ZeroDivisionError, "in the middle"),
    ]
    ring = TripleBuffer(1)
    async with ring.slot() as slot:
        pool = aiocuda.EventPool(stream.device)
        wrong.append((pool.acquire_nowait(), InvalidArgumentError, "never recorded"))
        for ends, error, text in wrong:
            with pytest.raises(error, match=text):
                slot.enter("processing", until=ends)
            assert (slot.state, ring.states, ring.busy) == ("uploading", ("uploading",), 1)
        slot.enter("processing", until=stream.synchronize())
        assert slot.state == "processing"


async def test_waiters_get_slots_in_order() -> None:
    """I2: back-pressure is an await."""
    ring = TripleBuffer(2)
    slots = [await ring.acquire(), await ring.acquire()]
    order: list[str] = []

    async def ask(name: str) -> Slot:
        slot = await ring.acquire(name)
        order.append(name)
        return slot

    first, second = asyncio.create_task(ask("first")), asyncio.create_task(ask("second"))
    await asyncio.sleep(0)
    assert order == []
    ring.release(slots[1])
    assert await quickly(first) is slots[1]
    assert not second.done()
    ring.release(slots[0])
    assert await quickly(second) is slots[0]
    assert order == ["first", "second"]
    assert ring.peak_busy == 2


async def test_a_place_in_line_that_is_cancelled_passes_on() -> None:
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    waiting = [asyncio.create_task(ring.acquire(number)) for number in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # before its turn
    ring.release(slot)
    waiting[1].cancel()  # it has a slot, and has not run yet
    assert await quickly(waiting[2]) is slot
    assert slot.item == 2
    assert [task.cancelled() for task in waiting] == [True, True, False]


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
async def test_many_coroutines_share_a_ring(depth: int) -> None:
    """I1, I2: a slot has one holder, and at most `depth` slots are busy."""
    ring = TripleBuffer(depth)
    holders: dict[int, int] = {}

    async def work(number: int) -> None:
        async with ring.slot(number) as slot:
            assert slot.number not in holders
            holders[slot.number] = number
            for state in ("processing", "downloading"):
                await asyncio.sleep(0)
                slot.enter(state)
                assert slot.item == number
            assert ring.busy <= depth
            del holders[slot.number]

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(work(number))
    assert (ring.busy, ring.peak_busy, set(ring.states)) == (0, depth, {"free"})


async def test_a_slot_is_released_once_and_where_it_was_acquired() -> None:
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    with pytest.raises(StaleHandleError):
        TripleBuffer().release(slot)
    ring.release(slot)
    with pytest.raises(StaleHandleError, match="released once"):
        ring.release(slot)
    assert await quickly(ring.acquire()) is slot


async def test_a_reserved_slot_is_free_until_its_item_has_come() -> None:
    ring = PipelineRing(1)
    progress: Any = Progress()
    slot = await ring.reserve()
    assert (slot.state, ring.busy, ring.busy_seconds) == ("free", 0, 0.0)
    waiting = asyncio.create_task(ring.acquire())
    ring.begin(slot, "item", progress)
    assert (slot.item, slot.state, ring.busy) == ("item", "processing", 1)
    with pytest.raises(StaleHandleError, match="not reserved"):
        ring.begin(slot, "another", progress)
    with pytest.raises(StaleHandleError, match="not reserved"):
        ring.begin(Slot(0), "item", progress)
    assert ring.busy_seconds > 0
    ring.release(slot)
    again = await quickly(waiting)
    assert (str(slot), again.number) == ("<Slot 0 ended>", 0)  # a task may have kept the slot of the item
    ring.release(again)
    for each in (slot, again):
        with pytest.raises(StaleHandleError, match="not reserved"):
            ring.begin(each, "item", progress)
    unused = await ring.reserve()
    ring.release(unused)  # without an item: nothing was busy
    assert (ring.busy, ring.peak_busy) == (0, 1)
    ring.reset_statistics()
    assert (ring.busy_seconds, ring.peak_busy) == (0.0, 0)


async def test_a_slot_that_cannot_be_had_back_is_replaced() -> None:
    ring = PipelineRing(2)
    kept, lost = await ring.acquire(), await ring.acquire()
    waiting = asyncio.create_task(ring.acquire("next"))
    ring.replace(lost)
    fresh = await quickly(waiting)
    assert fresh is not lost
    assert (fresh.number, fresh.item, ring.busy) == (lost.number, "next", 2)
    for release in (ring.release, ring.replace):
        with pytest.raises(StaleHandleError, match="not taken"):
            release(lost)
    ring.release(fresh)
    ring.release(kept)
    assert ring.states == ("free", "free")


async def test_a_ring_at_rest_serves_the_next_loop() -> None:
    ring = TripleBuffer(1)

    async def crowd() -> int:
        async def one() -> None:
            async with ring.slot():
                await asyncio.sleep(0)

        await quickly(asyncio.gather(one(), one(), one()))
        return ring.peak_busy

    assert await crowd() == 1
    assert await asyncio.to_thread(in_thread, crowd) == 1
    assert await crowd() == 1


async def test_a_block_that_fails_frees_its_slot() -> None:
    ring = TripleBuffer(1)
    with pytest.raises(ZeroDivisionError):
        async with ring.slot():
            raise ZeroDivisionError
    assert ring.states == ("free",)


async def test_slot_of_a_block_is_stale_after_it(device: aiocuda.Device, stream: Stream) -> None:
    async with TripleBuffer(1, buffers={"x": (4, np.float32)}, device=device) as ring:
        async with ring.slot() as first:
            memory = first.buffer("x")
        for use in (lambda: first.buffer("x"), lambda: first.enter("uploading"), lambda: first.item):
            with pytest.raises(StaleHandleError, match="the block of this slot has ended"):
                use()
        async with ring.slot() as second:
            assert second.buffer("x") is memory
        assert ring.states == ("free",)


async def test_slot_of_a_block_is_released_by_its_end_only() -> None:
    """Else the end would release the slot of the next holder."""
    ring = TripleBuffer(1)
    async with ring.slot("first") as slot:
        waiting = asyncio.create_task(ring.acquire("second"))
        with pytest.raises(StaleHandleError, match="by the end of its `async with"):
            ring.release(slot)
        await turns()
        assert (slot.item, waiting.done()) == ("first", False)
    assert (await quickly(waiting)).item == "second"


@pytest.mark.parametrize("depth", [0, -1, 1025, 10**9])
async def test_a_depth_out_of_range_is_refused(depth: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"1 to 1024, and this is {depth}"):
        TripleBuffer(depth)


@pytest.mark.parametrize("depth", [True, 3.0, "3", None, float("nan")])
async def test_a_depth_that_is_no_integer_is_refused(depth: Any) -> None:
    with pytest.raises(InvalidTypeError, match="depth is an integer"):
        TripleBuffer(depth)


async def test_a_ring_in_use_belongs_to_its_loop() -> None:
    ring = PipelineRing(2)

    async def elsewhere() -> str:
        with pytest.raises(WrongLoopError):
            await ring.acquire()
        if ring.free:
            with pytest.raises(WrongLoopError):
                ring.take()
        return "refused"

    slots = []
    while ring.free:
        slots.append(await ring.acquire())
        assert await asyncio.to_thread(in_thread, elsewhere) == "refused"
    for slot in slots:
        ring.release(slot)


async def test_taking_a_free_slot_overtakes_no_waiter() -> None:
    ring = PipelineRing(2)
    assert ring.free
    first, second = ring.take(), ring.take()
    assert not ring.free
    waiting = asyncio.create_task(ring.reserve())
    await asyncio.sleep(0)
    ring.release(first)
    assert not ring.free  # the waiter has it
    assert await waiting is first
    ring.release(second)
    assert ring.free
    assert ring.take() is second


async def test_a_slots_memory_stays_with_it(device: aiocuda.Device, stream: Stream) -> None:
    ring = TripleBuffer(1)
    async with ring.slot() as slot:
        slot.stream = stream
        buffer, array = slot.buffer("x", (4, 4), "u4"), slot.pinned("x", 16, "u4")
        assert slot.buffer("x", (4, 4), "u4") is buffer
        assert slot.pinned("x", 16, "u4") is array
        assert slot.buffer("y", (4, 4), "u4") is not buffer
    async with ring.slot() as slot:
        slot.stream = stream
        assert slot.buffer("x", (4, 4), "u4") is buffer
        assert slot.pinned("x", 16, "u4") is array
        assert slot.buffer("x", 16, "u4").shape == (16,)
        assert slot.buffer("x", 16, "f4").dtype == "f4"
        shape = [4, 4]
        assert slot.buffer("z", shape, "u4").shape == (4, 4)
        shape[0] = 2  # the same object means something else
        assert slot.buffer("z", shape, "u4").shape == (2, 4)
        assert slot.pinned("x", (2, 8), "u4").shape == (2, 8)
        buffer = slot.buffer("x", 16, "f4")
        buffer.free()
        assert not slot.buffer("x", 16, "f4").freed
        del buffer, array
    await until(lambda: device.memory.statistics().live_bytes == 160, "what was replaced going back")


async def test_a_changed_dtype_of_a_class_makes_another_buffer(stream: Stream) -> None:
    """Only what cannot change is taken for what was asked for before."""

    class Record:
        dtype: np.dtype[Any] = np.dtype("f4")

    slot = Slot(0)
    slot.stream = stream
    assert slot.buffer("x", 4, Record).dtype == "f4"
    Record.dtype = np.dtype("i8")
    assert slot.buffer("x", 4, Record).dtype == "i8"
    extents = [4]
    assert slot.buffer("x", extents).shape == (4,)
    extents[0] = 5
    assert slot.buffer("x", extents).shape == (5,)
    wrong: Any = True
    assert slot.buffer("x", 1).shape == (1,)
    with pytest.raises(InvalidTypeError):
        slot.buffer("x", wrong)
    with pytest.raises(InvalidTypeError):
        slot.buffer("x", wrong * 1.0)


async def test_a_missing_buffer_is_named(stream: Stream) -> None:
    slot = Slot(0)
    with pytest.raises(aiocuda.BusyError, match="no stream"):
        slot.buffer("x", 4)
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="not int"):
        slot.stream = wrong
    slot.stream = stream
    with pytest.raises(InvalidTypeError, match="name, not 7"):
        slot.buffer(wrong, 4)
    with pytest.raises(InvalidArgumentError, match="-1"):
        slot.buffer("x", -1)


async def test_waiter_gets_a_slot_whose_last_state_has_ended(stream: Stream, latch: Latch) -> None:
    """A loop that acquires, names the last operation and advances goes round for ever."""
    ring, numbers = TripleBuffer(), []
    latch.hold(stream)

    async def loop() -> None:
        for number in range(10):
            slot = await ring.acquire(number)
            numbers.append(slot.number)
            slot.enter("downloading", until=stream.synchronize())
            ring.advance()

    task = asyncio.create_task(loop())
    await latch.held()
    await turns()
    assert numbers == [0, 1, 2]
    latch.release()
    await quickly(task)
    assert numbers == [0, 1, 2] * 3 + [0]


@pytest.mark.parametrize("named", ["before", "after", "ended"])
async def test_waiter_gets_a_slot_whatever_comes_first(stream: Stream, latch: Latch, named: str) -> None:
    """The operation is named before the wait, or after it, or when it has ended."""
    ring = TripleBuffer(1)
    ring.advance()
    slot = await ring.acquire("first")
    latch.hold(stream)
    operation = stream.synchronize()
    if named == "before":
        slot.enter("downloading", until=operation)
    waiting = asyncio.create_task(ring.acquire("second"))
    await asyncio.sleep(0)
    if named == "after":
        slot.enter("downloading", until=operation)
    await latch.held()
    await turns()
    assert not waiting.done()
    latch.release()
    await quickly(operation)
    if named == "ended":
        slot.enter("downloading", until=operation)
        assert slot.item == "first"  # until the next turn of the loop
    assert await quickly(waiting) is slot
    assert (slot.item, slot.state) == ("second", "uploading")


async def test_failure_of_a_slot_that_was_handed_on_is_raised_by_advance(stream: Stream) -> None:
    """Once."""
    ring = TripleBuffer(1)
    ring.advance()
    for number in range(2):
        slot = await quickly(ring.acquire(number))
        slot.enter("uploading", until=stream.submit(operator.truediv, 1, 0))
        slot.enter("downloading", until=stream.synchronize())
    slot = await quickly(ring.acquire())
    with pytest.raises(ZeroDivisionError) as caught:
        ring.advance()
    assert "in slot 0 of a triple buffer, which was uploading" in caught.value.__notes__
    assert (ring.busy, slot.state) == (1, "uploading")
    ring.advance()


async def test_waiter_gets_no_slot_that_is_in_use(device: aiocuda.Device, stream: Stream) -> None:
    """A slot of a block, one whose last state is another, and one without an operation."""
    ring = TripleBuffer(3)
    ring.advance()
    async with ring.slot() as first:
        second, third = await ring.acquire(), await ring.acquire()
        first.enter("downloading", until=stream.synchronize())
        second.enter("processing", until=stream.synchronize())
        third.enter("downloading")
        waiting = asyncio.create_task(ring.acquire())
        await quickly(stream.synchronize())
        await turns()
        assert not waiting.done()
    assert (await quickly(waiting)).number == first.number
    assert repr(first) == "<Slot 0 ended>"


@pytest.mark.parametrize("first_call", ["before", "running", "ended"])
async def test_waiter_gets_a_slot_from_the_first_advance_on(stream: Stream, latch: Latch, first_call: str) -> None:
    """Before it the program may still read the slot's memory. The operation runs, or has ended, at the call."""
    ring = TripleBuffer(1)
    slot = await ring.acquire("first")
    latch.hold(stream)
    operation = stream.synchronize()
    slot.enter("downloading", until=operation)
    if first_call == "before":
        ring.advance()
    waiting = asyncio.create_task(ring.acquire("second"))
    await latch.held()
    await turns()
    if first_call == "running":
        ring.advance()
    latch.release()
    await quickly(operation)
    if first_call == "ended":
        await turns()
        assert (slot.item, waiting.done()) == ("first", False)
        ring.advance()
    assert await quickly(waiting) is slot
    assert slot.item == "second"


async def test_holders_that_release_their_slots_read_their_own_results(stream: Stream) -> None:
    """A slot whose last state has ended stays with its holder while others wait, without `advance`."""
    ring, results = TripleBuffer(1), []

    async def holder(number: int) -> None:
        slot = await ring.acquire(number)
        slot.stream = stream
        buffer, pinned = slot.buffer("x", 4, np.uint32), slot.pinned("x", 4, np.uint32)
        stream.fill(buffer, number)
        download = stream.download(buffer, out=pinned)
        slot.enter("downloading", until=download)
        await quickly(download)
        await turns()
        results.append((slot.item, pinned.tolist()))
        ring.release(slot)

    await quickly(asyncio.gather(*map(holder, range(4))))
    assert results == [(number, [number] * 4) for number in range(4)]


async def test_waiter_that_is_cancelled_as_its_slot_comes_passes_it_on(stream: Stream) -> None:
    ring = TripleBuffer(1)
    ring.advance()
    slot = await ring.acquire()
    waiting = [asyncio.create_task(ring.acquire(number)) for number in range(2)]
    await asyncio.sleep(0)
    slot.enter("downloading", until=stream.synchronize())
    while ring.busy:
        await asyncio.sleep(0)
    waiting[0].cancel()  # it has the slot, and has not run yet
    assert (await quickly(waiting[1])).item == 1
    assert waiting[0].cancelled()


async def test_slot_with_an_operation_is_found_no_more(stream: Stream, latch: Latch) -> None:
    ring = TripleBuffer()
    slots = [await ring.acquire() for _ in range(3)]
    for state, find in (("processing", ring.compute_slot), ("downloading", ring.download_slot)):
        latch.hold(stream)
        for slot in slots:
            slot.enter(state)  # type: ignore[arg-type]
        for slot in slots:
            assert find() is find() is slot
            slot.enter(state, until=stream.synchronize())  # type: ignore[arg-type]
        assert find() is None
        latch.release()
        await quickly(stream.synchronize())
        ring.advance()
