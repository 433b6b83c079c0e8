"""A graph of operations and its execution: a run of an `AsyncCoordinator` on the host driver."""

from __future__ import annotations

import asyncio
import time

import aiocuda
from aiocuda import AsyncCoordinator, Kernel
from aiocuda.coordination import Node
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Timeline, TimelineSpan

from .svg import Axis, Colour, Page

__all__ = ["draw"]

N = 1 << 20
BANDWIDTH = 4e8  #: 10 ms for each upload
KERNEL_S = 0.012
REPEATS = 5  #: the picture shows the fastest run

#: Where each operation is drawn, and its colour.
PLACES: dict[str, tuple[float, float, Colour]] = {
    "upload x": (24, 80, "blue"),
    "upload y": (24, 160, "blue"),
    "left": (206, 80, "orange"),
    "right": (206, 160, "orange"),
    "both": (388, 120, "orange"),
    "download": (570, 120, "green"),
}
BLOCK = (126.0, 44.0)

BLEND = Kernel(
    "blend",
    source="__global__ void blend(float* out, const float* left, const float* right);",
    host=lambda out, left, right: time.sleep(KERNEL_S),
)


async def record() -> tuple[dict[str, list[str]], dict[str, TimelineSpan]]:
    """Return the dependencies that the coordinator found, and the span of each operation, by name."""
    driver = HostDriver(bandwidth=BANDWIDTH)
    names: dict[Node[object], str] = {}
    needs: dict[str, list[str]] = {}

    def note(name: str, node: Node[object]) -> Node[object]:
        needs[name] = [names[other] for other in node.dependencies]
        names[node] = name
        return node

    async with aiocuda.open_device(driver=driver) as device:
        await device.load(BLEND)
        host = [await device.pinned(N) for _ in range(3)]
        async with AsyncCoordinator(device) as coordinator:
            x, y, left, right, both = (coordinator.compute_stream.empty(N) for _ in range(5))
            await coordinator.compute(BLEND, 1, 1, both, left, right)  # opens the streams
            uploads = coordinator.upload(host[0], x), coordinator.upload(host[1], y)
            await asyncio.gather(*uploads, coordinator.download(x, host[2]))  # the pages of all memory exist now
            async with Timeline(device) as timeline:
                note("upload x", coordinator.upload(host[0], x))
                note("upload y", coordinator.upload(host[1], y))
                note("left", coordinator.compute(BLEND, 1, 1, left, x, y))
                note("right", coordinator.compute(BLEND, 1, 1, right, x, y))
                note("both", coordinator.compute(BLEND, 1, 1, both, left, right))
                await note("download", coordinator.download(both, host[2]))
            operations = {node.operation.id: name for node, name in names.items() if node.operation is not None}
    driver.close()
    return needs, {operations[span.operation]: span for span in timeline.spans if span.operation in operations}


def _length_ms(spans: dict[str, TimelineSpan]) -> float:
    return (max(span.end_us for span in spans.values()) - min(span.start_us for span in spans.values())) / 1e3


def draw() -> str:
    """Return the picture of a run."""
    needs, spans = min((asyncio.run(record()) for _ in range(REPEATS)), key=lambda run: _length_ms(run[1]))
    if set(spans) != set(PLACES):
        raise RuntimeError(f"the timeline has {sorted(spans)}, and the picture shows {sorted(PLACES)}")
    streams = list(dict.fromkeys(spans[name].stream for name in PLACES))
    bottom = 268.0 + 44 * len(streams)
    page = Page(
        "A graph of operations, and its execution",
        "Above, arrows lead from each operation to those that need its result: two uploads, two kernels that read "
        "both, a kernel that reads both results, and a download. Below, the same operations on their streams.",
        bottom + 62,
    )
    page.text(20, 60, "The coordinator finds the arrows in the arguments", kind="note")
    for name, before in needs.items():
        for number, other in enumerate(before):
            (x1, y1, _), (x2, y2, _) = PLACES[other], PLACES[name]
            end = y2 + BLOCK[1] * (number + 1) / (len(before) + 1)  # each arrow has an end of its own
            page.arrow((x1 + BLOCK[0], y1 + BLOCK[1] / 2), (x2 - 1, end))
    for name, (x, y, colour) in PLACES.items():
        page.labelled(x, y, *BLOCK, name, colour=colour)
    page.text(20, 244, "and runs the operations on streams, which wait on the device:", kind="note")
    start = min(span.start_us for span in spans.values())
    axis = Axis(0, _length_ms(spans), 128, 694)
    page.axis(axis, 256, bottom, "time, ms")
    for number, stream in enumerate(streams):
        y = 262.0 + 44 * number
        page.text(20, y + 23, f"stream {number + 1}")
        for name, span in spans.items():
            if span.stream == stream:
                left, right = (axis.at((moment - start) / 1e3) for moment in (span.start_us, span.end_us))
                page.bar(left, y, right - left, 34, PLACES[name][2], label=name, tooltip=f"{name} on {stream}")
    return page.svg()
