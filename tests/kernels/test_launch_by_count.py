"""A launch that names the number of threads, `n=`, and leaves the grid to the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import (
    AsyncCoordinator,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    Kernel,
    Pipeline,
    Slot,
    Stage,
    Stream,
    StreamGroup,
    StreamPool,
)
from aiocuda.pipeline import Launch, SlotBuffer
from tests.helpers import quickly

pytestmark = pytest.mark.asyncio

SOURCE = """
extern "C" __global__ void mark(unsigned* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 1 + blockIdx.x;
    if (i == 0) { x[n] = gridDim.x; x[n + 1] = blockDim.x; }
}
"""


def mark_on_host(x: Any, n: int, *, grid: Any, block: Any) -> None:
    x[:n] = 1 + np.arange(n) // block[0]
    x[n:] = grid[0], block[0]


MARK = Kernel("mark", source=SOURCE, host=mark_on_host)
NOTHING = Kernel("nothing", source='extern "C" __global__ void nothing() {}', host=lambda: None)
FOUR = Kernel(
    "four",
    source='extern "C" __global__ void four(int* x, int a, int b, int c) { *x = a * 100 + b * 10 + c; }',
    host=lambda x, a, b, c: x.fill(a * 100 + b * 10 + c),
)


def expected(n: int, block: int) -> list[int]:
    return [*(1 + np.arange(n) // block).tolist(), -(-n // block), block]


@pytest.mark.parametrize(("n", "block"), [(1, 256), (256, 256), (257, 256), (1000, 128), (np.int64(64), np.int32(32))])
async def test_the_grid_has_as_many_blocks_as_the_count_needs(stream: Stream, n: int, block: int) -> None:
    buffer = stream.zeros(n + 2, np.uint32)
    stream.launch(MARK, buffer, n, n=n, block=block)
    assert (await quickly(stream.download(buffer))).tolist() == expected(n, block)


async def test_a_block_has_256_threads_by_default(stream: Stream) -> None:
    buffer = stream.zeros(302, np.uint32)
    stream.launch(MARK, buffer, 300, n=300)
    assert (await quickly(stream.download(buffer))).tolist() == expected(300, 256)


async def test_any_number_of_arguments_is_the_kernels(stream: Stream) -> None:
    """With `n=`, none of them is taken for the grid or the block, also not beside `block=`."""
    x = stream.zeros(1, np.int32)
    stream.launch(FOUR, x, 1, 2, 3, n=1, block=32)
    assert (await quickly(stream.download(x))).tolist() == [123]
    await quickly(stream.launch(NOTHING, n=1, block=32))
    with pytest.raises(InvalidTypeError, match="takes 4 arguments, 2 given"):
        stream.launch(FOUR, x, 1, n=1)


async def test_grid_and_block_may_be_keywords(stream: Stream) -> None:
    x = stream.zeros(1, np.int32)
    await quickly(stream.launch(NOTHING, grid=1, block=32))
    await quickly(stream.launch(NOTHING, 1, block=32))
    await quickly(stream.launch(kernel=NOTHING, grid=1, block=32))
    await quickly(stream.launch(FOUR, x, 1, 2, 3, grid=1, block=1))  # type: ignore[call-overload] # what is named has no position
    assert (await quickly(stream.download(x))).tolist() == [123]


WRONG: dict[str, tuple[Callable[[Any, Any], object], type[Exception], str]] = {
    "neither": (lambda s, x: s.launch(MARK, x, 4), InvalidTypeError, r"grid takes integers.*n=count"),
    "nothing": (lambda s, x: s.launch(), InvalidTypeError, "takes an aiocuda.Kernel, not NoneType"),
    "no kernel": (lambda s, x: s.launch(n=4), InvalidTypeError, "takes an aiocuda.Kernel, not NoneType"),
    "no kernel, n=0": (lambda s, x: s.launch(print, n=0), InvalidTypeError, "takes an aiocuda.Kernel"),
    "both": (lambda s, x: s.launch(MARK, x, 4, n=4, grid=1), InvalidTypeError, "n= or grid=, not both"),
    "n < 0": (lambda s, x: s.launch(MARK, x, 4, n=-1), InvalidArgumentError, "n is at least 0, not -1"),
    "n is a float": (lambda s, x: s.launch(MARK, x, 4, n=4.0), InvalidTypeError, "n is an integer, not 4.0"),
    "n is True": (lambda s, x: s.launch(MARK, x, 4, n=True), InvalidTypeError, "n is an integer, not True"),
    "block is a tuple": (lambda s, x: s.launch(MARK, x, 4, n=4, block=(8, 8)), InvalidTypeError, r"not \(8, 8\)"),
    "block is 0": (lambda s, x: s.launch(MARK, x, 4, n=4, block=0), InvalidArgumentError, "block with n= is at least"),
    "block is large": (lambda s, x: s.launch(MARK, x, 4, n=4, block=2048), InvalidArgumentError, "takes 1 to 1024"),
    "block, n=0": (lambda s, x: s.launch(MARK, x, 4, n=0, block=2048), InvalidArgumentError, "takes 1 to 1024"),
    "n is large": (lambda s, x: s.launch(MARK, x, 4, n=2**40, block=1), InvalidArgumentError, "grid.x is"),
    "arguments, n=0": (lambda s, x: s.launch(MARK, x, n=0), InvalidTypeError, "takes 2 arguments, 1 given"),
    "array, n=0": (lambda s, x: s.launch(MARK, np.ones(1), 4, n=0), InvalidTypeError, "upload"),
    "shared, n=0": (lambda s, x: s.launch(MARK, x, 4, n=0, shared_bytes=-1), InvalidArgumentError, "shared_bytes is"),
    "unknown": (lambda s, x: s.launch(MARK, x, 4, n=4, cluster=2), InvalidTypeError, "__cluster_dims__"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_launches_are_refused(stream: Stream, case: str) -> None:
    call, error, says = WRONG[case]
    buffer = stream.empty(6, np.uint32)
    with pytest.raises(error, match=says):
        call(stream, buffer)
    await quickly(stream.synchronize())


async def test_a_count_of_0_launches_nothing_and_keeps_its_place(stream: Stream, latch: Any) -> None:
    buffer = stream.zeros(2, np.uint32)
    latch.hold(stream)
    empty = stream.launch(MARK, buffer, 0, n=0, label="none")
    assert not empty.done()
    assert empty.label == "none"
    latch.release()
    await quickly(empty)
    assert (await quickly(stream.download(buffer))).tolist() == [0, 0]
    assert stream.statistics().launches == 1  # that of the latch


async def launch_by_coordinator(device: Device, x: Any, n: int) -> None:
    async with AsyncCoordinator(device) as coordinator:
        await coordinator.compute(MARK, x, n, n=n, block=32)
        assert coordinator.statistics().registered == 1
        with pytest.raises(InvalidTypeError, match="compute has no parameter 'cluster'"):
            coordinator.compute(MARK, x, n, n=n, cluster=1)
        with pytest.raises(InvalidArgumentError, match="block"):
            coordinator.compute(MARK, x, n, n=n, block=2048)
        with pytest.raises(InvalidArgumentError, match="grid"):
            coordinator.compute(MARK, 0, 32, x, n)


async def launch_by_group(device: Device, x: Any, n: int) -> None:
    async with StreamGroup(device, ["a", "b"]) as group:
        group.add_dependency("b", "a")
        await group["b"].launch(MARK, x, n, n=n, block=32)


async def launch_by_lease(device: Device, x: Any, n: int) -> None:
    async with StreamPool(device, maximum=1) as pool, pool.stream() as lease:
        await lease.launch(MARK, x, n, n=n, block=32)


async def launch_by_graph(device: Device, x: Any, n: int) -> None:
    async with device.stream() as stream:
        with stream.capture() as graph:
            stream.fill(x[:1], 0)
            stream.launch(MARK, x, n, n=n, block=32)
        await graph.launch(stream)
        assert len(graph) == 1 + (n > 0)


async def launch_by_pipeline(device: Device, x: Any, n: int) -> None:
    y = SlotBuffer("y", n + 2, np.uint32)
    launch = Launch(MARK, y, n, n=n, block=32)
    assert (launch.grid, launch.block, launch.args, launch.outputs) == (-(-n // 32), 32, (y, n), ("y",))

    def clear(slot: Slot) -> object:
        return slot.stream.fill(y.of(slot), 0)

    def copy(slot: Slot) -> object:
        return slot.stream.copy(x, y.of(slot))

    stages = [Stage("clear", clear), Stage("mark", launch), Stage("copy", copy)]
    await Pipeline(device, stages).execute_iteration(0)


@pytest.mark.parametrize("n", [0, 100])
@pytest.mark.parametrize(
    "way", [launch_by_coordinator, launch_by_group, launch_by_lease, launch_by_graph, launch_by_pipeline]
)
async def test_every_way_to_launch_takes_a_count(device: Device, stream: Stream, way: Any, n: int) -> None:
    x = stream.zeros(n + 2, np.uint32)
    await quickly(stream.synchronize())
    await quickly(way(device, x, n))
    assert (await quickly(stream.download(x))).tolist() == (expected(n, 32) if n else [0, 0])


STRUCTURED = np.dtype([("a", np.float32), ("b", np.uint8, 3)])


@pytest.mark.parametrize("shape", [(), 0, 5, (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.bool_, STRUCTURED], ids=str)
async def test_zeros_are_zero_for_every_dtype(stream: Stream, shape: Any, dtype: Any) -> None:
    count = int(np.prod(shape))
    used = stream.empty(count, dtype)
    await quickly(stream.fill(used.view(np.uint8), 255))
    used.free()  # so that its memory may come again
    buffer = stream.zeros(shape, dtype)
    assert (buffer.shape, buffer.dtype) == (np.zeros(shape).shape, dtype)
    found = await quickly(stream.download(buffer))
    assert found.tobytes() == bytes(found.nbytes)


async def test_zeros_are_float32_by_default(stream: Stream) -> None:
    assert stream.zeros(3).dtype == np.float32
    assert inspect.signature(Stream.zeros) == inspect.signature(Stream.empty)
    await quickly(stream.synchronize())
