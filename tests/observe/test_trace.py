"""K2: the trace that Perfetto opens."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from aiocuda import Device, Stream
from aiocuda.observe import Timeline, TimelineSpan
from aiocuda.observe._timeline import trace
from tests.helpers import AFFINE


def read(text: str) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Threads' names, and slices, as a reader of the format takes them."""
    document = json.loads(text, parse_constant=pytest.fail)  # JSON has no NaN and no Infinity
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    notes = [event for event in document["traceEvents"] if event["ph"] == "M"]
    assert len(slices) + len(notes) == len(document["traceEvents"])
    for event in slices:
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur"}
        assert event["dur"] >= 0
    for row, each in itertools.groupby(sorted(slices, key=lambda event: event["tid"]), lambda event: event["tid"]):
        for before, after in itertools.pairwise(sorted(each, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9, (
                f"slices of thread {row} overlap: Perfetto drops one"
            )
    return {event["tid"]: event["args"]["name"] for event in notes if event["name"] == "thread_name"}, slices


@pytest.mark.asyncio
async def test_each_operation_is_a_slice_of_its_streams_thread(device: Device, stream: Stream, other: Stream) -> None:
    async with Timeline(device) as timeline:
        buffer = stream.empty(1024, "u4")
        await stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
        await stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
        other.wait(stream.fill(buffer, 7))
        await other.download(buffer)
    rows, slices = read(timeline.to_trace())
    assert len(slices) == len(timeline.spans)
    assert sorted(rows.values()) == ["left", "right"]
    found = [(rows[event["tid"]], event["cat"], event["name"]) for event in slices]
    assert ("left", "launch", AFFINE.name) in found
    assert ("left", "fill", "fill") in found
    assert ("right", "wait", "wait") in found
    assert ("right", "download", "download") in found
    (span,) = (span for span in timeline.spans if span.kind == "fill")
    (fill,) = (event for event in slices if event["cat"] == "fill")
    assert (fill["ts"], fill["dur"]) == pytest.approx((span.start_us, span.end_us - span.start_us), abs=1)


def span(start: float, end: float, stream: str = "a", kind: str = "fill", kernel: str | None = None) -> TimelineSpan:
    return TimelineSpan(stream, kind, start, end, 0, kernel)


def test_slices_of_a_thread_do_not_overlap() -> None:
    spans = [span(4, 9), span(0, 4.5, kind="launch", kernel='k "1" <&>'), span(1, 3, "ü"), span(9, 9), span(9, 12)]
    rows, slices = read(trace(spans, "GPU"))
    assert rows == {1: "a", 2: "ü"}
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in slices] == [
        (1, 'k "1" <&>', 0, 4),
        (1, "fill", 4, 5),
        (1, "fill", 9, 0),
        (1, "fill", 9, 3),
        (2, "fill", 1, 2),
    ]


def test_an_empty_trace() -> None:
    assert read(trace([], "GPU")) == ({}, [])
