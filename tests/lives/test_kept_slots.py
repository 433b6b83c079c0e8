"""A slot that a task keeps when its item or its batch has ended: it does not reach the memory of the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, InvalidArgumentError, Pipeline, Slot, Stage, StaleHandleError, Stream
from aiocuda.serving import Batch, MicroBatcher
from tests.helpers import Latch, quickly

pytestmark = pytest.mark.asyncio

SIZE = 4

#: Each use of a slot.
USES: dict[str, Callable[[Slot], Any]] = {
    "buffer": lambda slot: slot.buffer("x", SIZE),
    "buffer without a shape": lambda slot: slot.buffer("x"),
    "pinned": lambda slot: slot.pinned("x", SIZE),
    "stream": lambda slot: slot.stream,
    "item": lambda slot: slot.item,
    "set item": lambda slot: setattr(slot, "item", 7),
    "result": lambda slot: slot.result("compute"),
    "state": lambda slot: slot.state,
    "enter": lambda slot: slot.enter("processing"),
    "free_buffers": lambda slot: slot.free_buffers(),
}


def assert_ended(slot: Slot) -> None:
    for name, use in USES.items():
        with pytest.raises(StaleHandleError, match=r"has ended.*await"):
            use(slot)
            raise AssertionError(name)
    assert str(slot) == f"<Slot {slot.number} ended>"


async def test_slot_and_stream_of_a_batch_that_has_ended_are_refused(device: Device) -> None:
    batches: list[Batch[int]] = []
    kept: list[tuple[Slot, Stream]] = []

    async def infer(batch: Batch[int]) -> list[int]:
        assert batch.slot.buffer("x", SIZE).device is device
        batches.append(batch)
        kept.append((batch.slot, batch.stream))
        if batch.items == [1]:
            raise ZeroDivisionError
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        for item in range(3):
            with contextlib.suppress(ZeroDivisionError):
                assert await quickly(batcher.submit(item)) == item
            for batch, (slot, stream) in zip(batches, kept, strict=True):
                with pytest.raises(StaleHandleError, match=f"batch {batch.number} has ended.*slot.*await"):
                    _ = batch.slot
                with pytest.raises(StaleHandleError, match=f"batch {batch.number} has ended.*stream.*await"):
                    _ = batch.stream
                assert_ended(slot)
                await quickly(stream.synchronize())  # it may be the key of a graph
        assert len({stream for _, stream in kept}) == 1
        assert [batch.items for batch in batches] == [[0], [1], [2]]


def check_that_a_device_is_missing(batch: Batch[int]) -> None:
    for name in ("slot", "stream"):
        with pytest.raises(InvalidArgumentError, match=rf"batch\.{name} needs a device.*: pass device="):
            getattr(batch, name)


async def test_batch_without_a_device_has_no_slot_at_any_time() -> None:
    async def infer(batch: Batch[int]) -> list[Batch[int]]:
        check_that_a_device_is_missing(batch)
        return [batch]

    async with MicroBatcher(infer, max_batch_size=1) as batcher:
        check_that_a_device_is_missing(await quickly(batcher.submit(1)))


@pytest.mark.parametrize("keeps", ["batch", "slot"])
@pytest.mark.parametrize("writes", [True, False])
async def test_task_that_outlives_its_batch_reaches_no_rows_of_others(device: Device, keeps: str, writes: bool) -> None:
    """P39: of 100 clients; the batches of 50 leave a task."""
    refused: list[StaleHandleError] = []
    tasks: list[asyncio.Task[None]] = []
    ended: list[int] = []  # those of the first 50 whose batch has ended
    gate = asyncio.Event()

    async def later(batch: Batch[float], slot: Any) -> None:
        await gate.wait()
        try:
            found: Any = slot if keeps == "slot" else batch.slot
            rows = found.pinned("rows", SIZE)
            if writes:
                rows[:] = -1
        except StaleHandleError as error:
            refused.append(error)

    async def infer(batch: Batch[float]) -> Any:
        rows = batch.slot.pinned("rows", SIZE)
        rows[:] = number = batch.items[0]
        if number < 50:
            tasks.append(asyncio.create_task(later(batch, batch.slot)))
        elif number > 60 and len(ended) == 50:
            gate.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [await batch.stream.download(await batch.stream.upload(rows))]

    async def client(batcher: MicroBatcher[float, Any], number: int) -> Any:
        result = await batcher.submit(float(number))
        if number < 50:
            ended.append(number)
        return result

    async with MicroBatcher(infer, max_batch_size=1, max_concurrent_batches=2, device=device) as batcher:
        results = await quickly(asyncio.gather(*(client(batcher, number) for number in range(100))))
        gate.set()  # if one batch of the first 50 has outlived all others
    await quickly(asyncio.wait(tasks))
    assert [set(result) for result in results] == [{number} for number in range(100)]
    assert len(refused) == 50


async def run(pipeline: Pipeline, item: int) -> None:
    assert [result async for result in pipeline.run([item])] == [item]


async def without_overlap(pipeline: Pipeline, item: int) -> None:
    assert [result async for result in pipeline.run([item], overlap=False)] == [item]


async def single(pipeline: Pipeline, item: int) -> None:
    assert await pipeline.execute_iteration(item) == item


async def submitted(pipeline: Pipeline, item: int) -> None:
    assert await (await pipeline.submit(item)) == item


async def failed(pipeline: Pipeline, item: int) -> None:
    with pytest.raises(ZeroDivisionError):
        await pipeline.execute_iteration(-1)


@pytest.mark.parametrize("awaits", [True, False])
@pytest.mark.parametrize("way", [run, without_overlap, single, submitted, failed])
async def test_slot_of_an_item_that_has_ended_is_refused(device: Device, way: Any, awaits: bool) -> None:
    kept: list[Slot] = []

    def enqueue(slot: Slot) -> None:
        slot.buffer("x", SIZE)
        slot.pinned("x", SIZE)
        kept.append(slot)

    async def wait(slot: Slot) -> Any:
        enqueue(slot)

    async def end(slot: Slot) -> Any:
        kept.append(slot)
        if slot.item < 0:
            raise ZeroDivisionError
        return slot.item

    stages = [Stage("compute", wait if awaits else enqueue), Stage("end", end)]
    async with Pipeline(device, stages, 1) as pipeline:
        for item in range(3):
            await quickly(way(pipeline, item))
            await quickly(single(pipeline, 5))  # at the latest
            for slot in kept:
                assert_ended(slot)
        assert pipeline.ring.states == ("free",)
        assert pipeline.statistics().blocks_replaced == 0


async def test_slot_is_ended_where_the_device_still_works(device: Device, stream: Stream, latch: Latch) -> None:
    """An item that has failed: its slot waits for an operation of another stream."""
    kept: list[Slot] = []

    async def compute(slot: Slot) -> int:
        kept.append(slot)
        if slot.item == 1:
            latch.hold(stream)
            stream.fill(slot.buffer("x", SIZE), 1)
            raise ZeroDivisionError
        return 2

    async with Pipeline(device, [Stage("compute", compute)], 1) as pipeline:
        with pytest.raises(ZeroDivisionError):
            await quickly(pipeline.execute_iteration(1))
        await latch.held()
        next_one = asyncio.create_task(pipeline.execute_iteration(2))
        latch.release()
        assert await quickly(next_one) == 2
        for slot in kept:
            assert_ended(slot)


async def test_kept_array_of_a_slot_is_not_that_of_the_next_one(device: Device) -> None:
    """Memory that was asked for in time stays with its task."""
    arrays: list[Any] = []

    async def infer(batch: Batch[int]) -> list[int]:
        arrays.append(batch.slot.pinned("x", SIZE, np.int64))
        arrays[-1][:] = batch.items[0]
        return batch.items

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        for item in range(4):
            await quickly(batcher.submit(item))
    assert [array.tolist() for array in arrays] == [[item] * SIZE for item in range(4)]
