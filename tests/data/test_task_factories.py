"""Loaders under odd task factories of the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aiocuda import Device
from aiocuda.data import DataLoader, to_device
from tests.data.samples import FIELDS, write
from tests.helpers import quickly

Work = Any  # a coroutine


def wraps(loop: asyncio.AbstractEventLoop, work: Work, **options: Any) -> asyncio.Task[Any]:
    """Run each coroutine inside of another one, as Sentry's integration does."""

    async def wrapped() -> Any:
        return await work

    return asyncio.Task(wrapped(), loop=loop, **options)


def without_context(loop: asyncio.AbstractEventLoop, work: Work) -> asyncio.Task[Any]:
    """Take no further arguments."""
    return asyncio.Task(work, loop=loop)


class Refuses:
    """Raises at the first task of some coroutines."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Work, **options: Any) -> asyncio.Task[Any]:
        if work.__qualname__ in self.names:
            self.names.discard(work.__qualname__)
            raise LookupError(f"no task for {work.__qualname__}")
        return asyncio.Task(work, loop=loop, **options)


FACTORIES: list[Any] = [wraps, without_context]
if sys.version_info >= (3, 12):
    FACTORIES.append(asyncio.eager_task_factory)


@contextmanager
def tasks_by(factory: Callable[..., Any]) -> Iterator[None]:
    """Make the tasks of the loop by a factory. Coroutines that were never awaited fail the test."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(before)
        gc.collect()


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
@pytest.mark.parametrize("factory", FACTORIES)
async def test_epochs_run_under_an_odd_factory(device: Device, kind: str, factory: Any) -> None:
    with tasks_by(factory):
        async with made(kind, device) as loader:
            assert await quickly(numbers(loader, 2)) == [0, 1]
            assert await quickly(numbers(loader)) == [0, 1, 2, 3, 4]
            if kind == "processes":
                os.kill(loader.worker_pids[0], signal.SIGKILL)
            assert await quickly(numbers(loader)) == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("DataLoader", "EpochRun._await_source"),
        ("to_device", "SourcePass._await_source"),
        ("DataLoader", "EpochRun.close"),
    ],
)
async def test_a_factory_that_raises_fails_the_epoch_and_the_next_one_runs(
    device: Device, kind: str, refused: str
) -> None:
    factory = Refuses(refused)
    with tasks_by(factory):
        async with made(kind, device) as loader:
            with pytest.raises(LookupError, match=f"no task for {refused}"):
                await quickly(numbers(loader))
            assert not factory.names
            assert await quickly(numbers(loader)) == [0, 1, 2, 3, 4]
    assert device.memory.statistics().live_bytes == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_factory_that_raises_at_the_start_of_processes(device: Device) -> None:
    with tasks_by(Refuses("ProcessDecoders.open")):
        with pytest.raises(LookupError, match=r"no task for ProcessDecoders\.open"):
            async with made("processes", device):
                pass
        async with made("processes", device) as loader:
            assert await quickly(numbers(loader)) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_factory_that_raises_when_a_process_is_replaced(device: Device) -> None:
    with tasks_by(Refuses("ProcessDecoders._replaced")):
        async with made("processes", device) as loader:
            os.kill(loader.worker_pids[0], signal.SIGKILL)
            with pytest.raises(LookupError, match=r"no task for ProcessDecoders\._replaced"):
                await quickly(numbers(loader))
