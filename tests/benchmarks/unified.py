"""Rows about managed memory."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from .figures import Measured
from .kernels import read
from .setting import Setting

#: Enough threads for any GPU.
GRID, BLOCK = 2048, 256


async def unified_prefetch(setting: Setting) -> Measured:
    """GB/s from the end of the host's write until a kernel has read it, with the prefetch that aiocuda suggests.

    Baseline: without it; the pages move while the kernel waits for each of them. Bound: following is never slower. The
    two take turns, so that both find the memory on the host. Outside the time: the host's write, which brings the
    pages back, in both cases.
    """
    nbytes = setting.count("nbytes")
    words = nbytes // 4
    stream = setting.stream()
    buffer, total = setting.device.unified(words, np.uint32), stream.empty(1, np.uint32)
    measured = Measured([])
    expected = 0
    await stream.fill(total, 0)

    async def run(value: int, prefetch: bool) -> float:
        nonlocal expected
        expected += value * words
        buffer.array[:] = value
        start = perf_counter()
        if prefetch:
            stream.prefetch(suggestion.buffer, suggestion.to)
        await stream.launch(read(), GRID, BLOCK, buffer, total, words)
        return nbytes / (perf_counter() - start) / 1e9

    for value in range(2):
        await run(value, prefetch=False)  # which loads the kernel, and shows aiocuda the pattern
    (suggestion,) = buffer.suggest_prefetch()
    await run(2, prefetch=True)
    for repeat in range(setting.count("repeats")):
        measured.baseline.append(await run(repeat, prefetch=False))
        measured.samples.append(await run(repeat, prefetch=True))
    found = int((await stream.download(total))[0])
    if found != expected % 2**32:
        raise RuntimeError(f"the kernel has read {found}, not {expected % 2**32}: what the host wrote was not there")
    return measured
