"""Graphs of operations: a fork and a join, a diamond, and a reduction tree over eight streams.

An `AsyncCoordinator` orders operations on the device by their reads and writes. The host registers them, one after the
other, and awaits only the last one. ``writes=[out]`` says that a kernel overwrites all of ``out``; without it, a
buffer that a kernel may write counts as read, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import numpy as np

import aiocuda

ITEMS = 1 << 12
LEAVES = 8
GRID, BLOCK = ITEMS // 256, 256

SOURCE = """
extern "C" __global__ void scale(float* out, const float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i];
}
extern "C" __global__ void add(float* out, const float* x, const float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
"""

scale = aiocuda.Kernel("scale", source=SOURCE, host=lambda out, x, factor, n: np.multiply(x, factor, out=out))
add = aiocuda.Kernel("add", source=SOURCE, host=lambda out, x, y, n: np.add(x, y, out=out))


async def fork_and_join(coordinator, x):
    """Two parallel kernels after one upload; the download depends on both."""
    up = coordinator.upload(x)
    both = coordinator.compute_stream.empty((2, ITEMS))
    coordinator.compute(scale, GRID, BLOCK, both[0], up, 2.0, ITEMS, writes=[both[0]])
    coordinator.compute(scale, GRID, BLOCK, both[1], up, 3.0, ITEMS, writes=[both[1]])  # another slice: beside it
    found = await coordinator.download(both)
    np.testing.assert_allclose(found, [2 * x, 3 * x])
    return found


async def diamond(coordinator, x):
    """A diamond: 2x, then 4x and 6x in parallel, then 10x."""
    top, left, right, bottom = (coordinator.compute_stream.empty(ITEMS) for _ in range(4))
    coordinator.compute(scale, GRID, BLOCK, top, coordinator.upload(x), 2.0, ITEMS, writes=[top])
    coordinator.compute(scale, GRID, BLOCK, left, top, 2.0, ITEMS, writes=[left])
    coordinator.compute(scale, GRID, BLOCK, right, top, 3.0, ITEMS, writes=[right])
    coordinator.compute(add, GRID, BLOCK, bottom, left, right, ITEMS, writes=[bottom])
    found = await coordinator.download(bottom)
    np.testing.assert_allclose(found, 10 * x)
    return found


async def reduction_tree(device, coordinator, x):
    """Eight leaves on eight streams; each level adds pairs, on the stream of the left operand."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(device.stream()) for _ in range(LEAVES)]
        level = [coordinator.upload(x * leaf, stream=stream).buffer for leaf, stream in enumerate(streams)]
        while len(level) > 1:
            sums = []
            for pair in range(0, len(level), 2):
                left, right = level[pair : pair + 2]
                stream = streams[pair * LEAVES // len(level)]
                coordinator.compute(add, GRID, BLOCK, left, left, right, ITEMS, stream=stream, kind="reduction")
                sums.append(left)
            level = sums
        found = await coordinator.download(level[0])
    np.testing.assert_allclose(found, x * sum(range(LEAVES)))
    return found


async def main(driver):
    x = np.arange(ITEMS, dtype=np.float32)
    async with aiocuda.open_device(driver=driver) as device, aiocuda.AsyncCoordinator(device, streams=8) as coordinator:
        print("fork and join", (await fork_and_join(coordinator, x))[:, 1])
        print("diamond", (await diamond(coordinator, x))[1])
        print("reduction tree", (await reduction_tree(device, coordinator, x))[1])
        await coordinator.drain()
        statistics = coordinator.statistics()
    print(f"{statistics.done} operations, {statistics.by_kind['transfer']} of them transfers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="graphs of operations, ordered on the device")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
