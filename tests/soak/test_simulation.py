"""Random programs on the simulated driver, one seed after the other, for as long as they are told to."""

from __future__ import annotations

import os
import random

import pytest

from aiocuda.testing.simulation.run import sweep

SECONDS = float(os.environ.get("AIOCUDA_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("AIOCUDA_SOAK_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.mark.soak
def test_programs_break_no_invariant() -> None:
    print(f"first seed {SEED}")  # noqa: T201 - what a failure is repeated with
    result = sweep(SEED, None, SECONDS)
    print(f"{result.seeds} programs, {result.seeds / result.seconds:.0f} a second: {result.report()}")  # noqa: T201
    assert result.violations == [], result.where
