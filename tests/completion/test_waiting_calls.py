"""Calls of the driver that wait for running work are counted, logged and drawn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Kernel
from aiocuda.completion._waiting_calls import (
    CURES,
    LONG,
    MOST_NAMED,
    WaitingCall,
    WaitingCalls,
    oldest_unfinished,
)
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Timeline
from tests.helpers import Latch, Peer, open_peer, quickly, until
from tests.project.tree import ROOT

Action: TypeAlias = Callable[[Device], Awaitable[object]]


class Events(logging.Handler):
    """The log events."""

    def __init__(self) -> None:
        super().__init__()
        self._fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        self._fields.append(dict(message))

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the events with this name."""
        return [each for each in self._fields if each["event"] == name]


@pytest.fixture
def events() -> Iterator[Events]:
    handler, logger = Events(), logging.getLogger("aiocuda")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class Clocked(Peer):
    """A driver whose clock moves only during the calls that a test makes long."""

    def __init__(self) -> None:
        super().__init__(HostDriver(devices=2))
        self.time = 1.0

    def now(self) -> float:
        return self.time

    def make_long(self, method: str, seconds: float = 1.5 * LONG, then: Callable[[], object] = lambda: None) -> None:
        """Let the next call of a method take so many seconds, and call a function in it."""

        def be_long(*arguments: object) -> None:
            del self.before[method]
            then()
            self.time += seconds

        self.before[method] = be_long


@contextlib.asynccontextmanager
async def held(device: Device, label: str = "request 17") -> AsyncIterator[Latch]:
    """A kernel that runs until the block ends, or until the latch is released."""
    async with device.stream(name="long") as stream:
        with Latch(device) as latch:
            with aiocuda.label(label):
                latch.hold(stream)
            await latch.held()
            yield latch


async def pin(device: Device) -> None:
    async with device.pin(np.zeros(16)):
        pass


async def unified(device: Device) -> None:
    device.unified(16).free()
    await trim(device)


async def trim(device: Device) -> None:
    await device.memory.trim()


async def load(device: Device) -> None:
    await device.load(Kernel("new", source='extern "C" __global__ void new(float *x) {}', host=lambda x: None))


async def stream(device: Device) -> None:
    async with device.stream():
        pass


async def copy_between_devices(device: Device) -> None:
    async with aiocuda.open_device(1, driver=device.driver) as other, other.stream() as there, device.stream() as here:
        await here.copy(here.empty(16), there.empty(16))
        await here.copy(here.empty(16), there.empty(16))


NAP = Kernel("nap", source='extern "C" __global__ void nap() {}', host=lambda: None, host_seconds=0.2)


async def wait(device: Device) -> None:
    async with device.stream() as stream:
        await stream.launch(NAP, 1, 1)


#: The name of CUDA's function, the method of the driver, and a coroutine function of the program that calls it.
CALLS: list[tuple[str, str, Action]] = [
    ("cuMemHostRegister", "pin", pin),
    ("cuMemHostUnregister", "unpin", pin),
    ("cuMemAllocManaged", "managed_allocate", unified),
    ("cuMemFree", "managed_deallocate", unified),
    ("cuKernelGetFunction", "load", load),
    ("cuStreamCreateWithPriority", "stream_create", stream),
    ("cuStreamCreateWithPriority", "notifier", wait),
    ("cuStreamDestroy", "stream_destroy", stream),
    ("cuMemPoolTrimTo", "pool_trim", trim),
    ("cuCtxEnablePeerAccess", "copy_peer", copy_between_devices),
]


def test_each_call_has_a_cure_and_is_on_the_page() -> None:
    assert {name for name, _, _ in CALLS} == set(CURES)
    page = (ROOT / "docs" / "explanation" / "calls-that-wait.md").read_text(encoding="utf-8")
    assert [name for name in CURES if f"`{name}`" not in page] == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "method", "action"), CALLS, ids=[method for _, method, _ in CALLS])
async def test_long_call_beside_running_work_is_counted_and_logged(
    name: str, method: str, action: Action, events: Events
) -> None:
    peer = Clocked()
    async with open_peer(peer) as (_, device):
        await device.load(NAP)
        async with held(device) as latch:
            peer.make_long(method, then=latch.release)  # some of the calls wait for the kernel
            await quickly(action(device))
        (event,) = events.of("driver_call_waited")
        assert (event["level"], event["call"], event["cure"]) == ("warning", name, CURES[name])
        assert event["seconds"] == pytest.approx(1.5 * LONG)
        assert event["running"].split(", ")[0] == "hold 'request 17' on long"
        assert device.statistics().driver_calls_waited == 1


@pytest.mark.asyncio
async def test_work_that_begins_during_the_call_counts(events: Events) -> None:
    """A launch of another thread may be held from then on."""
    peer, begun = Clocked(), threading.Event()
    async with open_peer(peer) as (_, device), device.stream(name="long") as stream:
        with Latch(device) as latch:
            first = latch.hold(stream)  # loads the kernel
            latch.release()
            await quickly(first)
            peer.make_long("load", then=begun.wait)
            loading = asyncio.ensure_future(load(device))
            await until(lambda: "load" not in peer.before)
            latch.hold(stream)
            await latch.held()
            begun.set()
            await quickly(loading)
            latch.release()
        (event,) = events.of("driver_call_waited")
        assert (event["call"], event["running"]) == ("cuKernelGetFunction", "hold on long")


@pytest.mark.asyncio
async def test_call_in_progress_holds_no_operation() -> None:
    """An operation that it held would hold its result, and a pipeline would take another block for its next item."""
    peer, begun, go = Clocked(), threading.Event(), threading.Event()
    async with open_peer(peer) as (_, device), device.stream() as stream, device.stream() as other:
        with Latch(device) as latch:
            operation = weakref.ref(other.wait(latch.hold(stream)))
            await latch.held()
            peer.make_long("load", then=lambda: (begun.set(), go.wait(60)))
            loading = asyncio.ensure_future(load(device))
            await until(begun.is_set)
            latch.release()
            await quickly(other.synchronize())
            held = operation()
            go.set()
            await quickly(loading)
            assert held is None


@pytest.mark.asyncio
async def test_long_call_on_an_idle_device_is_not_reported(events: Events) -> None:
    peer = Clocked()
    async with open_peer(peer) as (_, device):
        peer.make_long("load")
        await quickly(load(device))
        assert device.statistics().driver_calls_waited == 0
    assert events.of("driver_call_waited") == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds", "reports"), [(0.9 * LONG, 0), (1.1 * LONG, 1)])
async def test_call_is_long_after_20_ms(seconds: float, reports: int, events: Events) -> None:
    peer = Clocked()
    async with open_peer(peer) as (_, device), held(device) as latch:
        peer.make_long("load", seconds)
        await quickly(load(device))
        latch.release()
    assert len(events.of("driver_call_waited")) == reports


@pytest.mark.asyncio
async def test_work_that_waits_on_the_host_does_not_run(events: Events) -> None:
    """A launch whose kernel is being loaded waits for the call, and not the call for it."""
    peer = Clocked()
    async with open_peer(peer) as (_, device), device.stream() as stream:
        peer.make_long("load")
        await quickly(stream.launch(NAP, 1, 1))
    assert events.of("driver_call_waited") == []


@pytest.mark.asyncio
async def test_work_of_another_device_of_the_driver_counts(events: Events) -> None:
    """A call of CUDA waits for the kernels of all devices, and each device counts it from when it was opened."""
    peer = Clocked()
    peer.inner = HostDriver(devices=2)
    async with open_peer(peer) as (_, device), held(device) as latch:
        async with aiocuda.open_device(1, driver=peer.driver) as other:
            peer.make_long("load")
            await quickly(load(other))
            assert [each.statistics().driver_calls_waited for each in (device, other)] == [1, 1]
            latch.release()  # the end of a device waits for it, too
        async with aiocuda.open_device(1, driver=peer.driver) as again:
            assert again.statistics().driver_calls_waited == 0
    assert len(events.of("driver_call_waited")) == 1


@pytest.mark.asyncio
async def test_operations_of_a_few_streams_are_named(events: Events) -> None:
    peer = Clocked()
    async with open_peer(peer) as (_, device), contextlib.AsyncExitStack() as stack:
        with Latch(device) as latch:
            for number in range(MOST_NAMED + 1):
                own = await stack.enter_async_context(device.stream(name=f"s{number}"))
                latch.hold(own)
                own.synchronize()
            await latch.held()
            peer.make_long("load")
            await quickly(load(device))
            latch.release()
    (event,) = events.of("driver_call_waited")
    assert event["running"] == ", ".join(f"hold on s{number}" for number in range(MOST_NAMED))


@pytest.mark.asyncio
async def test_call_that_fails_is_reported_and_raises(events: Events) -> None:
    peer = Clocked()

    def fail() -> None:
        peer.time += 2 * LONG
        raise aiocuda.DeviceOutOfMemory("no room", requested=16)

    async with open_peer(peer) as (_, device), held(device) as latch:
        peer.make_long("pin", then=fail)
        with pytest.raises(aiocuda.DeviceOutOfMemory, match="no room"):
            await quickly(pin(device))
        latch.release()
    assert [event["call"] for event in events.of("driver_call_waited")] == ["cuMemHostRegister"]


@pytest.mark.asyncio
async def test_filter_of_the_program_that_fails_does_not_fail_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made on a thread without an event loop."""

    class Failing(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise ZeroDivisionError

    heard: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: heard.append(arguments.exc_type))
    peer, handler, logger = Clocked(), Failing(), logging.getLogger("aiocuda")
    async with open_peer(peer) as (_, device), held(device) as latch:
        peer.make_long("load")
        logger.addHandler(handler)
        try:
            await quickly(load(device))
        finally:
            logger.removeHandler(handler)
        latch.release()
    assert heard == [ZeroDivisionError]


# -- the loop, and the timeline, with a call of the host driver that waits


@contextlib.asynccontextmanager
async def waiting_call(device: Device) -> AsyncIterator[None]:
    """A thread waits in a call until the block ends. It has been there for a while."""
    calls, now = WaitingCalls.of(device.driver), device.driver.now
    async with held(device) as latch:
        pinning = asyncio.ensure_future(pin(device))
        await until(lambda: calls.longest(now() - LONG, now()) == "cuMemHostUnregister", "the call")
        yield
        latch.release()
        await quickly(pinning)


def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - it is the mistake that the event reports


def calls_of(events: Events, known: int = 0) -> set[Any]:
    """Return the driver calls that events of a blocked loop name; None for an event without one."""
    return {event.get("driver_call") for event in events.of("loop_blocked")[known:]}


@pytest.mark.asyncio
async def test_event_of_a_blocked_loop_names_the_call_of_another_thread(events: Events) -> None:
    async with aiocuda.open_device(driver="host") as device:
        async with waiting_call(device):
            # On a busy machine, the loop stands still without the call, too.
            await until(lambda: calls_of(events) - {None} or block_the_loop(0.3), "a report with a call")
        assert calls_of(events) - {None} == {"cuMemHostUnregister"}
        async with held(device) as latch:
            known = len(events.of("loop_blocked"))
            await until(lambda: None in calls_of(events, known) or block_the_loop(0.3), "a report without a call")
            latch.release()


@pytest.mark.asyncio
async def test_timeline_shows_the_call_and_the_iteration_that_it_blocked() -> None:
    async with aiocuda.open_device(driver="host") as device:
        async with Timeline(device) as timeline:
            async with waiting_call(device):
                block_the_loop(0.05)
                await asyncio.sleep(0)
        recording = timeline.recording()
        async with waiting_call(device):
            pass
        assert timeline.recording().calls == recording.calls  # the block has ended
    trace = json.loads(timeline.to_trace())["traceEvents"]
    (row,) = [each for each in trace if each.get("args", {}).get("name") == "driver calls that waited"]
    calls = [each for each in trace if each.get("cat") == "driver call" and each["name"] == "cuMemHostUnregister"]
    (shown,) = calls
    assert (shown["pid"], shown["tid"]) == (row["pid"], row["tid"])
    assert shown["args"] == {"running": "hold 'request 17' on long"}
    assert shown["dur"] >= 0.05e6
    longest = max((each for each in trace if each.get("cat") == "blocked"), key=lambda each: each["dur"])
    assert longest["args"]["driver call"] == "cuMemHostUnregister"
    assert "driver call" in timeline.to_html()


def test_the_call_that_took_most_of_a_time_is_the_longest() -> None:
    peer = Clocked()
    calls = WaitingCalls.of(peer.driver)
    assert WaitingCalls.of(peer.driver) is calls

    def inner() -> None:
        peer.time = 1.9
        assert calls.longest(1.0, 1.9) == "cuMemFree"  # in progress

    def outer() -> None:
        peer.time = 1.6
        calls.run("cuMemHostRegister", inner)

    calls.run("cuMemFree", outer)
    peer.time = 3.0
    assert calls.longest(1.0, 1.9) == "cuMemFree"
    assert calls.longest(1.8, 2.1) is None
    assert calls.longest(0.0, 1.5) is None
    calls.run("cuMemFree", lambda: setattr(peer, "time", 3.0 + 0.5 * LONG))  # a short one is not remembered
    assert calls.longest(3.0, peer.time) is None
    peer.inner.close()


@pytest.mark.asyncio
async def test_watch_of_calls_ends() -> None:
    peer, seen = Clocked(), list[WaitingCall]()
    async with open_peer(peer) as (_, device), held(device) as latch:
        calls = WaitingCalls.of(peer.driver)
        calls.watch(seen.append)
        peer.make_long("load")
        await quickly(load(device))
        calls.unwatch(seen.append)
        peer.make_long("load")
        await quickly(load(device))
        latch.release()
    (call,) = seen
    assert call.name == "cuKernelGetFunction"
    assert call.end - call.start == pytest.approx(1.5 * LONG)


@pytest.mark.asyncio
async def test_unfinished_work_is_found_while_another_thread_changes_it() -> None:
    """Also on free-threaded Python, where a deque may change while another thread copies it."""
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        buffer = stream.empty(4)
        over = threading.Event()

        def look() -> int:
            looks = 0
            while not over.is_set():
                oldest_unfinished(device.driver, MOST_NAMED)
                stream.statistics()
                looks += 1
            return looks

        looking = asyncio.ensure_future(asyncio.to_thread(look))
        for value in range(300):
            await quickly(aiocuda.gather(*(stream.fill(buffer, value) for _ in range(8))))
        over.set()
        assert await quickly(looking) > 0
