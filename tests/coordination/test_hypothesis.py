"""E8, E9: random graphs by Hypothesis, which reduces a failing graph to a small one; V1 to V16 are checked.

Each graph runs in virtual time, on a simulated device that decides by chance whatever a device may decide. `make test`
spends about 10 s of processor time on it, the soak as long as it is configured for.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable

import pytest

import aiocuda
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.budget import part_of
from tests.coordination.graphs import by_chance, compare
from tests.simulation.checker import Checker

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def graphs(examples: int) -> Callable[[], None]:
    """A test of so many."""

    @settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(st.randoms(use_true_random=False), st.integers(1, 25), st.sampled_from([1, 2, 64]), st.sampled_from([1, 4]))
    def test(chance: random.Random, count: int, max_in_flight: int, streams: int) -> None:
        steps = by_chance(chance, count)
        driver = SimulatedDriver(chance.randrange(1 << 16))
        checker = Checker(driver)

        async def main() -> None:
            async with aiocuda.open_device(driver=driver) as device:
                checker.watch(device)
                await compare(device, steps, max_in_flight, streams)

        loop = SimulatedLoop()
        loop.on_step = checker.step
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
        checker.end()
        assert checker.violations == []

    return test


@pytest.mark.slow
@pytest.mark.parametrize("count", [part_of(300), pytest.param(200, marks=pytest.mark.heavy)])
def test_graphs_that_hypothesis_makes(count: int) -> None:
    graphs(count)()


@pytest.mark.soak
def test_graphs_that_hypothesis_makes_for_long() -> None:
    until = time.monotonic() + float(os.environ.get("AIOCUDA_SOAK_SECONDS", "60"))
    while time.monotonic() < until:
        graphs(1_000)()
