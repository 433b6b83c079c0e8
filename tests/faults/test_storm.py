"""A storm of cancellations: no wake-up is lost, nothing leaks, no canary changes (P1, P6, P7, P25)."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from tests.faults.storm import CANCELLED, storm

SEED = int(os.environ.get("AIOCUDA_STORM_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.parametrize(
    ("driver", "operations"),
    [
        pytest.param("host", 20_000, marks=pytest.mark.slow),
        pytest.param("host", 1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param("cuda", 100_000, marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_a_third_of_all_waits_is_given_up(driver: Any, operations: int) -> None:
    print(f"seed {SEED}")  # noqa: T201 - what a failure is repeated with
    told = asyncio.run(storm(driver, operations, SEED))
    print(f"{told.operations} operations, {told.cancelled} cancelled, {told.late} too late: {told.points}")  # noqa: T201
    assert told.wrong == []
    assert told.operations == operations
    assert told.cancelled >= 0.8 * CANCELLED * operations
    assert len(told.points) == 7
