"""M3: cuda.core on streams of aiocuda. On a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, Stream
from tests.helpers import quickly
from tests.integrations.libraries import library, requires

core = library("cuda.core")
ours = library("aiocuda.integrations.cuda_core")

pytestmark = [pytest.mark.gpu, requires("cuda.core")]

SOURCE = 'extern "C" __global__ void add(float* x, float a, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] += a; }'  # noqa: E501

N = 1 << 16


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as opened:
        core.Device(0).set_current()
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as opened:
        yield opened


@pytest.fixture
def kernel(device: Device) -> Any:
    options = core.ProgramOptions(std="c++17", arch=f"sm_{core.Device(0).arch}")
    return core.Program(SOURCE, code_type="c++", options=options).compile("cubin").get_kernel("add")


def add(theirs: Any, kernel: Any, buffer: Any, value: float) -> None:
    core.launch(theirs, core.LaunchConfig(grid=N // 256, block=256), kernel, buffer.address, np.float32(value), N)


@pytest.mark.asyncio
async def test_launch_on_our_stream(stream: Stream, kernel: Any) -> None:
    buffer = stream.empty(N)
    stream.fill(buffer, 1)
    for value in range(1, 4):
        await quickly(ours.submit(stream, add, kernel, buffer, float(value)))
    assert (await quickly(stream.download(buffer)) == 7).all()
    assert ours.device_of(stream).device_id == 0


@pytest.mark.asyncio
async def test_wait_for_streams_and_events(device: Device, stream: Stream, kernel: Any) -> None:
    buffer = await quickly(stream.upload(np.zeros(N, np.float32)))
    theirs = core.Device(0).create_stream()
    for _ in range(3000):
        add(theirs, kernel, buffer, 1.0)
    event = theirs.record()
    operation = ours.wait(theirs)
    assert operation.seen_state == "submitted"  # a query would come too late
    await quickly(ours.wait(event))
    assert event.is_done
    await quickly(operation)
    assert (await quickly(stream.download(buffer)) == 3000).all()
