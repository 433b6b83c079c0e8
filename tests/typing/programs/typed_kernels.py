"""Kernels: their sources, their launches, and the memory that they use."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aiocuda
from aiocuda import DeviceBuffer, Kernel, Operation, PinnedBuffer

SOURCE = """
template <typename T> __global__ void scale(T a, const T* x, T* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""


def scale_on_host(a: float, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], n: int) -> None:
    y[:n] = a * x[:n]


scale = Kernel(
    "scale<float>", source=SOURCE, parameters="float a, const float* x, float* y, int n", options=["-use_fast_math"],
    host=scale_on_host,
)  # fmt: skip


async def launch(stream: aiocuda.Stream, x: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    dx, dy = await stream.upload(x), stream.zeros(x.shape, np.float32)
    assert_type(dx, DeviceBuffer)
    assert_type(dy[1:], DeviceBuffer)
    assert_type(stream.launch(scale, 1, 256, 2.0, dx, dy, x.size), Operation[None])
    assert_type(stream.launch(scale, 2.0, dx, dy, x.size, n=x.size, block=128), Operation[None])
    assert_type(await stream.launch(scale, (1, 1, 1), (256, 1), 2.0, dx, dy, x.size), None)
    return await stream.download(dy)


async def repeat(stream: aiocuda.Stream, x: DeviceBuffer, y: DeviceBuffer) -> None:
    async with stream.capture() as graph:
        stream.launch(scale, 1, 256, 3.0, x, y, x.size)
    assert_type(graph, aiocuda.Graph)
    assert_type(graph.launch(stream), Operation[None])
    await graph.launch(stream)


async def main() -> None:
    x = np.arange(100, dtype=np.float32)
    async with aiocuda.open_device(driver="host") as device, device.stream(priority="high") as stream:
        await device.load(scale)
        np.testing.assert_array_equal(await launch(stream, x), 2 * x)
        await repeat(stream, stream.zeros(100), stream.empty(100))
        pinned = device.pinned(100, np.float32)
        assert_type(pinned, PinnedBuffer)
        with aiocuda.label("copy"):
            copied = stream.copy(stream.empty_like(x), pinned)
        assert_type(copied.label, str | None)
        await copied
