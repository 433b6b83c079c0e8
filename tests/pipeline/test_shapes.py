"""Stages that ask the slot of an item for one name with different shapes or dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, InvalidArgumentError, Operation, Pipeline, Slot, Stage
from tests.helpers import quickly

pytestmark = pytest.mark.asyncio

Ask = Callable[[Slot, Any, Any], Any]


def buffer(slot: Slot, shape: Any, dtype: Any = np.float32) -> Any:
    return slot.buffer("x", shape, dtype)


def pinned(slot: Slot, shape: Any, dtype: Any = np.float32) -> Any:
    return slot.pinned("x", shape, dtype)


def asks(ask: Ask, shape: Any, dtype: Any = np.float32, *, awaits: bool = False) -> Any:
    """The function of a stage that asks; ``shape`` may be a function of the item."""

    def enqueue(slot: Slot) -> Operation[None]:
        ask(slot, shape(slot.item) if callable(shape) else shape, dtype)
        return slot.stream.synchronize()

    async def wait(slot: Slot) -> None:
        await enqueue(slot)

    return wait if awaits else enqueue


@pytest.mark.parametrize("ask", [buffer, pinned])
@pytest.mark.parametrize("awaits", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("other", [(8, np.float32), (4, np.int32), ((2, 2), np.float32)])
async def test_stages_that_ask_for_another_shape_are_named(device: Device, ask: Any, awaits: Any, other: Any) -> None:
    stages = [
        Stage("first", asks(ask, 4, awaits=awaits[0])),
        Stage("between", asks(ask, 4)),
        Stage("second", asks(ask, *other, awaits=awaits[1])),
    ]
    async with Pipeline(device, stages) as pipeline:
        with pytest.raises(InvalidArgumentError, match=r"stage 'second' .*'x'.* stage 'first' .*\(4,\).*float32"):
            await quickly(pipeline.execute_iteration(0))


@pytest.mark.parametrize("ask", [buffer, pinned])
@pytest.mark.parametrize("awaits", [True, False])
async def test_stages_that_differ_for_a_later_item_are_named(device: Device, ask: Any, awaits: bool) -> None:
    stages = [Stage("first", asks(ask, 4)), Stage("second", asks(ask, lambda item: item, awaits=awaits))]
    async with Pipeline(device, stages, 1) as pipeline:
        for item in (4, 4):
            await quickly(pipeline.execute_iteration(item))
        with pytest.raises(InvalidArgumentError, match=r"stage 'second'.* stage 'first'"):
            await quickly(pipeline.execute_iteration(5))
        await quickly(pipeline.execute_iteration(4))


async def test_stage_that_is_replayed_is_named(device: Device) -> None:
    """Its function is called for the first item only."""
    stages = [
        Stage("first", lambda slot: slot.stream.fill(slot.buffer("x", 4), 1)),
        Stage("second", asks(buffer, lambda item: item)),
    ]
    async with Pipeline(device, stages, 1, replay=["first"]) as pipeline:
        for item in (4, 4):
            await quickly(pipeline.execute_iteration(item))
        with pytest.raises(InvalidArgumentError, match=r"stage 'second'.* stage 'first'"):
            await quickly(pipeline.execute_iteration(5))
        await quickly(pipeline.execute_iteration(4))


@pytest.mark.parametrize("ask", [buffer, pinned])
async def test_stages_of_branches_are_named(device: Device, ask: Any) -> None:
    stages = [
        Stage("root", asks(lambda *_: None, 4, awaits=True)),
        Stage("left", asks(ask, 4), after=("root",)),
        Stage("right", asks(ask, 4, awaits=True), after=("root",)),
        Stage("end", asks(ask, 5), after=("right",)),
    ]
    async with Pipeline(device, stages) as pipeline:
        with pytest.raises(InvalidArgumentError, match=r"stage 'end'.* stage '(left|right)'"):
            await quickly(pipeline.execute_iteration(0))


@pytest.mark.parametrize("ask", [buffer, pinned])
async def test_another_shape_is_allowed_for_another_item_and_in_one_stage(device: Device, ask: Any) -> None:
    def several(slot: Slot) -> Operation[None]:
        for extent in (slot.item, 2 * slot.item):
            slot.buffer("own", extent)
            slot.pinned("own", extent)
        return slot.stream.synchronize()

    shape = lambda item: item  # noqa: E731
    stages = [Stage("first", asks(ask, shape)), Stage("several", several), Stage("second", asks(ask, shape))]
    async with Pipeline(device, stages, 2) as pipeline:
        assert [result async for result in pipeline.run([1, 2, 3, 3, 5, 1])] == [None] * 6


async def test_buffer_that_was_freed_may_have_another_shape(device: Device) -> None:
    def free(slot: Slot) -> Operation[None]:
        slot.buffer("x").free()
        return slot.stream.synchronize()

    stages = [Stage("first", asks(buffer, 4)), Stage("free", free), Stage("second", asks(buffer, 8))]
    async with Pipeline(device, stages, 2) as pipeline:
        assert [result async for result in pipeline.run(range(4))] == [None] * 4
