"""Kernels with pointers to structures: what the host implementation gets, and which buffers are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceBuffer, InvalidTypeError, Kernel, Stream
from aiocuda.driver.protocol import CompiledKernel, CudaSource
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import quickly

SOURCE = """
struct Pair { float x; int n; };
__global__ void add(const Pair* pairs, Pair* sum, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { atomicAdd(&sum->x, pairs[i].x); atomicAdd(&sum->n, pairs[i].n); }
}
"""
PAIR = np.dtype([("x", np.float32), ("n", np.int32)], align=True)
LARGE = np.dtype([("x", np.float64), ("n", np.int32)], align=True)
OTHER = np.dtype([("n", np.int32), ("x", np.float32)])  # as large as a pair

flags: list[tuple[bool, bool]] = []


def add_on_host(pairs: Any, total: Any, n: int) -> None:
    flags.append((pairs.flags.writeable, total.flags.writeable))
    for name in pairs.dtype.names:
        total[name] += pairs[name][:n].sum(0)


def fresh() -> Kernel:
    return Kernel("add", source=SOURCE, host=add_on_host)


@pytest.mark.asyncio
async def test_host_implementation_gets_structured_arrays(stream: Stream) -> None:
    """On a GPU, the kernel gets the same items."""
    flags.clear()
    kernel = fresh()
    assert repr(kernel) == "<Kernel add(const Pair* pairs, Pair* sum, int n)>"
    assert [parameter.structure for parameter in kernel.signature.parameters] == ["Pair", "Pair", ""]
    assert [kernel.writes(index) for index in range(3)] == [False, True, False]
    pairs = np.array([(0.5, 1), (1.5, 20), (2.5, 300)], PAIR)
    for _ in range(2):
        total = stream.zeros((), PAIR)
        stream.launch(kernel, await stream.upload(pairs), total, 3, n=3)
        assert (await quickly(stream.download(total))).tolist() == (4.5, 321)
    assert set(flags) in ({(False, True)}, set())


class Compiling(SimulatedDriver):
    """A compiler that has found 8 bytes for each structure. It runs host implementations."""

    wants_image = True

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        return CompiledKernel(b"", source.name, sizes=(8,) * len(source.structures))


def run(main: Callable[[Device, Stream, DeviceBuffer, DeviceBuffer], Awaitable[None]]) -> None:
    """Run it with a buffer of pairs, and one of items with 16 bytes."""

    async def opened() -> None:
        async with aiocuda.open_device(driver=Compiling(None)) as device, device.stream() as stream:
            await main(device, stream, stream.zeros(4, PAIR), stream.zeros(4, LARGE))

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(opened())


SAYS = r"argument 2 of add\(.*\) is a buffer of .*, 16 bytes each, and sizeof\(Pair\) is 8: give the dtype"


@pytest.mark.parametrize("way", ["after a load", "after a launch"])
def test_items_of_another_size_are_refused(way: str) -> None:
    async def main(device: Device, stream: Stream, small: DeviceBuffer, large: DeviceBuffer) -> None:
        kernel = fresh()
        if way == "after a load":
            await device.load(kernel)
        else:
            await stream.launch(kernel, small, small, 0, n=4)
        for _ in range(2):
            with pytest.raises(InvalidTypeError, match=SAYS) as caught:
                stream.launch(kernel, small, large, 0, n=4)
            assert (caught.value.expected, caught.value.given) == (8, 16)  # type: ignore[attr-defined]
            await stream.launch(kernel, small, small.view(OTHER), 0, n=4)  # the fields are not compared

    run(main)


def test_launch_that_compiles_the_kernel_is_refused_when_it_is_awaited() -> None:
    async def main(device: Device, stream: Stream, small: DeviceBuffer, large: DeviceBuffer) -> None:
        kernel = fresh()
        launched = stream.launch(kernel, small, large, 0, n=4)
        large.free()  # its size is known all the same
        with pytest.raises(InvalidTypeError, match=SAYS):
            await launched
        await stream.launch(kernel, small, small, 0, n=4)

    run(main)


def test_graph_that_compiles_the_kernel_is_refused() -> None:
    async def main(device: Device, stream: Stream, small: DeviceBuffer, large: DeviceBuffer) -> None:
        kernel = fresh()
        with stream.capture() as graph:
            stream.launch(kernel, small, large, 0, n=4)
        with pytest.raises(InvalidTypeError, match=SAYS):
            await graph
        graph.close()

    run(main)
