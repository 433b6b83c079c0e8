"""Pictures of timelines as SVG, readable on light and on dark pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from ..completion import KINDS
from ._recording import TimelineSpan, kept, shown

__all__ = ["COLOURS", "OTHER", "Panel", "TimelineSpan", "draw", "draw_panels", "legend_of"]

WIDTH: Final = 960
LEFT: Final = 130  # the streams' names
RIGHT: Final = 24
TOP: Final = 76  # title and legend
HEADING: Final = 34  # of a panel
ROW: Final = 34
BAR: Final = 22
LINE: Final = 3  # height of operations that only wait
BOTTOM: Final = 50  # the axis
MOST_NAMED: Final = 4  # kernels, in the legend
THINNEST: Final = 1.2  # pixels, so that an operation without duration is visible

#: Colours by kind. They differ in grey, too, and for readers with red-green blindness.
COLOURS: Final = {
    "read": "#c2506a",  # of the host
    **{name: kind.colour for name, kind in KINDS.items() if kind.colour is not None},
}
OTHER: Final = "#9aa3ad"  # waits and records, which only order other operations

# The picture has its own background, so its text is readable on every page.
_STYLE: Final = (
    "<style>.page{fill:#ffffff}.ink{fill:#1c2430}.note{fill:#3b4654}.line{stroke:#e3e7ec}.tick{stroke:#d3d9e0}"
    ".edge{stroke:#ffffff}@media(prefers-color-scheme:dark){.page{fill:#0f141a}.ink{fill:#e6ebf1}.note{fill:#b4bfca}.line{stroke:#29323d}"
    ".tick{stroke:#3a4653}.edge{stroke:#0f141a}}</style>"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A heading, and spans whose time begins with the first of them."""

    heading: str
    spans: Sequence[TimelineSpan]

    @property
    def start_us(self) -> float:
        """The time at which the first span begins."""
        return min((span.start_us for span in self.spans), default=0.0)

    @property
    def length_us(self) -> float:
        """The time from the first begin to the last end."""
        return max((span.end_us for span in self.spans), default=0.0) - self.start_us


class _Axis:
    """The horizontal axis: positions of times, and the ticks."""

    def __init__(self, start_ms: float, end_ms: float) -> None:
        self._step = _step(end_ms - start_ms)
        self.origin = math.floor(start_ms / self._step) * self._step
        self._end = end_ms
        self.scale = (WIDTH - LEFT - RIGHT) / (end_ms - self.origin)  # pixels per millisecond

    def ticks(self, top: float, bottom: float) -> Iterator[str]:
        """Yield the ticks from one height to another, with their labels below."""
        digits = max(0, -math.floor(math.log10(self._step) + 1e-9))
        for tick in range(math.floor((self._end - self.origin) / self._step + 1e-9) + 1):
            x = LEFT + tick * self._step * self.scale
            yield f'<path d="M{x:.1f} {top}V{bottom + 5}" class="tick" stroke-dasharray="2 3"/>'
            label = f"{self.origin + tick * self._step:.{digits}f}"
            yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" class="note">{label}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:.1f}" y="{bottom + 40}" text-anchor="middle" class="note">time, ms</text>'


def draw(spans: Sequence[TimelineSpan], title: str) -> str:
    """Return the picture of one timeline as SVG text. Its rows are in the order of the spans."""
    first = min((span.start_us for span in spans), default=0.0)
    last = max((span.end_us for span in spans), default=0.0)
    axis = _Axis(first / 1e3, max(last, first + 1.0) / 1e3)
    rows = tuple(dict.fromkeys(span.stream for span in spans))
    bottom = TOP + ROW * max(1, len(rows))
    body = [*_lines(TOP, len(rows)), *axis.ticks(TOP, bottom), *_rows(spans, rows, TOP, axis, 0.0)]
    return _page(title, spans, body, bottom + BOTTOM)


def draw_panels(panels: Sequence[Panel], rows: Sequence[str], title: str) -> str:
    """Return several timelines, one above the other, as SVG text. All have the same scale and the same rows."""
    axis = _Axis(0.0, max([panel.length_us for panel in panels] + [1.0]) / 1e3)
    height = HEADING + ROW * len(rows)
    bottom = TOP - HEADING // 2 + height * len(panels)
    body = list(axis.ticks(TOP, bottom))
    for number, panel in enumerate(panels):
        top = TOP - HEADING // 2 + height * number + HEADING
        heading = f'<text x="{LEFT}" y="{top - 9}" font-weight="600" class="ink">{_text(panel.heading)}</text>'
        body += [heading, *_lines(top, len(rows)), *_rows(panel.spans, rows, top, axis, panel.start_us)]
    return _page(title, [span for panel in panels for span in panel.spans], body, bottom + BOTTOM)


def _page(title: str, spans: Sequence[TimelineSpan], body: Sequence[str], height: float) -> str:
    """Return the SVG with background, title and legend around the body."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{_text(title)}</title>",
        _STYLE,
        f'<path d="M0 0h{WIDTH}v{height}h-{WIDTH}z" class="page"/>',
        f'<text x="{LEFT}" y="26" font-size="17" font-weight="600" class="ink">{_text(title)}</text>',
    ]
    return "\n".join([*head, *_legend(spans), *body, "</svg>\n"])


def _lines(top: float, rows: int) -> list[str]:
    return [
        f'<path d="M{LEFT} {top + ROW * number}H{WIDTH - RIGHT}" class="line"/>' for number in range(max(1, rows) + 1)
    ]


def _rows(spans: Sequence[TimelineSpan], rows: Sequence[str], top: float, axis: _Axis, start_us: float) -> list[str]:
    """Return the names of the rows and the bars; ``start_us`` is at the axis' zero."""
    out = []
    for number, name in enumerate(rows):
        y = top + ROW * number + ROW / 2 + 4.5
        out.append(f'<text x="{LEFT - 12}" y="{y:.1f}" text-anchor="end" class="ink">{_text(_short(name))}</text>')
    places = {name: top + ROW * number for number, name in enumerate(rows)}
    # Operations that only wait are drawn first: they often cover the operations that they wait for.
    in_order = sorted(spans, key=lambda span: span.kind in COLOURS)
    return out + [_bar(span, places[span.stream], axis, start_us) for span in in_order]


def _bar(span: TimelineSpan, top: float, axis: _Axis, start_us: float) -> str:
    works = span.kind in COLOURS
    height = BAR if works else LINE
    x = LEFT + ((span.start_us - start_us) / 1e3 - axis.origin) * axis.scale
    width = max(THINNEST, (span.end_us - span.start_us) / 1e3 * axis.scale)
    y = top + (ROW - height) / 2
    label = "" if span.label is None else f"data-label={_attribute(span.label)} "
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
        f'fill="{COLOURS.get(span.kind, OTHER)}" class="edge" stroke-width="{0.8 if width > 4 else 0}" '
        f"data-stream={_attribute(span.stream)} data-kind={_attribute(span.kind)} {label}"
        f'data-start-us="{span.start_us:.3f}" data-end-us="{span.end_us:.3f}">'
        f"<title>{_text(_tooltip(span, start_us))}</title></rect>"
    )


def _tooltip(span: TimelineSpan, start_us: float) -> str:
    what = span.kind if span.kernel is None else f"{span.kind} {shown(span.kernel)}"
    begin, end = ((each - start_us) / 1e3 for each in (span.start_us, span.end_us))
    lines = [f"{what} on {shown(span.stream)}: {begin:.3f} to {end:.3f} ms"]
    if span.label is not None:
        lines.append(f"label {shown(span.label)}")
    if span.nbytes:
        lines.append(f"{span.nbytes:,} bytes")
    return "\n".join(lines)


def _legend(spans: Sequence[TimelineSpan]) -> list[str]:
    names = sorted({span.kernel for span in spans if span.kernel is not None})
    kernels = ", ".join(map(_short, names[:MOST_NAMED])) + (" …" if len(names) > MOST_NAMED else "")
    out = []
    x = LEFT
    for kind, colour in legend_of({span.kind for span in spans}, COLOURS):
        label = f"launch {kernels}" if kind == "launch" and kernels else kind
        height = float(LINE) if colour == OTHER else 14.0
        out.append(f'<path d="M{x} {49 - height / 2}h14v{height}h-14z" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="54" class="note">{_text(label)}</text>')
        x += 44 + 8 * len(label)
    return out


def legend_of(kinds: Collection[str], colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names and the colours of these kinds, in the order of the colours; all without one have `OTHER`."""
    others = ", ".join(sorted(set(kinds).difference(colours)))
    return [*((kind, colour) for kind, colour in colours.items() if kind in kinds), *([(others, OTHER)] * bool(others))]


def _step(span: float) -> float:
    """Return the distance of two ticks: 1, 2 or 5 times a power of ten, for 6 to 15 ticks."""
    rough = span / 12
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _text(text: str) -> str:
    return escape(kept(text))


def _attribute(text: str) -> str:
    return quoteattr(kept(text))
