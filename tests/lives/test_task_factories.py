"""An object of each class with `aclose` works and ends, whatever task factory the program has set."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiocuda import AsyncCoordinator, BusyError, Device
from aiocuda.serving import MicroBatcher
from tests.helpers import PATIENCE
from tests.lives import rows
from tests.task_factories import each_factory, factory_of_tasks

#: `tests/data/test_task_factories.py` has those of the loaders, which take seconds.
LIVES = {name: row for name, row in (rows.ROWS | rows.DEVICES).items() if name not in ("DataLoader", "DeviceBatches")}


@pytest.mark.slow
@pytest.mark.asyncio
@each_factory
@pytest.mark.parametrize("name", LIVES)
async def test_each_object_works_and_ends(
    device: Device, name: str, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "HELD", rows.SOON)  # nothing here depends on the time that the work takes
    async with LIVES[name].make(device) as life:
        with factory_of_tasks(factory):
            async with life.thing:
                await life.work()
                await life.work()
    gc.collect()


@pytest.mark.asyncio
@each_factory
@pytest.mark.parametrize("what", ["coordinator", "device"])
async def test_host_function_cannot_close_what_waits_for_it(device: Device, what: str, factory: str) -> None:
    async with AsyncCoordinator(device) as coordinator:

        async def function() -> None:
            await (coordinator if what == "coordinator" else device).aclose()

        with factory_of_tasks(factory), pytest.raises(BusyError, match="waits for its own functions"):
            async with asyncio.timeout(PATIENCE):  # `quickly` makes a task
                await coordinator.host(function)


@pytest.mark.asyncio
@each_factory
async def test_batch_cannot_close_its_batcher(factory: str) -> None:
    async def function(batch: Any) -> list[int]:
        await batcher.aclose()
        return [1]

    batcher = MicroBatcher(function, max_batch_size=1)
    with factory_of_tasks(factory):
        async with batcher:
            with pytest.raises(BusyError, match="waits for its own functions"):
                async with asyncio.timeout(PATIENCE):
                    await batcher.submit(1)
