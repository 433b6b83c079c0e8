"""I4, I6: the throughput and the statistics of a pipeline, in virtual time: to the microsecond, on any machine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, Operation, Pipeline, PipelineStats, Slot, Stage
from aiocuda.observe import Timeline
from aiocuda.pipeline import PipelineAdvice
from tests.benchmarks.kernels import nanoseconds, spin
from tests.pipeline.virtual import MIXES, copies, in_virtual_time, launches, measure, three


def run(stages: Sequence[Stage], depth: int, items: int, **how: Any) -> tuple[float, PipelineStats, PipelineAdvice]:
    """Seconds, figures and advice."""

    async def main(device: Device) -> tuple[float, PipelineStats, PipelineAdvice]:
        async with Pipeline(device, stages, depth, **how) as pipeline:
            seconds = await measure(pipeline, items)
            return seconds, pipeline.statistics(), pipeline.advice()

    return in_virtual_time(main)


def bound(times: Sequence[float], items: int) -> float:
    """Row I6: the speed-up that nothing can exceed, over one step after the other."""
    return items * sum(times) / (items * max(times) + sum(times) - max(times))


@pytest.mark.parametrize("times", MIXES)
def test_speed_up_is_the_bound(times: Sequence[float]) -> None:
    """I6: what is missing is the host's time between an item's end and the next one's begin: none with a slot more."""
    items = 100
    alone = items * sum(times) * 1e-3
    for depth, least in ((3, 0.995), (4, 0.9999)):
        seconds, statistics, _ = run(three(times), depth, items)
        assert least <= alone / seconds / bound(times, items) <= 1
        assert statistics.overlap_efficiency == pytest.approx(items * max(times) * 1e-3 / seconds, abs=1e-3)
        assert statistics.utilisation == pytest.approx(items * times[1] * 1e-3 / seconds, abs=1e-3)


def test_one_step_after_the_other_takes_the_sum() -> None:
    async def main(device: Device) -> None:
        async with Pipeline(device, three((2, 5, 2))) as pipeline:
            async for _ in pipeline.run(range(10), overlap=False):
                pass
            statistics = pipeline.statistics()
            assert statistics.wall_seconds == pytest.approx(10 * 9e-3, rel=0.02)
            assert statistics.peak_busy_slots == 1
            assert statistics.bottleneck().name == "compute"

    in_virtual_time(main)


# -- figures, and the trace


#: Operations that take device time.
WORK = ("upload", "launch", "download")

#: Kernels that process: one; two, one after the other, and side by side.
KINDS: dict[str, list[Stage]] = {
    "one": three((2, 5, 2)),
    "chain": [
        Stage("upload", copies(2, "up")),
        Stage("a", launches(3)),
        Stage("b", launches(4)),
        Stage("download", copies(1, "down")),
    ],
    "fork": [
        Stage("upload", copies(1, "up")),
        Stage("a", launches(2)),
        Stage("b", launches(3), after="upload"),
        Stage("c", launches(6), after="b"),
        Stage("download", copies(2, "down"), after=("a", "c")),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_figures_are_those_of_the_exported_trace(kind: str, depth: int) -> None:
    """I4: utilisation and efficiency, recomputed from what Perfetto would show, agree within 5 %."""
    stages = KINDS[kind]

    async def main(device: Device) -> tuple[PipelineStats, str]:
        async with Pipeline(device, stages, depth) as pipeline:
            await measure(pipeline, 1)
            pipeline.reset_statistics()
            async with Timeline(device) as timeline:
                async for _ in pipeline.run(range(40)):
                    pass
            return pipeline.statistics(), timeline.to_trace()

    statistics, trace = in_virtual_time(main)
    events = json.loads(trace)["traceEvents"]
    names = [event for event in events if event["name"] == "thread_name"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in names}
    work = [event for event in events if event["ph"] == "X" and event["cat"] in WORK]
    wall = max(event["ts"] + event["dur"] for event in work) - min(event["ts"] for event in work)
    busy = dict.fromkeys((stage.name for stage in stages), 0.0)
    for event in work:
        busy[rows[event["pid"], event["tid"]]] += event["dur"]
    processing = max(busy[stage.name] for stage in stages[1:-1])
    assert statistics.utilisation == pytest.approx(processing / wall, rel=0.05)
    assert statistics.overlap_efficiency == pytest.approx(max(busy.values()) / wall, rel=0.05)
    assert statistics.throughput == pytest.approx(40 / wall * 1e6, rel=0.05)
    assert statistics.peak_busy_slots == depth


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_figures_are_those_of_the_exported_trace_on_a_gpu() -> None:
    """I4: not in virtual time. If the thread is interrupted between a timing event and the launch, only one of the two
    times includes that. So the test runs alone: `ALONE_ON_A_GPU`.
    """

    def compute(slot: Slot) -> Operation[None]:
        return slot.stream.launch(spin(5e-3), 1, 1, nanoseconds(5e-3))

    stages = [Stage("upload", copies(1, "up")), Stage("compute", compute), Stage("download", copies(1, "down"))]
    async with aiocuda.open_device(driver="cuda") as device, Pipeline(device, stages) as pipeline:
        async for _ in pipeline.run(range(3)):
            pass
        pipeline.reset_statistics()
        async with Timeline(device) as timeline:
            async for _ in pipeline.run(range(40)):
                pass
        statistics = pipeline.statistics()
    events = [event for event in json.loads(timeline.to_trace())["traceEvents"] if event.get("cat") in WORK]
    wall = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    kernels = sum(event["dur"] for event in events if event["cat"] == "launch")
    assert statistics.stage_seconds["compute"] == pytest.approx(kernels * 1e-6, rel=0.05)
    assert statistics.utilisation == pytest.approx(kernels / wall, rel=0.05)
    assert statistics.overlap_efficiency == pytest.approx(kernels / wall, rel=0.05)


def test_utilisation_is_that_of_the_busiest_of_overlapping_kernels() -> None:
    """I4"""
    seconds, statistics, _ = run(KINDS["fork"], 4, 50)
    assert sum(statistics.stage_seconds[name] for name in "abc") == pytest.approx(50 * 11e-3, rel=1e-3)
    assert statistics.utilisation == statistics.overlap_efficiency
    assert statistics.stage_seconds["c"] / seconds > 0.98


# -- what limits it


def test_the_stage_that_limits() -> None:
    seconds, statistics, _ = run(three((2, 5, 2)), 3, 50)
    found = statistics.bottleneck()
    assert (found.name, found.kind) == ("compute", "stage")
    assert found.share == pytest.approx(50 * 5e-3 / seconds, abs=1e-3)
    assert "5 ms for each item: only a quicker stage 'compute' helps" in found.why


def test_a_stage_that_waits_for_the_others() -> None:
    _, statistics, _ = run(three((2, 5, 2)), 1, 50)
    found = statistics.bottleneck()
    assert (found.name, found.kind) == ("compute", "stage")
    assert found.share == pytest.approx(5 / 9, abs=0.01)
    assert re.search("only 5[56]% of the time", found.why)
    assert "at most 1 in use at a time" in found.why


def test_a_source_and_a_consumer_that_limit() -> None:
    async def main(device: Device) -> None:
        async def source() -> Any:
            for number in range(30):
                await asyncio.sleep(8e-3)
                yield number

        async with Pipeline(device, three((2, 5, 2))) as pipeline:
            assert pipeline.statistics().bottleneck().kind == "nothing"
            await measure(pipeline, 3)
            pipeline.reset_statistics()
            async for _ in pipeline.run(source()):
                pass
            found = pipeline.statistics().bottleneck()
            assert (found.name, found.kind) == ("source", "source")
            assert "8 ms, longer than any stage" in found.why
            pipeline.reset_statistics()
            async for _ in pipeline.run(range(30)):
                await asyncio.sleep(7e-3)
            found = pipeline.statistics().bottleneck()
            assert (found.name, found.kind) == ("consumer", "consumer")
            assert found.share == pytest.approx(30 * 7e-3 / pipeline.statistics().wall_seconds, rel=0.01)
            assert "7 ms" in pipeline.advice().why

    in_virtual_time(main)
