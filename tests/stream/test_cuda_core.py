"""cuda.core and aiocuda enqueue on one stream, whichever of them has created it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, Kernel, Stream

pytestmark = [pytest.mark.asyncio, pytest.mark.gpu, pytest.mark.slow]  # importing cuda.core takes 0.5 s

COUNT = 1000

SOURCE = """
extern "C" __global__ void scale(float* x, float by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
"""


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="cuda") as opened:
        yield opened


@pytest.fixture
def core(device: Device) -> Iterator[Any]:
    """cuda.core, with the device's context current, which cuda.core needs, until the end of the test."""
    from cuda import core
    from cuda.bindings import driver

    code, before = driver.cuCtxGetCurrent()
    assert code == 0
    core.Device(device.index).set_current()
    yield core
    assert driver.cuCtxSetCurrent(before)[0] == 0


@pytest.fixture
def compiled(core: Any) -> Any:
    program = core.Program(SOURCE, "c++", options=core.ProgramOptions(std="c++17"))
    return program.compile("cubin").get_kernel("scale")


def launch(core: Any, stream: Any, compiled: Any, address: int, by: float) -> None:
    """Launch the kernel with cuda.core."""
    config = core.LaunchConfig(grid=(COUNT + 255) // 256, block=256)
    core.launch(stream, config, compiled, address, np.float32(by), np.int32(COUNT))


async def test_cuda_core_wraps_a_stream(device: Device, core: Any, compiled: Any) -> None:
    x = np.arange(COUNT, dtype=np.float32)
    async with device.stream() as stream:
        buffer = await stream.upload(x)
        theirs = core.Device(device.index).create_stream(stream)
        assert theirs.__cuda_stream__() == stream.__cuda_stream__()
        launch(core, theirs, compiled, buffer.address, 2)
        assert np.array_equal(await stream.download(buffer), 2 * x)


async def test_cuda_core_uses_a_lent_stream(device: Device, core: Any, compiled: Any) -> None:
    x = np.arange(COUNT, dtype=np.float32)
    async with device.stream() as stream:
        buffer = await stream.upload(x)
        async with stream.lend() as handle:
            theirs = core.Stream.from_handle(handle)
            assert int(theirs.handle) == handle
            launch(core, theirs, compiled, buffer.address, 2)
        assert np.array_equal(await stream.download(buffer), 2 * x)


async def test_stream_of_cuda_core_is_imported(device: Device, core: Any, compiled: Any) -> None:
    x = np.arange(COUNT, dtype=np.float32)
    scale = Kernel.from_cuda_core(compiled, "float* x, float by, int n")
    await device.load(scale)  # an imported stream cannot wait for it
    async with device.stream() as stream:
        buffer = await stream.upload(x)
        theirs = core.Device(device.index).create_stream()
        imported = Stream.from_handle(device, theirs)
        assert imported.__cuda_stream__() == theirs.__cuda_stream__()
        launch(core, theirs, compiled, buffer.address, 2)
        del theirs  # the imported stream keeps it open
        gc.collect()
        imported.launch(scale, (COUNT + 255) // 256, 256, buffer, 3, COUNT)
        stream.wait(imported)
        assert np.array_equal(await stream.download(buffer), 6 * x)
        await imported.aclose()
