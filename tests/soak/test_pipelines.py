"""Pipelines for long, and how near the host driver comes to what nothing can exceed."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

import aiocuda
from tests.benchmarks.pipelines import pipeline_bound
from tests.benchmarks.rows import ROWS
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
def test_the_host_driver_comes_near_the_bound() -> None:
    """I6: with stages of 2 ms and more, at least 0.85 of it for each of the four mixes. It wants a quiet machine."""
    loop, turns = metered_loop()

    async def run() -> dict[str, float]:
        async with open_setting("host", {**ROWS["pipeline_bound"].sizes, "scale": 2.0, "repeats": 1}, turns) as setting:
            return (await pipeline_bound(setting)).figures

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        figures = runner.run(run())
    reached = {name: value for name, value in figures.items() if name.startswith("of_bound")}
    print(reached)  # noqa: T201
    assert min(reached.values()) >= 0.85, figures
