"""SAXPY: a device, two streams, buffers, a kernel, and an operation that is awaited.

Each stream method enqueues and returns an `Operation` immediately. Work in one stream runs in the order in which it was
enqueued; `wait` orders two streams on the device. Only the last operation is awaited: its order implies all the others.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import aiocuda

SOURCE = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


def saxpy_on_host(a, x, y, n):  # what the host driver runs in the kernel's place
    y += np.float32(a) * x


saxpy = aiocuda.Kernel("saxpy", source=SOURCE, host=saxpy_on_host)


async def main(driver):
    x = np.arange(1_000_000, dtype=np.float32)
    y = np.ones_like(x)
    async with aiocuda.open_device(driver=driver) as device:
        left, right = device.stream(), device.stream(priority="high")
        dx, dy = left.empty_like(x), right.empty_like(y)  # available immediately, allocated in stream order
        up = left.copy(dx, x)  # an Operation: x is borrowed until it is done
        right.copy(dy, y)
        right.wait(up)  # on the device: no round trip through the host
        blocks = (x.size + 255) // 256  # of 256 threads each: one thread per element
        right.launch(saxpy, blocks, 256, 2.0, dx, dy, x.size)  # not awaited: stream order is enough
        result = await right.download(dy)
    assert np.array_equal(result, 2 * x + 1)
    print(result[:4])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a * x + y on two streams")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
