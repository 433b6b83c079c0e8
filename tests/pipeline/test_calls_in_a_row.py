"""Advice for `execute_iteration` in a plain loop, which does not overlap."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, ManagedContext, PerformanceWarning, Pipeline, Slot, Stage, StepConfig
from aiocuda._base import _advice
from aiocuda.pipeline._calls_in_a_row import CallsInARow

MESSAGE = r"3 times in a row execute_iteration was called .*pipeline\.submit\(item\).*pipeline\.run\(items\)"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test gets the advice: it is given once for each line of a program."""
    monkeypatch.setattr(_advice, "_given", set())


def calls(*times: tuple[float, float]) -> None:
    """Calls from one time to another."""
    row = CallsInARow()
    for began, ended in times:
        row.begin(began)
        row.end(began, ended)


def test_a_call_begins_within_a_tenth_of_the_time_of_the_one_before() -> None:
    calls((0, 1), (1.05, 2.05), (2.1, 3.1), (3.25, 4.25), (4.3, 5.3), (5.35, 6.35))
    calls((0, 1), (1, 2), (2, 3))
    with pytest.warns(PerformanceWarning, match=MESSAGE):
        calls((0, 1), (1.05, 2.05), (2.1, 3.1), (3.15, 4.15))


def test_calls_that_overlap_begin_another_row() -> None:
    row = CallsInARow()
    for began in range(9):
        row.begin(began)
        row.end(began, began + 1)
        if began % 3 == 2:
            row.interrupt()


async def work(slot: Slot) -> None:
    await asyncio.sleep(0.02)


async def one_after_the_other(pipeline: Pipeline, count: int = 4) -> None:
    for item in range(count):
        await pipeline.execute_iteration(item)


async def found(what: Any, *args: Any, attempts: int = 1) -> list[warnings.WarningMessage]:
    """Return the warnings of a coroutine function, which is called again until there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(attempts):
            await what(*args)
            if caught:
                break
    return caught


@pytest.mark.asyncio
async def test_once_per_pipeline_with_the_line_of_the_program(device: Device) -> None:
    async with Pipeline(device, [Stage("work", work)]) as pipeline:
        (warning,) = await found(one_after_the_other, pipeline, attempts=700)  # a busy machine may be late in between
        assert warning.category is PerformanceWarning
        assert warning.filename == __file__

        async def again() -> None:
            for _ in range(5):
                await pipeline.execute_iteration(1)

        assert await found(again) == []


@pytest.mark.asyncio
async def test_never_for_calls_that_overlap_tickets_depth_one_and_steps(device: Device) -> None:
    async def together(pipeline: Pipeline) -> None:
        for _ in range(5):
            await asyncio.gather(*(pipeline.execute_iteration(item) for item in range(2)))

    async def tickets(pipeline: Pipeline) -> None:
        for item in range(5):
            await (await pipeline.submit(item))

    async def pauses(pipeline: Pipeline) -> None:
        for item in range(5):
            await pipeline.execute_iteration(item)
            await asyncio.sleep(0.04)

    for function, depth in ((together, 3), (tickets, 3), (pauses, 3), (one_after_the_other, 1)):
        async with Pipeline(device, [Stage("work", work)], depth) as pipeline:
            assert await found(function, pipeline) == []

    async def steps() -> None:
        async with ManagedContext(driver=device.driver) as context:
            for _ in range(8):
                await context.triple_buffered_step(StepConfig())
                await context.flush()

    assert await found(steps) == []


@pytest.mark.asyncio
async def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", "0")
    async with aiocuda.open_device(driver="host") as device, Pipeline(device, [Stage("work", work)]) as pipeline:
        assert await found(one_after_the_other, pipeline, 8) == []


@pytest.mark.asyncio
async def test_a_filter_that_raises_it_begins_nothing(device: Device) -> None:
    async with Pipeline(device, [Stage("work", work)]) as pipeline:
        with warnings.catch_warnings(), pytest.raises(PerformanceWarning, match=MESSAGE):
            warnings.simplefilter("error")
            await one_after_the_other(pipeline, 500)
        assert pipeline.ring.busy == 0
        await (await pipeline.submit(1))
