"""The same pipeline with one, two and three slots: runs on the host driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

import numpy as np

import aiocuda
from aiocuda import Kernel, Operation, Pipeline, Slot, Stage
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Timeline, TimelineSpan

from .svg import Axis, Colour, Page

__all__ = ["draw"]

ITEMS = 6
NBYTES = 4_000_000
BANDWIDTH = 4e8  #: 10 ms for each copy
REPEATS = 5  #: the picture shows the fastest run of each depth
KERNEL_S = 0.010
SLOTS: tuple[Colour, ...] = ("blue", "orange", "green")
STAGES = ("upload", "compute", "download")

KERNEL = Kernel("work", source="__global__ void work();", host=lambda: time.sleep(KERNEL_S))


def _upload(slot: Slot) -> Operation[None]:
    return slot.stream.copy(slot.buffer("x", NBYTES, np.uint8), slot.pinned("x", NBYTES, np.uint8))


def _compute(slot: Slot) -> Operation[None]:
    return slot.stream.launch(KERNEL, 1, 1)


def _download(slot: Slot) -> Operation[object]:
    return slot.stream.download(slot.buffer("x"), out=slot.pinned("y", NBYTES, np.uint8))


async def record(depth: int) -> list[TimelineSpan]:
    """Return the spans of a run, in the order of the items in each stage."""
    stages = [Stage("upload", _upload), Stage("compute", _compute), Stage("download", _download)]
    runs: list[Sequence[TimelineSpan]] = []
    driver = HostDriver(bandwidth=BANDWIDTH)
    async with aiocuda.open_device(driver=driver) as device, Pipeline(device, stages, depth=depth) as pipeline:
        async for _ in pipeline.run(range(depth)):  # allocates the memory of the slots
            pass
        for _ in range(REPEATS):
            async with Timeline(device) as timeline:
                async for _ in pipeline.run(range(ITEMS)):
                    pass
            runs.append(timeline.spans)
    driver.close()
    kinds = {"upload": "upload", "copy": "upload", "launch": "compute", "download": "download"}
    spans = [[span._replace(kind=kinds[span.kind]) for span in run if span.kind in kinds] for run in runs]
    return sorted(min(spans, key=_length_ms), key=lambda span: span.operation)


def _length_ms(spans: Iterable[TimelineSpan]) -> float:
    starts, ends = zip(*((span.start_us, span.end_us) for span in spans), strict=True)
    return float(max(ends) - min(starts)) / 1e3


def draw() -> str:
    """Return the picture of three runs."""
    runs = {depth: asyncio.run(record(depth)) for depth in (1, 2, 3)}
    lengths = {depth: _length_ms(spans) for depth, spans in runs.items()}
    page = Page(
        "Triple buffer: one, two and three slots",
        f"Three timelines of the same {ITEMS} items. With one slot the stages take turns, with two slots two of them "
        "overlap, with three slots all of them do.",
        560,
    )
    page.legend(20, 58, [(colour, f"slot {number}") for number, colour in enumerate(SLOTS)])
    page.text(300, 58, f"numbers: {ITEMS} items; the fastest of {REPEATS} runs each", kind="note")
    axis = Axis(0, max(lengths.values()), 118, 696)
    page.axis(axis, 76, 502, "time, ms")
    for number, (depth, spans) in enumerate(runs.items()):
        top = 76 + 144 * number
        page.text(20, top + 16, f"{depth} slot{'s' * (depth > 1)}: {lengths[depth]:.0f} ms", bold=True)
        start = min(span.start_us for span in spans)
        for row, stage in enumerate(STAGES):
            y = top + 26 + 34 * row
            page.text(108, y + 20, stage, anchor="end")
            for item, span in enumerate(span for span in spans if span.kind == stage):
                left, right = (axis.at((moment - start) / 1e3) for moment in (span.start_us, span.end_us))
                tooltip = f"item {item}, slot {item % depth}: {stage}, {(span.end_us - span.start_us) / 1e3:.1f} ms"
                page.bar(left, y, right - left, 28, SLOTS[item % depth], label=str(item), tooltip=tooltip)
    return page.svg()
