"""Pipelines for long, and how near the host driver comes to what nothing can exceed."""

from __future__ import annotations

import asyncio
import os
import time
from statistics import median

import pytest

import aiocuda
from tests.benchmarks.pipelines import MIXES, against_by_hand
from tests.benchmarks.setting import open_setting
from tests.benchmarks.turns import metered_loop
from tests.pipeline.many import many

SEED = int(os.environ.get("AIOCUDA_SOAK_SEED", time.time_ns() % 2**32))


@pytest.mark.soak
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.asyncio
async def test_a_hundred_thousand_items(replay: bool) -> None:
    """I5: random times, a slow consumer: the output is that of one after the other, and nothing grows."""
    print(f"seed {SEED}")  # noqa: T201 - what a failure is repeated with
    async with aiocuda.open_device(driver="host") as device:
        await many(device, 100_000, SEED, replay=replay)


@pytest.mark.soak
@pytest.mark.parametrize("mix", MIXES)
def test_the_host_driver_comes_near_the_bound(mix: tuple[float, float, float]) -> None:
    """I6: at least 0.85 of it, with stages of 2 ms and more. It wants a machine without other work."""
    loop, turns = metered_loop()
    sizes = {"iterations": 30, "scale": 2.0, "repeats": 6}

    async def run() -> list[float]:
        async with open_setting("host", sizes, turns) as setting:
            return (await against_by_hand(setting, [mix], depth=3)).samples

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        reached = runner.run(run())
    print(mix, reached)  # noqa: T201
    assert median(reached) >= 0.85
