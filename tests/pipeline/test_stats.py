"""I4: the figures of a pipeline."""

from __future__ import annotations

import pytest

from aiocuda import Slot, Stage, TripleBuffer
from aiocuda.pipeline.meter import Meter
from aiocuda.pipeline.plan import Plan


def work(slot: Slot) -> None: ...


@pytest.mark.parametrize("seconds", [1.0, 1e-4])
@pytest.mark.parametrize("items", [1, 16, 17, 24, 25, 63, 65, 1000])
def test_a_sample_stands_for_as_many_items_as_came(items: int, seconds: float) -> None:
    """Each item takes a stage as long as the others; which of them are timed makes no difference."""
    meter = Meter(Plan([Stage("a", work), Stage("b", work)]), 3)
    for _ in range(items):
        weight = meter.begin()
        if weight:
            meter.stage(0, seconds, weight)
            meter.stage(1, seconds / 2, weight)
        meter.iteration(2 * seconds)
    told = meter.statistics(TripleBuffer()).stage_seconds
    assert told == pytest.approx({"a": items * seconds, "b": items * seconds / 2})


@pytest.mark.parametrize(("seconds", "one_in"), [(1e-3, 16), (1e-4, 64)])
def test_one_in_so_many_is_timed_after_the_first(seconds: float, one_in: int) -> None:
    """To time an item takes some 50 µs: where all else takes 100, it is done more rarely."""
    meter = Meter(Plan([Stage("a", work), Stage("b", work)]), 3)
    timed = []
    for item in range(16 + 2 * 64):
        weight = meter.begin()
        if weight:
            timed.append(item)
            meter.stage(0, seconds, weight)
            meter.stage(1, 1e-6, weight)
    assert timed[:16] == list(range(16))
    assert timed[16:] == [item for item in range(16, 16 + 2 * 64) if item % one_in == 0]


def test_what_an_item_under_way_has_taken_counts() -> None:
    meter = Meter(Plan([Stage("a", work)]), 3)
    meter.begin()
    meter.stage(0, 1.0)
    assert meter.statistics(TripleBuffer()).stage_seconds == {"a": 1.0}
