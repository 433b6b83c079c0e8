"""Timeline: when each operation of a device began and ended; its picture as SVG, and its trace for Perfetto."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self
from xml.sax.saxutils import escape, quoteattr

from .._device import Device
from .._event import Event
from ..completion._operation import Operation
from ..errors import AiocudaError
from ._listener import DeviceListener

__all__ = ["Timeline", "TimelineSpan"]

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


class TimelineSpan(NamedTuple):
    """One operation. Times are microseconds since the timeline began."""

    stream: str
    kind: str  #: ``"upload"``, ``"launch"``, ``"download"``, ``"wait"`` …
    start_us: float
    end_us: float
    operation: int  #: id of the operation
    kernel: str | None = None  #: name of the kernel of a launch


class Timeline(DeviceListener):
    """Records when each operation began and ended, for the operations that begin and end in its ``async with`` block.

    The times are those of a timing event before and after each operation (``cuEventElapsedTime``). Their resolution is
    half a microsecond; after 8 s it is lower, because CUDA returns milliseconds in single precision. In the block, each
    operation costs the host a few microseconds more; after the block, nothing::

        async with Timeline(device) as timeline:
            async for result in pipeline.run(items):
                ...
        Path("overlap.svg").write_text(timeline.to_svg(), encoding="utf-8")
        Path("overlap.json").write_text(timeline.to_trace(), encoding="utf-8")  # for https://ui.perfetto.dev

    A copy of pageable memory has chunks: its span begins with the first and ends with the last. At the end of the
    block, the timeline waits for the operations of this event loop.

    Parameters
    ----------
    device
        The device of the streams. Only one timeline or profiler can listen to a device at a time.

    Attributes
    ----------
    spans : list of TimelineSpan
        In the order in which the operations finished.
    untimed : int
        Operations without times: they failed, were enqueued before the timeline began, or recorded an event without
        timing.
    """

    _noun = "timeline"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.spans: list[TimelineSpan] = []
        self.untimed = 0
        self._base: Event | None = None
        self._chunks: dict[int, list[tuple[float, float]]] = {}  # by the id of an unfinished copy

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as listening:
            listening.enter_context(self.device.listen(self))
            async with self.device.stream(name="timeline") as stream:
                base = stream.record(timing=True)
                await base
            self._base = base  # operations that finish before this are not part of the block
            self._listening = listening.pop_all()
        return self

    def _on_stopped(self) -> None:
        self._chunks.clear()
        base, self._base = self._base, None
        if base is not None and self.device.driver.fault is None:
            base.release()

    def _on_finished(self, operation: Operation[Any], copy: int | None, start: int, end: int) -> None:
        if self._base is None:
            return
        times = self._times(self._base, start, end) if start else None
        if copy is not None:
            if times is not None:
                self._chunks.setdefault(copy, []).append(times)
            return
        chunks = self._chunks.pop(operation.id, [])
        if times is None:
            self.untimed += 1
            return
        begin = min((chunk[0] for chunk in chunks), default=times[0])
        name, kind, kernel = operation.stream_name, operation.kind, operation.kernel
        self.spans.append(TimelineSpan(name, kind, begin, times[1], operation.id, kernel))

    def _times(self, base: Event, start: int, end: int) -> tuple[float, float] | None:
        elapsed = self.device.driver.event_elapsed_ms
        try:
            return elapsed(base.handle, start) * 1e3, elapsed(base.handle, end) * 1e3
        except AiocudaError:  # after a device fault, which every waiter gets
            return None

    def to_svg(self, title: str | None = None) -> str:
        """Return a picture with a row for each stream and a rectangle for each operation; time goes from left to right.

        Each operation is a ``<rect>`` with ``data-stream``, ``data-kind``, ``data-start-us`` and ``data-end-us``. There
        are no other ``<rect>`` elements.
        """
        in_order = sorted(self.spans, key=lambda span: span.operation)  # the rows are in the order of first use
        return draw(in_order, title or f"Streams of {self.device.name} ({self.device.driver.name} driver)")

    def to_trace(self) -> str:
        """Return a trace as JSON in Chrome's format, for https://ui.perfetto.dev and ``chrome://tracing``.

        Each stream is a thread. Each operation is a slice, with the name of its kernel or its kind; the kind is also
        its category. An operation that ends after the next one begins is cut there: the overlap is an error of the
        timing events' resolution.
        """
        in_order = sorted(self.spans, key=lambda span: span.operation)
        return trace(in_order, f"{self.device.name} ({self.device.driver.name} driver)")

    def __repr__(self) -> str:
        return f"<Timeline of {self.device.name}: {len(self.spans)} operation{'s' * (len(self.spans) != 1)}>"


def trace(spans: Sequence[TimelineSpan], title: str) -> str:
    """Return spans as JSON in Chrome's trace format, with a thread for each stream; times are microseconds.

    The slices of one thread must nest. The operations of a stream follow each other, but their times may overlap by
    the resolution of a timing event, half a microsecond: so each span ends where the next one begins.
    """
    rows = {name: number for number, name in enumerate(dict.fromkeys(span.stream for span in spans), 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for name, row in rows.items():
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}})
        own = sorted((span for span in spans if span.stream == name), key=lambda span: (span.start_us, span.end_us))
        for span, after in itertools.zip_longest(own, own[1:]):
            end = span.end_us if after is None else min(span.end_us, after.start_us)
            event = {"ph": "X", "pid": 1, "tid": row, "name": span.kernel or span.kind, "cat": span.kind}
            events.append({**event, "ts": span.start_us, "dur": end - span.start_us})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def draw(spans: Sequence[TimelineSpan], title: str) -> str:
    """Return the picture as SVG text."""
    rows = {name: number for number, name in enumerate(dict.fromkeys(span.stream for span in spans))}
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
    for name, number in rows.items():
        y = TOP + ROW * number + ROW / 2 + 4.5
        out.append(f'<text x="{LEFT - 12}" y="{y:.1f}" text-anchor="end" fill="#1c2430">{_text(_short(name))}</text>')
    # Operations that only wait are drawn first: they often cover the operations that they wait for.
    in_order = sorted(spans, key=lambda span: span.kind in COLOURS)
    out += [_bar(span, rows[span.stream], origin, scale) for span in in_order]
    return "\n".join([*out, "</svg>\n"])


def _bar(span: TimelineSpan, row: int, origin: float, scale: float) -> str:
    works = span.kind in COLOURS
    height = BAR if works else LINE
    x = LEFT + (span.start_us / 1e3 - origin) * scale
    width = max(THINNEST, (span.end_us - span.start_us) / 1e3 * scale)
    y = TOP + ROW * row + (ROW - height) / 2
    what = span.kind if span.kernel is None else f"{span.kind} {span.kernel}"
    tooltip = f"{what} on {span.stream}: {span.start_us / 1e3:.3f} to {span.end_us / 1e3:.3f} ms"
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
        f'fill="{COLOURS.get(span.kind, OTHER)}" stroke="#ffffff" stroke-width="{0.8 if width > 4 else 0}" '
        f"data-stream={_attribute(span.stream)} data-kind={_attribute(span.kind)} "
        f'data-start-us="{span.start_us:.3f}" data-end-us="{span.end_us:.3f}"><title>{_text(tooltip)}</title></rect>'
    )


def _legend(spans: Sequence[TimelineSpan]) -> list[str]:
    present = {span.kind for span in spans}
    names = sorted({span.kernel for span in spans if span.kernel is not None})
    kernels = ", ".join(map(_short, names[:MOST_NAMED])) + (" …" if len(names) > MOST_NAMED else "")
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


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("\ufffd", text))
