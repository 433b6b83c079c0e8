"""The result of the demo, its JSON, and its timelines as text and as SVG."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..observe import COLOURS, Panel, TimelineSpan, draw_panels
from ._files import Skipped

__all__ = ["PICTURE_BATCHES", "STAGES", "DemoReport", "FileEntropy", "Overlap", "RunTimes", "printable", "result_line"]

#: Number of most random and of least random files in a report.
EXTREMES: Final = 5

#: The batches in the picture. More would be too small to see.
PICTURE_BATCHES: Final = 10

#: The stages, in order; also the names of their streams.
STAGES: Final = ("read", "upload", "compute", "download")


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntropy:
    """The entropy of a file, in bits per byte."""

    path: str
    bytes: int
    entropy: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunTimes:
    """The times of one run: of all of it, of its stages, and the share in which the busiest stage worked."""

    seconds: float
    stage_seconds: dict[str, float]
    efficiency: float


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


@dataclasses.dataclass(slots=True)
class DemoReport:
    """The result of the demo. The fields, in this order, are the keys of the JSON; see `as_json`.

    ``seconds`` and ``sequential_seconds`` are medians of three runs. ``stage_seconds`` are the times of the stages in
    the sequential run; ``speedup_bound`` is their sum ÷ the largest. ``overlap_efficiency`` is the share of the
    overlapped run in which the busiest stage worked. The speed-ups are None if nothing was read.
    """

    driver: str
    device: str
    version: str
    files: int = 0
    bytes: int = 0  #: of the files, holes included
    verified: bool = True
    seconds: float = 0.0
    sequential_seconds: float = 0.0
    speedup: float | None = None
    speedup_bound: float | None = None
    overlap_efficiency: float = 0.0
    stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    host_bandwidth: float | None = None  #: bytes per second of each modelled copy engine; None on a GPU
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    most_random: list[FileEntropy] = dataclasses.field(default_factory=list)
    least_random: list[FileEntropy] = dataclasses.field(default_factory=list)
    # Shown in the terminal, but not in the JSON.
    streamed: int = dataclasses.field(default=0, metadata={"json": False})  #: bytes that were sent through the device
    mismatched: list[str] = dataclasses.field(default_factory=list, metadata={"json": False})
    overlapped_stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict, metadata={"json": False})
    batches: int = dataclasses.field(default=0, metadata={"json": False})
    batch_bytes: int = dataclasses.field(default=0, metadata={"json": False})  #: of a full batch
    overlap: Overlap = dataclasses.field(default_factory=Overlap, metadata={"json": False})
    changed: int = dataclasses.field(default=0, metadata={"json": False})  #: files that were different in a later run
    root: str = dataclasses.field(default="", metadata={"json": False})  #: the path that was searched
    fallback_reason: str | None = dataclasses.field(default=None, metadata={"json": False})

    def as_json(self) -> str:
        """Return the report as one JSON object in ASCII. Paths are surrogate-escaped."""
        values, fields = dataclasses.asdict(self), dataclasses.fields(self)
        shown = {field.name: values[field.name] for field in fields if field.metadata.get("json", True)}
        return json.dumps(shown, indent=2) + "\n"

    def add(self, checked: Sequence[FileEntropy]) -> None:
        """Add files whose histograms have been checked."""
        self.files += len(checked)
        self.bytes += sum(file.bytes for file in checked)
        found = (file for file in checked if file.bytes)
        by_entropy = sorted({*self.most_random, *self.least_random, *found}, key=lambda one: (one.entropy, one.path))
        self.least_random = by_entropy[:EXTREMES]
        self.most_random = by_entropy[::-1][:EXTREMES]

    def add_wrong(self, paths: Sequence[str]) -> None:
        """Add files with a wrong histogram, each once: the job is not verified."""
        self.mismatched = list(dict.fromkeys([*self.mismatched, *paths]))
        self.verified = not self.mismatched

    def add_changed(self, count: int) -> None:
        """Add files that were different in a later run."""
        self.changed += count

    def add_times(self, overlapped: RunTimes, sequential: RunTimes) -> None:
        """Add the times of the median runs, and compare them."""
        self.seconds, self.sequential_seconds = overlapped.seconds, sequential.seconds
        self.overlap_efficiency = overlapped.efficiency
        self.stage_seconds, self.overlapped_stage_seconds = sequential.stage_seconds, overlapped.stage_seconds
        self.speedup = self.sequential_seconds / self.seconds
        self.speedup_bound = sum(self.stage_seconds.values()) / max(self.stage_seconds.values())


def result_line(path: str, size: int, entropy: float, histogram: Sequence[int]) -> str:
    """Return the line of a file for ``--results``."""
    return json.dumps({"path": path, "bytes": size, "entropy": entropy, "histogram": histogram}) + "\n"


def printable(path: str) -> str:
    """Return a file name without invalid text and control characters, for a terminal."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
