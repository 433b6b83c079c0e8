"""Streams and events: a fork, a join, and the time that each branch takes on the device.

An event is a point in a stream's order. Other streams wait for it on the device, so neither the fork nor the join needs
the host; two timing events give the device time between them. The host waits once, at the end.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import aiocuda

SOURCE = """
extern "C" __global__ void square(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i];
}
extern "C" __global__ void triple(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 3 * x[i];
}
extern "C" __global__ void add(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}
"""


def square_on_host(x, y, n):
    y[:] = x * x


def triple_on_host(x, y, n):
    y[:] = 3 * x


def add_on_host(x, y, n):
    y += x


# `host_seconds` is modelled time: on the host driver each branch takes 30 ms, and both together do not take 60.
square = aiocuda.Kernel("square", source=SOURCE, host=square_on_host, host_seconds=0.03)
triple = aiocuda.Kernel("triple", source=SOURCE, host=triple_on_host, host_seconds=0.03)
add = aiocuda.Kernel("add", source=SOURCE, host=add_on_host)


ITEMS = 10_000
BLOCKS = (ITEMS + 255) // 256  # of 256 threads each: one thread per item


def timed(stream, kernel, *args):
    """Launch a kernel between two timing events."""
    start = stream.record(timing=True)
    stream.launch(kernel, BLOCKS, 256, *args)
    return start, stream.record(timing=True)


async def main(driver):
    x = np.arange(ITEMS, dtype=np.float32) % 100
    async with aiocuda.open_device(driver=driver) as device:
        trunk, left, right = (device.stream(name=name) for name in ("trunk", "left", "right"))
        dx = await trunk.upload(x)
        squares, triples = trunk.empty_like(dx), trunk.empty_like(dx)
        # The first launch of a kernel compiles and loads it, off the loop, so it is not timed.
        await trunk.launch(square, BLOCKS, 256, dx, squares, ITEMS)
        await trunk.launch(triple, BLOCKS, 256, dx, triples, ITEMS)

        fork = trunk.record(timing=True)
        left.wait(fork)  # an event, an operation, or a whole stream
        right.wait(fork)
        left_start, left_end = timed(left, square, dx, squares, ITEMS)
        right_start, right_end = timed(right, triple, dx, triples, ITEMS)
        trunk.wait(left_end)
        trunk.wait(right_end)
        join = trunk.record(timing=True)
        trunk.launch(add, BLOCKS, 256, triples, squares, ITEMS)
        result = await trunk.download(squares)

        await aiocuda.gather(left_end, right_end, join)  # awaited before the times are read
        left_ms = left_start.elapsed_ms(left_end)
        right_ms = right_start.elapsed_ms(right_end)
        both_ms = fork.elapsed_ms(join)
    assert np.array_equal(result, x * x + 3 * x)
    print(result[:4])
    print(f"left {left_ms:.2f} ms, right {right_ms:.2f} ms, from fork to join {both_ms:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a fork and a join on the device, timed by events")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
