"""The mean and the percentiles of statistics, and the moving average, against other ways to compute them."""

from __future__ import annotations

import numpy as np
import pytest

from aiocuda._base._average import Average
from aiocuda._base._percentiles import mean_p50_p99

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import given, settings
from hypothesis import strategies as st

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=600)


@settings(deadline=None)
@given(VALUES)
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    expected = (np.mean(values), *np.percentile(values, (50, 99)))
    assert mean_p50_p99(values) == pytest.approx(expected)
    assert mean_p50_p99(iter(reversed(values))) == pytest.approx(expected)


def test_percentiles_of_nothing_are_zero() -> None:
    assert mean_p50_p99(()) == (0.0, 0.0, 0.0)


@settings(deadline=None)
@given(st.floats(-1e3, 1e3), st.lists(st.floats(-1e3, 1e3), max_size=50))
def test_average_is_the_sum_of_all_values_with_decaying_weights(first: float, values: list[float]) -> None:
    average = Average(first)
    for value in values:
        average.add(value)
    weights = [(7 / 8) ** len(values), *((7 / 8) ** (len(values) - 1 - at) / 8 for at in range(len(values)))]
    assert sum(weights) == pytest.approx(1.0)
    assert average.mean == pytest.approx(np.dot(weights, [first, *values]), abs=1e-6)


def test_deviation_of_equal_values_fades() -> None:
    average = Average(1.0)
    average.add(3.0)
    assert (average.mean, average.deviation) == (1.25, 0.5)
    for _ in range(100):
        average.add(average.mean)
    assert average.deviation < 1e-9
