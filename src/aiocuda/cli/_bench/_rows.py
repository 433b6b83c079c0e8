"""The measurements: asynchronous generators that yield one sample after the other, until the caller has enough."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np

from ...completion import gather
from ...device import Device
from ...kernels import Kernel
from ...memory import PinnedBuffer
from ...pipeline import Pipeline, Slot, Stage
from ...stream import Stream

__all__ = ["ROWS", "Row"]

MIB: Final = 1 << 20

#: Bytes of the large copies, on a GPU and elsewhere. The published rows of pageable memory copy 1 GiB.
PINNED_BYTES: Final = (64 * MIB, 4 * MIB)
PAGEABLE_BYTES: Final = (256 * MIB, 16 * MIB)

#: The kernel of the triple buffer takes these seconds.
KERNEL_SECONDS: Final = 1.25e-3

_empty = Kernel("empty", source='extern "C" __global__ void empty() {}', host=lambda: None)

# `%globaltimer` counts nanoseconds, whatever the clock rate of the device is.
_spin = Kernel(
    "spin",
    source="""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
""",
    host=lambda nanoseconds: None,
    host_seconds=KERNEL_SECONDS,
)

#: Yields samples without an end. The caller closes it.
Samples = AsyncGenerator[float, None]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A measurement."""

    name: str
    title: str
    unit: Literal["µs", "GB/s", "ops/s", "iterations/s"]
    measure: Callable[[Device], Samples]
    warmup: int = 1  #: samples that do not count: kernels are loaded, memory is allocated
    most: int = 2000  #: samples

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "µs"


async def await_empty_kernel(device: Device) -> Samples:
    """µs from the launch of an empty kernel on an idle stream to the line after the await."""
    async with device.stream() as stream:
        while True:
            start = perf_counter()
            await stream.launch(_empty, 1, 1)
            yield (perf_counter() - start) * 1e6


async def launches(device: Device) -> Samples:
    """Launches per second, of 20 000 that are not awaited, with ``sleep(0)`` every 256, and the last one awaited."""
    count = _count(device, 20_000, 2_000)
    async with device.stream() as stream:
        while True:
            start = perf_counter()
            for number in range(1, count):
                stream.launch(_empty, 1, 1)
                if number % 256 == 0:
                    await asyncio.sleep(0)
            await stream.launch(_empty, 1, 1)
            yield count / (perf_counter() - start)


async def ops_8x16(device: Device) -> Samples:
    """Awaited operations per second: 8 tasks with a stream each await 16 empty kernels together, 40 times."""
    rounds, in_flight = _count(device, 40, 8), 16
    streams = [device.stream() for _ in range(8)]

    async def worker(stream: Stream) -> None:
        for _ in range(rounds):
            await gather(*[stream.launch(_empty, 1, 1) for _ in range(in_flight)])

    try:
        while True:
            start = perf_counter()
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(worker(stream))
            yield len(streams) * rounds * in_flight / (perf_counter() - start)
    finally:
        for stream in streams:
            await stream.aclose()


async def pinned_up(device: Device) -> Samples:
    """GB/s from pinned memory to the device."""
    nbytes = _count(device, *PINNED_BYTES)
    async for sample in _pinned(device, nbytes, up=True):
        yield nbytes / sample / 1e9


async def pinned_down(device: Device) -> Samples:
    """GB/s from the device to pinned memory."""
    nbytes = _count(device, *PINNED_BYTES)
    async for sample in _pinned(device, nbytes, up=False):
        yield nbytes / sample / 1e9


async def pinned_4k(device: Device) -> Samples:
    """µs from the call that copies 4 KiB of pinned memory to the device to the line after the await."""
    async for sample in _pinned(device, 4096, up=True):
        yield sample * 1e6


async def _pinned(device: Device, nbytes: int, *, up: bool) -> Samples:
    """Seconds of a copy that is awaited."""
    host: PinnedBuffer = await device.pinned(nbytes, np.uint8)
    try:
        async with device.stream() as stream:
            buffer = stream.empty(nbytes, np.uint8)
            await stream.copy(buffer, host)
            while True:
                start = perf_counter()
                await (stream.copy(buffer, host) if up else stream.copy(host, buffer))
                yield perf_counter() - start
    finally:
        host.free()


async def pageable_up(device: Device) -> Samples:
    """GB/s from a NumPy array to the device, by copy threads."""
    nbytes = _count(device, *PAGEABLE_BYTES)
    array = np.ones(nbytes, np.uint8)
    async with device.stream() as stream:
        buffer = stream.empty(nbytes, np.uint8)
        while True:
            start = perf_counter()
            await stream.copy(buffer, array)
            yield nbytes / (perf_counter() - start) / 1e9


async def pageable_down(device: Device) -> Samples:
    """GB/s from the device into a NumPy array, by copy threads."""
    nbytes = _count(device, *PAGEABLE_BYTES)
    array = np.ones(nbytes, np.uint8)
    async with device.stream() as stream:
        buffer = await stream.upload(array)
        while True:
            start = perf_counter()
            await stream.download(buffer, out=array)
            yield nbytes / (perf_counter() - start) / 1e9


async def empty_free(device: Device) -> Samples:
    """µs to allocate 1 MiB of device memory and to free it, in bursts of 100."""
    burst = 100
    async with device.stream() as stream:
        while True:
            start = perf_counter()
            for _ in range(burst):
                stream.empty(MIB, np.uint8).free()
            seconds = perf_counter() - start
            await stream.synchronize()
            yield seconds / burst * 1e6


async def triple_buffer(device: Device) -> Samples:
    """Iterations per second of a pipeline of three slots: 64 MiB up, a kernel of 1.25 ms, 64 MiB down."""
    iterations = _count(device, 80, 8)
    source = await device.pinned(_count(device, *PINNED_BYTES), np.uint8)

    def compute(slot: Slot) -> Any:
        return slot.stream.launch(_spin, 1, 1, round(KERNEL_SECONDS * 1e9))

    try:
        async with Pipeline(device, _stages(source, compute), depth=3) as pipeline:
            while True:
                yield iterations / await _seconds(pipeline, iterations)
    finally:
        source.free()


async def pipeline_iteration(device: Device) -> Samples:
    """µs of an iteration of a pipeline: 4 KiB up, an empty kernel, 4 KiB down; four slots."""
    iterations = _count(device, 1000, 100)
    source = await device.pinned(4096, np.uint8)

    def compute(slot: Slot) -> Any:
        return slot.stream.launch(_empty, 1, 1)

    try:
        async with Pipeline(device, _stages(source, compute), depth=4) as pipeline:
            while True:
                yield await _seconds(pipeline, iterations) / iterations * 1e6
    finally:
        source.free()


def _stages(source: PinnedBuffer, compute: Callable[[Slot], Any]) -> list[Stage]:
    """Upload, compute and download of all bytes of ``source``."""
    nbytes = source.nbytes

    def upload(slot: Slot) -> Any:
        return slot.stream.copy(slot.buffer("data", nbytes, np.uint8), source)

    def download(slot: Slot) -> Any:
        return slot.stream.copy(slot.pinned("data", nbytes, np.uint8), slot.buffer("data", nbytes, np.uint8))

    return [Stage("upload", upload), Stage("compute", compute), Stage("download", download)]


def _count(device: Device, on_gpu: int, elsewhere: int) -> int:
    """Return a size: on a GPU, that of the published row; elsewhere a smaller one, because no figure is compared."""
    return on_gpu if device.driver.name == "cuda" else elsewhere


async def _seconds(pipeline: Pipeline, items: int) -> float:
    start = perf_counter()
    async for _ in pipeline.run(range(items)):
        pass
    return perf_counter() - start


async def timer_lateness(device: Device) -> Samples:
    """µs that a timer of the event loop of 2 ms is late. It does not use the device."""
    while True:
        start = perf_counter()
        await asyncio.sleep(0.002)
        yield (perf_counter() - start - 0.002) * 1e6


ROWS: Final = (
    Row("await_empty_kernel", "await an empty kernel", "µs", await_empty_kernel, warmup=20),
    Row("launches", "launches that are not awaited", "ops/s", launches, most=20),
    Row("ops_8x16", "awaited operations, 8 streams × 16", "ops/s", ops_8x16, most=50),
    Row("pinned_up", "copy of pinned memory to the device", "GB/s", pinned_up, most=200),
    Row("pinned_down", "copy of the device to pinned memory", "GB/s", pinned_down, most=200),
    Row("pinned_4k", "await a copy of 4 KiB, pinned", "µs", pinned_4k, warmup=20),
    Row("pageable_up", "copy of a NumPy array to the device", "GB/s", pageable_up, most=50),
    Row("pageable_down", "copy of the device to a NumPy array", "GB/s", pageable_down, most=50),
    Row("empty_free", "allocate and free 1 MiB", "µs", empty_free),
    Row("triple_buffer", "triple buffer: up, 1.25 ms kernel, down", "iterations/s", triple_buffer, most=20),
    Row("pipeline_iteration", "pipeline: 4 KiB up, empty kernel, down", "µs", pipeline_iteration, most=20),
    Row("timer_lateness", "a timer of 2 ms is late by", "µs", timer_lateness),
)
