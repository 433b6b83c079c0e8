"""A pipeline: read, upload, compute and download, each at work on another item.

A stage is a function of a slot. A coroutine function *awaits*: it reads a file or a socket, and the host is free in
this time. A plain function *enqueues*: it enqueues work on ``slot.stream`` and returns the operation; the pipeline
orders it after the previous stage, on the device. Buffers belong to the slot and serve one item after another. Results
arrive in the order of the source. At most ``depth`` slots are busy, so a slow consumer slows the pipeline down.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np

import aiocuda
from aiocuda import Pipeline, Stage

ITEMS = 1 << 20
COUNT = 10

SOURCE = """
extern "C" __global__ void square(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i];
}
"""


def square_on_host(x, y, n):
    np.multiply(x, x, out=y)


# Modelled time on the host driver: 5 ms of compute beside 2 ms of copying each way.
square = aiocuda.Kernel("square", source=SOURCE, host=square_on_host, host_seconds=0.005)


async def read(slot):
    slot.pinned("x", ITEMS)[:] = slot.item  # page-locked memory, which the device reads without a copy on the host
    await asyncio.sleep(0)  # in place of a file or a socket


def upload(slot):
    return slot.stream.copy(slot.buffer("x", ITEMS), slot.pinned("x", ITEMS))


def compute(slot):
    blocks = (ITEMS + 255) // 256  # of 256 threads each
    return slot.stream.launch(square, blocks, 256, slot.buffer("x", ITEMS), slot.buffer("y", ITEMS), ITEMS)


def download(slot):
    return slot.stream.download(slot.buffer("y", ITEMS), out=slot.pinned("y", ITEMS))


STAGES = [Stage("read", read), Stage("upload", upload), Stage("compute", compute), Stage("download", download)]


async def main(driver):
    async with aiocuda.open_device(driver=driver) as device, Pipeline(device, STAGES, depth=3) as pipeline:
        async for _ in pipeline.run(range(3)):  # makes buffers, page-locks memory, compiles the kernel
            pass
        seconds = {}
        for overlap in (False, True):
            pipeline.reset_statistics()
            began = time.perf_counter()
            # The last stage downloads into the slot's memory; the result is a copy, which stays.
            squares = [float(result[0]) async for result in pipeline.run(range(COUNT), overlap=overlap)]
            seconds[overlap] = time.perf_counter() - began
            assert squares == [number**2 for number in range(COUNT)]
        statistics = pipeline.statistics()
    print(f"{statistics.iterations} results in order, at most {statistics.peak_busy_slots} slots busy")
    print(f"one step after the other {seconds[False] * 1e3:.0f} ms, overlapped {seconds[True] * 1e3:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a triple-buffered pipeline of four stages")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
