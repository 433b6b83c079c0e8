"""Barriers in virtual time, at random: any order of the device's work, any party that leaves."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiocuda
from aiocuda import BrokenBarrierError, Stream, StreamBarrier
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.coordination.test_barrier import open_streams
from tests.helpers import SPIN


async def storm(seed: int) -> None:
    """Parties with work of any length, some of which are cancelled at any moment."""
    chance = random.Random(f"barrier {seed}")
    driver = SimulatedDriver(seed)
    async with aiocuda.open_device(driver=driver) as device:
        parties = chance.randint(1, 6)
        async with open_streams(device, parties) as streams:
            barrier = StreamBarrier(parties)
            for _ in range(6):
                work: list[aiocuda.Operation[None]] = []

                async def party(stream: Stream, work: list[aiocuda.Operation[None]]) -> float:
                    try:
                        await asyncio.sleep(chance.random() * 0.002)
                    except asyncio.CancelledError:
                        await barrier.abort()  # a missing party must fail the others
                        raise
                    work.append(stream.launch(SPIN, 1, 1, chance.randint(0, 3_000_000)))
                    time = await barrier.wait(stream)
                    assert len(work) == parties
                    assert all(operation.done() for operation in work)
                    return time

                tasks = [asyncio.create_task(party(stream, work)) for stream in streams]
                leaves = chance.random() < 0.4
                if leaves:
                    await asyncio.sleep(chance.random() * 0.006)
                    chance.choice(tasks).cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                times = {outcome for outcome in outcomes if isinstance(outcome, float)}
                errors = {type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)}
                assert len(times) <= 1
                assert errors <= ({asyncio.CancelledError, BrokenBarrierError} if leaves else set())
                assert barrier.broken == (barrier.broken and leaves)
                assert not (barrier.broken and times)
                await barrier.reset()
        assert device.statistics().in_flight == 0
    assert driver.violations == []
    driver.close()


@pytest.mark.slow
def test_barriers() -> None:
    for seed in range(15):
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            try:
                runner.run(storm(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
