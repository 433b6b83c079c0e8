"""Loops closed at random instants, 8 in 8 threads: nothing fails elsewhere, no descriptor is used again (P11)."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.faults.closings import THREADS, main

SEED = int(os.environ.get("AIOCUDA_CLOSINGS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.parametrize(
    ("driver", "loops"),
    [
        pytest.param("host", 400, marks=pytest.mark.slow),
        pytest.param("host", 10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param("cuda", 800, marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_loops_closed_with_work_in_flight(driver: Any, loops: int) -> None:
    print(f"seed {SEED}")  # noqa: T201 - what a failure is repeated with
    told = main(driver, loops, SEED)
    print(told)  # noqa: T201 - the figures
    assert told.errors == []
    assert len(told.closed) == 3
    assert told.kept_working > 0
    assert told.abandoned > loops / 4  # else they were closed with nothing in flight
    assert told.ports <= 2 * THREADS + 2  # one for each open loop, and one for a loop whose end was not noticed yet
