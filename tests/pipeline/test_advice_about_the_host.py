"""Advice about stages that await, threads that share the GIL and a busy event loop helps who follows it. Real time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Kernel, Pipeline, Slot, Stage
from aiocuda._base._host_use import HostLoad, _sampler
from aiocuda.pipeline import PipelineAdvice, PipelineStats
from aiocuda.pipeline._advice import HostTimes, advise
from aiocuda.pipeline._meter import Meter
from aiocuda.pipeline._plan import Plan
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import block_until, until
from tests.pipeline.virtual import launches

#: Following advice makes a pipeline at least so many times as fast if it says that something helps, and never slower.
HELPS = 1.3
NO_SLOWER = 0.95

_sleep_with_gil = ctypes.PyDLL(None).usleep


def keep_gil(microseconds: int = 1500) -> None:
    """Keep the GIL, as Python code does, and use little of the processor."""
    total = 0
    for number in range(8_000):
        total += number * number
    _sleep_with_gil(microseconds)


class Run(NamedTuple):
    period: float  #: seconds from one result to the next
    statistics: PipelineStats
    advice: PipelineAdvice


#: The stages with these numbers of items at a time.
Stages = Callable[[dict[str, int]], Sequence[Stage]]


async def run(device: Device, stages: Stages, concurrency: dict[str, int], items: int = 120, **settings: Any) -> Run:
    async with Pipeline(device, stages(concurrency), **settings) as pipeline:
        began = time.perf_counter()
        async for _ in pipeline.run(range(items)):
            pass
        return Run((time.perf_counter() - began) / items, pipeline.statistics(), pipeline.advice())


async def follow(device: Device, stages: Stages, least: float, changed: Stages | None = None) -> tuple[float, Run]:
    """How many times as fast the advice makes a pipeline, and the run before. More runs while it is not ``least``."""
    found = 0.0
    for _ in range(5):
        before = await run(device, stages, {}, depth=3)
        advice = before.advice
        after = await run(device, changed or stages, advice.concurrency, depth=advice.depth, streams=advice.streams)
        found = max(found, before.period / after.period)
        if found >= least:
            break
    return found, before


def upload(slot: Slot) -> Any:
    return slot.stream.upload(np.zeros(100, np.float32))


def one_stage(function: Callable[[Slot], Any]) -> Stages:
    return lambda many: [Stage("work", function, concurrency=many.get("work", 1)), Stage("upload", upload)]


# -- stages that await -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("offloaded", [False, True])
async def test_stage_that_waits_gets_more_items_than_there_are_processors(device: Device, offloaded: bool) -> None:
    async def waits(slot: Slot) -> None:
        if offloaded:
            await device.offload(time.sleep, 4e-3)  # noqa: TID251 - a function that waits
        else:
            await asyncio.sleep(4e-3)

    gain, before = await follow(device, one_stage(waits), HELPS)
    assert before.advice.concurrency["work"] >= 4
    assert "measure again" in before.advice.why
    assert gain >= HELPS


@pytest.mark.slow
@pytest.mark.asyncio
async def test_stage_that_blocks_the_loop_gets_no_more_items_and_helps_in_a_thread(device: Device) -> None:
    def wait() -> None:
        time.sleep(3e-3)  # noqa: TID251 - a function that blocks

    async def blocks(slot: Slot) -> None:
        wait()

    async def in_a_thread(slot: Slot) -> None:
        await device.offload(wait)

    for _ in range(5):  # other programs may take the processor
        before = await run(device, one_stage(blocks), {}, depth=3)
        if before.advice.concurrency == {"work": 1}:
            break
    assert before.advice.concurrency == {"work": 1}
    assert "stage 'work' has the event loop for" in before.advice.why
    assert before.advice.period_ms == pytest.approx(before.period * 1e3, rel=0.1)
    then = (await run(device, one_stage(in_a_thread), {}, depth=3)).advice  # run it in a thread, then ask again
    assert then.concurrency["work"] > 1
    after = await run(device, one_stage(in_a_thread), then.concurrency, depth=then.depth)
    assert after.period * HELPS <= before.period


# -- the GIL ---------------------------------------------------------------------------------------------------------


def three_stages(function: Callable[[Slot], Any]) -> Stages:
    return lambda many: [Stage(name, function, concurrency=many.get(name, 1)) for name in "abc"]


@contextlib.contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(4, multiprocessing.get_context("forkserver")) as executor:
        list(executor.map(keep_gil, [1] * 16))  # start them
        yield executor


@pytest.mark.slow
@pytest.mark.asyncio
async def test_nothing_is_promised_where_offloaded_functions_share_the_gil(device: Device) -> None:
    async def offloads(slot: Slot) -> None:
        await device.offload(keep_gil)

    gain, before = await follow(device, three_stages(offloads), NO_SLOWER)
    assert before.advice.concurrency == {"a": 1, "b": 1, "c": 1}
    assert before.advice.depth >= 3
    assert "share the GIL" in before.advice.why
    assert before.advice.period_ms == pytest.approx(before.period * 1e3, rel=0.1)
    assert gain >= NO_SLOWER


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
async def test_functions_that_share_the_gil_help_in_processes(device: Device) -> None:
    async def offloads(slot: Slot) -> None:
        await device.offload(keep_gil)

    with processes() as executor:

        async def in_a_process(slot: Slot) -> None:
            await asyncio.get_running_loop().run_in_executor(executor, keep_gil)

        gain, before = await follow(device, three_stages(offloads), HELPS, three_stages(in_a_process))
    assert "ProcessPoolExecutor" in before.advice.why
    assert gain >= HELPS


@pytest.mark.slow
@pytest.mark.asyncio
async def test_nothing_is_promised_where_kernels_of_the_host_driver_share_the_gil() -> None:
    kernel = Kernel("k", source="__global__ void k();", host=keep_gil_once)

    def launch(slot: Slot) -> Any:
        return slot.stream.launch(kernel, 1, 1)

    async with aiocuda.open_device(driver="host") as device:
        stages = [Stage(name, launch) for name in "abc"]
        before = await run(device, lambda many: stages, {}, depth=1)
        advice = before.advice
        assert "share the GIL" in advice.why
        assert advice.period_ms == pytest.approx(before.period * 1e3, rel=0.1)


def keep_gil_once() -> None:
    keep_gil()


# -- what is measured ------------------------------------------------------------------------------------------------


def is_idle() -> bool:
    """Whether the GIL is not sampled, after the end of runs that earlier tests have dropped."""
    gc.collect()
    return not _sampler.is_at_work


@pytest.mark.asyncio
async def test_gil_is_sampled_during_runs_only() -> None:
    async def waits(slot: Slot) -> None:
        await asyncio.sleep(0)

    async with aiocuda.open_device(driver="host") as device:
        await until(is_idle)
        async with Pipeline(device, one_stage(waits)({})) as pipeline:
            assert not _sampler.is_at_work
            async for _ in pipeline.run(range(3)):
                await until(lambda: _sampler.is_at_work)
            await until(lambda: not _sampler.is_at_work, "the end with the run")
            async with contextlib.aclosing(pipeline.run(range(3))) as results:
                await anext(results)
                await until(lambda: _sampler.is_at_work)
            await until(lambda: not _sampler.is_at_work, "the end with a run that was left")
            pipeline.reset_statistics()
            assert pipeline._resources.host_use.load() == HostLoad(0.0, 0.0, 0.0, None)


def test_nothing_of_the_host_is_measured_in_virtual_time() -> None:
    async def waits(slot: Slot) -> None:
        assert not _sampler.is_at_work
        await asyncio.sleep(1e-3)

    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(1)) as device:
            async with Pipeline(device, [Stage("wait", waits), Stage("compute", launches(2))]) as pipeline:
                async for _ in pipeline.run(range(20)):
                    pass
                assert pipeline._resources.host_times() is None

    block_until(is_idle)
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


@pytest.mark.asyncio
async def test_stage_that_is_timed_raises_as_any_other(device: Device) -> None:
    class ItemError(Exception):
        pass

    async def raises(slot: Slot) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
        raise ItemError

    async with Pipeline(device, one_stage(raises)({})) as pipeline:
        with pytest.raises(ItemError) as caught:
            async for _ in pipeline.run(range(3)):
                pass
    assert caught.value.__notes__ == ["in stage 'work' of item 0, counted from 0"]


# -- the numbers -----------------------------------------------------------------------------------------------------


def advised(
    gil: float | None, cpu: float, own: float, *, loop: float = 0.0, concurrency: int = 1, period: float = 10e-3
) -> PipelineAdvice:
    """The advice for a stage that takes 10 ms and one that takes 0.1 ms, on four processors, after a second."""

    async def work(slot: Slot) -> None:
        pass

    plan = Plan([Stage("work", work, concurrency=concurrency), Stage("upload", upload)])
    meter = Meter(plan)
    for _ in range(20):
        meter.add_host_time(0, 10e-3)
        meter.add_host_time(1, 0.1e-3)
        meter.add_item(10e-3)
    return advise(plan, meter, 3, processors=4, host=HostTimes(HostLoad(1.0, cpu, own, gil), [loop, 0.0], period))


@pytest.mark.parametrize(
    ("host", "concurrency"),
    [
        ({"gil": 0.05, "cpu": 0.1, "own": 0.1}, 8),  # it waits
        ({"gil": 0.05, "cpu": 1.0, "own": 0.05}, 4),  # it computes without the GIL
        ({"gil": 0.35, "cpu": 0.5, "own": 0.05}, 2),  # it computes in Python for a part of its time
        ({"gil": 0.95, "cpu": 1.0, "own": 0.05}, 1),  # and for all of its time
        ({"gil": None, "cpu": 0.1, "own": 0.1}, 4),  # too short a run
        ({"gil": 0.95, "cpu": 1.0, "own": 1.0, "loop": 9e-3}, 2),  # on the event loop
        ({"gil": 0.05, "cpu": 3.9, "own": 0.05, "concurrency": 6}, 6),  # no processor is left
    ],
)
def test_numbers_of_items_at_a_time(host: dict[str, Any], concurrency: int) -> None:
    advice = advised(**host)
    assert advice.concurrency == {"work": concurrency}
    assert ("share the GIL" in advice.why) == (host["gil"] == 0.95 and not host.get("loop"))


def test_period_is_that_of_the_run_where_the_host_needs_more_than_the_stages() -> None:
    assert advised(0.05, 0.1, 0.1, period=12e-3).period_ms == pytest.approx(12)
