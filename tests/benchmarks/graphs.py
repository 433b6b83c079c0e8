"""Rows about graphs: what enqueueing one costs."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from .figures import Measured
from .kernels import empty
from .setting import Setting


async def graph_launch(setting: Setting) -> Measured:
    """Microseconds of the loop's time to enqueue a captured upload of 4 KB, empty kernel and download of 4 KB.

    Baseline: three method calls, each an operation. Only the last operation of a batch is awaited, which is not
    counted. A batch stays far below the limit of operations in flight. Bound: at most 0.75 of the baseline.
    """
    nbytes, launches = setting.count("nbytes"), setting.count("launches")
    stream, kernel = setting.stream(), empty()
    buffer = stream.empty(nbytes, np.uint8)
    source, target = await setting.device.pinned(nbytes, np.uint8), await setting.device.pinned(nbytes, np.uint8)
    other = await setting.device.pinned(nbytes, np.uint8)
    async with stream.capture() as graph:
        stream.copy(buffer, source)
        stream.launch(kernel, 1, 1)
        stream.copy(target, buffer)
    await graph.launch(stream)
    measured = Measured([])
    for _ in range(setting.count("repeats") + 1):
        start = perf_counter()
        for _ in range(launches):
            last = graph.launch(stream)
        measured.samples.append((perf_counter() - start) / launches * 1e6)
        await last
        spent = 0.0
        for _ in range(launches):
            start = perf_counter()
            stream.copy(buffer, source)
            stream.launch(kernel, 1, 1)
            down = stream.copy(other, buffer)
            spent += perf_counter() - start
            await down  # an array is written by one copy at a time
        measured.baseline.append(spent / launches * 1e6)
    del measured.samples[0], measured.baseline[0]  # the first ones load the kernel
    return measured
