"""Managed memory as only a GPU shows it: pages that move, and the driver's attributes of them."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, Kernel, Stream, UnifiedBuffer
from aiocuda.memory._migrations import PAGE
from tests.helpers import Latch, quickly

pytestmark = [pytest.mark.asyncio, pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"], indirect=True)]

COUNT = 4 << 20  # 16 MiB: managed memory is kept small on a GPU that others use

READ = Kernel(
    "read",
    source="""
        __global__ void read(const unsigned int* words, unsigned int* sum, int count) {
            unsigned int found = 0;
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
                found += words[i];
            atomicAdd(sum, found);
        }
    """,
    host=lambda words, total, count: total.__setitem__(0, total[0] + words.sum(dtype=np.uint32)),
)


async def seconds_to_read(stream: Stream, buffer: UnifiedBuffer, total: Any) -> float:
    """Device time of a kernel that reads all of it."""
    start = stream.record(timing=True)
    stream.launch(READ, 512, 256, buffer, total, COUNT)
    end = stream.record(timing=True)
    await end
    return start.elapsed_ms(end) / 1e3


async def test_prefetch_moves_the_pages(device: Device, stream: Stream) -> None:
    """The kernel after a prefetch finds them there: it takes a fraction of the time that it takes to move them."""
    buffer, total = device.unified(COUNT, np.uint32), stream.empty(1, np.uint32)
    await stream.fill(total, 0)
    demand, prefetched = [], []
    for value in range(6):
        buffer.array[:] = value
        demand.append(await seconds_to_read(stream, buffer, total))
        buffer.array[:] = value
        await stream.prefetch(buffer)
        prefetched.append(await seconds_to_read(stream, buffer, total))
    assert median(prefetched[1:]) < median(demand[1:]) / 2
    assert (await stream.download(total))[0] == 2 * sum(range(6)) * COUNT % 2**32


async def test_where_it_was_prefetched_to_is_known(device: Device, stream: Stream) -> None:
    buffer = device.unified(COUNT, np.uint32)
    buffer.array[:] = 1
    for to, place in (("device", 0), ("host", -1)):
        await stream.prefetch(buffer, to)
        found = await device.offload(device.driver.managed_attributes, buffer.address, buffer.nbytes)
        assert found.last_prefetch == place


async def test_read_mostly_leaves_a_copy_with_each_reader(device: Device, stream: Stream) -> None:
    buffer, total = device.unified(COUNT, np.uint32), stream.empty(1, np.uint32)
    await stream.fill(total, 0)
    buffer.array[:] = 1
    first = await seconds_to_read(stream, buffer, total)
    moved: list[float] = []
    kept: list[float] = []
    for times in (moved, kept):
        for _ in range(4):
            assert np.asarray(buffer).sum() == COUNT  # brings it back to the host, or does not
            times.append(await seconds_to_read(stream, buffer, total))
        await buffer.advise("read_mostly")
        await stream.prefetch(buffer)
    assert median(kept) < median(moved) / 2, (first, moved, kept)


async def test_no_page_is_in_two_buffers(device: Device) -> None:
    buffers = [device.unified(nbytes, np.uint8) for nbytes in (1, 10, 5000, 1, 100_000)]
    assert [buffer.address % PAGE for buffer in buffers] == [0] * 5


async def test_host_access_after_a_kernel_and_beside_one(device: Device, stream: Stream, latch: Latch) -> None:
    buffer, beside = device.unified(1000, np.uint32), device.unified(1000, np.uint32)
    beside.array[:] = 5
    latch.hold(stream)
    fill = stream.fill(buffer, 3)
    await latch.held()
    assert (beside.array == 5).all()  # concurrent access: beside a kernel that runs
    latch.release()
    await quickly(fill)
    assert (buffer.array == 3).all()


async def test_advice_blocks_no_loop(device: Device, stream: Stream, latch: Latch) -> None:
    """Beside a held kernel: it may have to wait, and then a thread waits."""
    buffer = device.unified(COUNT, np.uint32)
    buffer.array[:] = 1
    latch.hold(stream)
    await latch.held()
    advice = asyncio.ensure_future(buffer.advise("accessed_by"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    device.unified(COUNT, np.uint32).array[:4] = 1
    latch.release()
    await quickly(advice)
    found = await device.offload(device.driver.managed_attributes, buffer.address, buffer.nbytes)
    assert found.accessed_by == {0}
