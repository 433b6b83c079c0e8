"""The same seed does the same again; a second loop takes over; and on any other loop nothing illegal happens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.budget import portions
from tests.helpers import AFFINE, SPIN, UVLOOP
from tests.simulation.run import simulate

_TRACES = """
from tests.simulation.run import simulate
for seed in range(SEEDS):
    print("seed", seed)
    print(*simulate(seed, trace=True).trace, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("seeds", portions(12))
def test_same_seed_same_trace_in_every_process(seeds: int) -> None:
    traces = set()
    for hash_seed in "012":
        finished = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"SEEDS = {seeds}\n{_TRACES}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=600,
        )
        assert finished.stderr == b""
        traces.add(finished.stdout)
    (trace,) = traces
    assert trace.count(b"\n") > 150 * seeds


def test_another_seed_has_another_trace() -> None:
    assert len({tuple(simulate(seed, trace=True).trace) for seed in range(5)}) == 5


async def work(device: Device, rounds: int = 6) -> list[int]:
    """Several streams that wait for one another, each step on what the one before has left."""
    streams = [device.stream() for _ in range(3)]
    results = []
    try:
        for turn in range(rounds):
            one, other, third = (streams[(turn + k) % 3] for k in range(3))
            buffer = one.empty(300, np.uint32)
            up = one.copy(buffer, np.arange(turn, turn + 300, dtype=np.uint32))
            other.wait(up)
            scaled = other.launch(AFFINE, 1, 32, buffer, 300, 3, 1)
            third.wait(scaled)
            array = await third.download(buffer)
            results.append(int(array[1]))
            buffer.free()
    finally:
        for stream in streams:
            await stream.aclose()
    return results


EXPECTED = [3 * (turn + 1) + 1 for turn in range(6)]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, *filter(None, [UVLOOP])])
def test_on_another_loop_all_is_legal(factory: Any) -> None:
    async def main() -> None:
        for seed in range(20):
            driver = SimulatedDriver(seed)
            async with aiocuda.open_device(driver=driver) as device:
                assert await work(device) == EXPECTED
            counted = driver.statistics()
            assert (driver.violations, counted["streams"], counted["events"]) == ([], 0, 0)
            driver.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def test_no_sleep_on_another_loop() -> None:
    """A kernel of an hour is over as soon as the loop has turned."""

    async def main() -> None:
        async with aiocuda.open_device(driver="simulated") as device, device.stream() as stream:
            await stream.launch(SPIN, 1, 1, 3_600_000_000_000)
            assert device.driver.now() > 3_600

    asyncio.run(asyncio.wait_for(main(), 10))


def test_on_a_simulated_loop_there_is_no_other_driver() -> None:
    async def main() -> None:
        async with aiocuda.open_device() as device:
            assert device.driver.name == "simulated"
        driver = HostDriver()
        try:
            with pytest.raises(aiocuda.InvalidArgumentError, match="the host driver in real time: use driver='simul"):
                await aiocuda.open_device(driver=driver)
        finally:
            driver.close()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


# One device, several loops


class Loops:
    """A device that one simulated loop has opened, to be used from others."""

    def __init__(self, seed: int = 0) -> None:
        self.driver = SimulatedDriver(seed)
        self.home = asyncio.Runner(loop_factory=SimulatedLoop)
        self.device: Device = self.home.run(self._open())

    async def _open(self) -> Device:
        return await aiocuda.open_device(driver=self.driver)

    def elsewhere(self, main: Any, *, after: float = 0.0) -> Any:
        """Run it in a loop of its own, whose time has gone on already."""
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(asyncio.sleep(after))
            return runner.run(main)

    def close(self) -> None:
        self.home.run(self.device.aclose())
        self.home.close()
        counted = self.driver.statistics()
        assert (self.driver.violations, counted["streams"], counted["events"]) == ([], 0, 0)
        self.driver.close()


@pytest.fixture(params=range(5))
def loops(request: pytest.FixtureRequest) -> Iterator[Loops]:
    opened = Loops(request.param)
    yield opened
    opened.close()


def test_device_of_a_session_serves_the_loops_of_its_tests(loops: Loops) -> None:
    for _ in range(3):
        assert loops.elsewhere(work(loops.device)) == EXPECTED
    assert loops.home.run(work(loops.device)) == EXPECTED
    assert loops.elsewhere(work(loops.device)) == EXPECTED


@pytest.mark.parametrize("after", [0.0, 1_000.0])
def test_drivers_time_goes_on_wherever_it_is_asked(loops: Loops, after: float) -> None:
    """Whether the next loop's own time is before or behind: nothing that the driver has begun gets longer by that."""

    async def begin() -> Stream:
        await asyncio.sleep(100)
        stream = loops.device.stream()
        stream.launch(SPIN, 1, 1, 50_000_000)
        return stream

    async def go_on() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        async with asyncio.timeout(1), loops.device.stream() as other:
            await other.launch(SPIN, 1, 1, 10_000_000)
            assert loops.driver.now() > begun
            while not loops.driver._machine.stream(stream._queue.handle).is_idle:
                await asyncio.sleep(0.001)
        return loop.time() - before

    stream = loops.home.run(begin())
    begun = loops.driver.now()
    assert loops.elsewhere(go_on(), after=after) < 0.1
    loops.home.run(stream.aclose())


def test_second_loop_does_the_same_again() -> None:
    def trace(seed: int) -> list[str]:
        loops = Loops(seed)
        lines: list[str] = []
        loops.driver.trace = lines
        loops.elsewhere(work(loops.device))
        loops.home.run(work(loops.device))
        loops.elsewhere(work(loops.device), after=3.0)
        loops.close()
        return lines

    for seed in range(5):
        assert trace(seed) == trace(seed)
