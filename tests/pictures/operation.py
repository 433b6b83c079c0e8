"""The life of one operation: a launch on the host driver, with the time of each step."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiocuda
from aiocuda import Kernel
from tests.benchmarks.machine import ROOT

from .svg import Colour, Page

__all__ = ["draw"]

KERNEL_S = 0.005
REPEATS = 15  #: the picture shows the launch with the median of the times

LANES: tuple[tuple[str, str, Colour], ...] = (
    ("coroutine", "", "purple"),
    ("stream", "queue", "blue"),
    ("device", "", "orange"),
    ("event loop", "", "green"),
)


class _Moments:
    """The times of the steps of one operation. A listener of the device."""

    timing = False

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def on_submit(self, operation: Any) -> None:
        """Called when the stream has accepted the operation."""
        self.times["submitted"] = time.perf_counter()

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        """Called when the loop has found the operation done."""
        self.times["resolved"] = time.perf_counter()

    def run_kernel(self) -> None:
        """The host implementation of the kernel."""
        self.times["began"] = time.perf_counter()
        time.sleep(KERNEL_S)
        self.times["ended"] = time.perf_counter()


async def record() -> dict[str, float]:
    """Return the times of the median launch in microseconds, from the call of ``launch``."""
    launches: list[dict[str, float]] = []
    moments = _Moments()
    kernel = Kernel("work", source="__global__ void work();", host=moments.run_kernel)
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        await device.load(kernel)
        with device.listen(moments):
            for _ in range(REPEATS):
                called = time.perf_counter()
                operation = stream.launch(kernel, 1, 1)
                returned = time.perf_counter()
                await operation
                resumed = time.perf_counter()
                times = {"called": called, "returned": returned, "resumed": resumed, **moments.times}
                launches.append({name: (moment - called) * 1e6 for name, moment in times.items()})
    return sorted(launches, key=lambda times: times["resumed"])[REPEATS // 2]


def _on_gpu() -> float:
    rows = json.loads((ROOT / "docs" / "benchmarks" / "h200.json").read_text("utf-8"))["rows"]
    return float(next(row["p50"] for row in rows if row["name"] == "await_empty_kernel"))


def draw() -> str:
    """Return the picture of a run."""
    times = asyncio.run(record())
    page = Page(
        "The life of one operation",
        "Four lanes: coroutine, stream queue, device and event loop. The launch is enqueued and returns; the coroutine "
        "awaits; the device runs the kernel; a notification wakes the loop; the loop resumes the coroutine.",
        582,
    )
    page.text(20, 56, "await stream.launch(kernel, …): a kernel of 5 ms on the host driver; not to scale", kind="note")
    places = {}
    for number, (name, more, colour) in enumerate(LANES):
        x = places[name] = 186.0 + 148 * number
        page.labelled(x - 64, 72, 128, 34, f"{name} {more}".strip(), colour=colour)
        page.line((x, 106), (x, 500), dashed=True)
    coroutine, stream, device, loop = places.values()
    rows = {
        "called": (138, "calls launch"),
        "submitted": (178, "accepted"),
        "returned": (222, "launch returns"),
        "began": (266, "kernel begins"),
        "ended": (352, "kernel ends"),
        "resolved": (416, "loop resolves"),
        "resumed": (468, "await returns"),
    }
    for name, (y, _) in rows.items():
        page.text(100, y + 5, f"{times[name]:,.0f} µs".replace(",", " "), anchor="end", bold=True)
    page.arrow((coroutine, 138), (stream - 5, 138), colour="purple")
    page.text((coroutine + stream) / 2, 130, "launch", anchor="middle", size=14)
    page.bar(stream - 5, 138, 10, 40, "blue")
    page.arrow((stream, 178), (device - 5, 178), colour="blue")
    page.text((stream + device) / 2, 170, "kernel, event", anchor="middle", size=14)
    page.arrow((stream - 5, 222), (coroutine + 5, 222), colour="blue")
    page.text((coroutine + stream) / 2, 214, "Operation", anchor="middle", size=14)
    page.bar(coroutine - 5, 126, 10, 100, "purple")
    page.text(coroutine + 12, 306, "awaits: the loop", size=14)
    page.text(coroutine + 12, 324, "runs other tasks", size=14)
    page.bar(device - 50, 266, 100, 86, "orange", label="kernel runs")
    page.arrow((device + 5, 352), (device + 60, 378), (loop - 5, 410), colour="orange")
    page.text(device - 8, 384, "event done:", anchor="end", size=14)
    page.text(device - 8, 402, "notification", anchor="end", size=14)
    page.bar(loop - 5, 410, 10, 50, "green")
    page.arrow((loop - 5, 458), (coroutine + 5, 468), colour="green")
    page.text(stream, 488, "result, in the next turn of the loop", anchor="middle", size=14)
    page.bar(coroutine - 5, 464, 10, 30, "purple")
    late = times["resumed"] - times["ended"]
    notes = (
        f"From the end of the kernel to the next line: {late:.0f} µs here, where the device",
        f"is threads of this process. On an H200, {_on_gpu():.1f} µs are enough for an empty kernel",
        "from the launch to the next line.",
    )
    for number, note in enumerate(notes):
        page.text(20, 528 + 20 * number, note, kind="note")
    return page.svg()
