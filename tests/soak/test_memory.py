"""A million random allocations, uses and frees over 8 streams, against a shadow copy."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

import aiocuda
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.memory.shadow import Shadow, all_adaptors

SEED = int(os.environ.get("AIOCUDA_MEMORY_SEED", random.SystemRandom().randrange(1 << 32)))

#: Of each kind of run; a driver is new every so often, so that one seed replays what it found in seconds.
OPERATIONS, EVERY = 500_000, 20_000


@pytest.mark.soak
@pytest.mark.asyncio
async def test_half_a_million_on_threads() -> None:
    print(f"first seed {SEED}")  # noqa: T201 - what a failure is repeated with
    async with aiocuda.open_device(driver="host") as device:
        for round_ in range(OPERATIONS // EVERY):
            if round_ % 2:
                device.memory.use(all_adaptors)
            await Shadow(device, SEED + round_).run(EVERY)
        assert device.driver.fault is None


@pytest.mark.soak
def test_half_a_million_in_virtual_time() -> None:
    for round_ in range(OPERATIONS // EVERY):
        seed = SEED + round_
        driver = SimulatedDriver(seed)

        async def main(driver: SimulatedDriver = driver, seed: int = seed, adapted: bool = bool(round_ % 2)) -> None:
            async with aiocuda.open_device(driver=driver) as device:
                if adapted:
                    device.memory.use(all_adaptors)
                await Shadow(device, seed).run(EVERY)

        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(main())
        assert driver.violations == [], f"seed {seed}"
