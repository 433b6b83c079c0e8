"""Two replicas of a model behind one micro-batcher. One replica is killed; the requests go on.

Each replica is a process with a GPU of its own, or with the host driver. On a machine with one GPU they share it, by
``CUDA_VISIBLE_DEVICES=0,0``. Replicas import this file, so the program starts below ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

import numpy as np

import aiocuda
from aiocuda.cluster import current_replica, open_cluster
from aiocuda.serving import MicroBatcher

SOURCE = """
extern "C" __global__ void scale(float* x, float factor, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) x[i] *= factor;
}
"""


def scale_on_host(x, factor, n):
    x[:n] *= factor


scale = aiocuda.Kernel("scale", source=SOURCE, host=scale_on_host)


class Model:
    """Runs in each replica, and opens the GPU of its replica."""

    def __init__(self, factor, driver):
        self.factor = factor
        self.driver = driver

    async def __aenter__(self):
        self.device = await aiocuda.open_device(driver=self.driver)
        await self.device.load(scale)  # before the first call
        self.stream = self.device.stream()
        return self

    async def __aexit__(self, *exc):
        await self.device.aclose()

    async def predict(self, rows):
        x = await self.stream.upload(rows)
        self.stream.launch(scale, 32, 256, x, self.factor, rows.size)
        return await self.stream.download(x)

    async def process(self):
        return current_replica().index, os.getpid()


async def main(driver, replicas):
    async with open_cluster("local", replicas=replicas) as cluster:
        model = await cluster.spawn(Model, 3.0, driver)

        async def infer(batch):
            rows = np.stack(batch.items)
            return list(await model.call("predict", rows, deadline_s=10, retry=True))

        async with MicroBatcher(infer, max_batch_size=32, max_concurrent_batches=2 * replicas) as batcher:
            requests = [asyncio.create_task(batcher.submit(np.full(64, i, np.float32))) for i in range(1000)]
            index, pid = await model.call("process")
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*requests)

        right = all((answer == 3 * i).all() for i, answer in enumerate(answers))
        print(f"{len(answers)} requests answered, all right: {right}")
        while cluster.statistics().replicas[index].state != "running":  # noqa: ASYNC110 - a demonstration
            await asyncio.sleep(0.05)
        print(f"the killed replica serves again, in epoch {cluster.statistics().replicas[index].epoch}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="replicas of a model, one of which is killed")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    asyncio.run(main(options.driver, options.replicas))
