"""Rows about many streams with work, in a process that has idle ones: what awaiting adds to the bare driver's time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

import aiocuda

from .figures import Measured
from .kernels import empty, nanoseconds, spin
from .raw_waits import RawWaits, raw_waits
from .runs import Runs
from .setting import Setting

__all__ = ["compared", "streams_bound"]


async def streams_bound(setting: Setting) -> Measured:
    """Milliseconds of three kernels of 10 ms on each of many streams, by `aiocuda.gather` of all launches.

    Baseline: the bare driver, which launches as many kernels on streams of its own and synchronises each stream.
    ``tasks_ms`` is a task per stream that awaits each kernel before it launches the next; ``callbacks_ms`` the same
    tasks over raw host callbacks. The four alternate. ``gather_of_raw`` and ``tasks_of_callbacks`` are ratios of
    medians of one run. Bounds: at most 1.05, and at most 1.06 (1.15 on 128 streams), in the worst run.
    """
    seconds, count, kernels = setting.sizes["seconds"], setting.count("streams"), setting.count("kernels")
    kernel, duration = spin(seconds), nanoseconds(seconds)
    for _ in range(setting.count("idle")):
        await setting.stream().launch(empty(), 1, 1)
    streams = [setting.stream() for _ in range(count)]
    bare = [setting.raw.stream() for _ in range(count)]
    launchers = [setting.raw.launcher(stream, seconds) for stream in bare]

    async def raw() -> None:
        for _ in range(kernels):
            for launch in launchers:
                launch()
        for stream in bare:
            setting.raw.synchronize(stream)

    async def gather() -> None:
        await aiocuda.gather(*[stream.launch(kernel, 1, 1, duration) for _ in range(kernels) for stream in streams])

    async def task(stream: aiocuda.Stream) -> None:
        for _ in range(kernels):
            await stream.launch(kernel, 1, 1, duration)

    async def tasks() -> None:
        await asyncio.gather(*map(task, streams))

    with raw_waits(setting.raw, count) as waits:

        async def callbacks() -> None:
            await asyncio.gather(*[_each(one, seconds, kernels) for one in waits])

        return await _alternate(setting, {"raw": raw, "gather": gather, "tasks": tasks, "callbacks": callbacks})


async def _each(waits: RawWaits, seconds: float, kernels: int) -> None:
    for _ in range(kernels):
        await waits.spin(seconds)


async def _alternate(setting: Setting, ways: dict[str, Callable[[], Awaitable[None]]]) -> Measured:
    measured, runs = Measured([]), Runs()
    for way in ways.values():
        await way()  # kernels are loaded
    for _ in range(setting.count("runs")):
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(setting.count("repeats")):
            for name, way in ways.items():
                start = perf_counter()
                await way()
                took[name].append((perf_counter() - start) * 1e3)
        measured.samples.extend(took["gather"])
        measured.baseline.extend(took["raw"])
        runs.add(compared(took))
    measured.figures.update(runs.medians() | runs.worst("lower", "gather_of_raw", "tasks_of_callbacks"))
    return measured


def compared(took: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the figures of one run, from the milliseconds of each way."""
    middle = {name: median(times) for name, times in took.items()}
    return {
        **{f"{name}_ms": time for name, time in middle.items()},
        "gather_of_raw": middle["gather"] / middle["raw"],
        "tasks_of_callbacks": middle["tasks"] / middle["callbacks"],
    }
