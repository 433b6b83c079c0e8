"""K2: requests of batchers in a timeline, from the call of ``submit`` to the answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device
from aiocuda._base._collections import COLLECTIONS
from aiocuda.observe import Timeline
from aiocuda.serving import Batch, BatcherStatistics, DeadlineError, MicroBatcher
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import UVLOOP, Latch, Reports, quickly, turns, until
from tests.observe.test_page import Page
from tests.observe.test_trace import Trace, read

OUTCOMES = ("answered", "failed", "expired", "cancelled")


class Held:
    """A function of a batcher that returns when the test lets it. It fails for the item ``"bad"``."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[Any]] = []

    async def __call__(self, batch: Batch[Any]) -> list[Any]:
        self.batches.append(batch.items)
        await self.gate.wait()
        return [ValueError(item) if item == "bad" else item for item in batch.items]


def milliseconds(event: dict[str, Any]) -> float:
    duration = event["dur"]
    assert isinstance(duration, float)
    return duration / 1e3


def waits_of(found: Trace) -> list[float]:
    """The seconds of the waits in the queue, in order."""
    return sorted(event["dur"] * 1e-6 for event in found.of("queued"))


def assert_waits_agree(found: Trace, told: BatcherStatistics, within: float = 2e-6) -> None:
    waits = waits_of(found)
    served = sum(size * batches for size, batches in told.sizes.items())
    waits = [0.0] * (served - len(waits)) + waits  # a trace leaves out the waits of no time, which uvloop measures
    assert np.percentile(waits, (50, 99)) == pytest.approx([told.wait_p50_s, told.wait_p99_s], abs=within)


def assert_outcomes_agree(found: Trace, told: BatcherStatistics) -> None:
    counts = Counter(event["cat"] for event in found.slices if event["cat"] in OUTCOMES)
    assert counts == Counter(
        answered=told.answered, failed=told.failed, expired=told.missed_deadlines, cancelled=told.cancelled
    )


async def answer_in_turn(device: Device) -> tuple[Trace, BatcherStatistics, float]:
    """Two batches in turn: the second one waits for the first, which takes 20 ms."""
    function = Held()
    async with MicroBatcher(function, max_batch_size=4, batch_wait_timeout_s=0, device=device) as batcher:
        async with Timeline(device) as timeline:
            with aiocuda.label("first"):
                first = [batcher.submit_nowait(item) for item in range(4)]
            await until(lambda: function.batches)
            submitted = time.monotonic()
            with aiocuda.label("second"):
                second = [batcher.submit_nowait(item) for item in range(4)]
            await asyncio.sleep(0.02)
            waited = time.monotonic() - submitted
            function.gate.set()
            await quickly(asyncio.gather(*first, *second))
        return read(timeline.to_trace()), batcher.statistics(), waited


@pytest.mark.asyncio
async def test_wait_in_the_queue_is_visible_and_agrees_with_the_statistics(device: Device) -> None:
    found, told, waited = await answer_in_turn(device)
    assert_waits_agree(found, told)
    assert_outcomes_agree(found, told)
    queued = found.of("queued")
    assert len(queued) == 8
    assert all(milliseconds(each) >= 0.5e3 * waited for each in queued if each["args"]["label"] == "second")
    # What follows the wait in its row is the time in the batch.
    for each in queued:
        (after,) = (
            one
            for one in found.of("answered")
            if found.row(one) == found.row(each) and one["ts"] == pytest.approx(each["ts"] + each["dur"], abs=0.01)
        )
        assert after["args"] == each["args"]
        assert after["args"]["label"] == ("first" if after["args"]["batch"] == 0 else "second")


@pytest.mark.asyncio
async def test_an_arrow_leads_from_each_request_to_its_batch(device: Device) -> None:
    found, _, _ = await answer_in_turn(device)
    arrows = [(one, other) for name, one, other in found.flows if name == "batch"]
    assert len(arrows) == 8
    for one, other in arrows:
        assert (one["cat"], other["cat"], other["name"]) == ("queued", "batch", "Held")
        assert one["args"]["batch"] == other["args"]["batch"]
        assert found.row(one).startswith("requests of Held")
        assert found.row(other) == "batches of Held"
    assert sorted({one["args"]["request"] for one, _ in arrows}) == list(range(1, 9))
    first, second = found.of("batch")
    assert [each["args"] for each in (first, second)] == [
        {"batch": number, "requests": 4, "failed": 0} for number in (0, 1)
    ]
    assert first["ts"] + first["dur"] <= second["ts"]
    assert {found.processes[each["pid"]].partition(" of ")[0] for each in (first, second)} == {"requests"}


@pytest.mark.skipif(UVLOOP is None, reason="uvloop is not installed")
def test_the_same_on_uvloop() -> None:
    """Its clock counts milliseconds."""

    async def main() -> None:
        async with aiocuda.open_device(driver="host") as device:
            found, told, _ = await answer_in_turn(device)
        assert_waits_agree(found, told, within=1.1e-3)
        assert max(waits_of(found)) >= 0.018

    with asyncio.Runner(loop_factory=UVLOOP) as runner:
        runner.run(main())


def test_requests_without_an_answer_are_visible() -> None:
    """They fail, expire or are cancelled; in the queue, and in a batch."""

    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(None)) as device:
            await without_an_answer(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


async def without_an_answer(device: Device) -> None:
    function = Held()
    batcher = MicroBatcher(function, max_batch_size=4, batch_wait_timeout_s=0, device=device)
    async with batcher, Timeline(device) as timeline:
        expires = batcher.submit_nowait("expires", deadline_s=0.01)
        cancelled = batcher.submit_nowait("cancelled")
        others = [batcher.submit_nowait(item) for item in ("bad", "good")]
        await until(lambda: function.batches)
        expires_queued = batcher.submit_nowait("expires", deadline_s=0.01)
        cancelled_queued = batcher.submit_nowait("cancelled")
        for future in (expires, expires_queued):
            with pytest.raises(DeadlineError):
                await quickly(future)
        for future in (cancelled, cancelled_queued):
            future.cancel()
        await turns(3)
        function.gate.set()
        assert isinstance((await quickly(asyncio.gather(*others, return_exceptions=True)))[0], ValueError)
    found, told = read(timeline.to_trace()), batcher.statistics()
    assert_waits_agree(found, told)
    assert_outcomes_agree(found, told)
    in_a_batch = {(each["cat"], each["name"]) for each in found.slices if each["cat"] in OUTCOMES}
    assert in_a_batch == {
        *((outcome, outcome) for outcome in OUTCOMES),
        ("expired", "expired in the queue"),
        ("cancelled", "cancelled in the queue"),
    }
    assert len(found.of("queued")) == 4  # those that no batch has got have one slice
    for each in found.of("expired"):
        assert milliseconds(each) >= 9 or "batch" in each["args"]
    (batch,) = found.of("batch")
    assert batch["args"] == {"batch": 0, "requests": 4, "failed": 1}
    assert len([flow for flow in found.flows if flow[0] == "batch"]) == 4


@pytest.mark.asyncio
async def test_requests_of_a_batcher_that_is_left_are_visible(device: Device) -> None:
    function = Held()
    async with Timeline(device) as timeline:
        with pytest.raises(ZeroDivisionError):
            async with MicroBatcher(function, max_batch_size=1, batch_wait_timeout_s=0, device=device) as batcher:
                requests = [batcher.submit_nowait(item) for item in range(3)]
                await until(lambda: function.batches)
                function.gate.set()
                raise ZeroDivisionError
        ended = await quickly(asyncio.gather(*requests, return_exceptions=True))
    assert [isinstance(each, ClosedError) for each in ended] == [False, True, True]
    found = read(timeline.to_trace())
    assert_outcomes_agree(found, batcher.statistics())
    assert Counter(each["name"] for each in found.of("failed")) == {"failed in the queue": 2}


@pytest.mark.asyncio
async def test_request_that_is_cancelled_before_its_batch_gets_it(device: Device) -> None:
    """The batch was formed, so the wait counts; its function never saw the request, so there is no arrow."""
    function = Held()
    async with MicroBatcher(function, max_batch_size=1, batch_wait_timeout_s=0, device=device) as batcher:
        async with Timeline(device) as timeline:
            batcher.submit_nowait(0).cancel()
            await turns(5)
    found, told = read(timeline.to_trace()), batcher.statistics()
    assert (len(found.of("queued")), told.cancelled, function.batches) == (1, 1, [])
    assert_waits_agree(found, told)
    assert_outcomes_agree(found, told)
    assert found.of("batch") == []
    assert found.flows == []


@pytest.mark.asyncio
async def test_batchers_of_the_same_function_have_rows_of_their_own(device: Device) -> None:
    function = Held()
    function.gate.set()
    async with contextlib.AsyncExitStack() as stack:
        batchers = [
            await stack.enter_async_context(
                MicroBatcher(function, max_batch_size=2, batch_wait_timeout_s=0, device=device)
            )
            for _ in range(2)
        ]
        async with Timeline(device) as timeline:
            await quickly(asyncio.gather(*[batcher.submit(1) for batcher in batchers for _ in range(4)]))
    found = read(timeline.to_trace())
    rows = {one["tid"]: set[int]() for one in found.of("batch")}
    assert len(rows) == 2
    for name, one, other in found.flows:
        if name == "batch":
            rows[other["tid"]].add(one["tid"])
    left, right = rows.values()
    assert left
    assert right
    assert not left & right


@pytest.mark.asyncio
async def test_requests_and_batches_that_overlap_are_in_different_lanes(device: Device) -> None:
    function = Held()
    async with MicroBatcher(
        function, max_batch_size=8, batch_wait_timeout_s=0, max_concurrent_batches=3, device=device
    ) as batcher:
        async with Timeline(device) as timeline:
            requests = [batcher.submit_nowait(item) for item in range(24)]
            await until(lambda: len(function.batches) == 3)
            function.gate.set()
            await quickly(asyncio.gather(*requests))
            assert await quickly(batcher.submit(1)) == 1
    found = read(timeline.to_trace())  # it checks that slices of a row do not overlap
    names = [found.row(each) for each in found.of("queued")]
    assert set(names) == {"requests of Held", *(f"requests of Held {number}" for number in range(2, 25))}
    assert names.count("requests of Held") == 2  # the last request has the first lane again
    assert {found.row(each) for each in found.of("batch")} == {
        "batches of Held", "batches of Held 2", "batches of Held 3"
    }  # fmt: skip
    data = Page(timeline.to_html()).data
    lanes = [(data["texts"][row[0]], row[2], row[5]) for row in data["rows"] if row[2] == 2]
    assert lanes == [
        *(("batches of Held", 2, lane) for lane in range(3)),
        *(("requests of Held", 2, lane) for lane in range(24)),
    ]
    assert len([arrow for arrow in data["arrows"] if arrow[0] == 2]) == 25
    (queued, *_) = (each for each in data["slices"] if data["texts"][each[0]] == "queued")
    assert [data["texts"][text] for text in queued[7:]] == ["request", "1", "batch", "0"]


@pytest.mark.asyncio
async def test_requests_that_begin_before_or_end_after_the_block_are_not_recorded(device: Device) -> None:
    function = Held()
    async with MicroBatcher(function, max_batch_size=1, batch_wait_timeout_s=0, device=device) as batcher:
        before = batcher.submit_nowait(1)
        await until(lambda: function.batches)
        async with Timeline(device) as outer:
            async with Timeline(device) as inner:
                within = batcher.submit_nowait(2)
                function.gate.set()
                await quickly(asyncio.gather(before, within))
                function.gate.clear()
                function.batches.clear()
                after = batcher.submit_nowait(3)
                await until(lambda: function.batches)
            function.gate.set()
            await quickly(after)
    for timeline, numbers in ((inner, [2]), (outer, [2, 3])):
        found = read(timeline.to_trace())
        assert [each["args"]["request"] for each in found.of("queued")] == numbers
        assert [each["args"]["request"] for each in found.of("answered")] == numbers
        assert sorted(each["args"]["batch"] for each in found.of("batch")) == [number - 1 for number in numbers]


def test_times_are_exact_in_virtual_time() -> None:
    async def main() -> str:
        async def compute(batch: Batch[int]) -> list[int]:
            await asyncio.sleep(0.25)
            return batch.items

        driver = SimulatedDriver(None, latency=0.0)
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            async with MicroBatcher(compute, max_batch_size=1, batch_wait_timeout_s=0, device=device) as batcher:
                async with Timeline(device) as timeline:
                    await asyncio.gather(*[batcher.submit(item) for item in range(3)])
            return timeline.to_trace()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        found = read(runner.run(main()))
    assert waits_of(found) == pytest.approx([0.0, 0.25, 0.5], abs=1e-4)
    assert [milliseconds(each) for each in found.of("answered")] == pytest.approx([250] * 3, abs=0.1)
    assert [milliseconds(each) for each in found.of("batch")] == pytest.approx([250] * 3, abs=0.1)


@pytest.mark.asyncio
async def test_labels_of_requests_stay_text(device: Device) -> None:
    function = Held()
    function.gate.set()
    label = "</script>\x00\ud800" + "x" * 10_000
    async with MicroBatcher(function, max_batch_size=1, device=device) as batcher:
        async with Timeline(device) as timeline:
            with aiocuda.label(label):
                await quickly(batcher.submit(1))
    (queued,) = read(timeline.to_trace()).of("queued")
    assert queued["args"]["label"].startswith("</script>\ufffd\ufffdx")
    assert len(queued["args"]["label"]) <= 1000
    assert "</script>\\" not in timeline.to_html()


@pytest.mark.asyncio
async def test_listener_that_fails_at_an_outcome_is_removed(device: Device) -> None:
    class Fails:
        calls = 0

        def on_batch(self, batch: Any) -> None: ...

        def on_outcome(self, request: Any) -> None:
            self.calls += 1
            raise ZeroDivisionError

    function, listener = Held(), Fails()
    function.gate.set()
    async with MicroBatcher(function, max_batch_size=1, device=device) as batcher:
        with Reports() as reports, device.listen(listener):
            assert await quickly(batcher.submit(1)) == 1
            assert await quickly(batcher.submit(2)) == 2
    assert listener.calls == 1
    assert [type(error) for error in reports.failures] == [ZeroDivisionError]


# -- iterations that block the loop ------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    """The fields of the log events."""
    fields: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message: Any = record.msg
            fields.append(dict(message))

    handler, logger = Handler(), logging.getLogger("aiocuda")
    logger.addHandler(handler)
    yield fields
    logger.removeHandler(handler)


def blocking(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - it is the mistake that the slice shows


@pytest.mark.slow
@pytest.mark.asyncio
async def test_blocked_iteration_has_the_line_that_the_log_event_names(events: list[dict[str, Any]]) -> None:
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        with Latch(device) as latch:
            async with Timeline(device) as timeline:
                latch.hold(stream)
                await latch.held()
                asyncio.get_running_loop().call_soon(blocking, 0.3)
                await until(lambda: any(event.get("seconds", 0) > 0.2 for event in events))
                latch.release()
    event = next(event for event in events if event["event"] == "loop_blocked" and event["seconds"] > 0.2)
    longest = max(read(timeline.to_trace()).of("blocked"), key=milliseconds)
    assert event["line"].startswith("blocking (")
    assert longest["args"] == {"callback": event["callback"], "line": event["line"]}
    assert longest["name"] == f"blocked by {event['line']}"
    assert milliseconds(longest) >= 290


@pytest.mark.slow
@pytest.mark.asyncio
async def test_each_blocked_iteration_has_its_own_line(device: Device) -> None:
    """Without a handler for log events, and without work on the device."""

    def also_blocking() -> None:
        time.sleep(0.08)  # noqa: TID251

    loop = asyncio.get_running_loop()
    async with Timeline(device) as timeline:
        for function in (functools.partial(blocking, 0.08), also_blocking):
            await asyncio.sleep(0.006)
            loop.call_soon(function)
            await asyncio.sleep(0.006)
    long = [event for event in read(timeline.to_trace()).of("blocked") if milliseconds(event) >= 60]
    lines = [event["args"]["line"].partition(" (")[0].rpartition(".")[2] for event in long]
    assert [line for line in lines if line in ("blocking", "also_blocking")] == ["blocking", "also_blocking"]
    data = Page(timeline.to_html()).data
    names = {data["texts"][each[1]] for each in data["slices"] if data["texts"][each[0]] == "blocked"}
    assert any(name.startswith("blocked by blocking (") for name in names)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_garbage_collection_that_blocks_the_loop_is_named(device: Device) -> None:
    def collect_slowly(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            blocking(0.1)

    async with Timeline(device) as timeline:
        gc.callbacks.append(collect_slowly)
        try:
            gc.collect(1)
        finally:
            gc.callbacks.remove(collect_slowly)
        await turns(2)
    assert COLLECTIONS.observers == []
    longest = max(read(timeline.to_trace()).of("blocked"), key=milliseconds)
    assert longest["name"].startswith("blocked by garbage collection of generation 1, 1")
