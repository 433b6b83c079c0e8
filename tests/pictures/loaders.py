"""Batches per second of data loaders, from docs/benchmarks/h200-loaders.json."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks.machine import ROOT

from .svg import Axis, Colour, Page

__all__ = ["draw"]

REPORT = ROOT / "docs" / "benchmarks" / "h200-loaders.json"

#: Cases of the report, ``{}`` for the executor, and their headings.
CASES = {
    "loader_{}_memcpy_66_KB_step_0.2_ms": "copies of 66 KB, steps of 0.2 ms",
    "loader_{}_memcpy_9.6_MB_step_1_ms": "copies of 9.6 MB, steps of 1 ms",
    "loader_{}_memcpy_67_MB_step_0.2_ms": "copies of 67 MB, steps of 0.2 ms",
    "loader_{}_images_9.6_MB_step_0.2_ms": "a decoder in Python, 9.6 MB",
    "loader_{}_resize_9.6_MB_step_1_ms": "images resized, 9.6 MB",
    "loader_{}_png_9.6_MB_step_1_ms": "PNG files decoded, 9.6 MB",
}

LABELS: tuple[tuple[str, Colour], ...] = (
    ("aiocuda, threads", "blue"),
    ("aiocuda, processes", "blue"),
    ("SPDL", "purple"),
    ("PyTorch", "red"),
    ("no loader", "grey"),
)

PANEL = 178


def draw() -> str:
    """Return the picture."""
    rows = {row["name"]: row for row in json.loads(REPORT.read_text("utf-8"))["rows"]}
    page = Page(
        "Batches per second that reach the GPU",
        "Six groups of bars, one for each kind of sample: aiocuda with threads and with processes, SPDL, PyTorch, "
        "and no loader. Longer bars are better.",
        76 + PANEL * (len(CASES) // 2) + 26,
    )
    page.text(20, 56, "8 workers, one H200; longer is better; each group has its own scale", kind="note")
    for number, (name, heading) in enumerate(CASES.items()):
        _panel(page, 20 + 350 * (number % 2), 72 + PANEL * (number // 2), heading, _figures(rows, name))
    page.text(20, 76 + PANEL * (len(CASES) // 2) + 12, "medians of docs/benchmarks/h200-loaders.json", kind="note")
    return page.svg()


def _figures(rows: dict[str, Any], name: str) -> list[float]:
    """Return the medians of a case, in the order of `LABELS`."""
    threads, processes = rows[name.format("thread")], rows[name.format("process")]
    spdl, *peers = [
        max(peer["p50"] for key, peer in threads["peers"].items() if key.startswith(library))
        for library in ("spdl", "torch", "serial")
    ]
    return [threads["p50"], processes["p50"], spdl, *peers]


def _panel(page: Page, left: float, top: float, heading: str, figures: list[float]) -> None:
    page.text(left, top + 18, heading, bold=True)
    axis = Axis(0, max(figures), left + 138, left + 268)
    for number, ((label, colour), figure) in enumerate(zip(LABELS, figures, strict=True)):
        y = top + 28 + 27 * number
        page.text(left, y + 16, label, size=14)
        page.bar(axis.left, y, axis.at(figure) - axis.left, 22, colour, tooltip=f"{label}: {figure:.4g} batches/s")
        page.text(axis.at(figure) + 6, y + 16, f"{figure:,.0f}".replace(",", " "), size=14)
