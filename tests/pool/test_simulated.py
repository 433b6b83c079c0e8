"""Stream pools under random programs in virtual time: exclusive leases are alone, and every request is served."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import pytest

import aiocuda
from aiocuda import Device, StreamPool
from aiocuda.pool import LeasedStream
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import SPIN


def simulate(seed: int) -> Counter[str]:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(storm(seed))


async def storm(seed: int) -> Counter[str]:
    """Tasks that take leases of all kinds and are cancelled at random moments."""
    chance = random.Random(f"pool {seed}")
    driver = SimulatedDriver(seed)
    seen: Counter[str] = Counter()
    async with aiocuda.open_device(driver=driver) as device:
        strategy: Any = chance.choice(["round_robin", "load_balanced", "priority", "workload"])
        users: Counter[str] = Counter()
        alone: set[str] = set()
        async with StreamPool(device, 1, chance.randint(1, 4), strategy=strategy, keep_seconds=0.002) as pool:

            async def use(number: int) -> None:
                exclusive, ready = chance.random() < 0.4, chance.random() < 0.2
                await asyncio.sleep(chance.random() * 0.02)
                if ready:
                    lease = await pool.any_ready(timeout=chance.choice([None, 0.001]))
                    assert lease._queue.idle
                    block: contextlib.AbstractAsyncContextManager[LeasedStream] = lease
                else:
                    block = pool.stream(
                        chance.choice(["memory", "compute", None]),
                        priority=chance.choice(["high", "normal", "low"]),
                        exclusive=exclusive,
                    )
                async with block as stream:
                    name = stream.name
                    assert name not in alone
                    if stream.exclusive:
                        assert not users[name]
                        alone.add(name)
                    users[name] += 1
                    try:
                        operation = stream.launch(SPIN, 1, 1, chance.randint(0, 2_000_000))
                        if chance.random() < 0.5:
                            await operation
                        else:
                            await asyncio.sleep(chance.random() * 0.005)
                    finally:
                        users[name] -= 1
                        alone.discard(name)

            tasks = [asyncio.create_task(use(number)) for number in range(40)]
            for task in chance.sample(tasks, 12):
                await asyncio.sleep(chance.random() * 0.004)
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                seen[type(outcome).__name__] += 1
            found = pool.statistics()
            assert (found.leases, found.exclusive, found.waiting) == (0, 0, 0)
            assert not any(place.reserved for place in pool._places)
            await asyncio.sleep(0.1)
            assert pool.statistics().streams <= 1
            seen["waited"] += found.waited
            seen["shrunk"] += pool.statistics().closed
            assert pool.has_ready()
        assert device.statistics().streams == 0
    assert driver.violations == []
    driver.close()
    return seen


@pytest.mark.slow
def test_storms() -> None:
    """B2: with cancellations at any time."""
    seen: Counter[str] = Counter()
    for seed in range(10):
        try:
            seen += simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert set(seen) == {"NoneType", "CancelledError", "TimeoutError", "waited", "shrunk"}


@pytest.mark.asyncio
async def test_pool_shrinks_after_the_load(simulated_device: Device) -> None:
    """B5: after `keep_seconds`, down to the minimum."""
    async with StreamPool(simulated_device, 2, 6, keep_seconds=5.0) as pool:
        leases = [await pool.any_ready() for _ in range(6)]
        for lease in leases[:5]:
            lease.release()
        await asyncio.sleep(4.9)
        assert pool.statistics().streams == 6
        async with pool.stream() as busy:
            busy.launch(SPIN, 1, 1, 1000)
        await asyncio.sleep(0.2)
        assert (pool.statistics().streams, pool.statistics().closed) == (2, 4)  # one is leased, one was used just now
        leases[5].release()
        await asyncio.sleep(20)
        assert (pool.statistics().streams, simulated_device.statistics().streams) == (2, 2)
