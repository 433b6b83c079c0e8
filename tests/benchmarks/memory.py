"""Rows about where memory comes from: allocating, freeing and using it again."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

import aiocuda
from aiocuda.memory import LimitResource, SizeClassResource, StatisticsResource

from .figures import Measured
from .kernels import nanoseconds, spin
from .setting import Setting


async def empty_free(setting: Setting) -> Measured:
    """Microseconds of ``stream.empty(nbytes)`` and ``free()`` on an idle stream, in bursts.

    The free lists serve them, and the driver need not be called. Baseline: ``cuMemAllocAsync`` and ``cuMemFreeAsync``
    from the device's default pool, which keeps what is freed. Figures: ``adaptors_us`` with size classes, a limit and
    statistics as adaptors; ``pool_us`` with limit and statistics on the driver's pool. Bound: 4 µs.
    """
    nbytes, burst = setting.count("nbytes"), setting.count("burst")
    stream, bare, raw = setting.stream(), setting.raw.stream(), setting.raw
    raw.keep_freed()
    memory = setting.device.memory
    default = memory.resource
    pool = memory.use(lambda upstream: StatisticsResource(LimitResource(upstream, 1 << 40)))
    cached = memory.use(lambda _: StatisticsResource(LimitResource(SizeClassResource(pool), 1 << 40)))

    def ours() -> None:
        stream.empty(nbytes, np.uint8).free()

    def by_hand() -> None:
        raw.free(bare, raw.allocate(bare, nbytes))

    async def burst_of(work: Callable[[], None]) -> float:
        start = perf_counter()
        for _ in range(burst):
            work()
        seconds = perf_counter() - start
        await stream.synchronize()
        return seconds / burst * 1e6

    measured, adapted, uncached = Measured([]), list[float](), list[float]()
    for _ in range(setting.count("repeats") + 1):
        for resource, samples in ((default, measured.samples), (cached, adapted), (pool, uncached)):
            memory.use(lambda _: resource)  # noqa: B023 - called at once
            samples.append(await burst_of(ours))
        measured.baseline.append(await burst_of(by_hand))
        raw.synchronize(bare)
    del measured.samples[0], measured.baseline[0], adapted[0], uncached[0]  # cold
    measured.figures["adaptors_us"] = median(adapted)
    measured.figures["pool_us"] = median(uncached)
    return measured


async def free_in_flight(setting: Setting) -> Measured:
    """Microseconds of ``buffer.free()`` while its stream has 100 ms of work before the buffer's use.

    Baseline: ``cuMemFreeAsync`` in the same place. ``other_stream_us`` is for a buffer that another stream will use as
    well, so that the free has to enqueue a wait. Bound: 50 µs for both.
    """
    nbytes, buffers, seconds = setting.count("nbytes"), setting.count("buffers"), setting.sizes["seconds"]
    stream, other, raw = setting.stream(), setting.stream(), setting.raw
    bare = raw.stream()
    launch = raw.launcher(bare, seconds)
    kernel = spin(seconds)
    await setting.device.load(kernel)
    measured = Measured([])
    elsewhere: list[float] = []
    for _ in range(setting.count("repeats")):
        own, shared = ([stream.empty(nbytes, np.uint8) for _ in range(buffers)] for _ in range(2))
        addresses = [raw.allocate(bare, nbytes) for _ in range(buffers)]
        await stream.synchronize()
        for each in (stream, other):
            each.launch(kernel, 1, 1, nanoseconds(seconds))
        launch()
        for buffer in (*own, *shared):
            stream.fill(buffer, 1)
        for buffer in shared:
            other.fill(buffer, 1)
        for samples, freed in ((measured.samples, own), (elsewhere, shared)):
            for buffer in freed:
                start = perf_counter()
                buffer.free()
                samples.append((perf_counter() - start) * 1e6)
        for address in addresses:
            start = perf_counter()
            raw.free(bare, address)
            measured.baseline.append((perf_counter() - start) * 1e6)
        await aiocuda.gather(stream.synchronize(), other.synchronize())
        raw.synchronize(bare)
    measured.figures["other_stream_us"] = median(elsewhere)
    return measured


async def reuse_ping_pong(setting: Setting) -> Measured:
    """Microseconds of a round of two streams that pass one block to each other, all after 100 ms of work.

    A buffer is allocated on one stream, used there and on the other, and freed in the order of the other; the next
    round allocates it there. Baseline: the two fills and the two waits of a round by hand, on one block. ``host_waits``
    counts rounds that took a quarter of the work's time, and polls in this time; ``blocks`` counts addresses. Bounds:
    none, and one.
    """
    nbytes, turns, seconds = setting.count("nbytes"), setting.count("turns"), setting.sizes["seconds"]
    left, right, raw, device = setting.stream(), setting.stream(), setting.raw, setting.device
    bare = raw.stream(), raw.stream()
    block, event, launch = raw.device_memory(nbytes), raw.event(), raw.launcher(bare[0], seconds)
    kernel = spin(seconds)
    await device.load(kernel)
    device.memory.use(SizeClassResource)
    for stream in (left, right):
        stream.empty(1, np.uint8).free()  # of another class: from now on both streams keep what is freed in them
    measured = Measured([], figures={"host_waits": 0.0, "blocks": 0.0})
    for _ in range(setting.count("repeats")):
        addresses = set()
        before = device.statistics()
        left.launch(kernel, 1, 1, nanoseconds(seconds))
        for turn in range(turns):
            one, two = (left, right) if turn % 2 == 0 else (right, left)
            start = perf_counter()
            buffer = one.empty(nbytes, np.uint8)
            two.wait(one.fill(buffer, turn))
            two.fill(buffer, turn + 1)
            addresses.add(buffer.address)
            buffer.free(two)
            took = perf_counter() - start
            measured.samples.append(took * 1e6)
            measured.figures["host_waits"] += took > seconds / 4
        after = device.statistics()
        measured.figures["host_waits"] += after.polls + after.sleeps + after.parks
        measured.figures["host_waits"] -= before.polls + before.sleeps + before.parks
        measured.figures["blocks"] = max(measured.figures["blocks"], len(addresses))
        await aiocuda.gather(left.synchronize(), right.synchronize())

        launch()
        for _turn in range(turns):
            start = perf_counter()
            for here, there in (bare, bare[::-1]):
                raw.fill(here, block, nbytes)
                raw.record(event, here)
                raw.wait(there, event)
            measured.baseline.append((perf_counter() - start) * 1e6)
        for stream in bare:
            raw.synchronize(stream)
    return measured
