"""A handler of a server that sends what the GPU has written, as soon as it is written.

The original blocks a thread for each request: `asyncio.to_thread(stream.synchronize)`. Requests beyond the number of
threads of the executor wait for a thread. `aiocuda.wait` needs no thread: one line, in the same handler.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import aiocuda
from aiocuda.lowlevel import queue_of

REQUESTS = 64
KIB = {"host": 256, "cuda": 4096}  # of each request


async def by_thread(stream: aiocuda.Stream) -> None:
    """The original. The method `synchronize` of PyTorch's and CuPy's streams blocks; streams of aiocuda have none."""
    await asyncio.to_thread(stream.device.driver.stream_synchronize, queue_of(stream).handle)


async def by_waiting(stream: aiocuda.Stream) -> None:
    await aiocuda.wait(stream)


async def main(driver: str) -> None:
    async with aiocuda.open_device(driver=driver, streams_ahead=REQUESTS) as device:
        streams = [device.stream() for _ in range(REQUESTS)]
        data = await device.pinned(KIB[device.driver.name] << 10, "uint8")
        buffers = [stream.empty(data.shape, data.dtype) for stream in streams]
        await aiocuda.wait(buffers)

        async def handler(number: int, wait: Callable[[aiocuda.Stream], Awaitable[None]]) -> int:
            streams[number].copy(buffers[number], data)
            await wait(streams[number])
            return threading.active_count()  # here it would send

        for name, wait in (("aiocuda.wait", by_waiting), ("a thread each", by_thread)):
            for _ in range(2):  # the first time is not measured
                began, processor = time.perf_counter(), time.process_time()
                threads = await asyncio.gather(*[handler(number, wait) for number in range(REQUESTS)])
                took, processor = time.perf_counter() - began, time.process_time() - processor
            print(f"{name}: {took * 1e3:.1f} ms, {processor * 1e3:.1f} ms of a processor, {max(threads)} threads")
        for stream in streams:
            await stream.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="auto", choices=("auto", "host", "cuda"))
    asyncio.run(main(parser.parse_args().driver))
