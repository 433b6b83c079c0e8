"""The output loop of a model server, which waits for the step that the GPU computes.

The original asks an event every millisecond: each step ends up to a millisecond late, and the loop wakes up for
nothing. `aiocuda.wait` takes the place of these two lines. It needs no device of its own: here aiocuda also enqueues
the work, so that the program runs without a GPU; a server has events of PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import aiocuda

STEPS = 40
MIB = {"host": 8, "cuda": 256}  # a step copies so much, in about 4 ms


async def by_polling(event: aiocuda.Event) -> None:
    """The original."""
    while not event.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def by_waiting(event: aiocuda.Event) -> None:
    await aiocuda.wait(event)


async def main(driver: str) -> None:
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        data = await device.pinned(MIB[device.driver.name] << 20, "uint8")
        buffer = stream.empty(data.shape, data.dtype)

        async def steps(wait: Callable[[aiocuda.Event], Awaitable[None]], count: int) -> tuple[float, float]:
            began, processor = time.perf_counter(), time.process_time()
            for _ in range(count):
                stream.copy(buffer, data)
                await wait(stream.record())
            return (time.perf_counter() - began) / count * 1e3, (time.process_time() - processor) / count * 1e3

        for name, wait in (("asked every millisecond", by_polling), ("aiocuda.wait", by_waiting)):
            await steps(wait, 5)
            took, processor = await steps(wait, STEPS)
            print(f"{name}: {took:.2f} ms a step, {processor:.2f} ms of a processor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="auto", choices=("auto", "host", "cuda"))
    asyncio.run(main(parser.parse_args().driver))
