"""Draws spans of time as SVG, with a row for each stream."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, Protocol
from xml.sax.saxutils import escape, quoteattr

__all__ = ["draw"]

WIDTH: Final = 1200
LEFT: Final = 150  # the streams' names
RIGHT: Final = 24
TOP: Final = 78  # title and legend
ROW: Final = 34
BAR: Final = 22
LINE: Final = 3  # height of operations that only wait
BOTTOM: Final = 50  # the axis
MOST_NAMED: Final = 4  # kernels, in the legend
THINNEST: Final = 1.2  # pixels, so that an operation without duration is visible

#: Colours by kind. They differ in grey, too, and for readers with red-green blindness.
COLOURS: Final = {
    "upload": "#2f6fb0",
    "launch": "#e08a1e",
    "download": "#3a9a5b",
    "copy": "#7a5aa8",
    "fill": "#b0508a",
    "prefetch": "#4aa3a2",
    "graph": "#8a6d3b",
}
OTHER: Final = "#9aa3ad"  # waits and records, which only order other operations

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Span(Protocol):
    """A span that is drawn."""

    @property
    def stream(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...
    @property
    def kernel(self) -> str | None: ...


def draw(spans: Sequence[Span], title: str) -> str:
    """Return the picture as SVG text."""
    rows = list(dict.fromkeys(span.stream for span in spans))
    first = min((span.start_us for span in spans), default=0.0)
    last = max((span.end_us for span in spans), default=0.0)
    last = max(last, first + 1.0)
    step = _step((last - first) / 1e3)
    origin = math.floor(first / 1e3 / step) * step
    end = last / 1e3
    scale = (WIDTH - LEFT - RIGHT) / (end - origin)  # pixels per millisecond
    height = TOP + ROW * max(1, len(rows)) + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{_text(title)}</title>",
        f'<path d="M0 0h{WIDTH}v{height}h-{WIDTH}z" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="17" font-weight="600" fill="#1c2430">{_text(title)}</text>',
        *_legend(spans),
        *_axis(origin, end, step, scale, len(rows)),
    ]
    for number, name in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        out.append(
            f'<text x="{LEFT - 12}" y="{y + 4.5:.1f}" text-anchor="end" fill="#1c2430">{_text(_short(name))}</text>'
        )
    # Operations that only wait are drawn first: they often cover the operations that they wait for.
    row_of = {name: number for number, name in enumerate(rows)}
    out += [
        _bar(span, row_of[span.stream], origin, scale) for span in sorted(spans, key=lambda span: span.kind in COLOURS)
    ]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _bar(span: Span, row: int, origin: float, scale: float) -> str:
    works = span.kind in COLOURS
    height = BAR if works else LINE
    x = LEFT + (span.start_us / 1e3 - origin) * scale
    width = max(THINNEST, (span.end_us - span.start_us) / 1e3 * scale)
    y = TOP + ROW * row + (ROW - height) / 2
    what = span.kind if span.kernel is None else f"{span.kind} {span.kernel}"
    tooltip = f"{what} on {span.stream}: {span.start_us / 1e3:.3f} to {span.end_us / 1e3:.3f} ms"
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
        f'fill="{COLOURS.get(span.kind, OTHER)}" '
        f'stroke="#ffffff" stroke-width="{0.8 if width > 4 else 0}" '
        f"data-stream={_attribute(span.stream)} data-kind={_attribute(span.kind)} "
        f'data-start-us="{span.start_us:.3f}" data-end-us="{span.end_us:.3f}"><title>{_text(tooltip)}</title></rect>'
    )


def _legend(spans: Sequence[Span]) -> list[str]:
    present = {span.kind for span in spans}
    kernels = _some(sorted({span.kernel for span in spans if span.kernel is not None}))
    labels = {"launch": f"launch {kernels}" if kernels else "launch"}
    entries = [(labels.get(kind, kind), colour, 14.0) for kind, colour in COLOURS.items() if kind in present]
    others = sorted(present - set(COLOURS))
    if others:
        entries.append((", ".join(others), OTHER, float(LINE)))
    out = []
    x = LEFT
    for label, colour, height in entries:
        out.append(f'<path d="M{x} {53 - height / 2}h14v{height}h-14z" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="58" fill="#3b4654">{_text(label)}</text>')
        x += 44 + 8 * len(label)
    return out


def _axis(origin: float, end: float, step: float, scale: float, rows: int) -> list[str]:
    bottom = TOP + ROW * max(1, rows)
    right = WIDTH - RIGHT
    out = [f'<path d="M{LEFT} {TOP + ROW * number}H{right}" stroke="#e3e7ec"/>' for number in range(max(1, rows) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for tick in range(math.floor((end - origin) / step + 1e-9) + 1):
        x = LEFT + tick * step * scale
        out.append(f'<path d="M{x:.1f} {TOP}V{bottom + 5}" stroke="#d3d9e0" stroke-dasharray="2 3"/>')
        label = f"{origin + tick * step:.{digits}f}"
        out.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="#3b4654">{label}</text>')
    middle = (LEFT + right) / 2
    out.append(f'<text x="{middle:.1f}" y="{bottom + 40}" text-anchor="middle" fill="#3b4654">time, ms</text>')
    return out


def _step(span: float) -> float:
    """Return the distance of two ticks: 1, 2 or 5 times a power of ten, for 6 to 15 ticks."""
    rough = span / 12
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def _some(names: Sequence[str]) -> str:
    """Return the first names as text; there is no room for all."""
    return ", ".join(_short(name) for name in names[:MOST_NAMED]) + (" …" if len(names) > MOST_NAMED else "")


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("\ufffd", text))
