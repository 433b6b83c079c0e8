"""Rows about lateness: how long after the end of its kernel does a coroutine run again, and at what processor time?

The kernels take the time of six patterns. The policies and a raw host callback (see `raw_waits`) alternate, with the
same durations. Lateness is the time from the launch to the line after the await, minus the kernel's duration.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import islice
from time import perf_counter, process_time
from typing import Any, NamedTuple

import aiocuda

from .durations import PATTERNS, REPEATING, SURPRISING, durations, mean
from .figures import Measured, percentile
from .kernels import any_spin, nanoseconds
from .raw_waits import raw_waits
from .runs import Runs
from .setting import Setting

__all__ = ["POLICIES", "RAW", "Cell", "lateness", "limited", "stuck_host_function"]

POLICIES: tuple[Any, ...] = ("balanced", "latency", "efficient")
RAW = "raw"

#: How many times the processor time of a raw callback ours may take, besides a fixed amount.
_CORES_OF_RAW = 1.8

#: The host functions that are enqueued ahead take as many times the time of the kernels.
_AHEAD = 10

Spin = Callable[[float], Awaitable[object]]


class Cell(NamedTuple):
    """One pattern, awaited in one way."""

    late_us: list[float]
    cores: float  #: processor time of all threads ÷ wall time


async def lateness(setting: Setting) -> Measured:
    """µs from the end of a kernel to the line after its await, of the policy ``balanced`` and all patterns.

    Figures, each a median of the runs: ``p50_us``, ``p99_us``, ``max_us`` and ``cores`` of each way and pattern; and
    what `limited` derives. A bound holds the worst run. Baseline: a raw host callback, alternating with ours.
    """
    measured, runs = Measured([]), Runs()
    ways = [*POLICIES, RAW]
    names: set[str] = set()
    for run in range(setting.count("runs")):
        cells: dict[str, dict[str, Cell]] = {way: {} for way in ways}
        for pattern in PATTERNS:
            for way in ways:
                cells[way][pattern] = await _cell(setting, way, pattern, run)
            ways.append(ways.pop(0))
        for pattern in PATTERNS:
            measured.samples.extend(cells["balanced"][pattern].late_us)
            measured.baseline.extend(cells[RAW][pattern].late_us)
        runs.add(described(cells))
        limits = limited(cells)
        runs.add(limits)
        names.update(limits)
    measured.figures.update(runs.medians() | runs.worst("lower", *sorted(names)))
    return measured


def described(cells: Mapping[str, Mapping[str, Cell]]) -> dict[str, float]:
    """Return the figures of each way and pattern."""
    return {
        f"{way}_{pattern}_{name}": value
        for way, patterns in cells.items()
        for pattern, cell in patterns.items()
        for name, value in {
            "p50_us": percentile(cell.late_us, 50),
            "p99_us": percentile(cell.late_us, 99),
            "max_us": max(cell.late_us),
            "cores": cell.cores,
        }.items()
    }


def limited(cells: Mapping[str, Mapping[str, Cell]]) -> dict[str, float]:
    """Return the figures that bounds hold, from the cells of one run.

    ``p99_beyond_raw_ms`` and ``longest_beyond_raw_ms`` are of the samples of all patterns together: a few slow samples
    of one pattern decide no p99. Cores are compared by pattern, because a pattern's mean duration decides them.
    """
    pooled = {way: [late for cell in patterns.values() for late in cell.late_us] for way, patterns in cells.items()}
    p99 = {way: percentile(late, 99) for way, late in pooled.items()}
    ours, raw = cells["balanced"], cells[RAW]
    p50 = {pattern: percentile(ours[pattern].late_us, 50) for pattern in ours}
    return {
        "p99_beyond_raw_ms": (p99["balanced"] - p99[RAW]) / 1e3,
        "longest_beyond_raw_ms": (max(pooled["balanced"]) - max(pooled[RAW])) / 1e3,
        "latency_p99_beyond_raw_ms": (p99["latency"] - p99[RAW]) / 1e3,
        **{f"{pattern}_p50_ms": p50[pattern] / 1e3 for pattern in REPEATING},
        **{
            f"{pattern}_p50_beyond_raw_ms": (p50[pattern] - percentile(raw[pattern].late_us, 50)) / 1e3
            for pattern in SURPRISING
        },
        "constant_cores": ours["constant"].cores,
        **{
            f"{pattern}_cores_beyond_raw": ours[pattern].cores - _CORES_OF_RAW * raw[pattern].cores
            for pattern in ours
            if pattern != "constant"
        },
    }


async def _cell(setting: Setting, way: str, pattern: str, run: int) -> Cell:
    """Measure one pattern, awaited in one way, on all streams. No stream has a history."""
    scale, warmup = setting.sizes["scale"], setting.count("warmup")
    count = warmup + max(1, round(setting.sizes["slice"] / (mean(pattern) * scale)))
    streams = setting.count("streams")
    kernels = [list(islice(durations(pattern, (stream, run), scale), count)) for stream in range(streams)]
    async with _spins(setting, way, streams) as spins:
        await _late(spins, [own[:warmup] for own in kernels])
        cpu, wall = process_time(), perf_counter()
        late = await _late(spins, [own[warmup:] for own in kernels])
        return Cell(late, (process_time() - cpu) / (perf_counter() - wall))


@asynccontextmanager
async def _spins(setting: Setting, way: str, streams: int) -> AsyncIterator[list[Spin]]:
    """Open a device with the policy of that name, or the bare driver, and so many streams on it."""
    async with AsyncExitStack() as stack:
        if way == RAW:
            yield [one.spin for one in stack.enter_context(raw_waits(setting.raw, streams))]
            return
        policy: Any = way
        device = await stack.enter_async_context(aiocuda.open_device(driver=setting.device.driver, policy=policy))
        yield [launcher(await stack.enter_async_context(device.stream())) for _ in range(streams)]


def launcher(stream: aiocuda.Stream) -> Spin:
    """Return a function that launches a kernel of so many seconds on the stream."""
    kernel = any_spin()
    return lambda seconds: stream.launch(kernel, 1, 1, nanoseconds(seconds))


async def _late(spins: Sequence[Spin], kernels: Sequence[Iterable[float]]) -> list[float]:
    """Await the kernels of each stream one after the other, and the streams side by side; return µs of lateness."""
    late: list[float] = []

    async def each(spin: Spin, own: Iterable[float]) -> None:
        for seconds in own:
            start = perf_counter()
            await spin(seconds)
            late.append((perf_counter() - start - seconds) * 1e6)

    await asyncio.gather(*map(each, spins, kernels))
    return late


async def stuck_host_function(setting: Setting) -> Measured:
    """Milliseconds of lateness while another library's Python host function takes 20 ms, again and again.

    The driver has one thread for host callbacks, so a raw callback is late by the time of the function. The kernels of
    some streams take 2 to 20 ms. ``latest_ms`` is the worst sample of a run, ``raw_latest_ms`` that of a raw callback,
    which is the baseline and alternates with ours. Bound: at most 3 ms in the worst run.
    """
    measured, runs, scale = Measured([]), Runs(), setting.sizes["scale"]
    streams, held = setting.count("streams"), setting.sizes["held"]
    count = max(1, round(setting.sizes["slice"] / (mean("uniform") * scale)))
    with raw_waits(setting.raw, streams) as raw:
        ours = [launcher(setting.stream()) for _ in range(streams)]
        ways: dict[str, list[Spin]] = {"ours": ours, RAW: [one.spin for one in raw]}
        for run in range(setting.count("runs")):
            kernels = [list(islice(durations("uniform", (stream, run), scale), count)) for stream in range(streams)]
            late = {}
            for way, spins in ways.items():
                await _late(spins, [own[:1] for own in kernels])
                with _stuck(setting, held, round(_AHEAD * setting.sizes["slice"] / held) + 10) as ended:
                    late[way] = [sample / 1e3 for sample in await _late(spins, kernels)]
                while not ended():
                    await asyncio.sleep(1e-3)
            measured.samples.extend(late["ours"])
            measured.baseline.extend(late[RAW])
            runs.add({"latest_ms": max(late["ours"]), "raw_latest_ms": max(late[RAW])})
    measured.figures.update(runs.medians() | runs.worst("lower", "latest_ms"))
    return measured


@contextmanager
def _stuck(setting: Setting, seconds: float, times: int) -> Iterator[Callable[[], bool]]:
    """Enqueue so many host functions of ``seconds`` on a stream; at the end of the block, let them end at once.

    Yields a function that tells whether all of them have ended.
    """
    stream, event, stop = setting.raw.stream(), setting.raw.event(), threading.Event()
    enqueue = setting.raw.host_function(stream, lambda: stop.wait(seconds))
    for _ in range(times):
        enqueue()
    setting.raw.record(event, stream)
    try:
        yield lambda: setting.raw.done(event)
        if setting.raw.done(event):
            raise RuntimeError(f"{times} host functions ended before the last kernel")
    finally:
        stop.set()
