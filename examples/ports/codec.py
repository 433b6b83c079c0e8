"""A codec of an array library, whose event loop runs in a thread of its own and is not the codec's.

The original awaits each event by a thread. A codec cannot know when to close a device: `aiocuda.wait` needs none.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Coroutine

import aiocuda

CHUNKS = 32
KIB = {"host": 512, "cuda": 8192}  # of each chunk


def synchronize(event: aiocuda.Event) -> None:
    """Block until the work before the event is done, as the method of that name of PyTorch's and CuPy's events."""
    while not event.stream.device.driver.event_query(event.handle):
        time.sleep(0.0002)  # noqa: TID251


async def decode(stream: aiocuda.Stream, buffer: aiocuda.DeviceBuffer, chunk: aiocuda.PinnedBuffer, by: str) -> None:
    stream.copy(buffer, chunk)
    event = stream.record()
    await (aiocuda.wait(event) if by == "aiocuda.wait" else asyncio.to_thread(synchronize, event))


async def read(driver: str) -> None:
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        chunk = await device.pinned(KIB[device.driver.name] << 10, "uint8")
        buffers = [stream.empty(chunk.shape, chunk.dtype) for _ in range(CHUNKS)]
        for by in ("aiocuda.wait", "a thread each"):
            for _ in range(2):  # the first time is not measured
                began, processor = time.perf_counter(), time.process_time()
                await asyncio.gather(*[decode(stream, buffer, chunk, by) for buffer in buffers])
                took, processor = time.perf_counter() - began, time.process_time() - processor
            print(f"{by}: {CHUNKS} chunks in {took * 1e3:.1f} ms, {processor * 1e3:.1f} ms of a processor")


def in_the_loop_of_the_library(work: Coroutine[None, None, None]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="auto", choices=("auto", "host", "cuda"))
    in_the_loop_of_the_library(read(parser.parse_args().driver))
