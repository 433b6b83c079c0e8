"""Steady state grows nothing: descriptors, threads, events, streams, memory of the process and of the pools (P25)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, EventPool
from tests.helpers import AFFINE

ROUNDS = 20

#: Operations of one call of `everything`, with those that they need.
EACH = 12


class Footprint(NamedTuple):
    """The resources of the process while no operation is unfinished."""

    descriptors: int
    threads: int
    streams: int
    events: int
    reserved: int  #: bytes, of the device's pools
    resident: int  #: bytes, of the process

    @classmethod
    def of(cls, device: Device) -> Footprint:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        statistics = device.statistics()
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            statistics.streams,
            statistics.events,
            device.memory.statistics().reserved_bytes,
            pages * os.sysconf("SC_PAGE_SIZE"),
        )


async def everything(device: Device, pool: EventPool) -> None:
    """Make and drop streams, memory of all kinds, events, graphs and waits."""
    async with device.stream() as stream, device.stream() as other:
        source = np.arange(1000, dtype=np.uint32)
        buffer = await stream.upload(source)
        stream.launch(AFFINE, 4, 256, buffer, 1000, 3, 1)
        pinned = device.pinned(1000, np.uint32)
        stream.copy(pinned, buffer)
        other.wait(stream.record())
        temporary = other.empty(1000, np.uint32)
        other.copy(temporary, buffer)
        event = await pool.acquire()
        await other.record(event=event)
        event.release()
        async with stream.capture() as graph:
            stream.launch(AFFINE, 4, 256, buffer, 1000, 1, 1)
            stream.fill(buffer[:8], 7)
        graph.launch(stream)
        given_up = asyncio.create_task(stream.synchronize().wait())
        await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        first, second = await aiocuda.gather(stream.download(buffer), other.download(temporary))
        assert (first[:8] == 7).all()
        assert (first[8:] == 3 * source[8:] + 2).all()
        assert (second == 3 * source + 1).all()
        buffer.free()
        if device.properties.managed_memory:
            unified = device.unified(100)
            await stream.fill(unified, 1)
        graph.close()


async def rounds(driver: Any, operations: int) -> list[Footprint]:
    """The footprint after each round."""
    found = []
    async with aiocuda.open_device(driver=driver) as device:
        pool = EventPool(device)
        for _ in range(ROUNDS):
            for number in range(operations // ROUNDS // EACH):
                await everything(device, pool)
                if number % 50 == 0:  # and a loop that comes and goes, in a thread that does
                    await asyncio.to_thread(asyncio.run, everything(device, pool))
            await device.drain()
            found.append(Footprint.of(device))
        assert device.statistics().resolved >= operations
    return found


@pytest.mark.parametrize(
    ("driver", "operations"),
    [
        pytest.param("host", 1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        pytest.param("host", 6_000, marks=[pytest.mark.heavy, pytest.mark.slow]),
        pytest.param("cuda", 100_000, marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_nothing_grows(driver: Any, operations: int) -> None:
    """Counts from the fifth of twenty rounds, when all caches are filled."""
    found = asyncio.run(rounds(driver, operations))[4:]
    slope = np.polyfit(range(len(found)), [each.resident for each in found], 1)[0] * len(found)
    print(f"{found[0]}\n{found[-1]}\nthe process grew by {slope / 2**20:.2f} MiB in {operations} operations")  # noqa: T201
    for name in ("descriptors", "threads", "streams", "events", "reserved"):
        counts = [getattr(each, name) for each in found]
        assert max(counts[len(counts) // 2 :]) <= max(counts[: len(counts) // 2]), f"{name}: {counts}"
    assert slope < 4 * 2**20
