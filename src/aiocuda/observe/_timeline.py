"""Timeline: when each operation of a device began and ended, by the device's own clock."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Self

from .._device import Device
from .._event import Event
from ..completion._operation import Operation
from ..errors import AiocudaError
from ._listener import Listener
from ._picture import draw
from ._trace import trace

__all__ = ["Timeline", "TimelineSpan"]


class TimelineSpan(NamedTuple):
    """One operation. Times are microseconds since the timeline began."""

    stream: str
    kind: str  #: ``"upload"``, ``"launch"``, ``"download"``, ``"wait"`` …
    start_us: float
    end_us: float
    operation: int  #: its id
    kernel: str | None = None  #: its name, of a launch


class Timeline(Listener):
    """Listens to a device and takes the time of every operation that begins and ends inside its block.

    A timing event before and one behind each operation say when the device came to it and when it was done with it
    (``cuEventElapsedTime``, which resolves half a microsecond, and less after 8 s: it counts milliseconds in single
    precision). That costs the host a few microseconds per operation, and nothing once the block is left::

        async with Timeline(device) as timeline:
            async for result in pipeline.run(items):
                ...
        Path("overlap.svg").write_text(timeline.to_svg(), encoding="utf-8")
        Path("overlap.json").write_text(timeline.to_trace(), encoding="utf-8")  # for https://ui.perfetto.dev

    A copy of pageable memory goes through the device in chunks: its span is from the first to the last. The block's
    end waits for this loop's work, so that all of it is told.

    Parameters
    ----------
    device
        Whose streams. One timeline or profiler at a time listens to it.

    Attributes
    ----------
    spans : list of TimelineSpan
        In the order in which the operations were resolved.
    untimed : int
        Operations that ended without times: they failed, were enqueued before the timeline began, or recorded an event
        without timing.
    """

    _noun = "timeline"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.spans: list[TimelineSpan] = []
        self.untimed = 0
        self._base: Event | None = None
        self._chunks: dict[int, list[tuple[float, float]]] = {}  # of copies that are not done

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as listening:
            listening.enter_context(self.device.listen(self))
            async with self.device.stream(name="timeline") as stream:
                base = stream.record(timing=True)
                await base
            self._base = base  # what has been resolved so far was no part of the block
            self._listening = listening.pop_all()
        return self

    def _ended(self) -> None:
        self._chunks.clear()
        base, self._base = self._base, None
        if base is not None and self.device.driver.fault is None:
            base.release()

    # -- what it is told -----------------------------------------------------------------------------------------

    def _resolved(self, operation: Operation[Any], owner: int | None, start: int, end: int) -> None:
        if self._base is None:
            return
        times = self._times(self._base, start, end) if start else None
        if owner is not None:
            if times is not None:
                self._chunks.setdefault(owner, []).append(times)
            return
        chunks = self._chunks.pop(operation.id, [])
        if times is None:
            self.untimed += 1
            return
        begins = [chunk[0] for chunk in chunks] or [times[0]]
        name, begin = operation.stream_name, min(begins)
        self.spans.append(TimelineSpan(name, operation.kind, begin, times[1], operation.id, operation.kernel))

    def _times(self, base: Event, start: int, end: int) -> tuple[float, float] | None:
        elapsed = self.device.driver.event_elapsed_ms
        try:
            return elapsed(base.handle, start) * 1e3, elapsed(base.handle, end) * 1e3
        except AiocudaError:  # lost to a fault, which those who wait are told of
            return None

    # -- what it tells -------------------------------------------------------------------------------------------

    def to_svg(self, title: str | None = None) -> str:
        """A picture: a row for each stream, a rectangle for each operation, time from left to right.

        Each rectangle is a ``<rect>`` with ``data-stream``, ``data-kind``, ``data-start-us`` and ``data-end-us``, and
        there are no others.
        """
        in_order = sorted(self.spans, key=lambda span: span.operation)  # and so the rows, by who began
        return draw(in_order, title or f"Streams of {self.device.name} ({self.device.driver.name} driver)")

    def to_trace(self) -> str:
        """A trace in Chrome's format, as JSON: https://ui.perfetto.dev and ``chrome://tracing`` open it.

        Each stream is a thread, each operation a slice with its kernel's name, or its kind, which is the category. One
        that ends less than a timing event's resolution after the next one's begin ends there.
        """
        in_order = sorted(self.spans, key=lambda span: span.operation)
        return trace(in_order, f"{self.device.name} ({self.device.driver.name} driver)")

    def __repr__(self) -> str:
        return f"<Timeline of {self.device.name}: {len(self.spans)} operation{'s' * (len(self.spans) != 1)}>"
