"""I4: the figures of a pipeline."""

from __future__ import annotations

import pytest

from aiocuda import Slot, Stage, TripleBuffer
from aiocuda.pipeline.meter import Meter
from aiocuda.pipeline.plan import Plan


def work(slot: Slot) -> None: ...


@pytest.mark.parametrize("items", [1, 16, 17, 24, 25, 1000])
def test_a_sample_stands_for_no_item_that_never_came(items: int) -> None:
    """Each item takes a stage one second; which of them are timed makes no difference."""
    meter = Meter(Plan([Stage("a", work), Stage("b", work)]), 3)
    for _ in range(items):
        weight = meter.begin()
        if weight:
            meter.stage(0, 1.0, weight)
            meter.stage(1, 0.5, weight)
        meter.iteration(2.0)
    seconds = meter.statistics(TripleBuffer()).stage_seconds
    assert seconds == pytest.approx({"a": items, "b": items / 2})


def test_what_an_item_under_way_has_taken_counts() -> None:
    meter = Meter(Plan([Stage("a", work)]), 3)
    meter.begin()
    meter.stage(0, 1.0)
    assert meter.statistics(TripleBuffer()).stage_seconds == {"a": 1.0}
