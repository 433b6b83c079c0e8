"""Rows in short slices, by public names of aiocuda alone: `compare` runs them with two versions of the library.

A slice does the work of the row with its name, if there is one, for some tenths of a second, without a baseline.
Machines and seconds differ by more than two versions do, so slices of both have to alternate.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeAlias

import numpy as np

import aiocuda
from aiocuda.data import DataLoader
from aiocuda.serving import MicroBatcher

from .figures import Better
from .kernels import empty, nanoseconds, spin
from .peers.rows import keep_busy

__all__ = ["SLICES", "Slice", "Work", "added", "idle", "open_streams"]

Work: TypeAlias = Callable[[float], Awaitable[float]]  #: for about so many seconds; returns the figure

#: Seconds of the kernel of `kernel_200us` and `busy_loop`, of an iteration of the busy loop, and of a pipeline's stage.
SHORT, BUSY, STAGE = 200e-6, 100e-6, 30e-6

#: Bytes of an upload from pageable memory, and of the small arrays of the rows about memory and loaders.
_MANY_BYTES, _FEW_BYTES = 64 << 20, 1 << 20

_BURST, _STREAMS, _IN_FLIGHT, _IDLE, _DEPTH, _ITEMS = 200, 8, 16, 64, 5, 100


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A row in slices. ``open`` prepares what its slices share."""

    unit: str
    better: Better
    open: Callable[[aiocuda.Device], AbstractAsyncContextManager[Work]]


async def added(wait: Callable[[], Awaitable[object]], own: float, seconds: float) -> list[float]:
    """Await for so many seconds; return µs of each await beyond the kernel's own time."""
    late, stop = list[float](), perf_counter() + seconds
    while (start := perf_counter()) < stop or not late:
        await wait()
        late.append((perf_counter() - start - own) * 1e6)
    return late


async def idle(seconds: float) -> float:
    """Return milliseconds of processor time, of all threads, for each second in which the loop has nothing to do."""
    cpu, wall = process_time(), perf_counter()
    await asyncio.sleep(seconds)
    return (process_time() - cpu) / (perf_counter() - wall) * 1e3


@asynccontextmanager
async def open_streams(device: aiocuda.Device, count: int) -> AsyncIterator[list[aiocuda.Stream]]:
    """Open so many streams, each of which has had work."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(device.stream()) for _ in range(count)]
        await aiocuda.gather(*[stream.launch(empty(), 1, 1) for stream in streams])
        yield streams


@asynccontextmanager
async def _await_empty_kernel(device: aiocuda.Device) -> AsyncIterator[Work]:
    async with open_streams(device, 1) as (stream,):

        async def work(seconds: float) -> float:
            return median(await added(lambda: stream.launch(empty(), 1, 1), 0.0, seconds))

        yield work


@asynccontextmanager
async def _launch(device: aiocuda.Device) -> AsyncIterator[Work]:
    kernel = empty()
    async with open_streams(device, 1) as (stream,):

        async def work(seconds: float) -> float:
            took, stop = list[float](), perf_counter() + seconds
            while (start := perf_counter()) < stop or not took:
                for _ in range(_BURST):
                    last = stream.launch(kernel, 1, 1)
                took.append((perf_counter() - start) / _BURST * 1e6)
                await last
            return median(took)

        yield work


@asynccontextmanager
async def _ops(gather: Callable[..., Awaitable[Any]], device: aiocuda.Device) -> AsyncIterator[Work]:
    kernel = empty()
    async with open_streams(device, _STREAMS) as streams:

        async def work(seconds: float) -> float:
            start = perf_counter()

            async def worker(stream: aiocuda.Stream) -> int:
                done = 0
                while perf_counter() < start + seconds or not done:
                    await gather(*[stream.launch(kernel, 1, 1) for _ in range(_IN_FLIGHT)])
                    done += _IN_FLIGHT
                return done

            return sum(await asyncio.gather(*map(worker, streams))) / (perf_counter() - start)

        yield work


@asynccontextmanager
async def _pipeline_30us(device: aiocuda.Device) -> AsyncIterator[Work]:
    kernel = spin(STAGE)
    stages = [
        aiocuda.Stage(name, lambda slot: slot.stream.launch(kernel, 1, 1, nanoseconds(STAGE)))
        for name in ("first", "second", "third")
    ]
    async with aiocuda.Pipeline(device, stages, _DEPTH) as pipeline:

        async def work(seconds: float) -> float:
            took, stop = list[float](), perf_counter() + seconds
            while (start := perf_counter()) < stop or not took:
                async for _ in pipeline.run(range(_ITEMS)):
                    pass
                took.append((perf_counter() - start) / _ITEMS * 1e6)
            return median(took)

        yield work


@asynccontextmanager
async def _kernel_200us(busy: float, device: aiocuda.Device) -> AsyncIterator[Work]:
    kernel = spin(SHORT)
    async with open_streams(device, 1) as (stream,):

        async def work(seconds: float) -> float:
            other = asyncio.create_task(keep_busy(busy)) if busy else None
            late = await added(lambda: stream.launch(kernel, 1, 1, nanoseconds(SHORT)), SHORT, seconds)
            if other is not None:
                other.cancel()
            return median(late)

        yield work


@asynccontextmanager
async def _pageable_up(device: aiocuda.Device) -> AsyncIterator[Work]:
    array = np.ones(_MANY_BYTES, np.uint8)
    async with open_streams(device, 1) as (stream,):
        buffer = stream.empty(_MANY_BYTES, np.uint8)
        yield lambda seconds: _each(lambda: stream.copy(buffer, array), seconds)


@asynccontextmanager
async def _empty_free(device: aiocuda.Device) -> AsyncIterator[Work]:
    async with open_streams(device, 1) as (stream,):

        async def turn() -> None:
            for _ in range(_BURST):
                stream.empty(_FEW_BYTES, np.uint8).free()
            await stream.synchronize()

        yield lambda seconds: _each(turn, seconds)


@asynccontextmanager
async def _pinned(device: aiocuda.Device) -> AsyncIterator[Work]:
    async def turn() -> None:
        (await device.pinned(_FEW_BYTES, np.uint8)).free()

    yield lambda seconds: _each(turn, seconds)


@asynccontextmanager
async def _loader_threads(device: aiocuda.Device) -> AsyncIterator[Work]:
    samples = [np.full(_FEW_BYTES // 64, number % 256, np.uint8) for number in range(_ITEMS * 8)]

    async def epoch() -> None:
        async with DataLoader(device, samples, batch_size=8) as loader:
            async for batch in loader:
                await batch.stream.synchronize()

    yield lambda seconds: _each(epoch, seconds)


@asynccontextmanager
async def _batcher_rows(device: aiocuda.Device) -> AsyncIterator[Work]:
    """64 tasks, each with one request at a time; the model is an upload and a download of the batch."""

    async def infer(batch: Any) -> Any:
        rows = await batch.stream.upload(np.stack(batch.items))
        found = await batch.stream.download(rows)
        rows.free()
        return list(found)

    row = np.zeros(64, np.float32)
    async with MicroBatcher(infer, max_batch_size=32, batch_wait_timeout_s=0.001, device=device) as batcher:

        async def client(stop: float) -> int:
            done = 0
            while perf_counter() < stop or not done:
                await batcher.submit(row)
                done += 1
            return done

        async def work(seconds: float) -> float:
            start = perf_counter()
            done = await asyncio.gather(*[client(start + seconds) for _ in range(64)])
            return sum(done) / (perf_counter() - start)

        yield work


@asynccontextmanager
async def _all_reduce(device: aiocuda.Device) -> AsyncIterator[Work]:
    async with open_streams(device, 1) as (stream,), aiocuda.AsyncCoordinator(device) as coordinator:
        buffers = [stream.empty(_FEW_BYTES // 4) for _ in range(3)]
        for buffer in buffers:
            await stream.fill(buffer, 1)
        yield lambda seconds: _each(lambda: coordinator.all_reduce(buffers), seconds)


async def _each(turn: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Take turns for so many seconds; return the median µs of one."""
    took, stop = list[float](), perf_counter() + seconds
    while (start := perf_counter()) < stop or not took:
        await turn()
        took.append((perf_counter() - start) * 1e6)
    return median(took)


@asynccontextmanager
async def _idle_64_streams(device: aiocuda.Device) -> AsyncIterator[Work]:
    async with open_streams(device, _IDLE):
        yield idle


SLICES: dict[str, Slice] = {
    "await_empty_kernel": Slice("µs", "lower", _await_empty_kernel),
    "launch": Slice("µs", "lower", _launch),
    "ops_8x16": Slice("ops/s", "higher", partial(_ops, aiocuda.gather)),
    "ops_8x16_asyncio": Slice("ops/s", "higher", partial(_ops, asyncio.gather)),
    "pipeline_30us": Slice("µs", "lower", _pipeline_30us),
    "busy_loop": Slice("µs", "lower", partial(_kernel_200us, BUSY)),
    "kernel_200us": Slice("µs", "lower", partial(_kernel_200us, 0.0)),
    "idle_64_streams": Slice("ms/s", "lower", _idle_64_streams),
    "pageable_64mb": Slice("µs", "lower", _pageable_up),
    "empty_free_200": Slice("µs", "lower", _empty_free),
    "pinned_1mb": Slice("µs", "lower", _pinned),
    "loader_threads": Slice("µs", "lower", _loader_threads),
    "batcher_64": Slice("requests/s", "higher", _batcher_rows),
    "all_reduce_1mb": Slice("µs", "lower", _all_reduce),
}
