"""A run that was left by `break`: its device faults while it is closed, or its event loop is closed first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, DeviceFault, Pipeline
from aiocuda.testing import Upset
from tests.helpers import quickly
from tests.pipeline.steps import stages
from tests.pipeline.virtual import in_virtual_time, three


def test_device_that_faults_while_an_abandoned_run_is_closed() -> None:
    """The new run fails with the fault, and nothing hangs."""

    async def main(device: Device) -> None:
        driver: Any = device.driver
        pipeline = Pipeline(device, three((1, 1, 1)))
        results = pipeline.run(range(100))
        async for _ in results:
            break
        assert driver.fault is None
        with pytest.raises(DeviceFault):
            async for _ in pipeline.run(range(3)):
                pass
        assert set(pipeline.ring.states) == {"free"}
        with pytest.raises(ClosedError):
            await anext(results)

    in_virtual_time(main, upsets=[Upset("fault", 8)])  # a command of the second item or the third


def test_abandoned_run_of_a_closed_event_loop_is_busy() -> None:
    """No task can end the run, so closing does not wait for it."""
    left: list[Any] = []

    async def abandon() -> None:
        device = await aiocuda.open_device(driver="host")
        pipeline = Pipeline(device, stages())
        results = pipeline.run(range(9))
        async for _ in results:
            break
        left.extend([device, pipeline, results])

    async def again() -> None:
        device, pipeline, _ = left
        with pytest.raises(BusyError):
            await quickly(anext(pipeline.run(range(3))))
        await device.aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()
    asyncio.run(again())
