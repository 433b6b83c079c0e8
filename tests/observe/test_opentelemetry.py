"""R4: a span for each awaited operation, and for each request of a batch."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import AsyncCoordinator, BusyError, Device, DeviceFault, InvalidTypeError, Kernel, Stream
from aiocuda._core import stream_operation
from aiocuda.driver.host import HostDriver
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import AFFINE, TRAP, Latch, quickly

pytest.importorskip("opentelemetry.sdk")
trace: Any = importlib.import_module("opentelemetry.trace")
sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
sampling: Any = importlib.import_module("opentelemetry.sdk.trace.sampling")
in_memory: Any = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
observe: Any = importlib.import_module("aiocuda.observe")


class Spans:
    """A tracer provider, and the spans that have ended."""

    def __init__(self, sampler: Any = None) -> None:
        self.exporter = in_memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def all(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def below(self, parent: Any) -> list[Any]:
        """The spans directly below another one, in the order of their beginnings."""
        context = parent.get_span_context()
        found = [span for span in self.all if span.parent is not None and span.parent.span_id == context.span_id]
        assert all(span.context.trace_id == context.trace_id for span in found)
        return sorted(found, key=lambda span: int(span.start_time))

    def instrument(self, device: Device, **options: Any) -> Any:
        return observe.OpenTelemetryInstrument(device, tracer_provider=self.provider, **options)


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    """A device of the host driver: GPU tests need no packages beside those that aiocuda requires."""
    async with aiocuda.open_device(driver="host") as opened:
        yield opened


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


@pytest.mark.asyncio
async def test_awaited_operations_are_spans_below_the_current_one(device: Device, stream: Stream, spans: Spans) -> None:
    with spans.instrument(device), spans.tracer.start_as_current_span("request") as request:
        buffer = await stream.upload(np.zeros(1024, np.uint32))
        with aiocuda.label("request-17"):
            for _ in range(5):
                last = stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1)
            await last
        await stream.download(buffer)
    await stream.synchronize()  # after the block
    upload, affine, download = spans.below(request)
    assert len(spans.all) == 4
    assert (upload.name, affine.name, download.name) == ("upload", "affine", "download")
    assert dict(upload.attributes) == {
        "aiocuda.operation_id": upload.attributes["aiocuda.operation_id"],
        "aiocuda.kind": "upload",
        "aiocuda.stream": "left",
        "aiocuda.device": 0,
        "aiocuda.nbytes": 4096,
    }
    assert affine.attributes["aiocuda.operation_id"] == last.id
    assert affine.attributes["aiocuda.kernel"] == "affine"
    assert affine.attributes["aiocuda.label"] == "request-17"
    for span in (upload, affine, download):
        assert span.status.status_code.name == "UNSET"
        assert request.start_time <= span.start_time + 1_000_000  # of two clocks
        assert span.start_time <= span.end_time <= request.end_time


@pytest.mark.asyncio
async def test_gathered_operations_have_spans_although_they_are_done_before(
    device: Device, stream: Stream, other: Stream, spans: Spans
) -> None:
    buffers = [each.empty(4, np.uint32) for each in (stream, other)]
    with spans.instrument(device), spans.tracer.start_as_current_span("request") as request:
        operations = [each.fill(buffer, 1) for each, buffer in zip((stream, other), buffers, strict=True) for _ in "12"]
        for operation in operations:
            lease = stream_operation(operation).lease
            assert lease is not None
            while not device.driver.event_query(lease.handle):  # the loop does nothing meanwhile
                pass
        await aiocuda.gather(*operations)
        with pytest.raises(ValueError, match="no number"):
            await stream.submit(int, "no number")
    found = [span.attributes["aiocuda.operation_id"] for span in spans.below(request)]
    assert sorted(found)[:4] == [operation.id for operation in operations]
    assert len(found) == 5  # the last one fails without a call of the driver


@pytest.mark.asyncio
async def test_operations_that_are_awaited_later_have_spans(device: Device, stream: Stream, spans: Spans) -> None:
    with spans.instrument(device), spans.instrument(device), spans.tracer.start_as_current_span("request") as request:
        operations = [stream.fill(stream.empty(4, np.uint32), 1) for _ in range(4)]
        failing = stream.submit(int, "no number")
        skipped = stream.fill(stream.empty(4), 1)
        with pytest.raises(aiocuda.SkippedError):
            await skipped  # all the others have ended before it
        with spans.tracer.start_as_current_span("elsewhere"):
            await operations[0]
            await operations[0]
            await aiocuda.gather(*operations[:2])
            with pytest.raises(ValueError, match="no number"):
                await failing
    found = spans.below(request)
    ids = [span.attributes["aiocuda.operation_id"] for span in found if "aiocuda.kind" in span.attributes]
    expected = [operations[0].id, operations[1].id, failing.id, skipped.id]
    assert sorted(ids) == sorted(2 * expected)  # one span of each instrument
    own = {span.attributes["aiocuda.operation_id"]: span for span in found if "aiocuda.kind" in span.attributes}
    assert own[failing.id].events[0].attributes["exception.type"] == "ValueError"
    assert own[failing.id].end_time <= own[skipped.id].end_time
    assert own[operations[0].id].status.status_code.name == "UNSET"


@pytest.mark.asyncio
async def test_node_that_is_awaited_later_has_a_span(device: Device, spans: Spans) -> None:
    with spans.instrument(device), spans.tracer.start_as_current_span("request") as request:
        async with AsyncCoordinator(device) as coordinator:
            node = coordinator.upload(np.ones(4, np.uint32))
            await coordinator.drain()
            await node
    assert "upload" in [span.name for span in spans.below(request)]


@pytest.mark.asyncio
async def test_exporter_that_raises_in_a_later_await_is_reported(device: Device, stream: Stream) -> None:
    def fail(operation: Any) -> None:
        raise ZeroDivisionError

    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    first, second = stream.fill(stream.empty(4), 1), stream.synchronize()
    await second
    stream_operation(first).report_when_awaited(fail)
    stream_operation(first).report_when_awaited(errors.append)
    assert await first is None
    assert [type(errors[0]), errors[1]] == [ZeroDivisionError, first]


def test_duration_is_that_of_the_operation(spans: Spans) -> None:
    kernel = Kernel("slow", source="__global__ void slow();", host=lambda: None, host_seconds=5e-3)

    async def main() -> Any:
        async with aiocuda.open_device(driver=SimulatedDriver(None, latency=0.0)) as device:
            stream = device.stream()
            with spans.instrument(device, timing=True), spans.tracer.start_as_current_span("request") as request:
                await stream.launch(kernel, 1, 1)
            return request

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        (span,) = spans.below(runner.run(main()))
    assert span.end_time - span.start_time == pytest.approx(5e6, rel=0.1)
    assert span.attributes["aiocuda.device_ms"] == pytest.approx(5, rel=0.02)


@pytest.mark.asyncio
async def test_staged_copy_is_one_span_from_its_first_chunk(device: Device, stream: Stream, spans: Spans) -> None:
    array = np.zeros(5 << 20, np.uint32)
    instrument = spans.instrument(device, timing=True)
    with instrument, spans.tracer.start_as_current_span("request") as request:
        buffer = await stream.upload(array)
        await stream.download(buffer)
    upload, download = spans.below(request)
    assert (upload.name, download.name) == ("upload", "download")
    assert upload.attributes["aiocuda.nbytes"] == array.nbytes
    assert "aiocuda.device_ms" not in upload.attributes
    assert upload.end_time - upload.start_time > 53_000  # at 391 GB/s, which is more than any bus has
    assert not instrument._copies


@pytest.mark.slow
@pytest.mark.asyncio
async def test_10000_concurrent_requests(device: Device, stream: Stream, other: Stream, spans: Spans) -> None:
    """Every span is below the request of its operation, also if that waits for staging, for a kernel, or in a queue."""
    count = 10_000
    array = np.zeros(1 << 15, np.uint32)
    target = stream.empty(1024, np.uint32)
    kernel = Kernel(
        "own", source='extern "C" __global__ void own(unsigned int* x) { *x = 1; }', host=lambda x: x.fill(1)
    )

    async def request(number: int) -> Any:
        with spans.tracer.start_as_current_span(f"request {number}") as span, aiocuda.label(f"request-{number}"):
            first = other if number % 2 else stream
            if number % 100 == 0:
                await first.upload(array)
            elif number % 3 == 0:
                await stream.launch(kernel, 1, 1, target[:1])  # the first ones wait until it is loaded
            else:
                first.synchronize()
                await first.fill(target[number % 1024 : number % 1024 + 1], 1)
            if number % 4 == 0:
                await stream.synchronize(label=f"second-{number}")
        return span

    with spans.instrument(device):
        requests = await asyncio.wait_for(asyncio.gather(*map(request, range(count))), 120)
    children: dict[int, list[Any]] = {}
    for span in spans.all:
        if span.parent is not None:
            children.setdefault(span.parent.span_id, []).append(span)
    assert len(spans.all) == count + sum(map(len, children.values()))
    missing = 0
    for number, parent in enumerate(requests):
        own = children.pop(parent.context.span_id, [])
        assert {span.context.trace_id for span in own} <= {parent.context.trace_id}
        labels = sorted(span.attributes["aiocuda.label"] for span in own)
        expected = [f"request-{number}"] + [f"second-{number}"] * (number % 4 == 0)
        assert set(labels) <= set(expected)
        assert len(labels) == len(set(labels))
        missing += len(expected) - len(labels)
        kinds = {"upload"} if number % 100 == 0 else {"own"} if number % 3 == 0 else {"fill"}
        assert {span.name for span in own} <= kinds | {"synchronize"}
    assert not children
    assert missing == 0


@pytest.mark.asyncio
async def test_without_a_sampled_span_there_are_no_spans(device: Device, stream: Stream) -> None:
    unsampled = Spans(sampling.ALWAYS_OFF)
    with unsampled.instrument(device):
        await stream.synchronize()
        with unsampled.tracer.start_as_current_span("request"):
            await stream.synchronize()
    assert unsampled.all == []


@pytest.mark.asyncio
async def test_sampled_span_of_another_process_is_a_parent(device: Device, stream: Stream, spans: Spans) -> None:
    remote = trace.SpanContext(0x1234, 0x56, is_remote=True, trace_flags=trace.TraceFlags(1))
    with spans.instrument(device), trace.use_span(trace.NonRecordingSpan(remote)):
        await stream.synchronize()
    (span,) = spans.all
    assert (span.context.trace_id, span.parent.span_id) == (0x1234, 0x56)


@pytest.mark.asyncio
async def test_full_host_queue_keeps_the_parents(spans: Spans) -> None:
    async with aiocuda.open_device(driver="host", max_in_flight=2) as device, device.stream() as stream:
        with Latch(device) as latch, spans.instrument(device):
            latch.hold(stream)

            async def request(number: int) -> Any:
                with spans.tracer.start_as_current_span(f"request {number}") as span:
                    await stream.synchronize(label=str(number))
                return span

            tasks = [asyncio.create_task(request(number)) for number in range(50)]
            await latch.held()
            latch.release()
            for number, span in enumerate(await quickly(asyncio.gather(*tasks))):
                (own,) = spans.below(span)
                assert own.attributes["aiocuda.label"] == str(number)


@pytest.mark.asyncio
async def test_failures_have_the_status_and_the_exception(spans: Spans) -> None:
    async with aiocuda.open_device(driver="host") as device:
        async with device.stream() as stream, device.stream() as other:
            with spans.instrument(device):
                with spans.tracer.start_as_current_span("request") as request:
                    target, waits = stream.empty(4, np.uint32), other.empty(4, np.uint32)

                    def refuse() -> None:
                        raise ValueError("bad \udc80 name")

                    refused = stream.submit(refuse)
                    other.wait(refused)
                    skipped = other.fill(waits, 1)
                    errors = await aiocuda.gather(refused, skipped, return_exceptions=True)
                    assert [type(error) for error in errors] == [ValueError, aiocuda.SkippedError]
                    await stream.fill(target, 1)
    failed = [span for span in spans.below(request) if span.status.status_code.name == "ERROR"]
    assert [span.attributes["aiocuda.kind"] for span in failed] == ["submit", "fill"]
    assert failed[1].events[0].attributes["exception.type"].endswith("SkippedError")
    assert failed[0].events[0].name == "exception"
    assert failed[0].events[0].attributes["exception.type"] == "ValueError"
    assert "bad \\udc80 name" in failed[0].events[0].attributes["exception.message"]
    for text in failed[0].events[0].attributes.values():
        str(text).encode()


@pytest.mark.asyncio
async def test_fault_ends_every_span(spans: Spans) -> None:
    async with aiocuda.open_device(driver=HostDriver()) as device:
        stream, other = device.stream(), device.stream()
        instrument = spans.instrument(device)
        with instrument, Latch(device) as latch:
            latch.hold(other)

            async def request(number: int) -> Any:
                with spans.tracer.start_as_current_span(f"request {number}") as span:
                    with pytest.raises(DeviceFault):
                        await (other.synchronize() if number else stream.launch(TRAP, 1, 1))
                return span

            requests = await quickly(asyncio.gather(*map(request, range(5))))
        for span in requests:
            (own,) = spans.below(span)
            assert own.status.status_code.name == "ERROR"
            assert own.events[0].attributes["exception.type"].endswith("DeviceFault")


@pytest.mark.asyncio
async def test_abandoned_and_cancelled_operations_leave_nothing(
    device: Device, stream: Stream, latch: Latch, spans: Spans
) -> None:
    instrument = spans.instrument(device)
    with instrument, spans.tracer.start_as_current_span("request") as request:
        latch.hold(stream)
        waiting = asyncio.ensure_future(stream.upload(np.zeros(5 << 20, np.uint32)).wait())
        abandoned = stream.upload(np.zeros(5 << 20, np.uint32))
        await latch.held()
        waiting.cancel()
        abandoned.abandon()
        latch.release()
        await quickly(stream.synchronize())
    assert [span.name for span in spans.below(request)] == ["synchronize"]
    del abandoned, waiting
    gc.collect()
    assert not instrument._copies


@pytest.mark.asyncio
async def test_labels_with_any_characters(device: Device, stream: Stream, spans: Spans) -> None:
    unusual = ['"quoted" <script>', "line\nline\x00", "\udc80 alone", "x" * 100_000, "ü"]
    with spans.instrument(device), spans.tracer.start_as_current_span("request") as request:
        for text in unusual:
            await stream.synchronize(label=text)
    found = [span.attributes["aiocuda.label"] for span in spans.below(request)]
    assert found == ['"quoted" <script>', "line\nline\x00", "\\udc80 alone", "x" * 1000 + "…", "ü"]


@pytest.mark.asyncio
async def test_coordinated_operations_are_below_the_request_that_registered_them(device: Device, spans: Spans) -> None:
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:

        async def request(number: int) -> Any:
            with spans.tracer.start_as_current_span(f"request {number}") as span:
                await coordinator.upload(np.zeros(4, np.uint32), label=f"request-{number}")
            return span

        with spans.instrument(device):
            for number, span in enumerate(await quickly(asyncio.gather(*map(request, range(8))))):
                assert {own.attributes["aiocuda.label"] for own in spans.below(span)} == {f"request-{number}"}


async def double(batch: Batch[int]) -> list[int]:
    await batch.stream.upload(np.asarray(batch.items))
    return [2 * item for item in batch.items]


@pytest.mark.asyncio
async def test_requests_of_a_batch_have_spans_below_their_own(device: Device, spans: Spans) -> None:
    async with MicroBatcher(double, max_batch_size=3, batch_wait_timeout_s=5, device=device) as batcher:

        async def request(number: int) -> Any:
            with spans.tracer.start_as_current_span(f"request {number}") as span:
                assert await batcher.submit(number) == 2 * number
            return span

        with spans.instrument(device):
            requests = await quickly(asyncio.gather(*map(request, range(3))))
        own = [spans.below(span) for span in requests]
        assert [[span.name for span in each] for each in own] == [["batch double"]] * 3
        (first,), (second,), (third,) = own
        assert first.links == ()
        assert [link.context.span_id for each in (second, third) for link in each.links] == [first.context.span_id] * 2
        attributes = dict(second.attributes)
        assert attributes.pop("aiocuda.wait_s") >= 0
        assert attributes == {"aiocuda.batch": 0, "aiocuda.batch_size": 3, "aiocuda.batch_weight": 3}
        upload, synchronize = spans.below(first)
        assert (upload.name, synchronize.name) == ("upload", "synchronize")  # a batch ends when its stream is done
        assert first.start_time <= upload.start_time + 1_000_000
        assert upload.end_time <= first.end_time


@pytest.mark.asyncio
async def test_only_sampled_requests_of_a_batch_have_spans(device: Device, spans: Spans) -> None:
    async with MicroBatcher(double, max_batch_size=3, batch_wait_timeout_s=5, device=device) as batcher:

        async def sampled() -> Any:
            with spans.tracer.start_as_current_span("request") as span:
                await batcher.submit(1)
            return span

        with spans.instrument(device):
            _, request, _ = await quickly(asyncio.gather(batcher.submit(0), sampled(), batcher.submit(2)))
            (own,) = spans.below(request)
            assert [span.name for span in spans.below(own)] == ["upload", "synchronize"]
            assert len(spans.all) == 4
            await quickly(asyncio.gather(*map(batcher.submit, range(3))))
            assert len(spans.all) == 4


@pytest.mark.asyncio
async def test_each_batch_has_operations_below_its_own_request(device: Device, spans: Spans) -> None:
    async with MicroBatcher(double, max_batch_size=1, max_concurrent_batches=4, device=device) as batcher:

        async def request(number: int) -> Any:
            with spans.tracer.start_as_current_span(f"request {number}") as span:
                await batcher.submit(number)
            return span

        with spans.instrument(device):
            for span in await quickly(asyncio.gather(*map(request, range(40)))):
                (own,) = spans.below(span)
                assert [each.name for each in spans.below(own)] == ["upload", "synchronize"]


@pytest.mark.asyncio
async def test_failed_requests_of_a_batch_have_the_exception(device: Device, spans: Spans) -> None:
    async def half(batch: Batch[int]) -> list[int | Exception]:
        if batch.items[0] < 0:
            raise ZeroDivisionError
        return [ValueError(f"odd {item}") if item % 2 else item for item in batch.items]

    async with MicroBatcher(half, max_batch_size=2, batch_wait_timeout_s=5, device=device) as batcher:

        async def request(number: int) -> Any:
            with spans.tracer.start_as_current_span(f"request {number}") as span:
                try:
                    await batcher.submit(number)
                except (ValueError, ZeroDivisionError) as error:
                    return span, type(error).__name__
            return span, None

        with spans.instrument(device):
            found = [await quickly(asyncio.gather(*map(request, pair))) for pair in ((2, 3), (-1, -2))]
    for span, error in (*found[0], *found[1]):
        (own,) = spans.below(span)
        assert own.status.status_code.name == ("UNSET" if error is None else "ERROR")
        assert [event.attributes["exception.type"] for event in own.events] == ([] if error is None else [error])
    assert Counter(error for pair in found for _, error in pair) == {"ZeroDivisionError": 2, "ValueError": 1, None: 1}


@pytest.mark.asyncio
async def test_fault_and_cancellation_end_the_spans_of_a_batch(spans: Spans) -> None:
    async def work(batch: Batch[int]) -> list[int]:
        if batch.items[0] < 0:
            await batch.stream.launch(TRAP, 1, 1)
        started.set()
        await ready.wait()
        return batch.items

    started, ready = asyncio.Event(), asyncio.Event()
    async with aiocuda.open_device(driver=HostDriver()) as device:
        batcher: MicroBatcher[int, int] = MicroBatcher(work, max_batch_size=1, device=device)
        requests: list[Any] = []

        async def request(number: int) -> None:
            with spans.tracer.start_as_current_span(f"request {number}") as span:
                requests.append(span)
                await batcher.submit(number)

        with spans.instrument(device):
            async with batcher:
                cancelled = asyncio.create_task(request(1))
                await quickly(started.wait())
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                ready.set()
                with pytest.raises(DeviceFault):
                    await quickly(request(-1))
        (first,), (second,) = map(spans.below, requests)
        assert first.status.status_code.name == "UNSET"
        assert second.status.status_code.name == "ERROR"
        (launch,) = spans.below(second)
        assert (launch.name, launch.status.status_code.name) == ("trap", "ERROR")


@pytest.mark.asyncio
async def test_listener_that_raises_in_a_batch_is_removed(device: Device) -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["exception"]))

    class Raises:
        def __init__(self, late: bool) -> None:
            self.late, self.calls = late, 0

        def on_batch(self, batch: Any) -> Any:
            self.calls += 1
            if not self.late:
                raise ZeroDivisionError
            return self.end

        def end(self, errors: Any) -> None:
            raise ZeroDivisionError

    early, late = Raises(late=False), Raises(late=True)
    async with MicroBatcher(double, max_batch_size=1, device=device) as batcher:
        with device.listen(early), device.listen(late):
            assert await quickly(batcher.submit(1)) == 2
            assert await quickly(batcher.submit(2)) == 4
    assert (early.calls, late.calls) == (1, 1)
    assert [type(each) for each in reports] == [ZeroDivisionError] * 2


@pytest.mark.asyncio
async def test_batcher_keeps_contexts_only_for_a_listener(device: Device) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    batches: list[Any] = []

    class Listener:
        def on_batch(self, batch: Any) -> None:
            batches.append(batch)

    async with MicroBatcher(double, max_batch_size=2, batch_wait_timeout_s=5, device=device) as batcher:
        variable.set("before")
        before = batcher.submit_nowait(1)
        with device.listen(Listener()):
            variable.set("inside")
            inside = batcher.submit_nowait(2)
            variable.set("after")
            assert await quickly(asyncio.gather(before, inside)) == [2, 4]
    (batch,) = batches
    assert (batch.function, batch.number, batch.size, batch.weight) == ("double", 0, 2, 2)
    assert batch.contexts[0] is None
    assert batch.contexts[1][variable] == "inside"
    assert 0 <= batch.waited_s[1] <= batch.waited_s[0] < 5


@pytest.mark.asyncio
async def test_instrument_is_entered_once_at_a_time(device: Device, stream: Stream, spans: Spans) -> None:
    instrument = spans.instrument(device)
    with instrument:
        with pytest.raises(BusyError):
            instrument.__enter__()
        await stream.synchronize()
    with instrument:
        pass
    assert repr(instrument) == f"<OpenTelemetryInstrument of {device.name}>"


@pytest.mark.asyncio
async def test_wrong_arguments(device: Device) -> None:
    with pytest.raises(InvalidTypeError, match=r"an OpenTelemetryInstrument takes an aiocuda\.Device, not int"):
        observe.OpenTelemetryInstrument(7)
    with pytest.raises(InvalidTypeError, match=r"tracer_provider is an opentelemetry\.trace\.TracerProvider or None"):
        observe.OpenTelemetryInstrument(device, tracer_provider=7)
    with pytest.raises(InvalidTypeError, match="timing is True or False"):
        observe.OpenTelemetryInstrument(device, timing=np.zeros(2))
