"""Advice on depth and streams: following it is never slower. In virtual time, which has no noise.

What the host does to stages is in `test_advice_about_the_host.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiocuda import BusyError, Device, Pipeline, Slot, Stage
from aiocuda._base._processor import last_level_cache, processors
from aiocuda.pipeline import PipelineAdvice
from aiocuda.pipeline._advice import advise
from aiocuda.pipeline._meter import Meter
from aiocuda.pipeline._plan import Plan
from tests.pipeline.virtual import MIXES, in_virtual_time, launches, measure, three

#: Host time that virtual time does not leave out: a wake-up at the end, a microsecond each query, of which a stream
#: that stages share wants three or four more for each item.
SLACK = 2e-3

ITEMS = 18


def run(
    stages: Sequence[Stage], depth: int, streams: Any = None, *, seed: int | None = None, consumer: float = 0.0
) -> tuple[float, PipelineAdvice]:
    """Seconds for some items, and the advice of that run."""

    async def main(device: Device) -> tuple[float, PipelineAdvice]:
        async with Pipeline(device, stages, depth, streams=streams) as pipeline:
            return await measure(pipeline, ITEMS, consumer), pipeline.advice()

    return in_virtual_time(main, seed)


def follow(stages: Sequence[Stage], depth: int, **how: Any) -> tuple[float, float, PipelineAdvice]:
    """Seconds before and after, and the advice."""
    before, advice = run(stages, depth, **how)
    after, _ = run(stages, advice.depth, advice.streams, **how)
    return before, after, advice


@pytest.mark.parametrize("seed", range(14))
def test_following_it_is_never_slower(seed: int) -> None:
    """Stages of a tenth of a millisecond to a tenth of a second, whatever the depth was."""
    chance = random.Random(seed)
    times = [round(chance.choice([0.1, 0.3, 1, 2, 5, 10, 100]) * chance.uniform(0.7, 1.4), 3) for _ in range(3)]
    before, after, advice = follow(three(times), chance.randint(1, 6))
    assert after <= before * (1 + SLACK), (times, advice)
    assert after == pytest.approx((ITEMS * max(times) + sum(times) - max(times)) * 1e-3, rel=0.02)  # nothing is quicker


def test_the_hosts_own_time_counts() -> None:
    """The stages alone would fit into three slots, and the host's moment between two items would not."""
    before, after, advice = follow(three((0.1, 0.1, 0.09)), 6)
    assert after <= before * (1 + SLACK), advice


@pytest.mark.parametrize("seed", range(12))
def test_following_it_is_never_slower_where_stages_fork(seed: int) -> None:
    chance = random.Random(seed)
    stages: list[Stage] = []
    for number in range(chance.randint(2, 6)):
        after = None if chance.random() < 0.6 else [one.name for one in stages if chance.random() < 0.5]
        stages.append(Stage(f"stage {number}", launches(chance.choice([0.2, 0.5, 1, 2, 3, 5, 8])), after=after))
    before, after_, advice = follow(stages, chance.randint(1, 6))
    assert after_ <= before * (1 + SLACK), advice


@pytest.mark.parametrize("seed", range(5))
def test_following_it_is_never_slower_where_the_consumer_is_slow(seed: int) -> None:
    chance = random.Random(seed)
    times = [chance.choice([0.5, 1, 2, 5]) for _ in range(3)]
    before, after, advice = follow(three(times), chance.randint(1, 5), consumer=chance.uniform(0, 4) * 1e-3)
    assert after <= before * (1 + SLACK), (times, advice)


@pytest.mark.parametrize("seed", range(3))
def test_where_times_vary_it_advises_no_less_than_there_is(seed: int) -> None:
    """The simulated device takes what it likes; a smaller depth could be slower, so none is advised."""
    for depth in (1, 3, 9):
        _, advice = run(three((2, 5, 2)), depth, seed=seed)
        assert advice.depth >= depth
        assert advice.streams == (("upload",), ("compute",), ("download",))
        assert "one slot more, and not fewer than now" in advice.why


@pytest.mark.parametrize(("times", "depth"), [*zip(MIXES, (3, 4, 2, 3), strict=True)])
def test_reasons_of_the_advice(times: Sequence[float], depth: int) -> None:
    """Equal stages want a slot more than there are stages: the host needs a moment to hand a free one on.

    And (2, 5, 2) one more than two: that would do if the host were never late by a millisecond.
    """
    _, advice = run(three(times), 3)
    assert advice.depth == depth
    assert advice.streams == (("upload",), ("compute",), ("download",))
    assert advice.period_ms == pytest.approx(max(times), rel=1e-3)
    slowest = ("upload", "compute", "download")[times.index(max(times))]
    assert f"stage '{slowest}' takes {max(times)} ms for each item" in advice.why
    assert f"an item uses its slot for {sum(times)} ms (upload → compute → download)" in advice.why


def test_stages_that_one_stream_is_enough_for() -> None:
    """Short stages in a row share a stream; not across a fork, and not if together they would be the slowest."""
    stages = [
        Stage("slow", launches(5)),
        Stage("a", launches(1)),
        Stage("b", launches(2)),
        Stage("c", launches(3)),
        Stage("left", launches(1)),
        Stage("right", launches(1), after="c"),
    ]
    before, after, advice = follow(stages, 4)
    assert advice.streams == (("slow",), ("a", "b"), ("c",), ("left",), ("right",))
    assert "a and b together take no longer than stage 'slow': they can share a stream" in advice.why
    assert after <= before * (1 + SLACK)


def test_stages_that_await_share_no_stream_and_count() -> None:
    async def wait(slot: Slot) -> None:
        await asyncio.sleep(6e-3)

    stages = [Stage("a", launches(1)), Stage("wait", wait), Stage("b", launches(1)), Stage("c", launches(1))]
    before, after, advice = follow(stages, 1)
    assert advice.streams == (("a",), ("wait",), ("b", "c"))
    at_once = min(6, processors())
    assert advice.concurrency == {"wait": at_once}
    assert advice.period_ms == pytest.approx(6, rel=0.01)  # with the present concurrency
    assert after < 0.8 * before


@pytest.mark.parametrize(("milliseconds", "at_once"), [(6.0, 3), (0.5, 1), (100.0, 8)])
def test_depth_and_concurrency_are_advised_together(milliseconds: float, at_once: int) -> None:
    """The kernel takes 2 ms: three readers of 6 ms keep up with it, and eight processors do not reach 50."""

    async def read(slot: Slot) -> None:
        await asyncio.sleep(milliseconds * 1e-3)

    def stages(concurrency: int) -> list[Stage]:
        return [Stage("read", read, concurrency=concurrency), Stage("compute", launches(2))]

    async def main(device: Device, concurrency: int, depth: int) -> tuple[float, PipelineAdvice]:
        async with Pipeline(device, stages(concurrency), depth) as pipeline:
            seconds = await measure(pipeline, 40)
            resources = pipeline._resources
            return seconds / 40, advise(resources.plan, resources.meter, depth, processors=8)

    before, advice = in_virtual_time(lambda device: main(device, 1, 2))
    assert advice.concurrency == {"read": at_once}
    assert advice.period_ms == pytest.approx(max(2.0, milliseconds), rel=0.01)  # it is not known for another one
    assert ("measure again" in advice.why) == (at_once > 1)
    after, again = in_virtual_time(lambda device: main(device, advice.concurrency["read"], advice.depth))
    assert after <= before * (1 + SLACK)
    assert after * 1e3 == pytest.approx(max(2.0, milliseconds / at_once), rel=0.1)
    assert again.period_ms == pytest.approx(after * 1e3, rel=0.1)
    assert again.concurrency == advice.concurrency
    assert ("one item for each processor" in advice.why) == (at_once == 8)
    assert ("concurrency=3 suits it" in advice.why) == (at_once == 3)


def test_nothing_is_advised_before_anything_was_timed() -> None:
    async def main(device: Device) -> None:
        pipeline = Pipeline(device, three((1, 1, 1)))
        with pytest.raises(BusyError, match="not every stage has been timed yet"):
            pipeline.advice()
        await measure(pipeline, 2)
        pipeline.advice()
        pipeline.reset_statistics()
        with pytest.raises(BusyError):
            pipeline.advice()

    in_virtual_time(main)


# Pinned memory and the processor's cache

MB = 1_000_000


def advice_for(depth: int, pinned_mb: int, cache_mb: int | None, *, steady: bool = True) -> PipelineAdvice:
    """The advice for three stages of which each takes a millisecond, so that four slots are needed."""
    plan = Plan(three((1, 1, 1)))
    meter = Meter(plan)
    for item in range(20):
        for position in range(3):
            meter.add_host_time(position, 1e-3 if steady or item % 5 else 2e-3)
        meter.add_item(3e-3)
    return advise(plan, meter, depth, pinned_mb * MB, None if cache_mb is None else cache_mb * MB)


@pytest.mark.parametrize(("pinned", "cache"), [(10, None), (0, 50), (10, 120)])
def test_pinned_memory_that_fits_or_is_unknown_is_not_mentioned(pinned: int, cache: int | None) -> None:
    advice = advice_for(12, pinned, cache)
    assert advice.depth == 4
    assert "cache" not in advice.why


def test_slots_outside_the_cache_are_named_with_the_number_that_fits() -> None:
    advice = advice_for(12, 10, 50)
    assert advice.depth == 4
    assert "12 slots have 120 MB of pinned memory, and the processor's cache has 50 MB" in advice.why
    assert "5 slots fit" in advice.why


def test_advice_keeps_what_the_stages_need_although_it_is_outside_the_cache() -> None:
    advice = advice_for(2, 40, 50)
    assert advice.depth == 4
    assert "4 slots have 160 MB" in advice.why
    assert "1 slot fits" in advice.why


def test_times_that_vary_keep_no_slots_outside_the_cache() -> None:
    assert advice_for(12, 10, None, steady=False).depth == 12
    assert advice_for(12, 10, 70, steady=False).depth == 7
    assert advice_for(12, 10, 30, steady=False).depth == 5  # one more than needed


@pytest.mark.asyncio
async def test_advice_of_a_pipeline_counts_the_pinned_memory_of_its_slots(device: Device) -> None:
    def fill(slot: Slot) -> Any:
        slot.pinned("x", 1 << 18)
        return slot.stream.synchronize()

    async with Pipeline(device, [Stage("fill", fill)], depth=2) as pipeline:
        async for _ in pipeline.run(range(4)):
            pass
        assert pipeline._resources.ring.pinned_bytes == 1 << 20
        assert pipeline.advice().depth >= 1


def test_size_of_the_last_level_cache(tmp_path: Path) -> None:
    assert last_level_cache(tmp_path) is None
    for index, size in enumerate(("48K", "2048K", "105M\n", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    last_level_cache.cache_clear()
    assert last_level_cache(tmp_path) == 105 << 20
