"""How long an await takes beside other ways to wait, from docs/benchmarks/h200*.json."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks.machine import ROOT

from .svg import Axis, Colour, Page

__all__ = ["draw"]

#: The second one has the rows whose peers were measured in an older run only.
REPORTS = [ROOT / "docs" / "benchmarks" / name for name in ("h200.json", "h200-peers.json")]

#: Rows of the report, and their headings in the picture.
ROWS = {
    "await_empty_kernel": "an empty kernel, from the launch to the next line",
    "latency_5ms": "added to a kernel of 5 ms",
    "busy_loop": "added to 200 µs, beside a busy coroutine",
}

PEERS: tuple[tuple[str, str, Colour], ...] = (
    ("cupy_host_function", "CuPy, host function", "orange"),
    ("torch_to_thread", "PyTorch, to_thread", "red"),
)


def draw() -> str:
    """Return the picture."""
    rows = {row["name"]: row for path in REPORTS for row in json.loads(path.read_text("utf-8"))["rows"]}
    busy = ", ".join(f"{label}: {_time(p50)}" for label, _, p50, _ in _figures(rows["busy_loop"]))
    page = Page(
        "How late a coroutine gets its result",
        "Three groups of points on a logarithmic axis of microseconds: the driver alone, aiocuda, CuPy and PyTorch. "
        f"On a busy loop, {busy}.",
        120 + 140 * len(ROWS),
    )
    axis = Axis(5, 5e6, 190, 690, logarithmic=True)
    bottom = 60.0 + 140 * len(ROWS)
    for value, label in ((10, "10 µs"), (100, "100 µs"), (1e3, "1 ms"), (1e4, "10 ms"), (1e5, "100 ms"), (1e6, "1 s")):
        x = axis.at(value)
        page.line((x, 72), (x, bottom), dashed=True, width=1)
        page.text(x, bottom + 20, label, size=14, anchor="middle", kind="note")
    page.text(20, bottom + 46, "dot: median, line: to the 99th percentile; one H200", kind="note", size=14)
    y = 60.0
    for name, heading in ROWS.items():
        page.text(20, y + 18, heading, bold=True)
        for number, (label, colour, p50, p99) in enumerate(_figures(rows[name])):
            line = y + 42 + 24 * number
            page.text(20, line + 5, label, size=14)
            page.line((axis.at(p50), line), (axis.at(p99), line), colour=colour, width=3)
            page.dot(axis.at(p50), line, colour, tooltip=f"{label}: {_time(p50)}, 99th percentile {_time(p99)}")
            beyond = max(axis.at(p99), axis.at(p50) + 4) + 8
            if beyond < 630:
                page.text(beyond, line + 5, _time(p50), size=14)
            else:
                page.text(axis.at(p50) - 10, line + 5, _time(p50), size=14, anchor="end")
        y += 140
    return page.svg()


def _figures(row: dict[str, Any]) -> list[tuple[str, Colour, float, float]]:
    """Return label, colour, median and 99th percentile in µs."""
    found: list[tuple[str, Colour, float, float]] = [
        ("the driver alone", "grey", row["baseline"]["p50"], row["baseline"].get("p99", row["baseline"]["p50"])),
        ("aiocuda", "blue", row["p50"], row["p99"]),
    ]
    found += [(label, colour, row["peers"][name]["p50"], row["peers"][name]["p99"]) for name, label, colour in PEERS]
    return found


def _time(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.3g} µs"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"
