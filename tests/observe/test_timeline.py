"""K2: the picture of the streams' overlap, and the times that it is drawn from."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    Pipeline,
    Stage,
    Stream,
)
from aiocuda.observe import Timeline, TimelineSpan, draw
from aiocuda.observe._drawing import BAR, LINE, RIGHT, WIDTH
from tests.helpers import AFFINE, TRAP, Latch, open_peer, quickly

pytestmark = pytest.mark.asyncio

NAMESPACE = "{http://www.w3.org/2000/svg}"


def rectangles(svg: str) -> list[tuple[str, str, float, float]]:
    """(stream, kind, start, end) of every ``<rect>``."""
    return [
        (
            rect.attrib["data-stream"],
            rect.attrib["data-kind"],
            float(rect.attrib["data-start-us"]),
            float(rect.attrib["data-end-us"]),
        )
        for rect in ET.fromstring(svg).iter(f"{NAMESPACE}rect")
    ]


def work(stream: Stream) -> list[aiocuda.Operation[Any]]:
    """One operation of each usual kind."""
    buffer = stream.empty(1024, np.uint32)
    return [
        stream.copy(buffer, np.zeros(1024, np.uint32)),
        stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1),
        stream.fill(buffer, 7),
        stream.download(buffer),
        stream.synchronize(),
    ]


async def test_each_operation_has_one_span_in_the_order_of_its_stream(
    device: Device, stream: Stream, other: Stream
) -> None:
    async with Timeline(device) as timeline:
        operations = work(stream)
        operations.append(other.wait(operations[-1]))
        operations += work(other)
    assert timeline.untimed == 0
    assert sorted(span.operation for span in timeline.spans) == [operation.id for operation in operations]
    for each in (stream, other):
        spans = [span for span in timeline.spans if span.stream == each.name]
        kinds = [operation.kind for operation in operations if operation.stream is each]
        assert [span.kind for span in spans] == kinds
        assert all(span.start_us <= span.end_us for span in spans)
        assert all(before.end_us <= after.start_us + 1 for before, after in itertools.pairwise(spans))
    left, right = (
        next(s for s in timeline.spans if (s.stream, s.kind) == (each.name, "launch")) for each in (stream, other)
    )
    assert left.end_us <= right.start_us + 1  # other waited for stream


async def test_times_are_device_times(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    """A held stream's work spans the hold; what went on beside it lies inside."""
    async with Timeline(device) as timeline:
        held = latch.hold(stream)
        await latch.held()
        beside = other.synchronize()
        await quickly(beside)
        behind = other.wait(held)
        latch.release()
    by_id = {span.operation: span for span in timeline.spans}
    assert by_id[held.id].start_us <= by_id[beside.id].start_us
    assert by_id[beside.id].end_us <= by_id[held.id].end_us
    assert by_id[held.id].end_us <= by_id[behind.id].end_us + 1


async def test_a_staged_copy_is_one_span(device: Device, stream: Stream) -> None:
    array = np.arange(5 << 20, dtype=np.uint32)  # several chunks
    async with Timeline(device) as timeline:
        buffer = await stream.upload(array)
        back = await stream.download(buffer)
    assert np.array_equal(back, array)
    up, down = timeline.spans
    assert (up.kind, down.kind) == ("upload", "download")
    assert up.end_us <= down.start_us + 1
    # At 391 GB/s, which is more than any bus has, each would take 53 µs.
    assert min(up.end_us - up.start_us, down.end_us - down.start_us) > 53


async def test_internal_events_are_not_chunks_of_a_copy() -> None:
    """A drain puts a mark between two copies; the second one begins with its own first chunk."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        array = np.arange(1 << 19, dtype=np.uint32)  # one chunk
        first, second = (stream.empty_like(array) for _ in range(2))
        async with Timeline(device) as timeline:
            with contextlib.ExitStack() as holding:
                # The first copy's chunk has gone to the device: from here on no thread fills another one.
                peer.before["upload"] = lambda *_: holding.enter_context(peer.holding_jobs())
                before = stream.copy(first, array)
                drained = asyncio.create_task(device.drain())
                await asyncio.sleep(0)
                behind = stream.copy(second, array)
                await quickly(drained)
                peer.before.clear()
                async with device.stream(name="clock") as clock:
                    await quickly(clock.synchronize())
            await quickly(behind)
        spans = {span.operation: span for span in timeline.spans}
        (held,) = (span for span in timeline.spans if span.stream == "clock")
        assert spans[before.id].end_us <= held.start_us
        assert spans[behind.id].start_us >= held.end_us


async def test_the_picture_has_a_rectangle_for_each_operation(device: Device) -> None:
    def up(slot: aiocuda.Slot) -> Any:
        return slot.stream.fill(slot.buffer("x", 1024, np.uint32), slot.item)

    def down(slot: aiocuda.Slot) -> Any:
        return slot.stream.download(slot.buffer("x", 1024, np.uint32))

    pipeline = Pipeline(device, [Stage("up", up), Stage("down", down)])
    async with Timeline(device) as timeline:
        assert [result[0] async for result in pipeline.run(range(5))] == list(range(5))
    svg = timeline.to_svg()
    expected = [(span.stream, span.kind, round(span.start_us, 3), round(span.end_us, 3)) for span in timeline.spans]
    assert sorted(rectangles(svg)) == sorted(expected)
    tree = ET.fromstring(svg)
    words = [text.text for text in tree.iter(f"{NAMESPACE}text")]
    assert {
        "up",
        "down",
        "fill",
        "download",
        "time, ms",
        f"Streams of {device.name} ({device.driver.name} driver)",
    } <= set(words)
    assert words.index("up") < words.index("down")
    with pytest.warns(RuntimeWarning, match=r"never entered.*`async with Timeline\(device\) as timeline`") as caught:
        assert "<rect" not in Timeline(device).to_svg("nothing yet")
    assert caught[0].filename == __file__
    with pytest.raises(InvalidArgumentError, match=r"no title.*Path\('x\.html'\)\.write_text\(timeline\.to_html\(\)"):
        timeline.to_html("x.html")


async def test_a_timeline_records_nothing_after_its_block(device: Device, stream: Stream) -> None:
    async with Timeline(device) as timeline:
        with pytest.raises(BusyError, match="already: leave its block first"):
            await timeline.__aenter__()
        await stream.synchronize()
    await stream.synchronize()
    assert len(timeline.spans) == 1
    assert repr(timeline) == f"<Timeline of {device.name}: 1 operation>"
    with pytest.raises(ZeroDivisionError):
        async with Timeline(device):
            raise ZeroDivisionError
    async with Timeline(device) as another:
        await stream.synchronize()
    assert len(another.spans) == 1
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="not int"):
        Timeline(wrong)


async def test_earlier_operations_have_no_span(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    async with Timeline(device) as timeline:
        behind = stream.synchronize()
        latch.release()
    assert [span.operation for span in timeline.spans] == [behind.id]
    assert timeline.untimed >= 1


async def test_failed_operations_have_no_span() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        async with Timeline(device) as timeline:
            peer.refuse("fill")
            failing, good = stream.fill(buffer, 1), None
            with pytest.raises(DriverError):
                await failing
            good = stream.fill(buffer, 2)
        assert [span.operation for span in timeline.spans] == [good.id]
        assert timeline.untimed == 1


async def test_a_fault_leaves_the_times_before_it() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        timeline = Timeline(device)

        async def fault() -> None:
            async with timeline:
                await stream.synchronize()
                await stream.launch(TRAP, 1, 1)

        with pytest.raises(DeviceFault):
            await fault()
        assert [span.kind for span in timeline.spans] == ["synchronize"]
        assert len(rectangles(timeline.to_svg())) == 1


async def test_names_with_special_characters_give_valid_xml() -> None:
    names = ['<&">', "line\nbreak", "\x00\x1b[31m", "a" * 50, "ünï\udcff"]
    spans = [TimelineSpan(name, "upload", 10.0 * at, 10.0 * at + 5, at) for at, name in enumerate(names)]
    found = rectangles(draw(spans, "a <title> & more"))
    assert len(found) == len(names)
    assert found[0][0] == names[0]
    assert found[2][0] == "\ufffd\ufffd[31m"


@pytest.mark.parametrize("span_us", [0.0, 0.4, 7.0, 1234.5, 1e6, 3.6e9])
async def test_the_axis_fits_any_length_of_time(span_us: float) -> None:
    svg = draw([TimelineSpan("a", "launch", 1e3, 1e3 + span_us, 1)], "t")
    tree = ET.fromstring(svg)
    ticks = [
        float(text.text or "") for text in tree.iter(f"{NAMESPACE}text") if (text.text or "").replace(".", "").isdigit()
    ]
    assert 2 <= len(ticks) <= 16
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= 1.0
    step, end = ticks[1] - ticks[0], 1.0 + max(span_us, 1.0) / 1e3
    assert end - step <= ticks[-1] <= end + step * 1e-6  # no empty space after the last
    (rect,) = tree.iter(f"{NAMESPACE}rect")
    right = float(rect.attrib["x"]) + float(rect.attrib["width"])
    assert right <= WIDTH
    assert span_us < 1.0 or right == pytest.approx(WIDTH - RIGHT, abs=0.1)


async def test_the_picture_names_kernels_and_draws_waits_as_lines() -> None:
    spans = [
        TimelineSpan("a", "launch", 0.0, 5.0, 1, "saxpy"),
        TimelineSpan("a", "launch", 5.0, 9.0, 2, "a<b>"),
        TimelineSpan("b", "wait", 0.0, 9.0, 3),
        TimelineSpan("b", "graph", 9.0, 11.0, 4),
    ]
    tree = ET.fromstring(draw(spans, "t"))
    words = [text.text for text in tree.iter(f"{NAMESPACE}text")]
    assert {"launch a<b>, saxpy", "graph", "wait"} <= set(words)
    waits, *work = (rect for rect in tree.iter(f"{NAMESPACE}rect"))
    assert (waits.attrib["data-kind"], float(waits.attrib["height"])) == ("wait", LINE)
    assert all(float(rect.attrib["height"]) == BAR for rect in work)
    titles = [title.text or "" for title in tree.iter(f"{NAMESPACE}title")]
    assert any(title.startswith("launch saxpy on a: ") for title in titles)
    many = [TimelineSpan("a", "launch", at, at + 1.0, at, f"k{at}") for at in range(9)]
    assert "launch k0, k1, k2, k3 …" in draw(many, "t")


async def test_a_launch_is_known_by_its_kernel(device: Device, stream: Stream) -> None:
    buffer = stream.empty(1024, np.uint32)
    await stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)  # loaded from here on
    async with Timeline(device) as timeline:
        stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
        stream.fill(buffer, 7)
    assert [(span.kind, span.kernel) for span in timeline.spans] == [("launch", AFFINE.name), ("fill", None)]
