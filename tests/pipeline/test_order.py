"""`Pipeline.set_order`: the stages in another order, between runs."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    Operation,
    Pipeline,
    Slot,
    Stage,
)
from tests.helpers import AFFINE, in_thread, quickly
from tests.pipeline.steps import SIZE, assert_quiet, down, up, value, values
from tests.pipeline.virtual import in_virtual_time, measure, three


def affine(a: int, b: int) -> Any:
    def launch(slot: Slot) -> Operation[None]:
        return slot.stream.launch(AFFINE, 4, 256, slot.buffer("data", SIZE, np.uint32), SIZE, a, b)

    return launch


def four() -> list[Stage]:
    """x → 2x, and x → x + 5, between an upload and a download."""
    return [Stage("up", up), Stage("double", affine(2, 0)), Stage("add", affine(1, 5)), Stage("down", down)]


DOUBLE_FIRST = ("up", "double", "add", "down")
ADD_FIRST = ("up", "add", "double", "down")


def names(pipeline: Pipeline) -> tuple[str, ...]:
    return tuple(stage.name for stage in pipeline.stages)


@pytest.mark.asyncio
@pytest.mark.parametrize("inside", [False, True], ids=["streams closed", "streams open"])
@pytest.mark.parametrize("streams", [None, [("double", "down")]], ids=["own streams", "shared stream"])
async def test_stages_run_in_the_new_order(device: Device, inside: bool, streams: list[tuple[str, str]] | None) -> None:
    pipeline = Pipeline(device, four(), 2, streams=streams)
    if inside:
        await pipeline.__aenter__()
    for order, expected in [(DOUBLE_FIRST, [7, 9, 11]), (ADD_FIRST, [12, 14, 16]), (DOUBLE_FIRST, [7, 9, 11])]:
        pipeline.set_order(order)
        assert names(pipeline) == order
        assert await values(pipeline, (1, 2, 3)) == expected
        assert value(await quickly(pipeline.execute_iteration(1))) == expected[0]
        tickets = [await quickly(pipeline.submit(number)) for number in (1, 2, 3)]
        assert [value(await quickly(ticket)) for ticket in tickets] == expected
        assert list(pipeline.statistics().stage_seconds) == list(order)
    assert "add → double" not in repr(pipeline)
    await pipeline.aclose()
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_stages_that_await_keep_their_order(device: Device) -> None:
    passed: list[tuple[str, int]] = []

    def stage(name: str) -> Stage:
        async def work(slot: Slot) -> int:
            await asyncio.sleep(0)
            passed.append((name, slot.item))
            return int(slot.item)

        return Stage(name, work)

    async with Pipeline(device, [stage("a"), stage("b")]) as pipeline:
        for order in ("ab", "ba", "ab"):
            passed.clear()
            pipeline.set_order(tuple(order))
            assert [result async for result in pipeline.run(range(5))] == list(range(5))
            for name in order:
                assert [item for other, item in passed if other == name] == list(range(5))
            for item in range(5):
                assert passed.index((order[0], item)) < passed.index((order[1], item))


@pytest.mark.asyncio
async def test_replayed_stages_are_captured_again(device: Device) -> None:
    called: list[str] = []

    def fill(slot: Slot) -> None:
        slot.pinned("source", SIZE, np.uint32)[:] = slot.item

    def send(slot: Slot) -> Operation[Any]:
        called.append("up")
        return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), slot.pinned("source", SIZE, np.uint32))

    def receive(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("result", SIZE, np.uint32))

    stages = [Stage("up", send, prepare=fill), *four()[1:3], Stage("down", receive)]
    async with Pipeline(device, stages, 2, replay=True) as pipeline:
        assert await values(pipeline, range(6)) == [2 * number + 5 for number in range(6)]
        pipeline.set_order(ADD_FIRST)
        assert await values(pipeline, range(6)) == [2 * (number + 5) for number in range(6)]
    assert called == ["up"] * 4


def test_streams_and_figures_are_those_of_the_new_order() -> None:
    """A pipeline as fast as one that was made with this order."""

    async def main(device: Device) -> None:
        async with Pipeline(device, three((2, 5, 2))) as pipeline:
            pipeline.set_order(["download", "compute", "upload"])
            assert await measure(pipeline, 50) / 50 == pytest.approx(5.08e-3, abs=1e-4)
            seconds = pipeline.statistics().stage_seconds
            assert [round(one / 50 * 1e3) for one in seconds.values()] == [2, 5, 2]
            assert list(seconds) == ["download", "compute", "upload"]

    in_virtual_time(main)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("up", InvalidTypeError, "the order is a sequence of the stages' names, each once, not 'up'"),
        (None, InvalidTypeError, "the order is a sequence of the stages' names, each once, not None"),
        ((), InvalidArgumentError, "the order of no stage has 'up' 0 times: name every stage once"),
        (("up", "down"), InvalidArgumentError, "the order 'up', 'down' has 'double' 0 times: name every stage once"),
        ((*ADD_FIRST, "up"), InvalidArgumentError, "has 'up' 2 times: name every stage once"),
        ((*ADD_FIRST, "left"), InvalidArgumentError, "the order names the stage 'left', and there are 'up', 'double'"),
        ((*ADD_FIRST, 3), InvalidArgumentError, "the order names the stage 3, and there are"),
    ],
)
async def test_refused_orders(device: Device, order: Any, error: type[Exception], message: str) -> None:
    pipeline = Pipeline(device, four())
    with pytest.raises(error, match=re.escape(message)):
        pipeline.set_order(order)
    assert names(pipeline) == DOUBLE_FIRST
    assert await values(pipeline, [1]) == [7]


@pytest.mark.asyncio
async def test_prerequisite_stays_before_its_stage(device: Device) -> None:
    stages = [*four()[:3], Stage("down", down, after=("double", "add"))]
    pipeline = Pipeline(device, stages)
    with pytest.raises(InvalidArgumentError, match="stage 'down' comes after 'add', which is no stage before it"):
        pipeline.set_order(("up", "double", "down", "add"))
    pipeline.set_order(ADD_FIRST)
    assert await values(pipeline, [1]) == [12]


@pytest.mark.asyncio
async def test_not_while_items_are_in_flight(device: Device) -> None:
    async with Pipeline(device, four()) as pipeline:
        ticket = await pipeline.submit(1)
        with pytest.raises(BusyError, match="1 items of submit or execute_iteration are in flight"):
            pipeline.set_order(ADD_FIRST)
        assert value(await quickly(ticket)) == 7
        run = pipeline.run(range(5))
        assert value(await quickly(anext(run))) == 5
        with pytest.raises(BusyError, match="another run of this pipeline has not ended"):
            pipeline.set_order(ADD_FIRST)
        await run.aclose()

        async def elsewhere() -> None:
            pipeline.set_order(ADD_FIRST)

        with pytest.raises(Exception, match="another event loop"):
            in_thread(elsewhere)
        pipeline.set_order(ADD_FIRST)
        assert value(await quickly(pipeline.execute_iteration(1))) == 12
    with pytest.raises(ClosedError, match="this pipeline has been closed"):
        pipeline.set_order(DOUBLE_FIRST)
