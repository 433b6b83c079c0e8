"""Cancellation: the effects of a time-out, of a cancelled task and of `abandon`.

An await can be cancelled at any time. Work that a stream has accepted cannot: a GPU has no way to stop it. So a
cancelled await changes only that await. `abandon` drops a result that is no longer needed; it does not change the order
of the stream either.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import aiocuda

SOURCE = """
extern "C" __global__ void slow_increment(float* x, int n) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < 100000000);  // 100 ms
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}
"""


def increment_on_host(x, n):
    x += 1


slow_increment = aiocuda.Kernel("slow_increment", source=SOURCE, host=increment_on_host, host_seconds=0.1)


async def main(driver):
    async with aiocuda.open_device(driver=driver) as device:
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        await stream.launch(slow_increment, 1, 32, buffer, 4)

        # 1. A time-out ends the wait, but not the work.
        operation = stream.launch(slow_increment, 1, 32, buffer, 4)
        try:
            async with asyncio.timeout(0.01):
                await operation
        except TimeoutError:
            print(f"timed out; the launch is {operation.state}")
        await operation  # the same operation, awaited again
        print(f"awaited again: {operation.state}, {await stream.download(buffer)}")

        # 2. Two tasks wait for one operation. One is cancelled, the other gets the result.
        stream.launch(slow_increment, 1, 32, buffer, 4)
        download = stream.download(buffer)
        first, second = (asyncio.create_task(download.wait()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        print(f"first cancelled: {first.cancelled()}, second: {await second}")

        # 3. An abandoned download ends immediately, its array is not written, and the stream continues.
        target = np.zeros(4, np.float32)
        stream.launch(slow_increment, 1, 32, buffer, 4)
        download = stream.download(buffer, out=target)
        download.abandon()
        try:
            await download
        except aiocuda.ClosedError:
            print(f"abandoned: {download.state}, target {target}")
        result = await stream.download(buffer)
        print(f"the stream went on: {result}")
    assert np.array_equal(result, np.full(4, 4.0))
    assert not target.any()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time-outs, cancelled tasks and abandoned operations")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
