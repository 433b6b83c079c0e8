"""A pipeline with stages that fork and join: two kernels and a host stage handle the same item at the same time.

`after` names the stages that a stage depends on; without it, that is the previous one in the list. Waits on the device
order the branches, without the host. A stage that awaits runs in parallel. The last stage joins them: `slot.result`
returns the result of each. The statistics name the bottleneck and advise a depth.
"""

from __future__ import annotations

import argparse
import asyncio
import zlib

import numpy as np

import aiocuda
from aiocuda import Pipeline, Stage
from aiocuda.pipeline import Launch, SlotBuffer

ITEMS = 1 << 18
COUNT = 20

SOURCE = """
extern "C" __global__ void brighten(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 10.0f;
}

extern "C" __global__ void slopes(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] - x[i ? i - 1 : 0];
}
"""


def brighten_on_host(x, y, n):
    np.add(x, np.float32(10), out=y)


def slopes_on_host(x, y, n):
    y[0] = 0
    np.subtract(x[1:], x[:-1], out=y[1:])


# Modelled times on the host driver.
brighten = aiocuda.Kernel("brighten", source=SOURCE, host=brighten_on_host, host_seconds=0.003)
slopes = aiocuda.Kernel("slopes", source=SOURCE, host=slopes_on_host, host_seconds=0.004)

image, brighter, edges = (SlotBuffer(name, ITEMS) for name in ("image", "brighter", "edges"))
BLOCKS = (ITEMS + 255) // 256  # of 256 threads each


async def decode(slot):
    slot.pinned("image", ITEMS)[:] = np.linspace(0, slot.item, ITEMS, dtype=np.float32)  # in place of a decoder
    await asyncio.sleep(0)


def upload(slot):
    return slot.stream.copy(image.of(slot), slot.pinned("image", ITEMS))


async def checksum(slot):
    """Runs on a thread while the device works; the slot's memory does not change in this time."""
    return await asyncio.to_thread(zlib.crc32, slot.pinned("image", ITEMS))


def download(slot):
    return [slot.stream.download(buffer.of(slot)[-1:]) for buffer in (brighter, edges)]


async def report(slot):
    (brightest,), (steepest,) = slot.result("download")
    return float(brightest), float(steepest), slot.result("checksum")


STAGES = [
    Stage("decode", decode),
    Stage("upload", upload),
    Stage("brighten", Launch(brighten, BLOCKS, 256, image, brighter, ITEMS)),
    Stage("slopes", Launch(slopes, BLOCKS, 256, image, edges, ITEMS), after="upload"),
    Stage("download", download, after=("brighten", "slopes")),
    Stage("checksum", checksum, after="decode"),
    Stage("report", report, after=("download", "checksum")),
]


async def main(driver):
    async with aiocuda.open_device(driver=driver) as device, Pipeline(device, STAGES) as pipeline:
        async for _ in pipeline.run(range(3)):  # makes buffers, page-locks memory, compiles the kernels
            pass
        pipeline.reset_statistics()
        sums = set()
        async for brightest, steepest, crc in pipeline.run(range(COUNT)):
            assert brightest - 10 >= steepest >= 0
            sums.add(crc)
        statistics, advice = pipeline.statistics(), pipeline.advice()
        print(f"{statistics.iterations} images, {len(sums)} checksums, at most {statistics.peak_busy_slots} slots busy")
        busiest = statistics.bottleneck()
        print(f"busiest: {busiest.name}, {busiest.share:.0%} of the time at work")
        print(f"advised: {advice.depth} slots, {len(advice.streams)} streams; {advice.why}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a pipeline whose stages fork and join")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
