"""Rows about many operations: what awaiting each of them costs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import aiocuda

from .figures import Measured
from .kernels import empty, nanoseconds, spin
from .peers.raw import own_time
from .setting import Setting


async def launch(setting: Setting) -> Measured:
    """µs of a launch that is not awaited: an empty kernel, in bursts whose last launch is awaited afterwards.

    Baseline: the launch and the event record by the bare driver from Python. ``c_ratio`` is the ratio to the same two
    driver calls in a loop of C. Bound: at most 1.6 times that.
    """
    stream, bare, kernel = setting.stream(), setting.raw.stream(), empty()
    once, event, count = setting.raw.launcher(bare, 0.0), setting.raw.event(), setting.count("launches")
    measured, in_c, bound = Measured([]), list[float](), setting.c_bound()
    for _ in range(setting.count("repeats") + 1):
        start = perf_counter()
        for _ in range(count):
            last = stream.launch(kernel, 1, 1)
        measured.samples.append((perf_counter() - start) / count * 1e6)
        await last
        start = perf_counter()
        for _ in range(count):
            once()
            setting.raw.record(event, bare)
        measured.baseline.append((perf_counter() - start) / count * 1e6)
        setting.raw.synchronize(bare)
        if not isinstance(bound, str):
            in_c.append(bound.launches(count) / count * 1e6)
    del measured.samples[0], measured.baseline[0]
    return with_c(measured, bound, in_c[1:], "us")


def with_c(measured: Measured, bound: object, in_c: Sequence[float], unit: str) -> Measured:
    """Add what C needs for the same as the figures ``c_…`` and ``c_ratio``, or the note that says why it is missing."""
    if in_c:
        measured.figures[f"c_{unit}"] = median(in_c)
        measured.figures["c_ratio"] = median(measured.samples) / median(in_c)
    else:
        measured.notes.append(str(bound))
    return measured


async def ops_8x16(setting: Setting) -> Measured:
    """Awaited operations per second: 8 streams, each with a task that enqueues 16 empty kernels and awaits them all.

    By `aiocuda.gather`. Baseline: the same launches by the bare driver, nothing awaited. ``c_ratio`` is the ratio to C,
    which asks each stream for its newest event. Bounds: at least 150 000, and four times what CuPy's host functions
    give.
    """
    work = _AwaitedOperations(setting)
    bare = [setting.raw.stream() for _ in work.streams]
    launchers = [setting.raw.launcher(stream, 0.0) for stream in bare]

    async def enqueued() -> float:
        start = perf_counter()
        for _ in range(work.rounds):
            for launch in launchers:
                for _ in range(work.in_flight):
                    launch()
        for stream in bare:
            setting.raw.synchronize(stream)
        return work.count / (perf_counter() - start)

    return await work.measure(lambda: work.awaited(aiocuda.gather), enqueued)


async def ops_8x16_asyncio(setting: Setting) -> Measured:
    """The same as `ops_8x16`, by `asyncio.gather`, which wraps each operation in a task. Baseline: `aiocuda.gather`.

    Bound: at least 0.30 of C.
    """
    work = _AwaitedOperations(setting)
    return await work.measure(lambda: work.awaited(asyncio.gather), lambda: work.awaited(aiocuda.gather))


class _AwaitedOperations:
    """The work of the rows ``ops_8x16…``: each stream has a task that enqueues empty kernels and awaits them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.streams = [setting.stream() for _ in range(setting.count("streams"))]
        self.rounds, self.in_flight = setting.count("rounds"), setting.count("in_flight")
        self.count = len(self.streams) * self.rounds * self.in_flight

    async def awaited(self, gather: Callable[..., Awaitable[Any]]) -> float:
        """Operations per second."""
        kernel = empty()

        async def worker(stream: aiocuda.Stream) -> None:
            for _ in range(self.rounds):
                await gather(*[stream.launch(kernel, 1, 1) for _ in range(self.in_flight)])

        start = perf_counter()
        async with asyncio.TaskGroup() as group:
            for stream in self.streams:
                group.create_task(worker(stream))
        return self.count / (perf_counter() - start)

    async def measure(self, ours: Callable[[], Awaitable[float]], baseline: Callable[[], Awaitable[float]]) -> Measured:
        """Measure ours, the baseline and C in turn."""
        measured, in_c, bound = Measured([]), list[float](), self._setting.c_bound()
        for _ in range(self._setting.count("repeats") + 1):
            measured.samples.append(await ours())
            measured.baseline.append(await baseline())
            if not isinstance(bound, str):
                in_c.append(self.count / bound.streams(len(self.streams), self.in_flight, self.rounds))
        del measured.samples[0], measured.baseline[0]  # the first ones load the kernel
        return with_c(measured, bound, in_c[1:], "per_s")


async def chain_500(setting: Setting) -> Measured:
    """Milliseconds for 500 kernels of 20 µs in one stream, all enqueued, each awaited by its own task.

    Baseline: the same chain with only its last operation awaited. Bound: at most 1.08 times that. A host function after
    each kernel makes it 2.4 to 2.7 times. The bare driver's time is the figure ``bare_ms``.
    """
    seconds, kernels = setting.sizes["seconds"], setting.count("kernels")
    kernel, stream = spin(seconds), setting.stream()
    bare = setting.raw.stream()
    launch = setting.raw.launcher(bare, seconds)

    def enqueue() -> list[aiocuda.Operation[None]]:
        return [stream.launch(kernel, 1, 1, nanoseconds(seconds)) for _ in range(kernels)]

    measured, bare_ms = Measured([]), []
    for _ in range(setting.count("repeats") + 1):
        start = perf_counter()
        await each_by_its_task(enqueue())
        measured.samples.append((perf_counter() - start) * 1e3)

        start = perf_counter()
        await enqueue()[-1]
        measured.baseline.append((perf_counter() - start) * 1e3)

        start = perf_counter()
        for _ in range(kernels):
            launch()
        setting.raw.synchronize(bare)
        bare_ms.append((perf_counter() - start) * 1e3)
    del measured.samples[0], measured.baseline[0]
    measured.figures["bare_ms"] = median(bare_ms[1:])
    return measured


async def each_by_its_task(operations: Sequence[aiocuda.Operation[Any]]) -> None:
    async with asyncio.TaskGroup() as group:
        for operation in operations:
            group.create_task(operation.wait())


async def streams(setting: Setting) -> Measured:
    """Milliseconds for three 10 ms kernels on each of N streams, each awaited by its own task.

    Baseline: three times the kernel's own time, which a device with room for N kernels needs. Bound: at most 1.08 times
    that. Arming more notifiers than hardware queues serialises the kernels: 4, 8 and 16 times. The samples are made in
    series: ``worst_ratio`` is that of the slowest series, ``longest_ratio`` that of the slowest sample.
    """
    seconds, kernels, repeats = setting.sizes["seconds"], setting.count("kernels"), setting.count("repeats")
    kernel = spin(seconds)
    many = [setting.stream() for _ in range(setting.count("streams"))]
    ideal = kernels * own_time(setting.raw, seconds) * 1e3
    measured = Measured([], [ideal])
    series = []
    for _ in range(setting.count("series")):
        samples = []
        for _ in range(repeats + 1):
            start = perf_counter()
            await each_by_its_task(
                [stream.launch(kernel, 1, 1, nanoseconds(seconds)) for _ in range(kernels) for stream in many]
            )
            samples.append((perf_counter() - start) * 1e3)
        del samples[0]
        measured.samples += samples
        series.append(median(samples))
    measured.figures["worst_ratio"] = max(series) / ideal
    measured.figures["longest_ratio"] = max(measured.samples) / ideal
    return measured


async def burst_20000(setting: Setting) -> Measured:
    """20 000 launches of an empty kernel, ``sleep(0)`` every 256, then the last one awaited.

    Twice: into an idle stream (the samples, in milliseconds), and after a kernel of 0.3 s, where a hardware queue is
    full after about 1 021 launches and the bare driver's next call blocks until the kernel ends (``held_ms``).
    Baseline: the same launches, bare. Bounds: at most 1.5 times the baseline in both cases, no call over 1 ms, no loop
    iteration over 5 ms.
    """
    burst = _Burst(setting)
    measured = Measured([])
    held_ms, bare_held_ms = [], []
    for _ in range(setting.count("repeats")):
        measured.samples.append(await burst.ours(held=False))
        measured.baseline.append(burst.bare(held=False))
        held_ms.append(await burst.ours(held=True))
        bare_held_ms.append(burst.bare(held=True))
    measured.figures.update(
        held_ms=median(held_ms),
        held_ratio=median(held_ms) / median(bare_held_ms),
        longest_call_ms=burst.longest_call * 1e3,
        longest_turn_ms=burst.longest_turn * 1e3,
        longest_gc_ms=burst.longest_gc * 1e3,
        bare_longest_call_ms=burst.bare_longest_call * 1e3,
    )
    return measured


class _Burst:
    """One burst, ours or bare, and the longest call and turn of all of them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._stream = setting.stream()
        self._bare = setting.raw.stream()
        self.longest_call = self.longest_turn = self.longest_gc = self.bare_longest_call = 0.0
        self._collecting = 0.0

    def _watch_gc(self, phase: str, info: dict[str, int]) -> None:
        """The longest garbage collection, which is part of calls and iterations."""
        if phase == "start":
            self._collecting = perf_counter()
        else:
            self.longest_gc = max(self.longest_gc, perf_counter() - self._collecting)

    async def ours(self, held: bool) -> float:
        """Milliseconds in all."""
        setting, stream, kernel = self._setting, self._stream, empty()
        await stream.launch(spin(setting.sizes["held"]), 1, 1, 1000)  # loaded before anything is timed
        await stream.launch(kernel, 1, 1)
        await asyncio.sleep(0)
        gc.callbacks.append(self._watch_gc)
        setting.turns.reset()
        begin = perf_counter()
        if held:
            stream.launch(spin(setting.sizes["held"]), 1, 1, nanoseconds(setting.sizes["held"]))
        every = setting.count("every")
        for number in range(setting.count("launches")):
            before = perf_counter()
            last = stream.launch(kernel, 1, 1)
            self.longest_call = max(self.longest_call, perf_counter() - before)
            if number % every == 0:
                await asyncio.sleep(0)
        await last
        took = perf_counter() - begin
        self.longest_turn = max(self.longest_turn, setting.turns.longest())
        gc.callbacks.remove(self._watch_gc)
        return took * 1e3

    def bare(self, held: bool) -> float:
        setting = self._setting
        launch = setting.raw.launcher(self._bare, 0.0)
        launch()
        setting.raw.synchronize(self._bare)
        begin = perf_counter()
        if held:
            setting.raw.launcher(self._bare, setting.sizes["held"])()
        for _ in range(setting.count("launches")):
            before = perf_counter()
            launch()
            self.bare_longest_call = max(self.bare_longest_call, perf_counter() - before)
        setting.raw.synchronize(self._bare)
        return (perf_counter() - begin) * 1e3
