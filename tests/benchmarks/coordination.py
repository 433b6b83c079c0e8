"""Rows about the coordinator: what it costs, and whether it keeps the device as busy as events by hand do."""

from __future__ import annotations

import asyncio
from statistics import median
from time import perf_counter
from typing import Any

import aiocuda
from aiocuda import AsyncCoordinator
from aiocuda.coordination import Node
from aiocuda.lowlevel import resources_of

from .figures import Measured
from .kernels import empty, nanoseconds, spin
from .peers.raw import own_time
from .setting import Setting

#: Chains of dependent operations.
CHAINS = 4


async def coordinator_overhead(setting: Setting) -> Measured:
    """Microseconds that the coordinator adds to an enqueue: four chains of empty kernels.

    A sample is the time per operation minus that of `Stream.launch` of the same kernels on four streams, measured
    directly afterwards; the latter is the baseline. Bound: at most 8 µs.
    """
    kernel = empty()
    streams = [setting.stream() for _ in range(CHAINS)]
    launches = setting.count("launches")
    await setting.device.load(kernel)
    measured = Measured([])
    for _ in range(setting.count("repeats") + 1):
        async with AsyncCoordinator(setting.device, max_in_flight=4096) as coordinator:
            for stream in streams:  # its own streams are there before anything is timed
                await coordinator.compute(kernel, 1, 1, stream=stream)
            last: list[Any] = [()] * CHAINS
            start = perf_counter()
            for number in range(launches):
                chain = number % CHAINS
                last[chain] = coordinator.compute(kernel, 1, 1, after=last[chain], stream=streams[chain])
            per_operation = (perf_counter() - start) / launches * 1e6
        start = perf_counter()
        for number in range(launches):
            streams[number % CHAINS].launch(kernel, 1, 1)
        bare = (perf_counter() - start) / launches * 1e6
        await setting.device.drain()
        measured.samples.append(per_operation - bare)
        measured.baseline.append(bare)
    del measured.samples[0], measured.baseline[0]
    return measured


async def coordinator_scale(setting: Setting) -> Measured:
    """Microseconds per operation of a graph of 100 000 over 16 streams, by a producer that waits for room.

    Baseline: the same per operation of a graph of 1 000. Bound: at most 1.3 times that. ``most_waiting`` is the largest
    number of operations on the host.
    """
    kernel = empty()
    await setting.device.load(kernel)
    many, few = setting.count("launches"), setting.count("few")
    streams = setting.count("streams")
    most = 0

    async def graph(count: int) -> float:
        nonlocal most
        async with AsyncCoordinator(setting.device, streams=streams) as coordinator:
            chains: list[Any] = [()] * streams
            start = perf_counter()
            for number in range(count):
                chain = number % streams
                chains[chain] = coordinator.compute(kernel, 1, 1, after=chains[chain])
                if number % 32 == 31:
                    await coordinator.room()
                    most = max(most, coordinator.statistics().waiting)
            await coordinator.drain()
            return (perf_counter() - start) / count * 1e6

    await graph(few)
    measured = Measured([])
    for _ in range(setting.count("repeats")):
        measured.baseline += [await graph(few) for _ in range(3)]
        measured.samples.append(await graph(many))
    measured.figures["most_waiting"] = most
    return measured


async def all_reduce_256mb(setting: Setting) -> Measured:
    """Milliseconds for an all-reduce of three buffers of 256 MB on one device.

    Baseline: copies of each of the buffers to another one: as many bytes are read and written. Bound: at most 1.3 times
    that.
    """
    items, count = setting.count("bytes") // 4, setting.count("buffers")
    stream = setting.stream()
    buffers = [stream.empty(items) for _ in range(2 * count)]
    measured = Measured([])
    async with AsyncCoordinator(setting.device) as coordinator:
        for buffer in buffers:
            await stream.fill(buffer, 1)
        for _ in range(setting.count("repeats") + 1):
            start = perf_counter()
            await coordinator.all_reduce(buffers[:count])
            measured.samples.append((perf_counter() - start) * 1e3)
            start = perf_counter()
            for number in range(count):
                copied = stream.copy(buffers[count + number], buffers[number])
            await copied
            measured.baseline.append((perf_counter() - start) * 1e3)
    del measured.samples[0], measured.baseline[0]  # the first one loads the kernel
    return measured


async def all_reduce_devices(setting: Setting) -> Measured:
    """Milliseconds for an all-reduce of 256 MB on each of two devices; in microseconds for 1 MB, in the figures.

    Baseline: each device copies half of its buffer to the other one, and gets the other half from it. As many bytes
    cross the link in each direction.
    """
    items = setting.count("bytes") // 4
    async with aiocuda.open_device(1, driver=resources_of(setting.device).driver) as second:
        devices, measured = (setting.device, second), Measured([])
        streams = [device.stream() for device in devices]
        buffers = [stream.empty(items) for stream in streams for _ in range(2)]
        for number, buffer in enumerate(buffers):
            await streams[number // 2].fill(buffer, 1)
        near, far, half = buffers[0], buffers[2], items // 2
        small = [buffer[: setting.count("small_bytes") // 4] for buffer in (near, far)]
        async with AsyncCoordinator(setting.device) as coordinator:
            for _ in range(setting.count("repeats") + 3):
                start = perf_counter()
                await coordinator.all_reduce([near, far])
                measured.samples.append((perf_counter() - start) * 1e3)
                start = perf_counter()
                copies = []
                for low, high in ((0, half), (half, items)):
                    copies = [
                        streams[0].copy(buffers[3][low:high], near[low:high]),
                        streams[1].copy(buffers[1][low:high], far[low:high]),
                    ]
                await aiocuda.gather(*copies)
                measured.baseline.append((perf_counter() - start) * 1e3)
            times = []
            for _ in range(setting.count("repeats") * 5):
                start = perf_counter()
                await coordinator.all_reduce(small)
                times.append((perf_counter() - start) * 1e6)
            measured.figures["small_us"] = median(times)
        for stream in streams:
            await stream.aclose()
    del measured.samples[:3], measured.baseline[:3]  # the first ones load the kernel and open the streams
    return measured


async def diamond(setting: Setting) -> Measured:
    """Milliseconds for a chain of diamonds of four 50 µs kernels: one, two in parallel, one; each after the previous.

    Baseline: the same with the bare driver, with events by hand on two streams. Bound: at most 1.05 times that.
    """
    seconds, count = setting.sizes["seconds"], setting.count("iterations")
    kernel = spin(seconds)
    await setting.device.load(kernel)
    left, right = setting.raw.stream(), setting.raw.stream()
    on_left, on_right = (setting.raw.launcher(stream, seconds) for stream in (left, right))
    events = [setting.raw.event() for _ in range(2 * count)]

    async def ours() -> float:
        async with AsyncCoordinator(setting.device, streams=2, max_in_flight=4 * count) as coordinator:

            def compute(*after: Node[Any]) -> Node[None]:
                return coordinator.compute(kernel, 1, 1, nanoseconds(seconds), after=after)

            await compute()
            await asyncio.gather(compute(), compute())
            start = perf_counter()
            last = compute()
            for _ in range(count):
                last = compute(compute(last), compute(last))
            await last
            return (perf_counter() - start) * 1e3

    def by_hand() -> float:
        start = perf_counter()
        on_left()
        for number in range(count):
            fork, join = events[2 * number : 2 * number + 2]
            setting.raw.record(fork, left)
            setting.raw.wait(right, fork)
            on_left()
            on_right()
            setting.raw.record(join, right)
            setting.raw.wait(left, join)
            on_left()
        setting.raw.synchronize(left)
        return (perf_counter() - start) * 1e3

    measured = Measured([])
    for _ in range(setting.count("repeats") + 1):
        measured.samples.append(await ours())
        measured.baseline.append(by_hand())
    del measured.samples[0], measured.baseline[0]
    return measured


async def critical_behind_low(setting: Setting) -> Measured:
    """Milliseconds from registration to the end of a critical kernel, after 1 000 low ones of 50 µs were registered.

    Baseline: the time of the kernels that may be in flight, one after the other: a place is free after one of them.
    ``places`` is the number of low kernels that got a place in this time. Bound: at most 2.
    """
    seconds, launches = setting.sizes["seconds"], setting.count("launches")
    kernel, in_flight = spin(seconds), setting.count("in_flight")
    await setting.device.load(kernel)
    alone = own_time(setting.raw, seconds) * 1e3
    measured, places = Measured([], [in_flight * alone]), []
    for _ in range(setting.count("repeats") + 1):
        async with AsyncCoordinator(setting.device, max_in_flight=in_flight) as coordinator:
            await coordinator.compute(kernel, 1, 1, 1000, priority="critical")  # its stream is there
            lows = [
                coordinator.compute(kernel, 1, 1, nanoseconds(seconds), priority="low") for _ in range(launches)
            ]  # fmt: skip
            await lows[0]
            start = perf_counter()
            critical = coordinator.compute(kernel, 1, 1, nanoseconds(seconds), priority="critical")
            await critical
            measured.samples.append((perf_counter() - start) * 1e3)
            places.append(sum(critical.registered_at < low.given_at < critical.given_at for low in lows))
    del measured.samples[0], places[0]
    measured.figures["places"] = max(places)
    measured.figures["median_places"] = median(places)
    return measured
