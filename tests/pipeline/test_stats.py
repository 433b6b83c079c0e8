"""I4: the figures of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from aiocuda import Slot, Stage
from aiocuda.pipeline import PipelineRing
from aiocuda.pipeline._meter import Meter
from aiocuda.pipeline._plan import Plan


def work(slot: Slot) -> None: ...


def meter_of_stages(*names: str) -> Meter:
    return Meter(Plan([Stage(name, work) for name in names]))


def take(meter: Meter, times: Iterable[float]) -> None:
    """Items of a pipeline of one stage, each of which takes so many seconds."""
    for seconds in times:
        if meter.begin():
            meter.add_sample(0, seconds)
        meter.add_item(seconds)


@pytest.mark.parametrize("seconds", [1.0, 1e-4])
@pytest.mark.parametrize("items", [1, 16, 17, 24, 25, 63, 65, 1000])
def test_a_sample_represents_all_items(items: int, seconds: float) -> None:
    """Each item takes a stage as long as the others; which of them are timed makes no difference."""
    meter = meter_of_stages("a", "b")
    for _ in range(items):
        if meter.begin():
            meter.add_sample(0, seconds)
            meter.add_sample(1, seconds / 2)
        meter.add_item(2 * seconds)
    told = meter.statistics(PipelineRing()).stage_seconds
    assert told == pytest.approx({"a": items * seconds, "b": items * seconds / 2})


@pytest.mark.parametrize(("seconds", "one_in"), [(1e-3, 16), (1e-4, 64)])
def test_one_in_so_many_is_timed_after_the_first(seconds: float, one_in: int) -> None:
    """To time an item takes some 50 µs: where all else takes 100, it is done more rarely."""
    meter = meter_of_stages("a", "b")
    timed = []
    for item in range(16 + 2 * 64):
        if meter.begin():
            timed.append(item)
            meter.add_sample(0, seconds)
            meter.add_sample(1, 1e-6)
        meter.add_item(seconds)
    assert timed[:16] == list(range(16))
    assert timed[16:] == [item for item in range(16, 16 + 2 * 64) if item % one_in == 0]


def test_what_an_item_under_way_has_taken_counts() -> None:
    meter = meter_of_stages("a")
    meter.begin()
    meter.add_sample(0, 1.0)
    assert meter.statistics(PipelineRing()).stage_seconds == {"a": 1.0}


@pytest.mark.parametrize("items", [17, 31, 63, 65, 1000])
def test_a_compilation_counts_once(items: int) -> None:
    """The first launch of a kernel is timed with it. The items that are not timed did not take that."""
    meter = meter_of_stages("a")
    take(meter, [1.0, *[1e-4] * (items - 1)])
    assert meter.statistics(PipelineRing()).stage_seconds["a"] == pytest.approx(1.0 + (items - 1) * 1e-4)


def test_an_item_timed_before_a_reset_represents_only_itself() -> None:
    """It had begun; the items that it would have represented are forgotten."""
    meter = meter_of_stages("a")
    take(meter, [1e-4] * 64)
    assert meter.begin()
    meter.reset()
    meter.add_sample(0, 1e-4)
    meter.add_item(1e-4)
    assert meter.statistics(PipelineRing()).stage_seconds == {"a": 1e-4}


@pytest.mark.parametrize("change", [130, 150, 190, 300])
def test_items_become_slow_and_brief_again(change: int) -> None:
    """No item is counted twice when samples become more frequent: the error is at most the items between two."""
    meter = meter_of_stages("a")
    all_of_them = [1e-4] * change + [1e-2] * 320 + [1e-4] * 500
    take(meter, all_of_them)
    told = meter.statistics(PipelineRing()).stage_seconds["a"]
    assert abs(told - sum(all_of_them)) <= 64 * 1e-2
    assert meter._totals[0].items <= len(all_of_them)


def test_items_that_fail_leave_no_figure_without_its_items() -> None:
    """A timed item that fails would have represented others: the next timed item does."""
    meter = meter_of_stages("a")
    for item in range(200):
        if meter.begin() and item % 64:
            meter.add_sample(0, 1e-4)
        if item % 64:
            meter.add_item(1e-4)
    assert meter.statistics(PipelineRing()).stage_seconds["a"] == pytest.approx(196 * 1e-4)


def test_an_item_without_overlap_represents_only_itself() -> None:
    """It is timed on the host, with what the host takes to learn of its end."""
    meter = meter_of_stages("a")
    take(meter, [1e-4] * 63)
    meter.add_host_time(0, 1.0)
    meter.add_item(1.0)
    assert meter.statistics(PipelineRing()).stage_seconds["a"] == pytest.approx(63e-4 + 1.0)


def test_utilisation_is_that_of_the_busiest_stage_that_processes() -> None:
    """A sum of several stages, whose work overlaps, would be more than 1; so may be an estimate from a sample."""
    meter = meter_of_stages("upload", "a", "b", "download")
    ring: Any = SimpleNamespace(busy_seconds=2.0, peak_busy=3)
    for seconds in (0.5, 0.6):
        for position, times in enumerate((3, 1, 2, 3)):
            meter.add_sample(position, times * seconds)
        meter.add_item(4.0)
        told = meter.statistics(ring)
        assert told.utilisation == min(1.0, told.stage_seconds["b"] / 2)
        assert told.overlap_efficiency == min(1.0, told.stage_seconds["upload"] / 2)
    assert (told.utilisation, told.stage_seconds["b"]) == (1.0, 2.2)
