"""Latencies of a service with and without frozen objects, from docs/benchmarks/h100.json."""

from __future__ import annotations

import json

from tests.benchmarks.machine import ROOT

from .svg import Axis, Colour, Page

__all__ = ["draw"]

REPORT = ROOT / "docs" / "benchmarks" / "h100.json"
QUANTILES = (50, 75, 90, 95, 98, 99, 99.9)


def draw() -> str:
    """Return the picture: a pair of bars for each percentile."""
    rows = {row["name"]: row for row in json.loads(REPORT.read_text("utf-8"))["rows"]}
    figures = rows["service_freeze"]["figures"]
    page = Page(
        "Latencies of a service with and without freezing",
        "A pair of bars for each percentile of the latency: with the objects of the start frozen, and without.",
        596,
    )
    page.text(
        20, 58, "one H100, a small model of PyTorch, 128 connections, each sends its next request at once", kind="note"
    )
    axis = Axis(0, figures["unfrozen_p99.9_ms"], 150, 610)
    for number, quantile in enumerate(QUANTILES):
        y = 82 + 66 * number
        page.text(20, y + 28, f"{quantile:g} %", bold=True)
        bars: tuple[tuple[str, str, Colour], ...] = (("frozen", "frozen", "blue"), ("not", "unfrozen", "orange"))
        for line, (label, name, colour) in enumerate(bars):
            figure, top = figures[f"{name}_p{quantile:g}_ms"], y + 26 * line
            page.text(140, top + 17, label, size=14, anchor="end")
            page.bar(axis.left, top, axis.at(figure) - axis.left, 22, colour, tooltip=f"{label}: {figure:.1f} ms")
            page.text(axis.at(figure) + 6, top + 17, f"{figure:.0f} ms", size=14)
    page.text(20, 560, "98 % means: of 100 requests, 98 are answered within this time", size=14, kind="note")
    rates = figures["frozen_per_s"], figures["unfrozen_per_s"]
    page.text(
        20, 582, f"requests per second: {rates[0]:,.0f} and {rates[1]:,.0f}".replace(",", " "), size=14, kind="note"
    )
    return page.svg()
