"""Loaders under odd task factories of the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from aiocuda import Device
from aiocuda.data import DataLoader, to_device
from tests.data.samples import FIELDS, write
from tests.helpers import PATIENCE
from tests.task_factories import each_factory, factory_of_tasks


class Source:
    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(5):
            await asyncio.sleep(0)
            yield np.array([number])


def made(kind: str, device: Device) -> Any:
    if kind == "to_device":
        return to_device(Source(), device)
    if kind == "processes":
        return DataLoader(device, range(5), fields=FIELDS, decode=write, workers=1, executor="process")
    return DataLoader(device, Source())


async def numbers(loader: Any, most: int = 99) -> list[int]:
    found: list[int] = []
    async for batch in loader:
        found.append(batch.number)
        if len(found) == most:
            break
    return found


EVERY = ["DataLoader", "to_device", pytest.param("processes", marks=pytest.mark.slow)]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", EVERY)
@each_factory
async def test_epochs_run_under_an_odd_factory(device: Device, kind: str, factory: str) -> None:
    """Also the left epoch, whose end is a task, and the process that a task replaces."""
    with factory_of_tasks(factory):
        async with asyncio.timeout(PATIENCE), made(kind, device) as loader:
            assert await numbers(loader, 2) == [0, 1]
            assert await numbers(loader) == [0, 1, 2, 3, 4]
            if kind == "processes":
                os.kill(loader.worker_pids[0], signal.SIGKILL)
            assert await numbers(loader) == [0, 1, 2, 3, 4]
    gc.collect()
