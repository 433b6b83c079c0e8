"""Rows about several streams: what a pool's strategies earn on the mix, and what a barrier costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import aiocuda

from .figures import Measured, percentile
from .kernels import empty, nanoseconds, spin
from .mix import KERNELS, Item, Played, mix, play
from .setting import Setting


async def pool_load_balanced(setting: Setting) -> Measured:
    """Milliseconds from asking for a stream to the end of the item, p99 of the mix, each sample with another seed.

    Baseline: round robin on the same mix. Bound: at most 0.8 times that.
    """
    return await _against_round_robin(setting, "load_balanced", lambda played: percentile(played.all, 99))


async def pool_priority(setting: Setting) -> Measured:
    """The same, p99 of the critical items. Bound: at most half of round robin's."""
    return await _against_round_robin(setting, "priority", lambda played: percentile(played.critical, 99))


async def pool_workload(setting: Setting) -> Measured:
    """Milliseconds that the whole mix takes. Bound: no longer than by round robin."""
    return await _against_round_robin(setting, "workload", lambda played: played.makespan)


async def _against_round_robin(setting: Setting, strategy: Any, figure: Callable[[Played], float]) -> Measured:
    device, streams = setting.device, setting.count("streams")
    source = await device.pinned(setting.count("nbytes"), np.uint8)
    targets: dict[str, aiocuda.DeviceBuffer] = {}

    def do(stream: aiocuda.Stream, item: Item) -> aiocuda.Operation[Any]:
        if item.seconds:
            return stream.launch(spin(item.seconds), 1, 1, nanoseconds(item.seconds))
        if stream.name not in targets:
            targets[stream.name] = stream.empty(source.nbytes, np.uint8)
        return stream.copy(targets[stream.name], source)

    for _, seconds in KERNELS:
        await device.load(spin(seconds))
    measured = Measured([])
    async with (
        aiocuda.StreamPool(device, streams, streams, strategy=strategy) as ours,
        aiocuda.StreamPool(device, streams, streams, strategy="round_robin") as theirs,
    ):
        for pool in (ours, theirs):
            await play(pool, mix(streams, 5), do)  # how long each kind takes is learned
            targets.clear()
        for seed in range(setting.count("repeats")):
            tasks = mix(streams, setting.count("items"), seed=seed)
            for pool, samples in ((ours, measured.samples), (theirs, measured.baseline)):
                samples.append(figure(await play(pool, tasks, do)) * 1e3)
                targets.clear()
    return measured


async def barrier_16(setting: Setting) -> Measured:
    """Microseconds from the call that joins 16 streams, each with an empty kernel, to the line after the await.

    Baseline: 15 events, waits for them in a hub, an event there and 15 waits for that, by hand, then a spinning
    synchronisation of the hub. Bound: at most twice that. The figure ``parties_us`` is a `StreamBarrier` instead, with
    a task for each stream and an event with a time in each.
    """
    count, kernel = setting.count("streams"), empty()
    raw = setting.raw
    bare = [raw.stream() for _ in range(count)]
    launchers = [raw.launcher(stream, 0.0) for stream in bare]
    arrived, joined = [raw.event() for _ in bare], raw.event()
    device_state = bare[0]
    measured, parties = Measured([]), []
    async with aiocuda.StreamGroup(setting.device, count) as group:
        barrier = aiocuda.StreamBarrier(count)
        for _ in range(setting.count("repeats") + 5):
            for stream in group:
                stream.launch(kernel, 1, 1)
            start = perf_counter()
            await group.barrier()
            measured.samples.append((perf_counter() - start) * 1e6)

            for launch in launchers:
                launch()
            start = perf_counter()
            for stream, event in zip(bare[1:], arrived[1:], strict=True):
                raw.record(event, stream)
                raw.wait(device_state, event)
            raw.record(joined, device_state)
            for stream in bare[1:]:
                raw.wait(stream, joined)
            raw.synchronize(device_state)
            measured.baseline.append((perf_counter() - start) * 1e6)

            for stream in group:
                stream.launch(kernel, 1, 1)
            start = perf_counter()
            await asyncio.gather(*(barrier.wait(stream) for stream in group))
            parties.append((perf_counter() - start) * 1e6)
            await asyncio.sleep(0)
    del measured.samples[:5], measured.baseline[:5]
    measured.figures["parties_us"] = median(parties[5:])
    return measured
