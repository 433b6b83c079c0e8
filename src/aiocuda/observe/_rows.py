"""Rows of slices and the arrows between them: the common form of a trace and of a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._recording import LoopRecord, Recording, TimelineSpan, offsets_us

__all__ = ["Arrow", "Row", "Rows", "Slice", "rows_of"]


class Slice(NamedTuple):
    """A bar of a row. Times are nanoseconds since the first timeline began. A slice takes 1 ns or more."""

    kind: str
    name: str
    start: int
    end: int
    operation: int = 0  #: id, 0 for none
    label: str | None = None
    nbytes: int = 0
    sources: tuple[int, ...] = ()  #: ids of the operations that it waited for, or that resumed it

    @property
    def start_us(self) -> float:
        return self.start / 1e3

    @property
    def duration_us(self) -> float:
        return (self.end - self.start) / 1e3


class Arrow(NamedTuple):
    """From a slice to another one, by their places in `Rows.slices`."""

    kind: str  #: ``"wait"``: the second waited for the first; ``"await"``: the first resumed the second
    source: int
    target: int


class Row(NamedTuple):
    """A row of slices that do not overlap."""

    name: str
    recording: int  #: index of the recording
    is_host: bool
    first: int  #: the row's slices are ``slices[first:last]``, in the order of time
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """All rows of some recordings, on one axis of time."""

    recordings: Sequence[Recording]
    offsets: Sequence[float]  #: for each recording the microseconds from the first one's zero to its own zero
    rows: list[Row] = dataclasses.field(default_factory=list)
    slices: list[Slice] = dataclasses.field(default_factory=list)
    arrows: list[Arrow] = dataclasses.field(default_factory=list)

    def add(self, name: str, recording: int, is_host: bool, slices: Iterable[Slice]) -> None:
        """Append a row, if it has slices."""
        first = len(self.slices)
        self.slices.extend(slices)
        if len(self.slices) > first:
            self.rows.append(Row(name, recording, is_host, first, len(self.slices)))


def rows_of(recordings: Sequence[Recording]) -> Rows:
    """Return the rows of all recordings: for each one its streams, then the rows of the host."""
    rows = Rows(recordings, offsets_us(recordings))
    for number, recording in enumerate(recordings):
        _add_streams(rows, number, recording.spans)
        several = len(recording.loops) > 1
        for index, loop in enumerate(recording.loops, 1):
            _add_loop(rows, number, loop, f" {index}" if several else "")
        _add_workers(rows, number, recording)
    places = {
        rows.slices[place].operation: place
        for row in rows.rows
        if not row.is_host
        for place in range(row.first, row.last)
    }
    _separate(rows, places)
    for row in rows.rows:
        for place in range(row.first, row.last):
            sources = (places[source] for source in rows.slices[place].sources if source in places)
            rows.arrows.extend(Arrow("await" if row.is_host else "wait", source, place) for source in sources)
    return rows


def _add_streams(rows: Rows, number: int, spans: Sequence[TimelineSpan]) -> None:
    by_stream: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_stream.setdefault(span.stream, []).append(span)
    offset = rows.offsets[number]
    for name, own in by_stream.items():
        own.sort(key=lambda span: (span.start_us, span.end_us, span.operation))
        slices = [
            Slice(
                span.kind, span.name, round((span.start_us + offset) * 1e3), round((span.end_us + offset) * 1e3),
                span.operation, span.label, span.nbytes, span.waited_for,
            )
            for span in own
        ]  # fmt: skip
        rows.add(name, number, False, slices)


def _add_loop(rows: Rows, number: int, loop: LoopRecord, suffix: str) -> None:
    recording, offset = rows.recordings[number], rows.offsets[number]

    def at(seconds: float) -> int:
        return round((recording.microseconds(seconds) + offset) * 1e3)

    iterations = [Slice("iteration", "iteration", at(start), at(end)) for start, end in loop.iterations]
    blocked = [Slice("blocked", "blocked", at(start), at(end)) for start, end in loop.blocked]
    resumes = []
    for each in loop.resumes:
        end = iterations[each.iteration].end if each.iteration < len(iterations) else 0
        resumes.append(
            Slice("await", f"await {each.name}", at(each.at), end, each.operation, each.label, 0, (each.operation,))
        )
    rows.add(f"event loop{suffix}", number, True, iterations)
    rows.add(f"blocked loop{suffix}", number, True, blocked)
    rows.add(f"awaits{suffix}", number, True, resumes)


def _add_workers(rows: Rows, number: int, recording: Recording) -> None:
    offset = rows.offsets[number]
    by_thread: dict[int, list[Slice]] = {}
    for job in recording.jobs:
        start, end = (round((recording.microseconds(each) + offset) * 1e3) for each in (job.start, job.end))
        by_thread.setdefault(job.thread, []).append(Slice("worker", job.name, start, end))
    for index, slices in enumerate(by_thread.values(), 1):
        rows.add(f"worker {index}", number, True, sorted(slices, key=lambda each: each.start))


def _separate(rows: Rows, places: dict[int, int]) -> None:
    """Make the slices of each row follow each other, take 1 ns or more, and end no earlier than their sources.

    The times of two operations of a stream, or of an operation and a wait for it, may overlap by the resolution of a
    timing event, half a microsecond: an operation ends where the next one of its row begins. Many operations take no
    time; they move by some nanoseconds. Then each arrow can begin and end inside its slices.
    """
    slices = rows.slices
    row_of = [index for index, row in enumerate(rows.rows) for _ in range(row.first, row.last)]
    for row in rows.rows:
        for place in range(row.first, row.last - 1):
            if slices[place].end > slices[place + 1].start:
                slices[place] = slices[place]._replace(end=slices[place + 1].start)
    free = [rows.slices[row.first].start for row in rows.rows]
    done = bytearray(len(slices))
    # A row's slices are in this order, too. An operation comes before the waits for it, which end no earlier.
    for place in sorted(range(len(slices)), key=lambda place: (slices[place].end, slices[place].operation, place)):
        each, own_row = slices[place], row_of[place]
        start = max(each.start, free[own_row])
        sources = (places.get(source, place) for source in each.sources)
        end = max(each.end, start + 1, *(slices[source].end for source in sources if done[source]))
        slices[place] = each._replace(start=start, end=end)
        free[own_row] = end
        done[place] = 1
