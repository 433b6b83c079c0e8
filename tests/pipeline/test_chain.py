"""Stages of items that are not timed: the chain calls them, and leaves what is unusual to the item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, Operation, Pipeline, Slot, Stage
from aiocuda.lowlevel import Chain, Queue
from tests.helpers import AFFINE
from tests.pipeline.steps import SIZE, assert_quiet, down, stages, triple, up, values

pytestmark = pytest.mark.asyncio

#: More items than are timed at the beginning of a pipeline.
ITEMS = 100


class Calls:
    """The positions at which chains were called, and what they have returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, int]] = []
        enqueue = Chain.enqueue

        class Counting(Chain):
            def enqueue(inner, start: int, *args: Any) -> int:  # noqa: N805 - `self` is the list's owner
                end = enqueue(inner, start, *args)
                self.made.append((start, end))
                return end

        monkeypatch.setattr("aiocuda.pipeline._resources.Chain", Counting)


def twice(slot: Slot) -> list[Operation[None]]:
    """x → 3x + 1, in two launches."""
    buffer = slot.buffer("data", SIZE, np.uint32)
    return [
        slot.stream.launch(AFFINE, 4, 256, buffer, SIZE, 3, 0),
        slot.stream.launch(AFFINE, 4, 256, buffer, SIZE, 1, 1),
    ]


def first_of_two(slot: Slot) -> Operation[None]:
    """x → 3x + 1, in two launches of which the first is returned."""
    return twice(slot)[0]


def nothing(slot: Slot) -> None:
    """x → 3x + 1, without an operation."""
    triple(slot)


def event(slot: Slot) -> Any:
    """x → 3x + 1, with an event after it."""
    triple(slot)
    return slot.stream.record()


def no_work(slot: Slot) -> None:
    """Nothing at all."""


async def test_usual_stages_are_called_in_one_pass(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    async with Pipeline(device, stages()) as pipeline:
        assert await values(pipeline, range(ITEMS)) == [3 * item + 1 for item in range(ITEMS)]
        assert_quiet(pipeline, streams=3)
    assert calls.made.count((0, 3)) > ITEMS // 2


@pytest.mark.parametrize("step", [twice, first_of_two, nothing, event])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_unusual_stage_is_ended_by_the_item(
    device: Device, monkeypatch: pytest.MonkeyPatch, step: Callable[[Slot], Any], place: int
) -> None:
    """All work of the stage comes before the next stage, whatever it returns; the stages after it are usual again."""
    calls = Calls(monkeypatch)
    steps = [Stage("upload", up), Stage("download", down)]
    if place < 2:
        steps.insert(1, Stage("first", step if place == 0 else triple))
        steps.insert(2, Stage("second", step if place == 1 else triple))
        expected = [3 * (3 * item + 1) + 1 for item in range(ITEMS)]
        async with Pipeline(device, steps) as pipeline:
            assert await values(pipeline, range(ITEMS)) == expected
        assert {(0, place + 1), (place + 2, place + 2)} <= set(calls.made)  # the item makes the wait after it
        return
    seen: list[int] = []

    def both(slot: Slot) -> Any:
        step(slot)
        return down(slot)

    async with Pipeline(device, [Stage("upload", up), Stage("rest", both)]) as pipeline:
        async for result in pipeline.run(range(ITEMS)):
            seen.append(int(result[0]))  # noqa: PERF401 - an asynchronous comprehension hides the loop
    assert seen == [3 * item + 1 for item in range(ITEMS)]


async def test_stage_without_work_passes_the_order_on(device: Device) -> None:
    steps = stages()
    steps.insert(1, Stage("nothing", no_work))
    async with Pipeline(device, steps) as pipeline:
        assert await values(pipeline, range(ITEMS)) == [3 * item + 1 for item in range(ITEMS)]


async def test_stages_of_one_stream_need_no_wait(device: Device) -> None:
    async with Pipeline(device, stages(), streams=[["upload", "compute", "download"]]) as pipeline:
        assert await values(pipeline, range(ITEMS)) == [3 * item + 1 for item in range(ITEMS)]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["raises", "returns text"])
async def test_failure_names_its_stage(device: Device, place: int, wrong: str) -> None:
    steps, bad = stages(), ITEMS - 10
    good = steps[place]

    def function(slot: Slot) -> Any:
        if slot.item != bad:
            return good.function(slot)
        if wrong == "raises":
            raise ZeroDivisionError
        good.function(slot)
        return "text"

    steps[place] = Stage(good.name, function)
    pipeline, found = Pipeline(device, steps), []
    async with pipeline:
        with pytest.raises((ZeroDivisionError, TypeError)) as failed:
            async for result in pipeline.run(range(ITEMS)):
                found.append(int(result[0]))  # noqa: PERF401 - what came before the error counts
        assert failed.value.__notes__ == [f"in stage {good.name!r} of item {bad}, counted from 0"]
        assert found == [3 * item + 1 for item in range(bad)]
        assert await values(pipeline, range(3)) == [1, 4, 7]
        assert_quiet(pipeline, streams=3)


async def test_interrupt_in_a_stage_leaves_the_loop(device: Device) -> None:
    """Ctrl-C in a function that the chain calls is raised from the loop, and the pipeline is quiet afterwards."""
    steps = stages()

    def function(slot: Slot) -> Any:
        if slot.item == ITEMS - 10:
            raise KeyboardInterrupt
        return triple(slot)

    steps[1] = Stage("compute", function)
    pipeline = Pipeline(device, steps)
    with pytest.raises(KeyboardInterrupt):
        await values(pipeline, range(ITEMS))
    assert await values(pipeline, range(3)) in ([1, 4, 7], [])


@pytest.mark.python_core
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_interrupt_behind_a_stage_names_that_stage(
    device: Device, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Ctrl-C after a function has returned, and before the chain has found the end of its work."""
    ends_with, name = Queue.ends_with, stages()[place].name
    interrupts = False

    def interrupted(queue: Queue, operation: object) -> bool:
        if interrupts and queue.name == name:
            raise KeyboardInterrupt
        return ends_with(queue, operation)

    monkeypatch.setattr(Queue, "ends_with", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        async for result in Pipeline(device, stages()).run(range(ITEMS)):
            interrupts = int(result[0]) > 3 * (ITEMS // 2)
    (note,) = raised.value.__notes__
    assert note.startswith(f"in stage {name!r} of item ")
