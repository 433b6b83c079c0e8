"""The path of a device fault: a run on the host driver, in which a kernel fails under six waiters."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Kernel

from .runs import described
from .svg import Axis, Page

__all__ = ["draw"]

FAULT_S = 0.030  #: after the first launch
QUICK_S = 0.010
LONG_S = 0.080


class _Run:
    """The waiters of one run, with the time and the outcome of each."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.failed_at = 0.0
        self.outcomes: list[tuple[str, float, float, str]] = []

    def now(self) -> float:
        """Return the milliseconds since the run began."""
        return (time.perf_counter() - self.began) * 1e3

    def fail(self) -> None:
        """The host implementation of the kernel that faults."""
        time.sleep(FAULT_S)
        self.failed_at = self.now()
        raise ValueError("an illegal address")

    async def wait(self, label: str, work: Awaitable[Any]) -> None:
        """Wait for an operation and note its outcome."""
        start = self.now()
        outcome = "result"
        try:
            await work
        except aiocuda.DeviceFault as fault:
            outcome = type(fault).__name__
        self.outcomes.append((label, start, self.now(), outcome))


async def record() -> _Run:
    """Return the run. Each waiter has a stream of its own, or follows the kernel that faults."""
    run = _Run()
    faulty = Kernel("faulty", source="__global__ void faulty();", host=run.fail)
    quick = Kernel("quick", source="__global__ void quick();", host=lambda: time.sleep(QUICK_S))
    slow = Kernel("slow", source="__global__ void slow();", host=lambda: time.sleep(LONG_S))
    device = await aiocuda.open_device(driver="host")
    a, b, c, d = (device.stream(name=name) for name in "abcd")
    for kernel in (faulty, quick, slow):
        await device.load(kernel)
    buffer = await a.upload(np.ones(16, np.float32))
    run.began = time.perf_counter()
    work = {
        "quick kernel, stream b": b.launch(quick, 1, 1),
        "faulty kernel, stream a": a.launch(faulty, 1, 1),
        "download after it, stream a": a.download(buffer),
        "long kernel, stream c": c.launch(slow, 1, 1),
        "wait for stream a, stream d": d.wait(a),
        "one more waiter of stream c": c.synchronize(),
    }
    async with asyncio.TaskGroup() as group:
        for label, operation in work.items():
            group.create_task(run.wait(label, operation))
    try:
        b.launch(quick, 1, 1)
    except aiocuda.DeviceFault as fault:
        run.outcomes.append(("a new launch, stream b", run.now(), run.now(), f"{type(fault).__name__}, not enqueued"))
    order = [*work, "a new launch, stream b"]
    run.outcomes.sort(key=lambda outcome: order.index(outcome[0]))
    with contextlib.suppress(aiocuda.DeviceFault):  # the fault that this picture shows
        await device.aclose()
    return run


def draw() -> str:
    """Return the picture of a run."""
    run = described(record, lambda run: [outcome for _, _, _, outcome in run.outcomes].count("result") == 1)
    page = Page(
        "A device fault reaches every waiter",
        "Rows of waiters. The one whose kernel ended before the fault has its result. All others get a DeviceFault "
        "at the next look at the device, on every stream, and so does a later call.",
        142 + 46 * len(run.outcomes) + 40,
    )
    page.text(20, 58, "line: the task awaits; the watchdog looks at the device every 25 ms", kind="note")
    last = max(end for _, _, end, _ in run.outcomes)
    axis = Axis(0, last * 1.05, 250, 520)
    bottom = 112 + 46 * len(run.outcomes)
    page.axis(axis, 98, bottom, "ms since the launch of the faulty kernel", most=5)
    fault = axis.at(run.failed_at)
    page.line((fault, 96), (fault, bottom), colour="red", width=2)
    page.text(fault, 88, f"fault at {run.failed_at:.1f} ms", anchor="middle", bold=True)
    for number, (label, start, end, outcome) in enumerate(run.outcomes):
        y = 122 + 46 * number
        page.text(20, y + 5, label, size=14)
        is_result = outcome == "result"
        page.line((axis.at(start), y), (axis.at(end), y), colour="green" if is_result else "red", width=4)
        if is_result:
            page.dot(axis.at(end), y, "green")
        else:
            page.cross(axis.at(end), y, "red")
        words = [f"{outcome.partition(',')[0]} at {end:.1f} ms", *filter(None, [outcome.partition(", ")[2]])]
        for line, text in enumerate(words):
            page.text(534, y + 5 + 18 * line, text, size=14)
    return page.svg()
