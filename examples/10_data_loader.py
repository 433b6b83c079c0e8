"""A data loader: worker processes decode images, a kernel uses the batches, and another loader resumes where it was.

Worker processes import this file. So the program starts below ``if __name__ == "__main__":``, and ``decode`` is at the
top of the module.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import numpy as np

import aiocuda
from aiocuda.data import DataLoader, Shuffle

SAMPLES, BATCH, SIDE = 96, 16, 64
FIELDS = [((SIDE, SIDE), np.uint8), ((), np.int64)]  # of one sample: an image and its label

SOURCE = """
extern "C" __global__ void row_sums(const unsigned char* images, unsigned int* sums, int pixels) {
    const unsigned char* image = images + (size_t)blockIdx.x * pixels;
    unsigned int sum = 0;
    for (int i = threadIdx.x; i < pixels; i += blockDim.x) sum += image[i];
    atomicAdd(sums + blockIdx.x, sum);
}
"""


def row_sums_on_host(images, sums, pixels):
    sums[: len(images)] += images.reshape(-1, pixels).sum(axis=1, dtype=np.uint32)


row_sums = aiocuda.Kernel("row_sums", source=SOURCE, host=row_sums_on_host)


def decode(index, out):
    """Decode a sample into memory that the device reads: here a formula in place of an image file."""
    image, label = out
    image[...] = np.add.outer(np.arange(SIDE), np.full(SIDE, index)) % 256
    label[...] = index % 10


def loader(device):
    return DataLoader(
        device, range(SAMPLES), fields=FIELDS, decode=decode, batch_size=BATCH, workers=2, executor="process",
        shuffle=Shuffle(seed=0),
    )  # fmt: skip


async def step(batch):
    """Use a batch on the device: the sum of each image."""
    images, _ = batch
    stream = batch.stream
    sums = stream.empty(len(batch.indices), np.uint32)
    stream.fill(sums, 0)
    stream.launch(row_sums, len(batch.indices), 128, images, sums, SIDE * SIDE)
    return await stream.download(sums)


async def main(driver):
    seen = {}
    async with aiocuda.open_device(driver=driver) as device:
        async with loader(device) as batches:
            async for batch in batches:
                seen.update(zip(batch.indices, await step(batch), strict=True))
                if batch.number == 2:
                    saved = json.dumps(batches.state_dict())  # beside the model, after the step
                    break
        print(f"left after {len(seen)} samples, with a state of {len(saved)} bytes")
        async with loader(device) as batches:
            batches.load_state_dict(json.loads(saved))
            async for batch in batches:
                seen.update(zip(batch.indices, await step(batch), strict=True))
            print(
                f"resumed: {len(seen)} of {SAMPLES} samples, each once: {batches.statistics().samples == SAMPLES // 2}"
            )
    right = all(seen[index] == (np.add.outer(np.arange(SIDE), np.full(SIDE, index)) % 256).sum() for index in seen)
    print(f"sums are right: {right}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a data loader with worker processes, which resumes where it was left")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
