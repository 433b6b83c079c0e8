"""M3: numba-cuda on streams of aiocuda. On a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, InvalidTypeError, Stream
from tests.helpers import quickly
from tests.integrations.libraries import library, requires

cuda = library("numba.cuda")
ours = library("aiocuda.integrations.numba")
kernels = library("tests.integrations.numba_kernel")

pytestmark = [
    requires("numba_cuda"),
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]  # Numba's own, of small grids

N = 1 << 16


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as opened:
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as opened:
        yield opened


def enqueue(theirs: Any, x: Any, value: float) -> None:
    kernels.add[N // 256, 256, theirs](x, np.float32(value))


@pytest.mark.asyncio
async def test_kernel_on_our_stream(stream: Stream) -> None:
    x = cuda.to_device(np.zeros(N, np.float32))
    for value in range(1, 4):
        await quickly(ours.submit(stream, enqueue, x, float(value)))
    assert (x.copy_to_host() == 6).all()


@pytest.mark.asyncio
async def test_kernel_on_our_buffer(stream: Stream) -> None:
    buffer = stream.empty(N)
    stream.fill(buffer, 1)
    await quickly(ours.submit(stream, lambda theirs: enqueue(theirs, cuda.as_cuda_array(buffer, sync=False), 2.0)))
    assert (await quickly(stream.download(buffer)) == 3).all()


@pytest.mark.asyncio
async def test_wait_in_place_of_async_done(device: Device) -> None:
    theirs, event = cuda.stream(), cuda.event()
    x = cuda.to_device(np.zeros(N, np.float32), stream=theirs)
    enqueue(theirs, x, 1.0)
    theirs.synchronize()
    for thing in (theirs, event, x):
        for _ in range(2000):
            enqueue(theirs, x, 1.0)
        event.record(theirs)
        operation = ours.wait(thing)
        ended = operation.done()
        assert event.query() or not ended
        await quickly(operation)
        assert event.query()
    await quickly(ours.wait())
    wrong: Any = "stream"
    with pytest.raises(InvalidTypeError, match="wait takes a stream, an event, a tensor"):
        ours.wait(wrong)
