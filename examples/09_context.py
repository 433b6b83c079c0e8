"""A managed context: one object for a device and its parts, in two modes with the same results.

`triple_buffered_step` begins a step and returns the telemetry of the step before the last: one step is uploaded while
another is computed and a third one downloaded. Inputs and outputs are buffers of the step's slot. The field lasts from
step to step, so the program allocates it. With ``asynchronous=False``, or AIOCUDA_ASYNC=0, the same program runs one
operation after the other on the device's default stream, and the driver makes no stream.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

import aiocuda
from aiocuda import ManagedContext, StepConfig

SIZE = 1 << 16
STEPS = 8

SOURCE = """
extern "C" __global__ void relax(const float* noise, float* field, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = field[i] = 0.5f * field[i] + noise[i];
}
"""


def relax_on_host(noise, field, out, n):
    np.multiply(field, np.float32(0.5), out=field)
    np.add(field, noise, out=field)
    out[:] = field


relax = aiocuda.Kernel("relax", source=SOURCE, host=relax_on_host)


async def run(driver, asynchronous):
    """Return the field after each step, and the number of streams that the driver has made."""
    async with ManagedContext(driver=driver, asynchronous=asynchronous) as context:
        field = await context.stream("control").upload(np.zeros(SIZE, np.float32))

        def compute(slot):
            out = slot.buffer("out", SIZE)
            return slot.stream.launch(relax, SIZE // 256, 256, slot.buffer("noise"), field, out, SIZE)

        random = np.random.default_rng(1)
        done = []
        for _ in range(STEPS):
            noise = random.random(SIZE, np.float32)  # a new array for each step: it is borrowed until the step is done
            telemetry = await context.triple_buffered_step(StepConfig({"noise": noise}, compute, ["out"]))
            if telemetry is not None:  # of the step before the last
                done.append(telemetry)
        done += await context.flush()
        assert [telemetry.step for telemetry in done] == list(range(STEPS))
        return [telemetry.outputs["out"] for telemetry in done], context.statistics().streams_created


async def main(driver):
    fields = {}
    for asynchronous in (True, False):
        fields[asynchronous], streams = await run(driver, asynchronous)
        mode = "asynchronous" if asynchronous else "synchronous"
        print(f"{mode}: {STEPS} steps, {streams} streams made")
    same = all(np.array_equal(left, right) for left, right in zip(fields[True], fields[False], strict=True))
    print(f"bit-equal: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a managed context in both modes")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
