"""Streams that share hardware queues, from docs/benchmarks/h200-peers.json."""

from __future__ import annotations

import json

from tests.benchmarks.machine import ROOT

from .svg import Axis, Colour, Page

__all__ = ["draw"]

REPORT = ROOT / "docs" / "benchmarks" / "h200-peers.json"
STREAMS = (32, 64, 128)


def draw() -> str:
    """Return the picture: above how streams share queues, below what this costs."""
    rows = {row["name"]: row for row in json.loads(REPORT.read_text("utf-8"))["rows"]}
    page = Page(
        "Streams share hardware queues",
        "Above: four streams on two hardware queues; a host function in one stream holds the stream that shares its "
        "queue. Below: the measured times of 32, 64 and 128 streams.",
        640,
    )
    _queues(page, 64, "a host function after each kernel, in the same stream", held=True)
    _queues(page, 212, "aiocuda: the notification waits in a stream of its own", held=False)
    page.text(20, 384, "Measured: each stream awaits three kernels of 10 ms", bold=True, size=17)
    page.text(20, 406, "one H200, ideal: 30 ms; aiocuda has 32 queues, CuPy CUDA's default of 8", kind="note")
    axis = Axis(0, rows["streams_128"]["peers"]["cupy_host_function"]["p50"], 230, 630)
    for number, streams in enumerate(STREAMS):
        row = rows[f"streams_{streams}"]
        y = 424 + 66 * number
        page.text(20, y + 28, f"{streams} streams", bold=True)
        bars: tuple[tuple[str, Colour, float], ...] = (
            ("aiocuda", "blue", row["p50"]),
            ("CuPy", "orange", row["peers"]["cupy_host_function"]["p50"]),
        )
        for line, (label, colour, figure) in enumerate(bars):
            top = y + 26 * line
            page.text(220, top + 17, label, size=14, anchor="end")
            page.bar(axis.left, top, axis.at(figure) - axis.left, 22, colour, tooltip=f"{label}: {figure:.1f} ms")
            page.text(axis.at(figure) + 6, top + 17, f"{figure:.0f} ms", size=14)
    page.text(20, 628, "CuPy waits by a host function in each stream (launch_host_func)", size=14, kind="note")
    return page.svg()


def _queues(page: Page, top: float, heading: str, *, held: bool) -> None:
    """Draw two queues, each with the work of two streams in the order in which it was enqueued."""
    page.text(20, top + 10, heading, bold=True)
    entries: list[tuple[str, Colour]] = [("kernel A", "blue"), ("kernel B", "green")]
    for queue in range(2):
        y = top + 24 + 54 * queue
        names = [
            (name.replace("A", "C").replace("B", "D"), colour) if queue else (name, colour) for name, colour in entries
        ]
        page.text(20, y + 26, f"queue {queue + 1}")
        page.box(96, y, 604, 44)
        if held:
            page.bar(104, y + 7, 150, 30, names[0][1], label=names[0][0])
            page.bar(258, y + 7, 130, 30, "grey", label="host function")
            page.bar(392, y + 7, 150, 30, names[1][1], label=names[1][0])
            page.text(550, y + 27, "waits for both", kind="note")
        else:
            page.bar(104, y + 7, 150, 14, names[0][1])
            page.bar(104, y + 24, 150, 14, names[1][1])
            page.text(264, y + 27, f"{names[0][0]} and {names[1][0]} run at the same time", kind="note")
