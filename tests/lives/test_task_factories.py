"""An object of each class with `aclose` works and ends, whatever task factory the program has set."""

from __future__ import annotations

import gc

import pytest

from aiocuda import Device
from tests.lives.rows import DEVICES, ROWS
from tests.task_factories import each_factory, factory_of_tasks

#: `tests/data/test_task_factories.py` has those of the loaders, which take seconds.
LIVES = {name: row for name, row in (ROWS | DEVICES).items() if name not in ("DataLoader", "DeviceBatches")}


@pytest.mark.slow
@pytest.mark.asyncio
@each_factory
@pytest.mark.parametrize("name", LIVES)
async def test_each_object_works_and_ends(device: Device, name: str, factory: str) -> None:
    async with LIVES[name].make(device) as life:
        with factory_of_tasks(factory):
            async with life.thing:
                await life.work()
                await life.work()
    gc.collect()
