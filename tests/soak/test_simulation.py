"""Random programs on the simulated driver, one seed after the other, for `AIOCUDA_SOAK_SECONDS`."""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.run import sweep

SECONDS = float(os.environ.get("AIOCUDA_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("AIOCUDA_SOAK_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [True, False])
def test_programs_break_no_invariant(asynchronous: bool) -> None:
    """The programs on default streams only take a quarter of the time."""
    print(f"first seed {SEED}")  # noqa: T201 - to repeat a failure
    result = sweep(SEED, None, SECONDS if asynchronous else SECONDS / 4, asynchronous=asynchronous)
    print(f"{result.seeds} programs, {result.seeds / result.seconds:.0f} a second: {result.report()}")  # noqa: T201
    assert result.violations == [], result.traceback
