"""A row about many waiters of one operation, and what it costs when they are cancelled."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter

from aiocuda.testing import Latch

from .figures import Measured
from .setting import Setting


async def cancel_waiters(setting: Setting) -> Measured:
    """Milliseconds to cancel all waiters of one operation in the order of their coming.

    Baseline: the waiters of an `asyncio.Event`, cancelled in that order, in the same run. Bounds: at most twice the
    baseline, in that order and in the reverse order (``reverse_ratio``).
    """
    count, reverse_ms = setting.count("waiters"), []
    measured, event = Measured([]), asyncio.Event()
    stream = setting.stream()
    for _ in range(setting.count("repeats")):
        measured.baseline.append(await _cancelled(count, event.wait, 1))
        with Latch(setting.device, seconds=120) as latch:
            latch.hold(stream)
            await latch.held()
            held = stream.synchronize()
            measured.samples.append(await _cancelled(count, held.wait, 1))
            reverse_ms.append(await _cancelled(count, held.wait, -1))
        await held
    measured.figures.update(reverse_ms=median(reverse_ms), reverse_ratio=median(reverse_ms) / median(measured.baseline))
    return measured


async def _cancelled(count: int, wait: Callable[[], Awaitable[object]], order: int) -> float:
    """Milliseconds from the first cancellation to the end of the task that is cancelled last."""

    async def each() -> None:
        await wait()

    tasks = [asyncio.create_task(each()) for _ in range(count)]
    await asyncio.sleep(0)
    gc.collect()
    begin = perf_counter()
    for task in tasks[::order]:
        task.cancel()
    await asyncio.wait({tasks[::order][-1]})
    took = perf_counter() - begin
    await asyncio.gather(*tasks, return_exceptions=True)
    return took * 1e3
