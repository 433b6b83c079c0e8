"""``aiocuda bench``: measures this machine, beside the published figures.

The measurements are asynchronous generators that yield one sample after the other, until the caller has enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from .. import __version__
from ..completion import gather
from ..device import Device
from ..errors import DeviceOutOfMemory
from ..kernels import Kernel
from ..memory import PinnedBuffer
from ..pipeline import Pipeline, Slot, Stage
from ..stream import Stream

__all__ = ["ROWS", "SCHEMA", "BenchReport", "BenchRow", "Row", "bench", "checkout", "published_figures"]

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


# -- the report ---------------------------------------------------------------------------------------------------


SCHEMA: Final = "aiocuda-bench/1"

#: Seconds of a row, with its first samples, which do not count.
ROW_SECONDS: Final = 1.0

#: A row may take up to so many seconds for its least number of samples. With one sample, it ends then.
MOST_ROW_SECONDS: Final = 1.5
LEAST_SAMPLES: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """The figures of a measurement. The fields, in this order, are the keys of the JSON.

    ``p99`` is on the bad side: 99 % of the samples are better. ``ratio`` is ``p50`` ÷ ``published``.
    """

    name: str
    title: str
    p50: float | None  #: None if it could not be measured
    p99: float | None
    n: int  #: samples
    unit: str
    published: float | None  #: the published p50; None if there is none
    ratio: float | None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class BenchReport:
    """The result. The fields, in this order, are the keys of the JSON."""

    schema: str
    command: str
    driver: str
    comparable: bool  #: False on another driver than ``cuda``: it has no GPU
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None  #: of a package that runs from a checkout of git
    dirty: bool | None  #: True if its files differ from that commit
    published: dict[str, Any]  #: where the published figures were measured
    rows: list[BenchRow] = dataclasses.field(default_factory=list)

    def as_json(self) -> str:
        """Return the report as one JSON object in ASCII."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def published_figures() -> dict[str, Any]:
    """Return the content of ``published.json``."""
    text = resources.files(__package__ or "").joinpath("published.json").read_text("utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


async def bench(
    device: Device, reason: str | None, begin: Callable[[BenchReport], None], show: Callable[[BenchRow], None]
) -> BenchReport:
    """Measure every row, and return the report.

    Parameters
    ----------
    device
        An open device.
    reason
        Why no GPU is used, or None.
    begin, show
        Called with the report before the first row, and with each row when it has been measured.
    """
    figures = published_figures()
    versions = await device.offload(device.driver.versions)
    commit, dirty = await device.offload(checkout, Path(__file__).parents[1])
    is_gpu = device.driver.name == "cuda"
    report = BenchReport(
        schema=SCHEMA,
        command=" ".join(["aiocuda", *sys.argv[1:]]),
        driver=device.driver.name,
        comparable=is_gpu,
        machine={
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "gpu": device.name if is_gpu else None,
            "reason": reason,
            "cuda": versions.get("cuda-driver"),
        },
        versions={"aiocuda": __version__, "python": platform.python_version(), "numpy": np.__version__, **versions},
        commit=commit,
        dirty=dirty,
        published=figures["measured"],
    )
    begin(report)
    for row in ROWS:
        report.rows.append(await _measured(row, device, figures["rows"].get(row.name, {}).get("p50")))
        show(report.rows[-1])
    return report


async def _measured(row: Row, device: Device, published: float | None) -> BenchRow:
    try:
        samples = await _samples(row, device)
    except (DeviceOutOfMemory, MemoryError) as error:
        return BenchRow(row.name, row.title, None, None, 0, row.unit, published, None, str(error) or "out of memory")
    ordered = sorted(samples, reverse=not row.lower_is_better)
    p50 = statistics.median(ordered)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    ratio = None if published is None else p50 / published
    return BenchRow(row.name, row.title, p50, p99, len(ordered), row.unit, published, ratio)


async def _samples(row: Row, device: Device) -> list[float]:
    """Return the samples of a row, without the first ones."""
    found: list[float] = []
    begin = perf_counter()
    async with contextlib.aclosing(row.measure(device)) as samples:
        async for sample in samples:
            found.append(sample)
            taken = len(found) - row.warmup
            seconds = perf_counter() - begin
            limit = ROW_SECONDS if taken >= LEAST_SAMPLES else MOST_ROW_SECONDS
            if taken >= row.most or (taken > 0 and seconds > limit):
                break
    return found[row.warmup :]


class Checkout(NamedTuple):
    """The commit, and whether files differ from it. None if the package does not run from a checkout of git."""

    commit: str | None
    dirty: bool | None


def checkout(package: Path) -> Checkout:
    """Return the commit of a package's folder. **May block**, to run git."""
    try:
        # An installed package may be below the folder of another repository, and is no part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return Checkout(_git(package, "rev-parse", "HEAD").strip(), bool(_git(package, "status", "--porcelain", ".")))
    except (OSError, subprocess.SubprocessError):
        return Checkout(None, None)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
