"""R3: the log events for operators, and their context."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

import aiocuda
from aiocuda import Device, DeviceFault, Kernel, QueueFullError, Stream
from aiocuda._base import _collections, _log, _loop_watch
from aiocuda._base._collections import COLLECTIONS
from aiocuda._base._log import is_heard, log
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import Upset
from aiocuda.serving import MicroBatcher
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import SPIN, TRAP, FewQueues, Latch, open_peer, quickly, until
from tests.project.tree import SOURCE


class Records(logging.Handler):
    """Collects the records of the logger ``aiocuda``, with the thread that wrote each."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[dict[str, Any], int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        self.all.append((dict(message), threading.get_ident()))

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the fields of the events with this name."""
        return [fields for fields, _ in self.all if fields["event"] == event]


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logger = logging.getLogger("aiocuda")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    structlog.contextvars.clear_contextvars()


# The application decides

PROGRAM = """
import asyncio, sys, aiocuda

def trap(x, n):
    raise ZeroDivisionError

async def main():
    async with aiocuda.open_device(driver="host") as device:
        kernel = aiocuda.Kernel("trap", source='extern "C" __global__ void trap(float *x, int n) {}', host=trap)
        async with device.stream() as stream:
            try:
                await stream.launch(kernel, 1, 1, stream.empty(4), 4)
            except aiocuda.DeviceFault:
                pass

asyncio.run(main())
print("structlog" in sys.modules)
"""


def run(program: str) -> tuple[str, str]:
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout, finished.stderr


def test_nothing_is_printed_and_structlog_is_not_imported_without_a_handler() -> None:
    assert run(PROGRAM) == ("False\n", "")


def test_a_handler_of_the_standard_library_gets_lines() -> None:
    configure = "import logging; logging.basicConfig(level='INFO', format='%(levelname)s %(name)s %(message)s')"
    out, err = run(configure + PROGRAM)
    assert out == "True\n"
    assert "kernel_loaded" in err
    opened, _, fault, closed = err.splitlines()
    assert opened == "INFO aiocuda device_opened device=host 0 index=0 driver=host"
    assert fault.startswith("ERROR aiocuda device_fault device=host 0 code=719 error=device 0 has faulted: ")
    assert closed == "INFO aiocuda device_closed device=host 0 index=0 driver=host unfinished=0"


def test_levels_and_handlers_are_those_of_the_logger(records: Records) -> None:
    logger = logging.getLogger("aiocuda")
    assert is_heard("info")
    logger.setLevel(logging.ERROR)
    assert (is_heard("warning"), is_heard("error")) == (False, True)
    log("warning", "ignored")
    assert records.all == []
    logger.setLevel(logging.INFO)
    records.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        assert (is_heard("warning"), is_heard("error")) == (False, True)
        logger.removeHandler(records)
        assert not is_heard("error")  # only a `NullHandler` is left
    finally:
        logger.propagate = True


def test_the_configuration_of_structlog_is_neither_used_nor_changed(records: Records) -> None:
    _log._logger.cache_clear()
    structlog.configure(processors=[lambda *_: pytest.fail("the application's processor was called")])
    try:
        before = structlog.get_config()
        log("info", "device_opened", device="d")
        assert records.of("device_opened")[0]["device"] == "d"
        assert structlog.get_config() == before
    finally:
        structlog.reset_defaults()


def test_json_with_the_context_variables(records: Records) -> None:
    """As the page describes it: a `ProcessorFormatter` with a JSON renderer."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    formatter = structlog.stdlib.ProcessorFormatter
    handler.setFormatter(formatter(processors=[formatter.remove_processors_meta, structlog.processors.JSONRenderer()]))
    logger = logging.getLogger("aiocuda")
    logger.addHandler(handler)
    try:
        with structlog.contextvars.bound_contextvars(request_id="r-1", name="a record has such an attribute"):
            log("warning", "queue_full", limit=3)
    finally:
        logger.removeHandler(handler)
    written = json.loads(stream.getvalue())
    assert written.pop("timestamp").endswith("Z")
    assert written == {
        "event": "queue_full", "level": "warning", "logger": "aiocuda", "limit": 3, "request_id": "r-1",
        "name": "a record has such an attribute",
    }  # fmt: skip


def test_each_field_is_an_attribute_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        log("error", "device_fault", device="host 0")
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "aiocuda", "ERROR", "device_fault device=host 0 request_id=r-1",
    )  # fmt: skip
    assert (vars(record)["device"], vars(record)["request_id"]) == ("host 0", "r-1")


@pytest.mark.asyncio
async def test_a_filter_that_fails_does_not_stop_the_work(device: Device, records: Records) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    records.addFilter(lambda record: 1 / 0 > 0)
    await quickly(device.memory.trim())
    assert [context["message"] for context in reported] == ["aiocuda: the event memory_trimmed was not logged"]
    assert isinstance(reported[0]["exception"], ZeroDivisionError)


# The events


@pytest.mark.asyncio
async def test_a_device_is_opened_and_closed(records: Records) -> None:
    async with aiocuda.open_device(driver="host") as device:
        (opened,) = records.of("device_opened")
        assert (opened["device"], opened["index"], opened["driver"]) == (device.name, 0, "host")
        assert records.of("device_closed") == []
    (closed,) = records.of("device_closed")
    assert (closed["device"], closed["unfinished"], closed["level"]) == (device.name, 0, "info")


@pytest.mark.asyncio
async def test_a_device_is_left_with_unfinished_work(records: Records) -> None:
    device = await aiocuda.open_device(driver="host")
    device.drain_timeout = 0.01
    latch = Latch(device)
    stream = device.stream()
    held = latch.hold(stream)
    await latch.held()
    with pytest.warns(aiocuda.DrainTimeoutWarning), pytest.raises(ZeroDivisionError):
        async with device:
            raise ZeroDivisionError
    latch.release()
    (closed,) = records.of("device_closed")
    assert closed["level"] == "warning"
    assert closed["unfinished"] >= 1
    assert held.done()


@pytest.mark.asyncio
async def test_a_fault_has_the_context_of_the_task_that_submitted_the_work(records: Records) -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream, other = device.stream(), device.stream()

        async def request(name: str) -> None:
            structlog.contextvars.bind_contextvars(request_id=name)
            with pytest.raises(DeviceFault):
                await stream.launch(TRAP, 1, 1)

        structlog.contextvars.bind_contextvars(request_id="main")
        await other.synchronize()
        await asyncio.create_task(request("r-7"))
    (fault,) = records.of("device_fault")
    assert fault["request_id"] == "r-7"
    assert fault["level"] == "error"
    assert fault["failed"] >= 1
    assert "launch" in fault["operation"]


@pytest.mark.asyncio
async def test_memory_is_trimmed(device: Device, stream: Stream, records: Records) -> None:
    buffer = stream.empty(1 << 20)
    buffer.free()
    await quickly(stream.synchronize())
    freed = await quickly(device.memory.trim(keep=1 << 40))
    (trimmed,) = records.of("memory_trimmed")
    assert (trimmed["device"], trimmed["freed_bytes"]) == (device.name, freed)
    assert trimmed["keep_bytes"] == 1 << 40


@pytest.mark.asyncio
async def test_memory_is_trimmed_for_an_allocation(records: Records) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("allocate", error=lambda: aiocuda.DeviceOutOfMemory("none left"))
        stream.empty(8)
        (trimmed,) = records.of("memory_trimmed")
        assert trimmed["requested_bytes"] == 32


@pytest.mark.asyncio
async def test_an_event_pool_is_full(device: Device, records: Records) -> None:
    pool = aiocuda.EventPool(device, limit=1)
    event = pool.acquire_nowait()
    with pytest.raises(QueueFullError):
        pool.acquire_nowait()
    (full,) = records.of("queue_full")
    assert (full["queue"], full["limit"], full["level"]) == ("event pool", 1, "warning")
    event.release()


@pytest.mark.asyncio
async def test_a_full_stream_is_reported_once(records: Records) -> None:
    async with aiocuda.open_device(driver="host", max_in_flight=2) as device:
        latch = Latch(device)
        stream = device.stream(name="busy")
        buffer = stream.empty(4)
        latch.hold(stream)
        await latch.held()
        with structlog.contextvars.bound_contextvars(request_id="r-3"):
            for _ in range(50):
                stream.fill(buffer, 1)
        latch.release()
        await quickly(stream.synchronize())
    (full,) = records.of("queue_full")
    assert (full["queue"], full["stream"], full["limit"], full["request_id"]) == ("stream", "busy", 2, "r-3")


@pytest.mark.asyncio
async def test_a_stream_is_left_open(device: Device, records: Records) -> None:
    """The event is written on the loop, although the garbage collector runs elsewhere."""
    stream = device.stream(name="forgotten")
    await quickly(stream.synchronize())
    holder = [stream]
    del stream

    def collect() -> None:
        holder.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed"):
        await asyncio.to_thread(collect)
    await until(lambda: bool(records.of("stream_left_open")))
    ((fields, thread),) = [each for each in records.all if each[0]["event"] == "stream_left_open"]
    assert (fields["stream"], fields["device"]) == ("forgotten", device.name)
    assert fields["opened_at"].startswith(f"{__file__}:")
    assert thread == threading.get_ident()


def test_a_lost_notification(records: Records) -> None:
    """The watchdog finds the end of the operation, and some rounds later the notifier that has not come."""

    async def main() -> None:
        driver = SimulatedDriver(0, upsets=[Upset("lose")])
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            stream = device.stream(name="first")
            with structlog.contextvars.bound_contextvars(request_id="r-4"):
                waiting = stream.launch(SPIN, 1, 1, 50_000_000)
            second = device.stream()
            other = second.launch(SPIN, 1, 1, 900_000_000)
            await waiting
            await other
            assert device.statistics().lost_wakes == 1
        driver.close()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    (lost,) = records.of("notification_lost")
    assert (lost["stream"], lost["request_id"], lost["lost"]) == ("first", "r-4", 1)


def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - it is the mistake that the event reports


async def reported(records: Records, block: Callable[[], object], **expected: str) -> dict[str, Any]:
    """Block the loop again until there is a report with these texts in its fields, and return it.

    On a busy machine, the thread that samples the stack can come too late.
    """
    found: list[dict[str, Any]] = []

    def look() -> object:
        events = records.of("loop_blocked")
        found[:] = [each for each in events if all(text in each[name] for name, text in expected.items())]
        return found or block()

    await until(look, "the report")
    return found[0]


@pytest.mark.asyncio
async def test_a_callback_that_blocks_the_loop_is_named(records: Records) -> None:
    """The event has no context variables: another task may have begun the work that the watchdog watches."""
    structlog.contextvars.bind_contextvars(request_id="of another request")
    async with aiocuda.open_device(driver="host") as device:
        latch = Latch(device)
        stream = device.stream()
        latch.hold(stream)
        await latch.held()

        async def handler() -> dict[str, Any]:
            return await reported(records, lambda: block_the_loop(0.3), callback="handler", line="block_the_loop (")

        blocked = await asyncio.create_task(handler())
        latch.release()
    assert "request_id" not in blocked
    assert blocked["seconds"] > 0.05
    assert __file__ in blocked["callback"]
    await until(lambda: all(thread.name != "aiocuda-loop-watch" for thread in threading.enumerate()))


@contextlib.asynccontextmanager
async def waiting_request(device: aiocuda.Device, kind: str) -> AsyncIterator[None]:
    """Something waits in a block, and the device is idle."""
    hold = asyncio.Event()

    async def infer(batch: Any) -> Any:
        await hold.wait()
        return batch.items

    async def stage(slot: Any) -> None:
        await hold.wait()

    waiting: Any
    async with (
        MicroBatcher(infer, max_batch_size=1, device=None if "without" in kind else device) as batcher,
        aiocuda.Pipeline(device, [aiocuda.Stage("stage", stage)]) as pipeline,
        aiocuda.AsyncCoordinator(device) as coordinator,
    ):
        if kind.startswith("batcher"):
            waiting = asyncio.ensure_future(batcher.submit(1))
        elif kind == "pipeline":
            waiting = await pipeline.submit(1)
        else:
            event = aiocuda.EventPool(device).acquire_nowait()
            waiting = coordinator.upload(np.ones(1), after=event)
        await asyncio.sleep(0)
        yield
        hold.set()
        if kind == "coordinator":
            async with device.stream() as stream:
                stream.record(event=event)
        await quickly(waiting)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["batcher", "batcher without a device", "pipeline", "coordinator"])
async def test_callback_that_blocks_the_loop_while_requests_wait_is_named(records: Records, kind: str) -> None:
    """The event was silent, because the device had no work: the loop was blocked before it could give it any."""
    async with aiocuda.open_device(driver="host") as device, waiting_request(device, kind):

        async def handler() -> None:
            await reported(records, lambda: block_the_loop(0.3), callback="handler", line="block_the_loop (")

        await asyncio.create_task(handler())
    await until(lambda: all(thread.name != "aiocuda-loop-watch" for thread in threading.enumerate()))


@pytest.mark.asyncio
async def test_a_callback_that_blocks_inside_asyncio_is_named(records: Records) -> None:
    async with aiocuda.open_device(driver="host") as device:
        latch = Latch(device)
        stream = device.stream()
        latch.hold(stream)
        await latch.held()
        loop = asyncio.get_running_loop()

        def call_soon_often() -> None:
            began = time.monotonic()
            gc.disable()  # with so many handles, a collection takes most of the time
            try:
                while time.monotonic() < began + 0.3:
                    loop.call_soon(int)
            finally:
                gc.enable()

        await reported(records, call_soon_often, callback=__file__)
        latch.release()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("driver", "value", "told"), [(FewQueues, None, 1), (FewQueues, "8", 0), (HostDriver, None, 0)]
)
async def test_few_hardware_queues_are_logged_unless_the_program_has_asked_for_them(
    records: Records, monkeypatch: pytest.MonkeyPatch, driver: type[HostDriver], value: str | None, told: int
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value or "")
    if value is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    with contextlib.closing(driver()) as made:
        async with aiocuda.open_device(driver=made):
            pass
    events = records.of("few_hardware_queues")
    assert len(events) == told
    for event in events:
        assert (event["level"], event["device"], event["index"], event["hardware_queues"]) == ("info", "host 0", 0, 8)


@pytest.mark.asyncio
async def test_a_garbage_collection_that_blocks_the_loop_is_named(records: Records) -> None:
    def collect_slowly(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            block_the_loop(0.3)

    async with aiocuda.open_device(driver="host") as device:
        latch = Latch(device)
        stream = device.stream()
        latch.hold(stream)
        await latch.held()

        def collect() -> None:
            gc.callbacks.append(collect_slowly)
            try:
                gc.collect(1)
            finally:
                gc.callbacks.remove(collect_slowly)

        name = "test_a_garbage_collection_that_blocks_the_loop_is_named"
        blocked = await reported(records, collect, callback="garbage collection of generation 1, ", line=name)
        latch.release()
    assert re.fullmatch(r"garbage collection of generation 1, [\d.e+]+ ms", blocked["callback"])


@pytest.mark.asyncio
async def test_line_that_the_collector_interrupts_is_the_innermost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that allocates was reported at a line of the library, which the collector calls."""
    monkeypatch.setattr(_collections, "NOTED", 0.0)
    found: list[Any] = []

    def observe(collection: object) -> None:
        found.append(_loop_watch.running_callback(threading.get_ident()))

    async with aiocuda.open_device(driver="host"):
        COLLECTIONS.observers.append(observe)
        try:
            gc.collect()
        finally:
            COLLECTIONS.observers.remove(observe)
    name = test_line_that_the_collector_interrupts_is_the_innermost_one.__qualname__
    assert found
    for callback, line in found:
        assert line.startswith(f"{name} ({__file__}:")
        assert "_collections.py" not in callback


@pytest.mark.asyncio
async def test_a_garbage_collection_of_the_library_is_not_reported(records: Records) -> None:
    def collect_slowly(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            block_the_loop(0.3)

    async with aiocuda.open_device(driver="host") as device:
        latch = Latch(device)
        stream = device.stream()
        latch.hold(stream)
        await latch.held()
        gc.callbacks.append(collect_slowly)
        try:
            COLLECTIONS.collect()
        finally:
            gc.callbacks.remove(collect_slowly)
        waking = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > waking + 2)
        latch.release()
    events = records.of("loop_blocked")  # a busy machine may be late elsewhere
    assert not [each for each in events if "garbage collection" in each["callback"] or "collect" in each["line"]]


@pytest.mark.asyncio
async def test_a_batch_function_that_blocks_the_loop_before_it_gives_work_to_the_device_is_named(
    records: Records,
) -> None:
    """The wait for its stream began a timer of the device, which hid that the timer of the batcher was late."""

    async def infer(batch: Any) -> Any:
        block_the_loop(0.3)
        return batch.items

    async with (
        aiocuda.open_device(driver="host") as device,
        MicroBatcher(infer, max_batch_size=1, device=device) as batcher,
    ):
        for _ in range(3):
            before = len(records.of("loop_blocked"))
            await quickly(batcher.submit(0))
            await until(functools.partial(has_more_events, records, before), "the report")
    assert all(each["seconds"] > 0.2 for each in records.of("loop_blocked"))


def has_more_events(records: Records, before: int) -> bool:
    return len(records.of("loop_blocked")) > before


class _Requests:
    """Requests that wait, for `LoopWatch.watch_while`."""

    waiting = True

    def wait(self) -> bool:
        return self.waiting


@pytest.mark.parametrize("first", ["reactor", "requests"])
def test_a_timer_in_time_hides_no_other_one_that_is_late(
    records: Records, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """There is a timer of the reactor, and one for requests that wait: the first of them comes, and rests."""
    clock, requests = [1.0], _Requests()
    timers: list[Any] = []
    monkeypatch.setattr(_loop_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(_loop_watch, "_sampler", SimpleNamespace(watch=lambda *_: None, forget=lambda *_: None))
    loop = SimpleNamespace(call_later=lambda _, call, **__: timers.append(call))
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    watch = _loop_watch.LoopWatch()

    def arrive() -> None:
        watch.arrived()
        watch.rest()

    starts: list[Any] = [lambda: watch.expect(0.025), lambda: watch.watch_while(requests.wait)]
    arrivals: list[Any] = [arrive, lambda: timers.pop()()]
    if first == "requests":
        starts, arrivals = starts[::-1], arrivals[::-1]
    starts[0]()
    clock[0] += 0.01
    starts[1]()
    requests.waiting = False
    clock[0] += 0.015
    arrivals[0]()
    assert not records.of("loop_blocked")
    clock[0] += 0.2
    arrivals[1]()
    (report,) = records.of("loop_blocked")
    assert report["seconds"] == pytest.approx(0.19)


def test_a_timer_that_is_late_by_at_most_50_ms_is_not_reported(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time.monotonic()]
    monkeypatch.setattr(_loop_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(_loop_watch, "_sampler", SimpleNamespace(watch=lambda *_: None, forget=lambda *_: None))
    watch = _loop_watch.LoopWatch()
    for late, reports in ((0.0, 0), (0.049, 0), (0.051, 1), (0.0, 1)):
        watch.expect(0.025)
        clock[0] += 0.025 + late
        watch.arrived()
        assert len(records.of("loop_blocked")) == reports


@pytest.mark.asyncio
async def test_a_kernel_is_loaded(device: Device, stream: Stream, records: Records) -> None:
    """With the context of the task that launched it first, although it is loaded on a worker thread."""
    source = f'extern "C" __global__ void nothing{time.time_ns()}(float *x) {{}}'
    name = source.split()[4].partition("(")[0]
    kernel = Kernel(name, source=source, host=lambda x: None)
    buffer = stream.empty(4, np.float32)
    with structlog.contextvars.bound_contextvars(request_id="r-9"):
        launched = stream.launch(kernel, 1, 1, buffer)
    await quickly(launched)
    (loaded,) = records.of("kernel_loaded")
    assert (loaded["kernel"], loaded["device"], loaded["request_id"]) == (name, device.name, "r-9")
    assert loaded["origin"] == ("compiled" if device.driver.name == "cuda" else "host")
    assert loaded["seconds"] >= 0
    if device.driver.name == "cuda":  # another kernel of the same source comes from the cache on disk
        await quickly(stream.launch(Kernel(name, source=source), 1, 1, buffer))
        assert records.of("kernel_loaded")[1]["origin"] == "cache"
