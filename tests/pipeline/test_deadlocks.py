"""A stage that awaits its own pipeline: it gets `DeadlockError` if the wait can never end, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocuda import DeadlockError, Device, Pipeline, Slot, Stage
from tests.helpers import quickly, turns
from tests.pipeline.steps import assert_quiet

pytestmark = pytest.mark.asyncio


async def last(slot: Slot) -> Any:
    return slot.item


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_stage_that_awaits_an_item_of_its_pipeline(device: Device, depth: int, concurrency: int) -> None:
    """The inner item cannot pass the outer one: it waited forever, whether a slot was free or not."""

    async def nested(slot: Slot) -> Any:
        return await pipeline.execute_iteration(slot.item - 1) if slot.item else 0

    stages = [Stage("nested", nested, concurrency=concurrency), Stage("last", last)]
    async with Pipeline(device, stages, depth) as pipeline:
        with pytest.raises(DeadlockError, match=r"stage 'nested' of item 0, counted from 0.*use another pipeline"):
            await quickly(pipeline.execute_iteration(1))
        assert await quickly(pipeline.execute_iteration(0)) == 0
        assert_quiet(pipeline, streams=2)


async def test_last_stage_with_room_may_await_another_item(device: Device) -> None:
    async def nested(slot: Slot) -> Any:
        return 10 + await pipeline.execute_iteration(slot.item - 1) if slot.item else 0

    async with Pipeline(device, [Stage("nested", nested, concurrency=2)], 3) as pipeline:
        assert await quickly(pipeline.execute_iteration(1)) == 10
        with pytest.raises(DeadlockError):
            await quickly(pipeline.execute_iteration(2))


@pytest.mark.parametrize("beside", [0, 1])
async def test_stage_that_awaits_several_items_of_its_pipeline(device: Device, beside: int) -> None:
    async def nested(slot: Slot) -> Any:
        if not slot.item:
            return 1
        return sum(await asyncio.gather(*(pipeline.execute_iteration(0) for _ in range(3))))

    async with Pipeline(device, [Stage("nested", nested, concurrency=1 + beside)], 1 + beside) as pipeline:
        if beside:
            assert await quickly(pipeline.execute_iteration(1)) == 3
        else:
            with pytest.raises(DeadlockError):
                await quickly(pipeline.execute_iteration(1))


@pytest.mark.parametrize("depth", [1, 3])
async def test_stage_that_awaits_a_slot_of_its_pipeline(device: Device, depth: int) -> None:
    """Later items hold all other slots, and cannot pass it."""
    inner: list[Any] = []

    async def nested(slot: Slot) -> Any:
        if slot.item == 0 and not inner:
            await turns(5)  # until the other items have come
            with pytest.raises(DeadlockError, match="a slot of the pipeline nested"):
                await pipeline.submit(-1)
            inner.append("refused")
        return slot.item

    async with Pipeline(device, [Stage("nested", nested)], depth) as pipeline:
        found = await quickly(asyncio.gather(*(pipeline.execute_iteration(item) for item in range(depth))))
        assert (found, inner) == (list(range(depth)), ["refused"])


async def test_ticket_that_no_stage_awaits_is_not_refused(device: Device) -> None:
    inner: list[Any] = []

    async def nested(slot: Slot) -> Any:
        if slot.item:
            inner.append(await pipeline.submit(0))
            inner.append(asyncio.create_task(pipeline.execute_iteration(0)))
            await turns(10)
        return slot.item

    async with Pipeline(device, [Stage("nested", nested)], 3) as pipeline:
        assert await quickly(pipeline.execute_iteration(1)) == 1
        assert await quickly(asyncio.gather(*(one.wait() if hasattr(one, "wait") else one for one in inner))) == [0, 0]
