"""Rows of slices and the arrows between them: the common form of a trace and of a page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ._recording import LoopRecord, Recording, TimelineSpan, offsets_us

__all__ = ["Arrow", "Row", "Rows", "Slice", "rows_of"]


class Slice(NamedTuple):
    """A bar of a row. Times are microseconds since the first timeline began."""

    kind: str
    name: str
    start_us: float
    end_us: float
    operation: int = 0  #: id, 0 for none
    label: str | None = None
    nbytes: int = 0


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
    rows: list[Row] = dataclasses.field(default_factory=list)
    slices: list[Slice] = dataclasses.field(default_factory=list)
    arrows: list[Arrow] = dataclasses.field(default_factory=list)
    #: For each recording the microseconds from the first one's zero to its own zero.
    offsets: Sequence[float] = ()

    def add(self, name: str, recording: int, is_host: bool, slices: Iterable[Slice]) -> None:
        """Append a row, if it has slices."""
        first = len(self.slices)
        offset = self.offsets[recording]
        self.slices.extend(
            each._replace(start_us=each.start_us + offset, end_us=each.end_us + offset) for each in slices
        )
        if len(self.slices) > first:
            self.rows.append(Row(name, recording, is_host, first, len(self.slices)))


def rows_of(recordings: Sequence[Recording]) -> Rows:
    """Return the rows of all recordings: for each one its streams, then the rows of the host."""
    rows = Rows(recordings, offsets=offsets_us(recordings))
    for number, recording in enumerate(recordings):
        _add_streams(rows, number, recording.spans)
        loops = len(recording.loops)
        for index, loop in enumerate(recording.loops, 1):
            _add_loop(rows, number, recording, loop, f" {index}" if loops > 1 else "")
        _add_workers(rows, number, recording)
    _add_arrows(rows)
    return rows


def _add_streams(rows: Rows, number: int, spans: Sequence[TimelineSpan]) -> None:
    """Add a row for each stream. The times of a stream's spans overlap by the resolution of a timing event."""
    by_stream: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_stream.setdefault(span.stream, []).append(span)
    for name, own in by_stream.items():
        own.sort(key=lambda span: (span.start_us, span.end_us))
        slices = (
            Slice(span.kind, span.name, span.start_us, span.end_us, span.operation, span.label, span.nbytes)
            for span in own
        )
        rows.add(name, number, False, _cut(slices))


def _add_loop(rows: Rows, number: int, recording: Recording, loop: LoopRecord, suffix: str) -> None:
    at = recording.microseconds
    iterations = [(at(start), at(end)) for start, end in loop.iterations]
    rows.add(
        f"event loop{suffix}", number, True,
        _cut(Slice("iteration", "iteration", start, end) for start, end in iterations),
    )  # fmt: skip
    rows.add(
        f"blocked loop{suffix}", number, True,
        _cut(Slice("blocked", "blocked", at(start), at(end)) for start, end in loop.blocked),
    )  # fmt: skip
    resumes = []
    for each in loop.resumes:
        start = at(each.at)
        end = iterations[each.iteration][1] if each.iteration < len(iterations) else start
        resumes.append(Slice("await", f"await {each.name}", start, max(start, end), each.operation, each.label))
    rows.add(f"awaits{suffix}", number, True, _cut(resumes))


def _add_workers(rows: Rows, number: int, recording: Recording) -> None:
    at = recording.microseconds
    by_thread: dict[int, list[Slice]] = {}
    for job in recording.jobs:
        by_thread.setdefault(job.thread, []).append(Slice("worker", job.name, at(job.start), at(job.end)))
    for index, slices in enumerate(by_thread.values(), 1):
        rows.add(f"worker {index}", number, True, _cut(sorted(slices, key=lambda each: each.start_us)))


def _cut(slices: Iterable[Slice]) -> Iterator[Slice]:
    """End each slice where the next one of its row begins."""
    for each, after in itertools.pairwise(itertools.chain(slices, (None,))):
        assert each is not None
        yield each if after is None or each.end_us <= after.start_us else each._replace(end_us=after.start_us)


def _add_arrows(rows: Rows) -> None:
    """Add the arrows between operations, and from operations to the awaits that they resumed."""
    places: dict[int, int] = {}
    awaits: list[tuple[int, int]] = []
    for row in rows.rows:
        for place in range(row.first, row.last):
            each = rows.slices[place]
            if row.is_host and each.kind == "await":
                awaits.append((each.operation, place))
            elif not row.is_host:
                places[each.operation] = place
    for recording in rows.recordings:
        for span in recording.spans:
            target = places[span.operation]
            for source in span.waited_for:
                if source in places:
                    rows.arrows.append(Arrow("wait", places[source], target))
    rows.arrows.extend(Arrow("await", places[source], place) for source, place in awaits if source in places)
