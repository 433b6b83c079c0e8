"""Traces in Chrome's JSON format, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ._recording import Recording, TimelineSpan, kept
from ._rows import Part, Row, Rows, Slice, rows_of

__all__ = ["trace", "trace_of"]

#: What precedes the name of the device in the name of each process.
_OWNERS: Final = {Part.STREAMS: "", Part.HOST: "host of ", Part.REQUESTS: "requests of "}


def trace(spans: Sequence[TimelineSpan], title: str) -> str:
    """Return spans as JSON in Chrome's trace format, with a thread for each stream; times are microseconds."""
    return trace_of([Recording(title, spans)])


def trace_of(recordings: Sequence[Recording]) -> str:
    """Return recordings as JSON in Chrome's trace format.

    Each device is a process whose threads are its streams. Its host is another one, with threads for event loops, their
    blocked iterations, awaits and workers; its requests are a third one, after those of all devices. The slices of one
    thread must not overlap: the operations of a stream follow each other, but their times may overlap by the resolution
    of a timing event, half a microsecond.
    """
    rows = rows_of(recordings)
    events: list[dict[str, Any]] = []
    for number, recording in enumerate(recordings):
        parts = {row.part for row in rows.rows if row.recording == number} | {Part.STREAMS}
        if recording.counters:
            parts.add(Part.HOST)
        for part in sorted(parts):
            name = f"{_OWNERS[part]}{kept(recording.device)}"
            events.append(_note(_process(number, part, len(recordings)), "process_name", name=name))
    threads = _threads(rows.rows, len(recordings))
    places = []  # process and thread of each slice
    for row, (process, thread) in zip(rows.rows, threads, strict=True):
        name = f"{kept(row.name)} {row.lane + 1}" if row.lane else kept(row.name)
        events.append(_note(process, "thread_name", thread, name=name))
        events.append(_note(process, "thread_sort_index", thread, sort_index=thread))
        own = rows.slices[row.first : row.last]
        events += [_slice(each, process, thread) for each in own]
        places += [(process, thread)] * len(own)
    events += _flows(rows, places)
    events += _counters(rows)
    accuracy = max((recording.accuracy_us for recording in recordings), default=0.0)
    document = {
        "displayTimeUnit": "ms", "traceEvents": events, "otherData": {"host_time_accuracy_us": round(accuracy, 3)}
    }  # fmt: skip
    return json.dumps(document, allow_nan=False)


def _process(recording: int, part: Part, recordings: int) -> int:
    """Return the number of the process for a part of a recording."""
    return 2 * recordings + recording + 1 if part is Part.REQUESTS else 2 * recording + part + 1


def _threads(rows: Sequence[Row], recordings: int) -> list[tuple[int, int]]:
    """Return process and thread of each row; the threads of a process are counted from 1."""
    counts: dict[int, int] = {}
    threads = []
    for row in rows:
        process = _process(row.recording, row.part, recordings)
        counts[process] = counts.get(process, 0) + 1
        threads.append((process, counts[process]))
    return threads


def _note(process: int, name: str, thread: int | None = None, /, **arguments: object) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": process, "name": name, "args": arguments}
    return event if thread is None else event | {"tid": thread}


def _slice(each: Slice, process: int, thread: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if each.operation:
        arguments["operation"] = each.operation
    if each.label is not None:
        arguments["label"] = kept(each.label)
    if each.nbytes:
        arguments["bytes"] = each.nbytes
    for name, value in each.details:
        arguments[name] = kept(value) if isinstance(value, str) else value
    return {
        "ph": "X", "pid": process, "tid": thread, "name": kept(each.name), "cat": each.kind,
        "ts": each.start_us, "dur": each.duration_us, "args": arguments,
    }  # fmt: skip


def _flows(rows: Rows, places: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the two ends of each arrow.

    A reader closes a slice at its end, so an arrow leaves 1 ns earlier. It must not arrive before it has left.
    """
    for number, arrow in enumerate(rows.arrows, 1):
        source, target = rows.slices[arrow.source], rows.slices[arrow.target]
        leaves = min(source.end, target.end) - 1
        if leaves < source.start:
            continue  # the resolution of the timing events has turned them round
        flow = {"name": arrow.kind, "cat": "flow", "id": number}
        (process, thread), (to_process, to_thread) = places[arrow.source], places[arrow.target]
        yield {**flow, "ph": "s", "pid": process, "tid": thread, "ts": leaves / 1e3}
        arrives = max(target.start, leaves)
        yield {**flow, "ph": "f", "bp": "e", "pid": to_process, "tid": to_thread, "ts": arrives / 1e3}


def _counters(rows: Rows) -> Iterator[dict[str, Any]]:
    for number, recording in enumerate(rows.recordings):
        for name, values in recording.counters.items():
            for at, value in values:
                when = round(recording.microseconds(at) + rows.offsets[number], 3)
                yield {"ph": "C", "pid": 2 * number + 2, "name": name, "ts": when, "args": {name: value}}
