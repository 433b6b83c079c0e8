"""E8, E9: random graphs against a serial oracle: equal results, the exact skipped nodes, one call per callback."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time

import pytest

import aiocuda
from aiocuda import Device
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.coordination.graphs import by_chance, compare
from tests.helpers import PATIENCE


def simulate(seed: int) -> list[str]:
    """Return the violated invariants. The function itself compares the results with those of a serial run."""
    chance = random.Random(seed)
    steps = by_chance(chance, chance.randint(1, 40))
    driver = SimulatedDriver(seed)

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await compare(device, steps, chance.choice((1, 2, 5, 64)), chance.choice((1, 3, 8)))
            assert device.statistics().in_flight == 0
            del device

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    return driver.violations


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_random_graphs_come_to_what_they_come_to_one_by_one(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        try:
            assert simulate(seed) == []
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(6))
async def test_random_graphs_in_real_time(device: Device, seed: int) -> None:
    chance = random.Random(seed)
    await asyncio.wait_for(compare(device, by_chance(chance, 40), chance.choice((2, 8, 64)), 4), PATIENCE)


@pytest.mark.soak
def test_random_graphs_for_long() -> None:
    until = time.monotonic() + float(os.environ.get("AIOCUDA_SOAK_SECONDS", "60"))
    for seed in itertools.count(1_000_000):
        if time.monotonic() > until:
            return
        try:
            assert simulate(seed) == []
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
