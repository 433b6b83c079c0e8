"""Thousands of short epochs leave nothing behind: no descriptor, memory file, process, thread or pinned byte."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import DataLoader, to_device
from aiocuda.driver.host import HostDriver
from tests.data.test_processes import shared_files
from tests.helpers import until


def decode(sample: int, out: Any) -> None:
    out["x"][...] = sample


class CountsPinned(HostDriver):
    """A host driver that counts page-locked bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    @property
    def pinned_bytes(self) -> int:
        return sum(self._sizes.values())

    def pinned_allocate(self, nbytes: int) -> int:
        address = super().pinned_allocate(nbytes)
        self._sizes[address] = nbytes
        return address

    def pinned_deallocate(self, address: int) -> None:
        super().pinned_deallocate(address)
        del self._sizes[address]

    def pin(self, address: int, nbytes: int) -> None:
        super().pin(address, nbytes)
        self._sizes[address] = nbytes

    def unpin(self, address: int) -> None:
        super().unpin(address)
        del self._sizes[address]


def loader_threads() -> int:
    return sum("loader" in thread.name or "to-device" in thread.name for thread in threading.enumerate())


def clocks() -> int:
    """Return the number of open files of threads' times: a thread that decodes keeps its own open until it ends."""
    return sum(file.endswith("/schedstat") for file in open_files())


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]


async def traces(device: aiocuda.Device, driver: CountsPinned) -> dict[str, int]:
    """What a loader could leave behind.

    Free regions of the pool are not counted: their number is the most that were in use at once, and it depends on the
    time at which the garbage collector runs.
    """
    pool = device._resources.pinned_pool
    gc.collect()
    pool.sweep()
    free = sum(region.nbytes for regions in pool._free.values() for region in regions)
    statistics = driver.statistics()
    # A thread that ends is no longer listed before its file is closed.
    await until(lambda: clocks() <= loader_threads(), "the end of the files of threads that have ended")
    files = open_files()
    return {
        "descriptors": sum(not file.endswith("/schedstat") for file in files),
        "memory files": shared_files(),
        "processes": len(multiprocessing.active_children()),
        "threads": loader_threads(),
        "pinned and in use": sum(region.nbytes for region in pool.lent.values()),
        "pinned and not free": driver.pinned_bytes - free,
        "streams": statistics["streams"],
        "many events": statistics["events"] > 200,
    }


def resident() -> int:
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "epochs", [pytest.param(400, marks=pytest.mark.heavy), pytest.param(10_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_epochs_leave_nothing_behind(executor: Any, epochs: int) -> None:
    driver = CountsPinned()
    options: Any = {"fields": {"x": ((16,), np.int64)}, "decode": decode, "workers": 2, "executor": executor}
    async with aiocuda.open_device(driver=driver) as device:
        async with DataLoader(device, range(3), **options) as loader:
            assert [batch.indices async for batch in loader] == [(0,), (1,), (2,)]
        await until(lambda: not loader_threads(), "the end of the loader's threads")
        before = await traces(device, driver)
        async with DataLoader(device, range(3), **options) as loader:
            for epoch in range(epochs):
                assert len([batch async for batch in loader]) == 3
                if epoch == epochs // 4:
                    open_before, memory = await traces(device, driver), resident()
            assert await traces(device, driver) == open_before
            assert resident() < memory + 4e6
        await until(lambda: not loader_threads(), "the end of the loader's threads")
        assert await traces(device, driver) == before
        await device.memory.trim()
        assert device.memory.statistics().live_bytes == 0


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "rounds", [pytest.param(30, marks=pytest.mark.heavy), pytest.param(1000, marks=pytest.mark.soak)]
)
async def test_loaders_leave_nothing_behind(rounds: int) -> None:
    """Each is left in another way: at its end, by break, and by an exception; every tenth has processes."""
    driver = CountsPinned()
    async with aiocuda.open_device(driver=driver) as device:
        before: dict[str, int] | None = None
        for number in range(rounds):
            executor: Any = "process" if number % 10 == 0 else "thread"
            options: Any = {"fields": {"x": ((16,), np.int64)}, "decode": decode, "workers": 2, "executor": executor}
            try:
                async with DataLoader(device, range(3 + number % 5), batch_size=2, **options) as loader:
                    async for batch in loader:
                        if number % 3 == 1:
                            break
                        if number % 3 == 2:
                            raise ZeroDivisionError
                        batch.keep()
            except ZeroDivisionError:
                pass
            async for batch in to_device([np.zeros(4)] * 3, device):
                batch.keep()
            del batch
            if number == 10:
                await until(lambda: not loader_threads(), "the end of the loaders' threads")
                before = await traces(device, driver)
        await until(lambda: not loader_threads(), "the end of the loaders' threads")
        after = await traces(device, driver)
        assert before is not None
        assert after == before
        await device.memory.trim()
        assert device.memory.statistics().live_bytes == 0
