"""Advice about stages that await, threads that share the GIL and a busy event loop helps who follows it. Real time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Kernel, Pipeline, Slot, Stage
from aiocuda._base._host_use import HostLoad
from aiocuda.pipeline import PipelineAdvice
from aiocuda.pipeline._advice import HostTimes, advise
from aiocuda.pipeline._meter import Meter
from aiocuda.pipeline._plan import Plan
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import quick_probe
from tests.pipeline.virtual import launches

__all__ = ["quick_probe"]

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
    advice: PipelineAdvice


#: The stages with these numbers of items at a time.
Stages = Callable[[dict[str, int]], Sequence[Stage]]


async def run(device: Device, stages: Stages, concurrency: dict[str, int], items: int = 160, **settings: Any) -> Run:
    async with Pipeline(device, stages(concurrency), **settings) as pipeline:
        began = time.perf_counter()
        async for _ in pipeline.run(range(items)):
            pass
        return Run((time.perf_counter() - began) / items, pipeline.advice())


async def follow(
    device: Device, stages: Stages, words: str, least: float, changed: Stages | None = None
) -> PipelineAdvice:
    """Follow the advice, which has these words, and return it. Again, while that helps too little."""
    for _ in range(5):
        before = await run(device, stages, {}, depth=3)
        advice = before.advice
        after = await run(device, changed or stages, advice.concurrency, depth=advice.depth, streams=advice.streams)
        if words in advice.why and after.period * least <= before.period:
            break
    assert words in advice.why
    assert after.period * least <= before.period
    return advice


def upload(slot: Slot) -> Any:
    return slot.stream.upload(np.zeros(100, np.float32))


def one_stage(function: Callable[[Slot], Any]) -> Stages:
    return lambda many: [Stage("work", function, concurrency=many.get("work", 1)), Stage("upload", upload)]


def three_stages(function: Callable[[Slot], Any]) -> Stages:
    return lambda many: [Stage(name, function, concurrency=many.get(name, 1)) for name in "abc"]


@contextlib.contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(4, multiprocessing.get_context("forkserver")) as executor:
        list(executor.map(keep_gil, [1] * 16))  # start them
        yield executor


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
@pytest.mark.parametrize("offloaded", [False, True])
async def test_stage_that_waits_gets_more_items_at_a_time(device: Device, offloaded: bool) -> None:
    async def waits(slot: Slot) -> None:
        if offloaded:
            await device.offload(time.sleep, 4e-3)  # noqa: TID251 - a function that waits
        else:
            await asyncio.sleep(4e-3)

    advice = await follow(device, one_stage(waits), "measure again", HELPS)
    assert advice.concurrency["work"] >= 2


@pytest.mark.slow
@pytest.mark.asyncio
async def test_stage_that_blocks_the_loop_gets_no_more_items_and_helps_in_a_thread(device: Device) -> None:
    def wait() -> None:
        time.sleep(3e-3)  # noqa: TID251 - a function that blocks

    async def blocks(slot: Slot) -> None:
        wait()

    async def in_a_thread(slot: Slot) -> None:
        await device.offload(wait)

    advice = await follow(device, one_stage(blocks), "stage 'work' has the event loop for", NO_SLOWER)
    assert advice.concurrency == {"work": 1}
    await follow(device, one_stage(in_a_thread), "concurrency=", HELPS)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
async def test_functions_that_share_the_gil_help_in_processes(device: Device) -> None:
    async def offloads(slot: Slot) -> None:
        await device.offload(keep_gil)

    with processes() as executor:

        async def in_a_process(slot: Slot) -> None:
            await asyncio.get_running_loop().run_in_executor(executor, keep_gil)

        advice = await follow(device, three_stages(offloads), "ProcessPoolExecutor", HELPS, three_stages(in_a_process))
    assert "share the GIL" in advice.why
    assert advice.concurrency == {"a": 1, "b": 1, "c": 1}


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
async def test_nothing_is_promised_where_kernels_of_the_host_driver_share_the_gil() -> None:
    kernel = Kernel("k", source="__global__ void k();", host=lambda: keep_gil())

    def launch(slot: Slot) -> Any:
        return slot.stream.launch(kernel, 1, 1)

    async with aiocuda.open_device(driver="host") as device:
        before = await run(device, lambda many: [Stage(name, launch) for name in "abc"], {}, depth=1)
        assert "share the GIL" in before.advice.why or "other programs have the processors" in before.advice.why
        assert before.advice.period_ms == pytest.approx(before.period * 1e3, rel=0.1)


# -- what is measured --------------------------------------------------------------------------------------------------


async def waits(slot: Slot) -> None:
    await asyncio.sleep(1e-3)


@pytest.mark.asyncio
async def test_run_measures_its_use_of_the_host_until_the_statistics_restart() -> None:
    async with aiocuda.open_device(driver="host") as device, Pipeline(device, one_stage(waits)({})) as pipeline:
        async with contextlib.aclosing(pipeline.run(range(3))) as results:
            await anext(results)
        host = pipeline._resources.host_times()
        assert host is not None
        assert 0 < host.load.own_cpu <= host.load.cpu
        assert pipeline._resources.host_times() == host  # the run that was left has ended
        async for _ in pipeline.run(range(3)):
            pass
        assert "waits for the GIL are not measured: that takes 4 s of a run, on Linux" in pipeline.advice().why
        pipeline.reset_statistics()
        assert pipeline._resources.host_use.load() == HostLoad()


def test_nothing_of_the_host_is_measured_in_virtual_time() -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(1)) as device:
            async with Pipeline(device, [Stage("wait", waits), Stage("compute", launches(2))]) as pipeline:
                async for _ in pipeline.run(range(20)):
                    pass
                assert pipeline._resources.host_times() is None
                assert "GIL" not in pipeline.advice().why

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


# -- the numbers and the texts -----------------------------------------------------------------------------------------

GIL, LOOP = "threads share the GIL, and have it for", "the event loop has the GIL for 95% of the time"
OTHERS, QUOTA = (
    "other programs have the processors: the event loop was queued for one for 0.5 s of 1 s",
    "has used up its quota in 50% of the periods",
)
NOT_MEASURED = "waits for the GIL are not measured"


@pytest.mark.parametrize(
    ("gil", "cpu", "own", "more", "concurrency", "words"),
    [
        (0.05, 0.1, (0.1, 0.0), {}, 8, None),  # it waits
        (0.05, 1.0, (0.05, 0.0), {}, 4, None),  # it computes without the GIL
        (0.05, 3.9, (0.05, 0.0), {"concurrency": 6}, 6, None),  # no processor is left
        (0.35, 0.5, (0.05, 0.0), {}, 3, None),  # it computes in Python for a part of its time, and for all of it
        (0.95, 1.0, (0.05, 0.0), {}, 1, GIL),
        (0.05, 0.1, (0.1, 0.0), {"loop": 9e-3}, 1, "stage 'work' has the event loop for 9 ms of the 10 ms"),
        (0.95, 0.9, (0.8, 0.1), {}, 1, LOOP),  # the loop has it
        (0.05, 0.1, (0.1, 0.0), {"blocking": {0}}, 1, "stage 'work' blocks the event loop"),
        (0.05, 0.1, (0.05, 0.5), {}, 4, OTHERS),
        (0.05, 0.1, (0.05, 0.5), {"throttled": 5}, 4, QUOTA),
        (None, 0.1, (0.1, 0.0), {}, 8, NOT_MEASURED),  # a short run: it waits, or computes
        (None, 1.0, (0.05, 0.0), {}, 4, NOT_MEASURED),
    ],
)
def test_reasons(
    gil: float | None, cpu: float, own: tuple[float, float], more: dict[str, Any], concurrency: int, words: str | None
) -> None:
    """A stage takes 10 ms, and another one 0.1 ms, on four processors, after a second."""
    load = HostLoad(1.0, *own, cpu, 10, more.get("throttled", 0), gil)
    plan = Plan([Stage("work", waits, concurrency=more.get("concurrency", 1)), Stage("upload", upload)])
    meter = Meter(plan)
    for _ in range(20):
        meter.add_host_time(0, 10e-3)
        meter.add_host_time(1, 0.1e-3)
        meter.add_item(10e-3)
    host = HostTimes(load, [more.get("loop", 0.0), 0.0], 12e-3)
    advice = advise(plan, meter, 3, processors=4, blocking=more.get("blocking", ()), host=host)
    assert advice.concurrency == {"work": concurrency}
    for each in (GIL, LOOP, OTHERS, QUOTA, NOT_MEASURED):
        assert (each in advice.why) == (each == words)
    assert (words or "measured") in f"measured {advice.why}"
    if "concurrency" not in more:
        assert advice.period_ms == pytest.approx(12)  # that of the run, where the host needs more than the stages
