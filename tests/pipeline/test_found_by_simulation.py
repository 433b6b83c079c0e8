"""What random programs on the simulated driver found in pipelines, each as the few steps that it takes.

Without seeds: what a seed does changes with the programs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Kernel, Operation, Pipeline, Slot, Stage
from aiocuda.driver.simulated import SimulatedDriver, Upset
from aiocuda.testing import kernels
from aiocuda.testing.simulation.loop import SimulatedLoop


@pytest.mark.parametrize(("alone", "nth"), [(True, 1), (True, 2), *((False, nth) for nth in range(1, 7))])
def test_wait_that_is_refused_after_the_consumer_has_left_is_told_to_the_loop(alone: bool, nth: int) -> None:
    """It was the pipeline's own, which nobody reads; what was skipped for it was taken as told."""
    affine = Kernel("affine", source=kernels.AFFINE.source, host=kernels.AFFINE.host)  # which is loaded first
    driver = SimulatedDriver(None, upsets=[Upset("refuse", nth, "stream_wait", 802)])
    told: list[BaseException] = []

    def up(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.buffer("x", 4, np.uint32), slot.item)

    def compute(slot: Slot) -> Operation[Any]:
        return slot.stream.launch(affine, 1, 4, slot.buffer("x", 4, np.uint32), 4, 3, 1)

    def down(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("x", 4, np.uint32))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        async with aiocuda.open_device(driver=driver) as device:
            stages = [Stage("up", up), Stage("compute", compute), Stage("down", down)]
            async with Pipeline(device, stages, depth=3) as pipeline:
                results = pipeline.run([np.zeros(4, np.uint32)] * 3)
                one = pipeline.execute_iteration(np.zeros(4, np.uint32)) if alone else anext(results)
                consumer = asyncio.ensure_future(one)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                consumer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await consumer
                await results.aclose()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert driver.violations == []
    assert sum(driver.upsets.happened.values()) == 1
    assert [getattr(error, "code", None) for error in told] == [802]
