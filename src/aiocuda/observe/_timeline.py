"""Timeline: when each operation of a device began and ended, and its trace for Perfetto."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, Self

from .._device import Device
from .._event import Event
from ..completion._operation import Operation
from ..errors import AiocudaError
from ._drawing import TimelineSpan, draw
from ._listener import DeviceListener

__all__ = ["Timeline", "TimelineSpan"]


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
