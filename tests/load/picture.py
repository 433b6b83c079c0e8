"""Draws ``curves`` of a report: latency and goodput against the offered load.

``python -m tests.load.picture docs/benchmarks/host-serving.json docs/pictures/latency-against-load.svg``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from .setting import Setting

__all__ = ["draw", "main"]

DEADLINE_MS = Setting().client_deadline_s * 1e3

WIDTH, HEIGHT = 960, 460
TOP, BOTTOM = 120, 400
PANELS = ((70, 460), (550, 940))  # left and right edges

#: Colours and marks of the servers, in the order of the curves. The marks tell them apart without colours.
LOOKS = (
    ("#2f6fb0", "circle"),
    ("#c2506a", "square"),
    ("#e08a1e", "triangle"),
    ("#3a9a5b", "diamond"),
    ("#7a5aa8", "cross"),
    ("#7f8894", "ring"),
)

_DESCRIPTION = (
    "Two panels with a line for each server. Left: the 99th percentile of the latency against the offered load, with "
    "the deadline. Right: the right results within the deadline, per second."
)

# The picture has its own background, so its text is readable on every page.
_STYLE = (
    "<style>.page{fill:#ffffff}.ink{fill:#1c2430}.note{fill:#3b4654}.line{stroke:#e3e7ec}.limit{stroke:#1c2430}"
    "@media(prefers-color-scheme:dark){.page{fill:#0f141a}.ink{fill:#e6ebf1}.note{fill:#b4bfca}.line{stroke:#29323d}"
    ".limit{stroke:#e6ebf1}}</style>"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` at one pixel to ``high`` at another.

    Attributes
    ----------
    is_logarithmic
        True for a logarithmic axis.
    """

    low: float
    high: float
    first: float
    last: float
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; values beyond the ends are at the ends."""
        value = min(max(value, self.low), self.high)
        share = (value - self.low) / (self.high - self.low)
        if self.is_logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return round values between the ends: 1, 2 and 5 times the powers of ten, or multiples of one of them."""
        powers = range(math.floor(math.log10(self.high)) - 3, math.ceil(math.log10(self.high)) + 1)
        values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        if not self.is_logarithmic:
            step = next(value for value in values if value >= (self.high - self.low) / 6)
            values = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in values if self.low <= value * 1.0001 and value <= self.high * 1.0001]


def draw(curves: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as SVG text.

    Raises
    ------
    ValueError
        There are no curves, or more than the picture has colours for.
    """
    if not 1 <= len(curves) <= len(LOOKS):
        raise ValueError(f"the picture shows 1 to {len(LOOKS)} servers, not {len(curves)}")
    points = [point for curve in curves for point in curve["points"]]
    loads = [point["load"] * 100 for point in points]
    latencies = [point["p99_ms"] for point in points if point["p99_ms"] is not None] + [DEADLINE_MS]
    title = "Latency and goodput against the load; capacities in requests per second"
    left, right = PANELS[0]
    across, across2 = (Axis(min(loads) - 5, max(loads) + 5, *panel) for panel in PANELS)
    down = Axis(min(latencies) / 1.25, max(latencies) * 1.25, BOTTOM, TOP, is_logarithmic=True)
    down2 = Axis(0.0, max(point["goodput"] for point in points) * 1.1, BOTTOM, TOP)
    limit = down.at(DEADLINE_MS)
    body = [
        *_frame(across, down, "99th percentile of latency, ms"),
        f'<path d="M{left} {limit:.1f}H{right}" class="limit" stroke-dasharray="6 4"/>',
        f'<text x="{left + 4}" y="{limit - 6:.1f}" class="note">deadline</text>',
        *_frame(across2, down2, f"right results within {DEADLINE_MS:g} ms, per second"),
    ]
    for curve, (colour, mark) in zip(curves, LOOKS, strict=False):
        body += _line(curve, "p99_ms", across, down, colour, mark)
        body += _line(curve, "goodput", across2, down2, colour, mark)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f"<desc>{_DESCRIPTION}</desc>",
        _STYLE,
        f'<path d="M0 0h{WIDTH}v{HEIGHT}h-{WIDTH}z" class="page"/>',
        f'<text x="{PANELS[0][0]}" y="26" font-size="17" font-weight="600" class="ink">{title}</text>',
        *_legend(curves),
    ]
    return "\n".join([*head, *body, "</svg>\n"])


def _frame(across: Axis, down: Axis, heading: str) -> list[str]:
    """Return the lines, labels and heading of a panel."""
    out = [f'<text x="{across.first}" y="{TOP - 12}" font-weight="600" class="ink">{heading}</text>']
    for value in across.ticks():
        x = across.at(value)
        out.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM + 5}" class="line"/>')
        out.append(f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle" class="note">{value:g}</text>')
    for value in down.ticks():
        y = down.at(value)
        out.append(f'<path d="M{across.first - 5} {y:.1f}H{across.last}" class="line"/>')
        out.append(f'<text x="{across.first - 9}" y="{y + 4.5:.1f}" text-anchor="end" class="note">{value:g}</text>')
    middle = (across.first + across.last) / 2
    label = "offered load, % of the server's own capacity"
    out.append(f'<text x="{middle}" y="{BOTTOM + 42}" text-anchor="middle" class="note">{label}</text>')
    return out


def _line(curve: Mapping[str, Any], field: str, across: Axis, down: Axis, colour: str, mark: str) -> list[str]:
    """Return a server's line and its marks, which have the values as tooltips."""
    known = [point for point in curve["points"] if point[field]]
    places = [(across.at(point["load"] * 100), down.at(point[field])) for point in known]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    out = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'] if places else []
    for point, (x, y) in zip(known, places, strict=True):
        tooltip = (
            f"{curve['label']} at {point['load'] * 100:g} % of its capacity: {point['offered']:.0f} requests/s, "
            f"p99 {point['p99_ms'] or math.nan:.1f} ms, goodput {point['goodput']:.0f}/s, "
            f"refused {point['refused']:.0%}"
        )
        out.append(_mark(x, y, colour, mark, tooltip))
    return out


def _mark(x: float, y: float, colour: str, mark: str, tooltip: str = "") -> str:
    shapes = {
        "circle": f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
        "square": f"M{x - 4.5:.1f} {y - 4.5:.1f}h9v9h-9z",
        "triangle": f"M{x:.1f} {y - 6:.1f}l6 10h-12z",
        "diamond": f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z",
        "ring": f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0zm2.5 0a2.5 2.5 0 1 1 5 0a2.5 2.5 0 1 1 -5 0z",
        "cross": f"M{x - 5:.1f} {y - 1.5:.1f}h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
    }
    return f'<path d="{shapes[mark]}" fill="{colour}"><title>{escape(tooltip)}</title></path>'


def _legend(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    for number, (curve, (colour, mark)) in enumerate(zip(curves, LOOKS, strict=False)):
        x, y = PANELS[0][0] + 300 * (number % 3), 50 + 22 * (number // 3)
        text = f"{curve['label']}: {curve['capacity']:.0f}/s"
        out.append(_mark(x + 6, y, colour, mark))
        out.append(f'<text x="{x + 18}" y="{y + 4}" class="note">{escape(text)}</text>')
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.picture", description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("svg", type=Path)
    given = parser.parse_args(argv)
    given.svg.parent.mkdir(parents=True, exist_ok=True)
    given.svg.write_text(draw(json.loads(given.report.read_text("utf-8"))["curves"]), encoding="utf-8")


if __name__ == "__main__":
    main()
