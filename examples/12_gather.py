"""Fork and join with `asyncio.gather`: a group of streams, a barrier for two branches, and a ring of three slots."""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import aiocuda

N = 1 << 16
SOURCE = """
extern "C" __global__ void scale(const float* x, float* y, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = by * x[i];
}

extern "C" __global__ void add(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}
"""
scale = aiocuda.Kernel("scale", source=SOURCE, host=lambda x, y, by, n: np.multiply(x, by, out=y))
add = aiocuda.Kernel("add", source=SOURCE, host=lambda x, y, n: np.add(x, y, out=y))
BUFFERS = {"x": (N, np.float32), "left": (N, np.float32), "right": (N, np.float32)}


async def main(driver):
    async with (
        aiocuda.open_device(driver=driver) as device,
        aiocuda.StreamGroup(device, ("up", "left", "right")) as group,
        aiocuda.TripleBuffer(buffers=BUFFERS, device=device) as ring,
    ):
        group.add_dependency("left", "up")  # on the device: no round trip through the host
        group.add_dependency("right", "up")

        async def branch(name, slot, by, barrier):
            group[name].launch(scale, slot.buffer("x"), slot.buffer(name), by, N, n=N)
            await barrier.wait(group[name])  # later work of both streams comes after the work of both

        async def item(number):
            barrier = aiocuda.StreamBarrier(2)
            async with ring.slot() as slot:  # waits for one of three
                group["up"].copy(slot.buffer("x"), np.full(N, number, np.float32))
                await asyncio.gather(branch("left", slot, 2.0, barrier), branch("right", slot, 3.0, barrier))
                group["left"].launch(add, slot.buffer("right"), slot.buffer("left"), N, n=N)
                return await group["left"].download(slot.buffer("left"))

        results = await asyncio.gather(*map(item, range(8)))
        print([int(result[0]) for result in results], "at most 3 at a time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="fork and join with asyncio.gather, a barrier and a triple buffer")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
