"""Pipelines: the rows I of docs/reference/features.md that hold, on every driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda import BusyError, Device, InvalidArgumentError, Operation, Pipeline, Slot, Stage, TripleBuffer
from tests.helpers import AFFINE, Latch, quickly, until

pytestmark = pytest.mark.asyncio

LENGTH = 256


def upload(slot: Slot) -> Operation[None]:
    array = np.full(LENGTH, slot.item, np.uint32)
    return slot.stream.copy(slot.buffer("x", LENGTH, np.uint32), array)


def compute(slot: Slot) -> Operation[None]:
    """Twice the item, and one more."""
    return slot.stream.launch(AFFINE, 1, 256, slot.buffer("x", LENGTH, np.uint32), LENGTH, 2, 1)


def download(slot: Slot) -> Operation[npt.NDArray[Any]]:
    return slot.stream.download(slot.buffer("x", LENGTH, np.uint32))


STAGES = [Stage("upload", upload), Stage("compute", compute), Stage("download", download)]


async def begun(pipeline: Pipeline, latch: Latch, state: str) -> None:
    """The device works on a stage, and the state of the one busy slot shows it."""
    await until(lambda: latch.running == 1, f"the stage that is {state}")
    await until(lambda: sorted(pipeline.ring.states) == sorted((state, "free", "free")), state)
    assert latch.running == 1


async def test_slot_goes_round_its_states(device: Device) -> None:
    """I1: free, uploading, processing, downloading, free, each as long as the device is at it; readable at any time."""
    with contextlib.ExitStack() as stack:
        latches = [stack.enter_context(Latch(device)) for _ in STAGES]

        def held(stage: Stage, latch: Latch) -> Stage:
            def hold(slot: Slot) -> Any:
                latch.hold(slot.stream)
                return stage.function(slot)

            return Stage(stage.name, hold)

        async with device.stream() as stream:  # what is loaded or page-locked later may wait for what is held
            for latch in latches:
                latch.hold(stream)
                latch.release()
            await quickly(stream.launch(AFFINE, 1, 256, stream.empty(LENGTH, np.uint32), LENGTH, 1, 0))
        pipeline = Pipeline(device, [held(stage, latch) for stage, latch in zip(STAGES, latches, strict=True)])
        assert pipeline.ring.states == ("free", "free", "free")
        result = asyncio.create_task(pipeline.execute_iteration(20))
        for latch, state in zip(latches, ("uploading", "processing", "downloading"), strict=True):
            await quickly(begun(pipeline, latch, state))
            latch.release()
        assert (await quickly(result) == 41).all()
        assert pipeline.ring.states == ("free", "free", "free")


async def test_ring_is_safe_under_concurrent_coroutines() -> None:
    """I1: a slot has one holder at a time."""
    ring = TripleBuffer()
    holders: set[int] = set()

    async def use(item: int) -> None:
        async with ring.slot(item) as slot:
            assert slot.number not in holders
            holders.add(slot.number)
            for state in ("uploading", "processing", "downloading"):
                slot.enter(state)
                await asyncio.sleep(0)
                assert (slot.item, slot.state, ring.states[slot.number]) == (item, state, state)
            holders.discard(slot.number)

    await quickly(asyncio.gather(*(use(item) for item in range(50))))
    assert (ring.busy, ring.peak_busy, ring.states) == (0, 3, ("free", "free", "free"))


@pytest.mark.parametrize("depth", [1, 3, 7])
async def test_ring_of_any_depth_makes_the_next_one_wait(depth: int) -> None:
    """I2: a request for one slot too many waits for a release, in order of arrival."""
    ring = TripleBuffer(depth)
    slots = [await quickly(ring.acquire(number)) for number in range(depth)]
    order: list[str] = []

    async def wait(name: str) -> None:
        slot = await ring.acquire(name)
        order.append(slot.item)
        ring.release(slot)

    tasks = [asyncio.create_task(wait(name)) for name in ("first", "second")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == []
    ring.release(slots[0])
    await quickly(asyncio.gather(*tasks))
    assert order == ["first", "second"]


async def test_three_slots_are_the_default_and_none_is_refused(device: Device) -> None:
    """I2: a pipeline's ring, too."""
    assert TripleBuffer().depth == Pipeline(device, STAGES).ring.depth == 3
    with pytest.raises(InvalidArgumentError, match="depth is from 1"):
        Pipeline(device, STAGES, depth=0)


async def test_stages_in_order_by_iteration_and_over_a_source(device: Device) -> None:
    """I3: named stages with buffers of their own; one item by itself, items of a source."""

    async def source() -> AsyncIterator[int]:
        for number in range(10):
            yield number

    async with Pipeline(device, STAGES) as pipeline:
        assert [stage.name for stage in pipeline.stages] == ["upload", "compute", "download"]
        assert (await quickly(pipeline.execute_iteration(4)) == 9).all()
        results = [result[0] async for result in pipeline.run(source())]
    assert results == [2 * number + 1 for number in range(10)]


async def test_statistics_of_a_pipeline(device: Device) -> None:
    """I4: counts, times, shares of one, and a reset."""
    async with Pipeline(device, STAGES) as pipeline:
        async for _ in pipeline.run(range(20)):
            pass
        found = pipeline.statistics()
        pipeline.reset_statistics()
        assert pipeline.statistics().iterations == 0
    assert found.iterations == 20
    assert 0 < found.p50_ms <= found.p99_ms
    assert found.average_ms > 0
    assert found.throughput > 0
    assert 0 < found.utilisation <= found.overlap_efficiency <= 1
    assert set(found.stage_seconds) == {"upload", "compute", "download"}


async def test_results_in_order_and_never_more_than_depth_slots(device: Device) -> None:
    """I5: a slow consumer holds the source back."""
    drawn = 0

    def source() -> Iterator[int]:
        nonlocal drawn
        for number in range(30):
            drawn += 1
            yield number

    async with Pipeline(device, STAGES, depth=4) as pipeline:
        delivered = 0
        async for result in pipeline.run(source()):
            assert result[0] == 2 * delivered + 1
            for _ in range(10):
                await asyncio.sleep(0)
            assert drawn <= delivered + 4
            delivered += 1
        assert delivered == 30
        assert pipeline.statistics().peak_busy_slots <= 4


async def test_failing_stage_ends_the_run_cleanly(device: Device) -> None:
    """I5: what came before is delivered; nothing is left in flight, all slots are free, and the pipeline runs again."""

    def fragile(slot: Slot) -> Operation[None]:
        if slot.item == 5:
            raise ArithmeticError("item 5 cannot be computed")
        return compute(slot)

    results: list[int] = []

    async def collect(pipeline: Pipeline, count: int) -> None:
        async for result in pipeline.run(range(count)):
            results.append(int(result[0]))  # noqa: PERF401 - what came before a failure is kept

    async with Pipeline(device, [STAGES[0], Stage("fragile", fragile), STAGES[2]]) as pipeline:
        with pytest.raises(ArithmeticError, match="item 5") as caught:
            await collect(pipeline, 30)
        assert results == [1, 3, 5, 7, 9]
        assert caught.value.__notes__ == ["in stage 'fragile' of item 5, counted from 0"]
        assert set(pipeline.ring.states) == {"free"}
        assert device.statistics().in_flight == 0
        results.clear()
        await collect(pipeline, 3)
    assert results == [1, 3, 5]


async def test_iteration_is_captured_and_replayed(device: Device) -> None:
    """I7: upload, compute and download as one operation; what it works on changes between launches."""
    async with device.stream() as stream:
        buffer = stream.empty(LENGTH, np.uint32)
        up, down = await device.pinned(LENGTH, np.uint32), await device.pinned(LENGTH, np.uint32)
        async with stream.capture() as graph:
            stream.copy(buffer, up)
            computed = stream.launch(AFFINE, 1, 256, buffer, LENGTH, 2, 1)
            stream.download(buffer, out=down)
        for item in range(5):
            up[:] = item
            await quickly(graph.launch(stream))
            assert (down == 2 * item + 1).all()
        graph.update(computed, buffer, LENGTH, 3, 2)
        await quickly(graph.launch(stream))
        assert (down == 14).all()


async def test_pipeline_captures_its_iteration_per_slot_and_replays_it(device: Device) -> None:
    """I7: the stages' functions are called once for each slot; what changes is prepared on the host for each item."""
    called: list[str] = []

    def fill(slot: Slot) -> None:
        slot.pinned("source", LENGTH, np.uint32)[:] = slot.item

    def up(slot: Slot) -> Operation[None]:
        called.append("upload")
        return slot.stream.copy(slot.buffer("x", LENGTH, np.uint32), slot.pinned("source", LENGTH, np.uint32))

    def down(slot: Slot) -> Operation[Any]:
        called.append("download")
        return slot.stream.download(slot.buffer("x", LENGTH, np.uint32), slot.pinned("result", LENGTH, np.uint32))

    stages = [Stage("upload", up, prepare=fill), Stage("compute", compute), Stage("download", down)]
    async with Pipeline(device, stages, depth=3, replay=True) as pipeline:
        results = [np.unique(result).tolist() async for result in pipeline.run(range(10))]
    assert results == [[2 * item + 1] for item in range(10)]
    assert called == ["upload", "download"] * 3


async def test_triple_buffer_owns_memory_and_moves_its_slots_on(device: Device) -> None:
    """I9: no call waits; an item is uploaded, computed and downloaded in a slot, whose buffers the ring has made."""
    before = device.memory.statistics().live_bytes
    buffers: Any = {"x": (LENGTH, np.uint32)}
    items, results = list(range(10)), list[int]()
    async with TripleBuffer(buffers=buffers, device=device) as ring, contextlib.AsyncExitStack() as stack:
        assert len(ring) == 3
        assert device.memory.statistics().live_bytes >= before + 3 * 4 * LENGTH
        up, compute, down = [await stack.enter_async_context(device.stream()) for _ in range(3)]
        assert (ring.compute_slot(), ring.download_slot()) == (None, None)
        while items or ring.busy:
            work: list[Operation[Any]] = []
            if items and (slot := ring.upload_slot(items[0])) is not None:
                array = np.full(LENGTH, items.pop(0), np.uint32)
                work.append(up.copy(slot.buffer("x"), array))
                slot.enter("uploading", until=work[-1])
            if (slot := ring.compute_slot()) is not None:
                work.append(compute.launch(AFFINE, 1, 256, slot.buffer("x"), LENGTH, 2, 1))
                slot.enter("processing", until=work[-1])
            if (slot := ring.download_slot()) is not None:
                work.append(down.download(slot.buffer("x", LENGTH, np.uint32)))
                slot.enter("downloading", until=work[-1])
                results.append(int((await quickly(work[-1]))[0]))
            states = ring.states
            for operation in work:
                await quickly(operation)
            assert ring.states == states
            ring.advance()
    assert results == [2 * item + 1 for item in range(10)]
    await until(lambda: device.memory.statistics().live_bytes == before, "the memory going back")


async def test_plain_loop_over_submit_overlaps(device: Device) -> None:
    """I8: a call waits for a slot only; tickets hold results, and no slots, and are awaited in any order."""
    with Latch(device) as latch:

        def held(slot: Slot) -> Operation[None]:
            if slot.item == 0:
                latch.hold(slot.stream)
            return compute(slot)

        async with Pipeline(device, [STAGES[0], Stage("held", held), STAGES[2]]) as pipeline:
            tickets = [await quickly(pipeline.submit(item)) for item in range(3)]
            waiting = asyncio.create_task(pipeline.submit(3))
            await quickly(until(lambda: latch.running == 1, "the first item"))
            assert (pipeline.ring.busy, waiting.done()) == (3, False)
            latch.release()
            tickets.append(await quickly(waiting))
            await quickly(until(lambda: pipeline.ring.busy == 0, "the end of all items"))
            assert [(await quickly(ticket))[0] for ticket in reversed(tickets)] == [7, 5, 3, 1]


async def test_order_of_stages_changes_between_runs(device: Device) -> None:
    """I8: between runs, and not while items are in flight."""

    def add(slot: Slot) -> Operation[None]:
        return slot.stream.launch(AFFINE, 1, 256, slot.buffer("x", LENGTH, np.uint32), LENGTH, 1, 3)

    stages = [STAGES[0], STAGES[1], Stage("add", add), STAGES[2]]
    async with Pipeline(device, stages) as pipeline:
        assert [result[0] async for result in pipeline.run(range(4))] == [2 * item + 4 for item in range(4)]
        ticket = await pipeline.submit(1)  # without a turn of the loop: the host does not know yet that it has ended
        with pytest.raises(BusyError, match="in flight"):
            pipeline.set_order(["upload", "add", "compute", "download"])
        assert (await quickly(ticket))[0] == 6
        pipeline.set_order(["upload", "add", "compute", "download"])
        assert [stage.name for stage in pipeline.stages] == ["upload", "add", "compute", "download"]
        assert [result[0] async for result in pipeline.run(range(4))] == [2 * (item + 3) + 1 for item in range(4)]
