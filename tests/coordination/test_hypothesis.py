"""Random graphs as Hypothesis makes them, so that one that fails is made small."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiocuda
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing.simulation.loop import SimulatedLoop
from tests.coordination.graphs import by_chance, compare

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(1, 25), st.sampled_from([1, 2, 64]), st.sampled_from([1, 4]))
def test_graphs_that_hypothesis_makes(chance: random.Random, count: int, max_in_flight: int, streams: int) -> None:
    steps = by_chance(chance, count)
    driver = SimulatedDriver(chance.randrange(1 << 16))

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await compare(device, steps, max_in_flight, streams)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert driver.violations == []
