"""Rows of slices and the arrows between them: the common form of a trace and of a page."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ._recording import Batch, Blocked, LoopRecord, Recording, Request, TimelineSpan, WaitedCall, offsets_us

__all__ = ["Arrow", "Part", "Row", "Rows", "Slice", "rows_of"]


class Part(IntEnum):
    """The part of a recording that a row belongs to."""

    STREAMS = 0
    HOST = 1
    REQUESTS = 2


#: The kind of the arrows that end in a part's slices.
_ARROWS = {Part.STREAMS: "wait", Part.HOST: "await", Part.REQUESTS: "batch"}


class Slice(NamedTuple):
    """A bar of a row. Times are nanoseconds since the first timeline began. A slice takes 1 ns or more."""

    kind: str
    name: str
    start: int
    end: int
    operation: int = 0  #: id, 0 for none
    label: str | None = None
    nbytes: int = 0
    sources: tuple[Hashable, ...] = ()  #: keys of the slices that it waited for, or that resumed it
    key: Hashable = None  #: by which other slices name it as a source
    details: tuple[tuple[str, str | int], ...] = ()  #: further names and values

    @property
    def start_us(self) -> float:
        return self.start / 1e3

    @property
    def duration_us(self) -> float:
        return (self.end - self.start) / 1e3


class Arrow(NamedTuple):
    """From a slice to another one, by their places in `Rows.slices`."""

    #: ``"wait"``: the second waited for the first; ``"await"``: the first resumed the second; ``"batch"``: the second
    #: is the batch of the first.
    kind: str
    source: int
    target: int


class Row(NamedTuple):
    """A row of slices that do not overlap."""

    name: str
    recording: int  #: index of the recording
    part: Part
    first: int  #: the row's slices are ``slices[first:last]``, in the order of time
    last: int
    lane: int = 0  #: rows with the lanes 0, 1, 2 … belong together: what overlaps is in different lanes


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """All rows of some recordings, on one axis of time."""

    recordings: Sequence[Recording]
    offsets: Sequence[float]  #: for each recording the microseconds from the first one's zero to its own zero
    rows: list[Row] = dataclasses.field(default_factory=list)
    slices: list[Slice] = dataclasses.field(default_factory=list)
    arrows: list[Arrow] = dataclasses.field(default_factory=list)

    def add(self, name: str, recording: int, part: Part, slices: Iterable[Slice], lane: int = 0) -> None:
        """Append a row, if it has slices."""
        first = len(self.slices)
        self.slices.extend(slices)
        if len(self.slices) > first:
            self.rows.append(Row(name, recording, part, first, len(self.slices), lane))

    def clock(self, recording: int) -> Callable[[float], int]:
        """Return a function that puts a time of a recording's clock on the axis."""
        own, offset = self.recordings[recording], self.offsets[recording]
        return lambda seconds: round((own.microseconds(seconds) + offset) * 1e3)


def rows_of(recordings: Sequence[Recording]) -> Rows:
    """Return the rows of all recordings: for each one its streams, then the rows of the host and of the requests."""
    rows = Rows(recordings, offsets_us(recordings))
    for number, recording in enumerate(recordings):
        _add_streams(rows, number, recording.spans)
        several = len(recording.loops) > 1
        for index, loop in enumerate(recording.loops, 1):
            _add_loop(rows, number, loop, recording.calls, f" {index}" if several else "")
        _add_workers(rows, number, recording)
        _add_calls(rows, number, recording.calls)
        _add_batchers(rows, number, recording)
    places: dict[Hashable, int] = {each.key: place for place, each in enumerate(rows.slices) if each.key is not None}
    _separate(rows, places)
    for row in rows.rows:
        for place in range(row.first, row.last):
            sources = (places[source] for source in rows.slices[place].sources if source in places)
            rows.arrows.extend(Arrow(_ARROWS[row.part], source, place) for source in sources)
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
                span.operation, span.label, span.nbytes, span.waited_for, span.operation,
            )
            for span in own
        ]  # fmt: skip
        rows.add(name, number, Part.STREAMS, slices)


def _add_loop(rows: Rows, number: int, loop: LoopRecord, calls: Sequence[WaitedCall], suffix: str) -> None:
    at = rows.clock(number)
    iterations = [Slice("iteration", "iteration", at(start), at(end)) for start, end in loop.iterations]
    blocked = [_blocked_slice(each, at(each.start), at(each.end), calls) for each in loop.blocked]
    resumes = []
    for each in loop.resumes:
        end = iterations[each.iteration].end if each.iteration < len(iterations) else 0
        resumes.append(
            Slice("await", f"await {each.name}", at(each.at), end, each.operation, each.label, 0, (each.operation,))
        )
    rows.add(f"event loop{suffix}", number, Part.HOST, iterations)
    rows.add(f"blocked loop{suffix}", number, Part.HOST, blocked)
    rows.add(f"awaits{suffix}", number, Part.HOST, resumes)


def _blocked_slice(blocked: Blocked, start: int, end: int, calls: Sequence[WaitedCall]) -> Slice:
    """Return the slice of a blocked iteration, with the call of the driver that took most of its time."""
    half = (blocked.end - blocked.start) / 2
    inside = (each for each in calls if min(each.end, blocked.end) - max(each.start, blocked.start) > half)
    details: tuple[tuple[str, str], ...] = tuple(("driver call", each.name) for each in inside)
    if blocked.callback is None or blocked.line is None:
        return Slice("blocked", "blocked", start, end, details=details)
    details = (("callback", blocked.callback), ("line", blocked.line), *details[:1])
    return Slice("blocked", f"blocked by {blocked.line}", start, end, details=details)


def _add_workers(rows: Rows, number: int, recording: Recording) -> None:
    at = rows.clock(number)
    by_thread: dict[int, list[Slice]] = {}
    for job in recording.jobs:
        by_thread.setdefault(job.thread, []).append(Slice("worker", job.name, at(job.start), at(job.end)))
    for index, slices in enumerate(by_thread.values(), 1):
        rows.add(f"worker {index}", number, Part.HOST, sorted(slices, key=lambda each: each.start))


def _add_calls(rows: Rows, number: int, calls: Sequence[WaitedCall]) -> None:
    at = rows.clock(number)
    groups = [
        (Slice("driver call", each.name, at(each.start), at(each.end), details=(("running", each.running),)),)
        for each in calls
    ]
    for lane, slices in enumerate(_lanes(groups)):
        rows.add("driver calls that waited", number, Part.HOST, slices, lane)


def _add_batchers(rows: Rows, number: int, recording: Recording) -> None:
    """Add the batches and the requests of each batcher."""
    by_batcher: dict[tuple[int, str], tuple[list[Batch], list[Request]]] = {}
    for batch in recording.batches:
        by_batcher.setdefault((batch.batcher, batch.function), ([], []))[0].append(batch)
    for request in recording.requests:
        by_batcher.setdefault((request.batcher, request.function), ([], []))[1].append(request)
    at = rows.clock(number)
    for (_, function), (batches, requests) in sorted(by_batcher.items(), key=lambda item: item[0]):
        members: dict[int | None, list[Hashable]] = {}
        for request in requests:
            members.setdefault(request.batch, []).append((request.batcher, request.number))
        batch_slices = [
            Slice(
                "batch", function, at(each.start), at(each.end), sources=tuple(members.get(each.number, ())),
                details=(("batch", each.number), ("requests", each.size), ("failed", each.failed)),
            )
            for each in batches
        ]  # fmt: skip
        for name, groups in (
            ("batches", [(each,) for each in batch_slices]),
            ("requests", [_request_slices(each, at) for each in requests]),
        ):
            for lane, slices in enumerate(_lanes(groups)):
                rows.add(f"{name} of {function}", number, Part.REQUESTS, slices, lane)


def _request_slices(request: Request, at: Callable[[float], int]) -> tuple[Slice, ...]:
    """Return the wait of a request in the queue, and the time from there to its outcome."""
    details: tuple[tuple[str, str | int], ...] = (("request", request.number),)
    if request.batch is not None:
        details += (("batch", request.batch),)
    submitted, ended, label, outcome = at(request.submitted), at(request.ended), request.label, request.outcome
    if request.began is None:
        return (Slice(outcome, f"{outcome} in the queue", submitted, ended, label=label, details=details),)
    began, key = at(request.began), (request.batcher, request.number)
    return (
        Slice("queued", "queued", submitted, began, label=label, key=key, details=details),
        Slice(outcome, outcome, began, ended, label=label, details=details),
    )


def _lanes(groups: Iterable[tuple[Slice, ...]]) -> list[list[Slice]]:
    """Return lanes of slices that do not overlap. The slices of a group follow each other, and stay together."""
    lanes: list[list[Slice]] = []
    busy: list[tuple[int, int]] = []  # heaps: end and number of each lane in use, and the numbers of the others
    free: list[int] = []
    for group in sorted(groups, key=lambda group: group[0].start):
        while busy and busy[0][0] <= group[0].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        lanes[lane].extend(group)
        heapq.heappush(busy, (group[-1].end, lane))
    return lanes


def _separate(rows: Rows, places: dict[Hashable, int]) -> None:
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
