"""Line charts as SVG, one below the other: the measurements of a workload over its iterations."""

from __future__ import annotations

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 900, 96, 24, 48
HEIGHT, GAP, BOTTOM = 190, 54, 52  # of a chart, between two of them, below the last one
COLOURS = ("#2f6fb0", "#e08a1e", "#3a9a5b", "#7a5aa8")
INK, GREY = "#1c2430", "#d3d9e0"


class Line(NamedTuple):
    """One quantity: a value for each x."""

    name: str
    x: list[float]
    y: list[float]
    dashed: bool = False


class Chart(NamedTuple):
    """Lines over the same axes. A logarithmic axis leaves out values of 0 or less."""

    label: str
    lines: list[Line]
    logarithmic: bool = False


def draw(title: str, x_label: str, charts: list[Chart]) -> str:
    """Return the picture as text."""
    height = TOP + len(charts) * (HEIGHT + GAP) - GAP + BOTTOM
    every = [value for chart in charts for line in chart.lines for value in line.x]
    first, last = min(every, default=0.0), max(every, default=1.0)
    across = (first, last if last > first else first + 1.0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="17" font-weight="600">{escape(title)}</text>',
    ]
    for number, chart in enumerate(charts):
        out += _chart(chart, TOP + number * (HEIGHT + GAP), across)
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return "\n".join([*out, "</svg>", ""])


def _chart(chart: Chart, top: float, across: tuple[float, float]) -> list[str]:
    points = [
        [(x, math.log10(y) if chart.logarithmic else y) for x, y in zip(line.x, line.y, strict=True) if _fits(chart, y)]
        for line in chart.lines
    ]
    ticks_y = _ticks(*_extent([y for line in points for _, y in line]), 5)
    if chart.logarithmic:
        ticks_y = sorted({float(math.floor(tick)) for tick in ticks_y} | {math.ceil(ticks_y[-1])})
    low, high = ticks_y[0], ticks_y[-1]
    right, bottom = WIDTH - RIGHT, top + HEIGHT

    def at_x(x: float) -> float:
        return LEFT + (x - across[0]) / (across[1] - across[0]) * (right - LEFT)

    def at_y(y: float) -> float:
        return bottom - (y - low) / (high - low) * HEIGHT

    out = []
    for tick in ticks_y:
        label = f"1e{tick:.0f}" if chart.logarithmic else f"{tick:g}"
        out.append(f'<path d="M{LEFT} {at_y(tick):.1f}H{right}" stroke="{GREY}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at_y(tick) + 4.5:.1f}" text-anchor="end">{label}</text>')
    for tick in _ticks(*across, 10):
        if across[0] <= tick <= across[1]:
            out.append(f'<path d="M{at_x(tick):.1f} {top}V{bottom + 5}" stroke="{GREY}" stroke-dasharray="2 3"/>')
            out.append(f'<text x="{at_x(tick):.1f}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    place = f'x="18" y="{(top + bottom) / 2}" transform="rotate(-90 18 {(top + bottom) / 2})"'
    out.append(f'<text {place} text-anchor="middle">{escape(chart.label)}</text>')
    legend = float(right - sum(8 * len(line.name) + 36 for line in chart.lines))
    for number, (line, path) in enumerate(zip(chart.lines, points, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        dashes = ' stroke-dasharray="7 5"' if line.dashed else ""
        where = "L".join(f"{at_x(x):.2f} {at_y(y):.2f}" for x, y in path)
        if where:
            out.append(f'<path d="M{where}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        out.append(f'<path d="M{legend:.0f} {top - 8}h24" stroke="{colour}" stroke-width="2.5"{dashes}/>')
        out.append(f'<text x="{legend + 29:.0f}" y="{top - 4}">{escape(line.name)}</text>')
        legend += 8 * len(line.name) + 36
    return out


def _fits(chart: Chart, y: float) -> bool:
    return math.isfinite(y) and (y > 0 or not chart.logarithmic)


def _extent(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.0 if high > low else max(abs(high) * 1e-6, 1e-12)  # a constant is a line in the middle
    return low - room, high + room


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from at most the lowest value to at least the highest, about so many."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
