"""Overlap: when each stage of the demo worked on the first batches, without and with overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..observe._drawing import COLOURS, Panel, TimelineSpan, draw_panels

__all__ = ["PICTURE_BATCHES", "STAGES", "Overlap"]

#: The batches in the picture. More would be too small to see.
PICTURE_BATCHES: Final = 10

#: The stages, in order; also the names of their streams.
STAGES: Final = ("read", "upload", "compute", "download")


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """The spans of two runs over the same batches. Each span of the stage ``read`` is the host's time for one batch."""

    serial: Sequence[TimelineSpan] = ()
    overlapped: Sequence[TimelineSpan] = ()

    @classmethod
    def of(cls, serial: Iterable[TimelineSpan], overlapped: Iterable[TimelineSpan]) -> Overlap:
        """Return the overlap of the spans of both runs, without waits and without those of other streams."""
        return cls(_work(serial), _work(overlapped))

    def panels(self) -> list[Panel]:
        """Return the two timelines with their headings."""
        serial, overlapped = Panel("", self.serial), Panel("", self.overlapped)
        return [
            Panel(f"one stage after the other: {serial.length_us / 1e3:.0f} ms", self.serial),
            Panel(f"the stages overlap: {overlapped.length_us / 1e3:.0f} ms", self.overlapped),
        ]

    def to_svg(self, title: str) -> str:
        """Return both timelines as SVG, one above the other, with one scale."""
        return draw_panels(self.panels(), STAGES, title)

    def text(self, width: int, marks: str) -> Iterator[tuple[str, str]]:
        """Yield the lines of both timelines for a terminal, each with the stage that it shows, or ``""``.

        ``width`` is the number of characters of the longer timeline. The batches take the two characters of ``marks``
        in turn.
        """
        panels = self.panels()
        per_character = max(panel.length_us for panel in panels) / width
        if not per_character:
            return
        for panel in panels:
            yield "", panel.heading
            for stage in STAGES:
                ends = [
                    ((span.start_us - panel.start_us) / per_character, (span.end_us - panel.start_us) / per_character)
                    for span in panel.spans
                    if span.stream == stage
                ]
                yield stage, _line(ends, width, marks)


def _work(spans: Iterable[TimelineSpan]) -> list[TimelineSpan]:
    return [span for span in spans if span.stream in STAGES and span.kind in COLOURS]


def _line(intervals: Sequence[tuple[float, float]], width: int, marks: str) -> str:
    """Return a line with a mark for each character that an interval covers by half.

    Each interval has at least one mark, behind those of the interval before it.
    """
    line = ""
    for number, (start, end) in enumerate(intervals):
        first, last = round(start), round(end)
        if first == last:
            first = int((start + end) / 2)
            last = first + 1
        line = line.ljust(first)
        line += marks[number % 2] * max(1, last - len(line))
    return line[:width]
