"""Rows about bytes: pageable memory, and copies that overlap with kernels."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import aiocuda

from .by_hand import ByHand, Shape
from .figures import Measured
from .kernels import nanoseconds, spin
from .setting import Setting


async def pageable_up(setting: Setting) -> Measured:
    """GB/s of a NumPy array of 1 GiB into a device buffer, with the default 8 copy threads.

    Baseline: ``cuMemcpyHtoDAsync`` from the same array, which blocks its caller and copies with one thread. Bounds: 2.5
    times that, 0.70 of a copy of the same amount of pinned memory in the same run, and no loop iteration over 5 ms.
    """
    return await _pageable(setting, "up")


async def pageable_down(setting: Setting) -> Measured:
    """GB/s of a device buffer of 1 GiB into a NumPy array that exists (its pages are there), as `pageable_up`.

    Bounds: twice ``cuMemcpyDtoHAsync``, 0.85 of a copy into pinned memory, and no turn of the loop over 5 ms.
    """
    return await _pageable(setting, "down")


async def _pageable(setting: Setting, direction: str) -> Measured:
    nbytes = setting.count("nbytes")
    array = np.ones(nbytes, np.uint8)
    stream = setting.stream()
    buffer = stream.empty(nbytes, np.uint8)
    await stream.copy(buffer, array)
    bare, bare_buffer = setting.raw.stream(), setting.raw.device_memory(nbytes)
    setting.raw.pageable("up", bare_buffer, array, bare)

    async def ours() -> None:
        if direction == "up":
            await stream.copy(buffer, array)
        else:
            await stream.download(buffer, out=array)

    pinned, pinned_rates = setting.raw.pinned(nbytes), []
    measured, longest = Measured([]), 0.0
    await ours()  # the pinned ring and the copy threads exist from now on
    for _ in range(setting.count("repeats")):
        setting.turns.reset()
        start = perf_counter()
        await ours()
        measured.samples.append(nbytes / (perf_counter() - start) / 1e9)
        longest = max(longest, setting.turns.longest())

        start = perf_counter()
        setting.raw.pageable(direction, bare_buffer, array, bare)
        measured.baseline.append(nbytes / (perf_counter() - start) / 1e9)

        start = perf_counter()
        if direction == "up":
            setting.raw.upload(bare, bare_buffer, pinned, nbytes)
        else:
            setting.raw.download(bare, pinned, bare_buffer, nbytes)
        setting.raw.synchronize(bare)
        pinned_rates.append(nbytes / (perf_counter() - start) / 1e9)
    measured.figures["longest_turn_ms"] = longest * 1e3
    measured.figures["pinned_ratio"] = median(measured.samples) / median(pinned_rates)
    return measured


async def triple_buffer(setting: Setting) -> Measured:
    """Iterations per second of 64 MB up, a 1.25 ms kernel and 64 MB down, through a `Pipeline` of depth 3.

    Baseline: three streams, three buffers and events between them, written by hand, all enqueued ahead and waited for
    once. Bound: at least 0.97 of it. Both use pinned memory on the host.
    """
    nbytes, iterations = setting.count("nbytes"), setting.count("iterations")
    seconds = setting.sizes["seconds"]
    kernel = spin(seconds)
    source = await setting.device.pinned(nbytes, np.uint8)

    def upload(slot: aiocuda.Slot) -> Any:
        return slot.stream.copy(slot.buffer("data", nbytes, np.uint8), source)

    def compute(slot: aiocuda.Slot) -> Any:
        return slot.stream.launch(kernel, 1, 1, nanoseconds(seconds))

    def download(slot: aiocuda.Slot) -> Any:
        return slot.stream.copy(slot.pinned("data", nbytes, np.uint8), slot.buffer("data", nbytes, np.uint8))

    stages = [aiocuda.Stage("upload", upload), aiocuda.Stage("compute", compute), aiocuda.Stage("download", download)]
    pipeline = aiocuda.Pipeline(setting.device, stages, depth=setting.count("depth"))
    by_hand = ByHand(setting.raw, Shape(nbytes, seconds, nbytes), setting.count("depth"))
    measured = Measured([])
    async with pipeline:  # keeps its streams from run to run
        for _ in range(setting.count("repeats") + 1):
            start = perf_counter()
            async for _result in pipeline.run(range(iterations)):
                pass
            measured.samples.append(iterations / (perf_counter() - start))
            start = perf_counter()
            by_hand.run(iterations)
            measured.baseline.append(iterations / (perf_counter() - start))
    del measured.samples[0], measured.baseline[0]  # the first ones allocate the slots' buffers
    return measured
