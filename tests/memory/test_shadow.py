"""Random use of memory over 8 streams: no byte is overwritten, and live bytes return to what they were."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

import aiocuda
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.memory import MemoryResource, SizeClassResource
from aiocuda.testing import SimulatedLoop
from tests.helpers import PATIENCE
from tests.memory.shadow import Shadow, all_adaptors
from tests.seeds import seed_of_source

SEED = int(os.environ.get("AIOCUDA_MEMORY_SEED", seed_of_source()))

STACKS: dict[str, Callable[[MemoryResource], MemoryResource] | None] = {
    "pool": None,
    "classes": SizeClassResource,
    "all": all_adaptors,
}


async def _run(device: aiocuda.Device, stack: str, operations: int) -> None:
    build = STACKS[stack]
    if build is not None:
        device.memory.use(build)
    await Shadow(device, SEED).run(operations)
    if device.driver.name != "cuda":  # its pool serves the whole process
        async with asyncio.timeout(PATIENCE):
            while device.memory.statistics().reserved_bytes:
                await asyncio.sleep(0.001)
                await device.memory.trim()  # once the device has come to the last of the frees


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("stack", "operations"), [("pool", 6000), ("classes", 8000), ("all", 6000)])
async def test_on_threads(stack: str, operations: int) -> None:
    driver = HostDriver(bandwidth=1e11, latency=0)
    try:
        async with aiocuda.open_device(driver=driver) as device:
            await _run(device, stack, operations)
        assert driver.fault is None
    finally:
        driver.close()


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "operations"), [("pool", 6000), ("classes", 8000), ("all", 6000)])
def test_in_virtual_time(stack: str, operations: int) -> None:
    """Which sees an edge that is missing, whether or not it did harm."""
    driver = SimulatedDriver(SEED)

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await _run(device, stack, operations)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert driver.violations == [], f"seed {SEED}"
    assert driver.fault is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("stack", "operations"), [("pool", 50_000), ("classes", 25_000), ("all", 25_000)])
async def test_on_a_gpu(stack: str, operations: int) -> None:
    async with aiocuda.open_device(driver="cuda") as device:
        await _run(device, stack, operations)
