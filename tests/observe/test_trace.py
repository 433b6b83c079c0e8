"""K2, R6: the trace that Perfetto opens, read back."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import time
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, Kernel, Pipeline, Slot, Stage, Stream
from aiocuda._core import stream_operation
from aiocuda.lowlevel import queue_of
from aiocuda.observe import Recording, StreamProfiler, Timeline, TimelineSpan, trace_of
from aiocuda.observe._loop_monitor import BLOCKED
from aiocuda.observe._recording import LABEL_KEPT, LoopRecord, Resume
from aiocuda.observe._trace import trace
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import AFFINE, UVLOOP, Latch, in_thread, quickly, turns

#: Labels that must survive every output.
HOSTILE = [
    "a \"quoted\" 'label'",
    "</script><script>alert(1)</script>",
    "<!-- <img src=x onerror=alert(1)>",
    "control \x00 \x1b[31m \x7f \x85",
    "lone \ud800 surrogates \udfff",
    "lines\u2028and\u2029paragraphs\r\n",
    "&amp; ]]> ${x} `x` @DATA@",
    "x" * 100_000,
]


@dataclasses.dataclass
class Trace:
    """A trace as a reader of the format takes it."""

    processes: dict[int, str]
    threads: dict[tuple[int, int], str]
    slices: list[dict[str, Any]]
    flows: list[tuple[str, dict[str, Any], dict[str, Any]]]  #: name, and the slices at both ends
    counters: dict[str, list[tuple[float, int]]]

    def row(self, event: dict[str, Any]) -> str:
        return self.threads[event["pid"], event["tid"]]

    def of(self, category: str) -> list[dict[str, Any]]:
        return [event for event in self.slices if event["cat"] == category]


def read(text: str) -> Trace:
    """Read a trace, and check each event and both ends of each flow."""
    text.encode("utf-8")
    document = json.loads(text, parse_constant=pytest.fail)  # JSON has no NaN and no Infinity
    assert set(document) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert document["otherData"]["host_time_accuracy_us"] >= 0
    by_phase: dict[str, list[dict[str, Any]]] = {phase: [] for phase in "MXsfC"}
    for event in document["traceEvents"]:
        by_phase[event["ph"]].append(event)
    notes = {name: [e for e in by_phase["M"] if e["name"] == name] for name in ("process_name", "thread_name")}
    found = Trace(
        {event["pid"]: event["args"]["name"] for event in notes["process_name"]},
        {(event["pid"], event["tid"]): event["args"]["name"] for event in notes["thread_name"]},
        by_phase["X"],
        [],
        {},
    )
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found.slices:
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert event["dur"] >= 0.001, "an arrow could not begin or end in it"
        assert event["pid"] in found.processes
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert rows.keys() <= found.threads.keys()
    for row, each in rows.items():
        for before, after in itertools.pairwise(each):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9, f"slices of {row} overlap: Perfetto drops one"

    def slice_at(end: dict[str, Any]) -> dict[str, Any]:
        own = rows[end["pid"], end["tid"]]
        (inside,) = (e for e in own if e["ts"] - 1e-6 <= end["ts"] < e["ts"] + e["dur"] - 1e-6)
        return inside

    starts, ends = ({event["id"]: event for event in by_phase[phase]} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(by_phase["s"]) == len(by_phase["f"])
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"], "Perfetto drops a flow that ends before it begins"
        found.flows.append((start["name"], slice_at(start), slice_at(end)))
    for event in by_phase["C"]:
        ((name, value),) = event["args"].items()
        assert name == event["name"]
        found.counters.setdefault(name, []).append((event["ts"], value))
    return found


def operations(found: Trace, name: str) -> set[tuple[int, int]]:
    """The ids of the operations at both ends of the flows with a name."""
    return {(one["args"]["operation"], other["args"]["operation"]) for flow, one, other in found.flows if flow == name}


@pytest.mark.asyncio
async def test_each_operation_is_a_slice_of_its_streams_thread(device: Device, stream: Stream, other: Stream) -> None:
    async with Timeline(device) as timeline:
        buffer = stream.empty(1024, "u4")
        await stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
        await stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
        with aiocuda.label("seven"):
            other.wait(stream.fill(buffer, 7))
        await other.download(buffer)
    found = read(timeline.to_trace())
    assert found.processes[1] == f"{device.name} ({device.driver.name} driver)"
    assert found.processes[2].startswith("host")
    slices = [event for event in found.slices if event["pid"] == 1]
    assert len(slices) == len(timeline.spans)
    assert sorted(name for (process, _), name in found.threads.items() if process == 1) == ["left", "right"]
    rows = [(found.row(event), event["cat"], event["name"], event["args"].get("label")) for event in slices]
    assert ("left", "launch", AFFINE.name, None) in rows
    assert ("left", "fill", "fill", "seven") in rows
    assert ("right", "wait", "wait", "seven") in rows
    assert ("right", "download", "download", None) in rows
    (span,) = (span for span in timeline.spans if span.kind == "fill")
    (fill,) = found.of("fill")
    assert (fill["ts"], fill["dur"]) == pytest.approx((span.start_us, span.end_us - span.start_us), abs=1)
    assert fill["args"] == {"operation": span.operation, "label": "seven", "bytes": 4096}
    assert {event["args"]["operation"] for event in slices} == {span.operation for span in timeline.spans}


@pytest.mark.asyncio
async def test_an_arrow_leads_to_a_wait_from_its_operation(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    buffer = stream.empty(1024, "u4")
    early = stream.fill(buffer, 1)
    await early
    async with Timeline(device) as timeline:
        other.wait(early)  # it ended before the timeline
        held = latch.hold(stream)
        waits = other.wait(held)
        same = stream.wait(held)  # of its own stream
        after = other.fill(other.empty(4), 2)
        latch.release()
        await quickly(after)
    assert [span.waited_for for span in timeline.spans if span.operation == waits.id] == [(held.id,)]
    found = read(timeline.to_trace())
    assert operations(found, "wait") <= {(held.id, waits.id), (held.id, same.id)}
    assert (held.id, waits.id) in operations(found, "wait")
    (flow,) = (flow for flow in found.flows if flow[0] == "wait" and flow[2]["args"]["operation"] == waits.id)
    assert (found.row(flow[1]), found.row(flow[2])) == ("left", "right")
    assert flow[2]["cat"] == "wait"


@pytest.mark.asyncio
async def test_a_marker_does_not_take_the_arrow_of_the_next_operation(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    async with Timeline(device) as timeline:
        held = latch.hold(stream)
        await latch.held()
        queue = queue_of(other)
        queue.follow(stream_operation(held))
        queue.submit_marker()
        after = other.fill(other.empty(4), 2)
        latch.release()
        await quickly(after)
    assert {span.operation: span.waited_for for span in timeline.spans}[after.id] == (held.id,)
    assert operations(read(timeline.to_trace()), "wait") == {(held.id, after.id)}


@pytest.mark.asyncio
async def test_arrows_of_a_coordinator_and_of_a_pipeline(device: Device) -> None:
    async with Timeline(device) as timeline, AsyncCoordinator(device) as coordinator:
        source = coordinator.upload(np.zeros(1024, np.uint32))
        buffer = await source
        first = coordinator.compute(AFFINE, 4, 256, buffer, 1024, 3, 1)
        await coordinator.download(buffer, after=[first])
    work = {span.operation: span for span in timeline.spans}
    crossing = [
        (work[source].stream, span.stream)
        for span in timeline.spans
        for source in span.waited_for
        if source in work and work[source].stream != span.stream
    ]
    arrows = operations(read(timeline.to_trace()), "wait")
    assert len(arrows) == len(crossing) >= 1

    def up(slot: Slot) -> Any:
        return slot.stream.fill(slot.buffer("x", 1024, np.uint32), slot.item)

    def down(slot: Slot) -> Any:
        return slot.stream.download(slot.buffer("x", 1024, np.uint32))

    async with Timeline(device) as timeline:
        async for _ in Pipeline(device, [Stage("up", up), Stage("down", down)]).run(range(4)):
            pass
    found = read(timeline.to_trace())
    rows = {(found.row(one), found.row(other)) for name, one, other in found.flows if name == "wait"}
    assert ("up", "down") in rows


@pytest.mark.asyncio
async def test_an_arrow_leads_to_the_await_that_an_operation_resumed(
    device: Device, stream: Stream, latch: Latch
) -> None:
    async def wait(operation: aiocuda.Operation[Any]) -> None:
        await operation

    async with Timeline(device) as timeline:
        with aiocuda.label("held"):
            held = latch.hold(stream)
            unwatched = stream.fill(stream.empty(4), 1)
            last = stream.synchronize()
        tasks = [asyncio.create_task(wait(each)) for each in (held, last)]
        await turns(5)
        latch.release()
        await quickly(asyncio.gather(*tasks))
    found = read(timeline.to_trace())
    resumed = operations(found, "await")
    assert {(held.id, held.id), (last.id, last.id)} <= resumed
    assert unwatched.id not in {operation for operation, _ in resumed}
    for name, one, other in found.flows:
        if name == "await":
            assert other["ts"] >= one["ts"] + one["dur"] - 0.01
            assert (found.row(other), other["cat"], other["name"]) == ("awaits", "await", f"await {one['name']}")
            assert other["args"].get("label") == one["args"].get("label")
    iterations = found.of("iteration")
    for each in found.of("await"):
        assert any(one["ts"] <= each["ts"] <= one["ts"] + one["dur"] + 0.01 for one in iterations)


async def ends_and_awaits(device: Device) -> None:
    """Compare times on the axis with the host's clock before each call and after each await."""
    now = device.driver.now
    calls: dict[int, tuple[float, float]] = {}
    async with device.stream() as stream, Timeline(device) as timeline:
        target = stream.empty(1 << 16, "u4")
        for value in range(200):
            before = now()
            operation = stream.fill(target, value)
            await operation
            calls[operation.id] = before, now()
    recording = timeline.recording()
    assert len(recording.spans) == 200
    assert 0 <= recording.accuracy_us == timeline.accuracy_us
    for span in recording.spans:
        called, resumed = map(recording.microseconds, calls[span.operation])
        # The timeline puts device times as late as possible, so nothing is too early by more than rounding.
        assert span.end_us <= resumed + 0.01
        assert span.start_us >= called - 0.01 - (0.6 if device.driver.name == "cuda" else 0)
    for _, one, other in read(timeline.to_trace()).flows:
        assert one["ts"] + one["dur"] <= other["ts"] + 0.01


@pytest.mark.asyncio
async def test_no_operation_ends_after_the_await_that_it_resumed(device: Device) -> None:
    await ends_and_awaits(device)


async def host_rows(device: Device) -> None:
    async with device.stream() as stream, Timeline(device) as timeline:
        uploaded = await stream.upload(np.zeros(1 << 20, np.uint32))
        await device.offload(busy, 0.002)
        busy(4 * BLOCKED)  # blocks the loop between two awaits
        await stream.synchronize()
        del uploaded
        gc.collect()
        await stream.synchronize()
    found = read(timeline.to_trace())
    blocked = found.of("blocked")
    assert any(event["dur"] >= 2 * BLOCKED * 1e6 for event in blocked)
    assert all(event["dur"] > BLOCKED * 1e6 - 0.01 for event in blocked)
    workers = found.of("worker")
    assert "busy" in {event["name"] for event in workers}
    assert any(event["dur"] >= 2000 for event in workers if event["name"] == "busy")
    assert all(found.row(event).startswith("worker") for event in workers)
    assert {"event loop", "blocked loop"} <= set(found.threads.values())
    flight = found.counters["operations in flight"]
    assert max(value for _, value in flight) >= 1
    assert flight[-1][1] == 0
    assert max(value for _, value in found.counters["device memory, bytes"]) >= 4 << 20
    times = [at for at, _ in flight]
    assert times == sorted(times)


def busy(seconds: float) -> None:
    """Use the processor, as a callback does that blocks the loop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.asyncio
async def test_the_host_has_rows_and_counters(device: Device) -> None:
    await host_rows(device)


@pytest.mark.skipif(UVLOOP is None, reason="uvloop is not installed")
@pytest.mark.parametrize("check", [host_rows, ends_and_awaits])
def test_the_same_on_uvloop(check: Any) -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            await check(device)

    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        runner.run(main())


@pytest.mark.asyncio
async def test_operations_on_the_host_are_counted() -> None:
    async with aiocuda.open_device(driver="host", max_in_flight=4) as device:
        stream = device.stream()
        with Latch(device) as latch:
            async with Timeline(device) as timeline:
                latch.hold(stream)
                await latch.held()
                last = [stream.synchronize() for _ in range(20)][-1]
                latch.release()
                await quickly(last)
    waiting = read(timeline.to_trace()).counters["operations on the host"]
    assert max(value for _, value in waiting) >= 10
    assert waiting[-1][1] == 0


@pytest.mark.asyncio
async def test_a_callback_that_calls_no_hook_blocks_the_loop_too(device: Device) -> None:
    async with Timeline(device) as timeline:
        await asyncio.sleep(0.002)
        asyncio.get_running_loop().call_soon(busy, 4 * BLOCKED)
        await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
    assert max(event["dur"] for event in read(timeline.to_trace()).of("blocked")) >= 2 * BLOCKED * 1e6


@pytest.mark.asyncio
async def test_nothing_is_scheduled_after_the_block(device: Device, stream: Stream) -> None:
    class Counting:
        calls = 0

    loop = asyncio.get_running_loop()
    soon, later = loop.call_soon, loop.call_later

    def counted(call: Any) -> Any:
        def schedule(*arguments: Any, **options: Any) -> Any:
            if "LoopMonitor" in repr(arguments):
                Counting.calls += 1
            return call(*arguments, **options)

        return schedule

    loop.call_soon, loop.call_later = counted(soon), counted(later)  # type: ignore[method-assign]
    try:
        async with Timeline(device) as timeline:
            await stream.synchronize()
        assert Counting.calls > 0
        iterations, Counting.calls = len(timeline.recording().loops[0].iterations), 0
        await stream.synchronize()
        await device.offload(int)
        await asyncio.sleep(0.012)
        assert Counting.calls == 0
        recording = timeline.recording()
        assert len(recording.loops[0].iterations) == iterations
        assert "int" not in {job.name for job in recording.jobs}
    finally:
        loop.call_soon, loop.call_later = soon, later  # type: ignore[method-assign]


@pytest.mark.asyncio
async def test_an_idle_loop_sleeps_during_the_block(device: Device) -> None:
    """The timer wakes it every 5 ms; nothing else does."""
    async with Timeline(device) as timeline:
        await asyncio.sleep(0.1)
    (loop,) = timeline.recording().loops
    assert len(loop.iterations) < 40


@pytest.mark.asyncio
async def test_each_loop_of_a_device_has_its_rows(device: Device) -> None:
    async def work() -> None:
        async with device.stream(name="elsewhere") as stream:
            for _ in range(5):
                await stream.synchronize()

    async with device.stream(name="here") as stream, Timeline(device) as timeline:
        await stream.synchronize()
        await asyncio.to_thread(in_thread, work)
    found = read(timeline.to_trace())
    assert {"event loop 1", "event loop 2", "here", "elsewhere"} <= set(found.threads.values())
    assert len(timeline.recording().loops) == 2


@pytest.mark.asyncio
async def test_several_timelines_and_a_profiler_listen_at_the_same_time(device: Device, stream: Stream) -> None:
    outer, inner, profiler = Timeline(device), Timeline(device), StreamProfiler(device)
    async with outer:
        first = stream.synchronize()
        async with profiler, inner:
            second = stream.synchronize()
        third = stream.synchronize()
    assert {span.operation for span in outer.spans if span.stream == "left"} == {first.id, second.id, third.id}
    assert {span.operation for span in inner.spans if span.stream == "left"} == {second.id}
    assert {each.name for each in profiler.report().total.operations} == {"synchronize"}
    for timeline in (outer, inner):
        read(timeline.to_trace())


@pytest.mark.asyncio
async def test_a_second_block_replaces_the_first(device: Device, stream: Stream) -> None:
    timeline = Timeline(device)
    async with timeline:
        await stream.synchronize()
    async with timeline:
        second = stream.synchronize()
        await second
    assert [span.operation for span in timeline.spans] == [second.id]
    assert len(read(timeline.to_trace()).of("synchronize")) == 1


def test_virtual_time_has_no_timer() -> None:
    """A timer would move the time of a loop in which nothing else happens."""
    kernel = Kernel("slow", source="__global__ void slow();", host=lambda: None, host_seconds=5e-3)

    async def main() -> str:
        driver = SimulatedDriver(None, latency=0.0)
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            stream = device.stream()
            async with Timeline(device) as timeline:
                await stream.launch(kernel, 1, 1)
            return timeline.to_trace()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        found = read(runner.run(main()))
    (slow,) = found.of("launch")
    assert slow["dur"] == pytest.approx(5e3, rel=0.05)
    assert found.of("blocked") == []
    assert len(operations(found, "await")) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
async def test_labels_of_every_kind(device: Device, stream: Stream, text: str) -> None:
    async with Timeline(device) as timeline:
        with aiocuda.label(text):
            await stream.fill(stream.empty(4), 1)
    (span,) = (span for span in timeline.spans if span.kind == "fill")
    assert span.label == text
    assert span.nbytes == 16
    found = read(timeline.to_trace())
    (fill,) = found.of("fill")
    label = fill["args"]["label"]
    assert len(label) <= LABEL_KEPT
    assert label[:20].isprintable() or not text[:20].isprintable()
    assert text.isascii() is False or text.isprintable() is False or len(text) > LABEL_KEPT or label == text


def span(start: float, end: float, stream: str = "a", kind: str = "fill", kernel: str | None = None) -> TimelineSpan:
    return TimelineSpan(stream, kind, start, end, 0, kernel)


def test_slices_of_a_thread_do_not_overlap() -> None:
    spans = [span(4, 9), span(0, 4.5, kind="launch", kernel='k "1" <&>'), span(1, 3, "ü"), span(9, 9), span(9, 12)]
    found = read(trace(spans, "GPU"))
    assert found.processes == {1: "GPU"}
    assert found.threads == {(1, 1): "a", (1, 2): "ü"}
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in found.slices] == [
        (1, 'k "1" <&>', 0, 4),
        (1, "fill", 4, 5),
        (1, "fill", 9, 0.001),
        (1, "fill", 9.001, 2.999),
        (2, "fill", 1, 2),
    ]


def test_an_empty_trace() -> None:
    found = read(trace([], "GPU"))
    assert (found.threads, found.slices, found.flows) == ({}, [], [])


def test_flows_that_the_resolution_has_turned_round() -> None:
    """A wait that ends before its operation by less than the resolution keeps its arrow; an impossible one has none."""
    spans = [
        TimelineSpan("a", "fill", 0, 10, 1),
        TimelineSpan("b", "wait", 2, 9.8, 2, waited_for=(1,)),
        TimelineSpan("c", "wait", 12, 13, 3, waited_for=(1, 99)),
        TimelineSpan("a", "fill", 20, 21, 4),
        TimelineSpan("d", "wait", 5, 6, 5, waited_for=(4,)),
    ]
    assert operations(read(trace(spans, "GPU")), "wait") == {(1, 2), (1, 3)}


def test_devices_have_one_axis() -> None:
    """The times of a recording that began 1 ms later are 1 ms later."""
    loop = LoopRecord([(10.002, 10.003)], [], [Resume(10.0025, 0, 1, "fill", None)])
    first = Recording("one", [TimelineSpan("a", "fill", 0.0, 5.0, 1)], host_zero=10.0)
    second = Recording("two", [TimelineSpan("a", "fill", 0.0, 5.0, 1)], [loop], host_zero=10.001)
    found = read(trace_of([first, second]))
    assert found.processes == {1: "one", 3: "two", 4: "host of two"}
    assert [(event["pid"], round(event["ts"])) for event in found.of("fill")] == [(1, 0), (3, 1000)]
    (resumed,) = found.of("await")
    assert (resumed["ts"], resumed["dur"]) == pytest.approx((2500, 500), abs=0.01)


@pytest.mark.slow
def test_cost_of_a_trace_is_linear() -> None:
    def many(count: int) -> Recording:
        spans = [
            TimelineSpan(f"s{each % 50}", "launch", each * 1.0, each + 0.9, each + 1, "k", "label", 8, (each,))
            for each in range(count)
        ]
        loop = LoopRecord(
            [(each * 1e-6, (each + 0.5) * 1e-6) for each in range(count)],
            [],
            [Resume(each * 1e-6, each, each + 1, "k", None) for each in range(count)],
        )
        return Recording("GPU", spans, [loop], (), {"operations": [(each * 1e-6, each) for each in range(count)]})

    def seconds(count: int) -> float:
        recording = many(count)
        began = time.process_time()
        trace_of([recording])
        return time.process_time() - began

    assert min(seconds(20_000) for _ in range(2)) < 15 * max(min(seconds(4_000) for _ in range(3)), 1e-3)
