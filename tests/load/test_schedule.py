"""Schedules of arrivals."""

from __future__ import annotations

import itertools
import statistics

import pytest

from tests.load.schedule import MOST_ARRIVALS, Phase, poisson


def test_schedule_depends_on_the_seed_alone() -> None:
    phases = [Phase(1000, 1.0)]
    assert poisson(phases, 3) == poisson(phases, 3)
    assert poisson(phases, 3) != poisson(phases, 4)


def test_gaps_are_exponential() -> None:
    arrivals = poisson([Phase(1000, 20.0)], 1)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1e-3, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1e-3, rel=0.03)  # equal to the mean
    assert sum(gap > 1e-3 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)  # 1 / e


def test_each_phase_has_its_rate_and_its_time() -> None:
    arrivals = poisson([Phase(500, 10.0), Phase(2000, 5.0)], 2)
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0]
    assert arrivals[-1] < 15.0
    assert sum(at < 10.0 for at in arrivals) == pytest.approx(5000, rel=0.05)
    assert sum(at >= 10.0 for at in arrivals) == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (1, 0), (float("inf"), 1), (float("nan"), 1), (1, -2)])
def test_phase_without_arrivals_or_end_is_refused(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Phase(rate, seconds)


def test_schedule_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_ARRIVALS}"):
        poisson([Phase(1e6, 10.0)], 0)
