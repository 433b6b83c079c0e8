"""Pipelines in virtual time: stages that take exactly the given times, on a simulated driver without chance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

import aiocuda
from aiocuda import Device, Kernel, Operation, Pipeline, Slot, Stage
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.benchmarks.sources import SPIN

T = TypeVar("T")

#: Bytes per second of each copy engine: a millisecond is a thousand bytes.
BANDWIDTH = 1e6

#: The mixes of row I6, in milliseconds: upload, compute, download.
MIXES = [(2, 5, 2), (5, 5, 5), (1, 10, 1), (10, 1, 10)]


def in_virtual_time(
    main: Callable[[Device], Awaitable[T]], seed: int | None = None, policy: Any = "efficient", **options: Any
) -> T:
    """Run a coroutine function on a simulated device; without a seed all work takes exactly its given time.

    A loop that polls takes a turn for each microsecond that it polls for, and so a hundred times longer to simulate.
    """

    async def run() -> T:
        driver = SimulatedDriver(seed, bandwidth=BANDWIDTH, latency=0.0, **options)
        async with aiocuda.open_device(driver=driver, policy=policy) as device:
            result = await main(device)
        assert driver.violations == []
        driver.close()
        return result

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


@cache
def kernel(ms: float) -> Kernel:
    """It takes so many milliseconds."""
    return Kernel("spin", source=SPIN, host=lambda nanoseconds: None, host_seconds=ms * 1e-3)


def copies(ms: float, way: str) -> Callable[[Slot], Operation[Any]]:
    """The function of a stage that copies for so many milliseconds."""
    nbytes = round(ms * BANDWIDTH * 1e-3)

    def up(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.buffer(way, nbytes, np.uint8), slot.pinned(way, nbytes, np.uint8))

    def down(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.pinned(way, nbytes, np.uint8), slot.buffer(way, nbytes, np.uint8))

    return up if way == "up" else down


def launches(ms: float) -> Callable[[Slot], Operation[Any]]:
    """Return a stage function with a kernel that takes so many milliseconds."""
    return lambda slot: slot.stream.launch(kernel(ms), 1, 1, 0)


def three(times: Sequence[float]) -> list[Stage]:
    """Upload, compute and download of so many milliseconds each."""
    up, compute, down = times
    return [
        Stage("upload", copies(up, "up")),
        Stage("compute", launches(compute)),
        Stage("download", copies(down, "down")),
    ]


async def measure(pipeline: Pipeline, items: int, consumer: float = 0.0) -> float:
    """Return the virtual seconds for so many items, if the consumer has each result for so long; all is warm."""
    async for _ in pipeline.run(range(pipeline.ring.depth)):
        pass
    pipeline.reset_statistics()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async for _ in pipeline.run(range(items)):
        await asyncio.sleep(consumer)
    return loop.time() - began
