"""Events: a point in a stream's order, on loan."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DriverError,
    Event,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    WrongDeviceError,
)
from aiocuda.driver.host import HostDriver
from tests.helpers import SPIN, Latch, Peer, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_event_covers_all_earlier_work(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    before = stream.fill(stream.empty(4), 1)
    event = stream.record()
    assert isinstance(event, Event)
    assert event.operation.kind == "record"
    assert event.stream is stream
    await latch.held()
    assert not event.done()
    with pytest.raises(BusyError):
        event.result()
    latch.release()
    assert await quickly(_await(event)) is None
    assert before.done()
    assert event.done()
    assert event.result() is None
    assert event.exception() is None
    assert await event.wait() is None
    assert repr(event) == "<Event done>"


async def _await(event: Event) -> None:
    await event


async def watched(device: Device) -> None:
    """Every stream with unfinished work has been polled: an event that is not done is held."""
    ticks = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > ticks + 2, "the watchdog")


async def test_callbacks(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    event = stream.record()
    called: list[Any] = []
    event.add_done_callback(called.append)
    event.add_done_callback(print)
    assert event.remove_done_callback(print) == 1
    latch.release()
    await quickly(_await(event))
    await asyncio.sleep(0)
    assert called == [event.operation]


async def test_other_streams_wait_for_it_on_the_device(stream: Stream, other: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.zeros(4, np.float32))
    latch.hold(stream)
    stream.fill(buffer, 5)
    event = stream.record()
    other.wait(event)
    result = other.download(buffer)
    await latch.held()
    assert not result.done()
    latch.release()
    assert (await quickly(result) == 5).all()


async def test_elapsed_time(stream: Stream) -> None:
    start = stream.record(timing=True)
    stream.launch(SPIN, 1, 1, 20_000_000)
    end = stream.record(timing=True)
    with pytest.raises(BusyError, match="await it, then ask"):
        start.elapsed_ms(end)
    await end
    assert start.elapsed_ms(end) > 19
    assert start.elapsed_ms(start) == 0


async def test_elapsed_time_of_events_that_take_none(stream: Stream) -> None:
    plain, timed = stream.record(), stream.record(timing=True)
    await timed
    for start, end in ((plain, timed), (timed, plain)):
        with pytest.raises(InvalidArgumentError, match="timing=True"):
            start.elapsed_ms(end)


async def test_released_event_answers_to_nothing(stream: Stream, other: Stream) -> None:
    event = stream.record()
    await event
    event.release()
    assert repr(event) == "<Event released>"
    uses: list[Callable[[], object]] = [
        event.done,
        event.result,
        event.exception,
        event.release,
        lambda: event.handle,
        lambda: event.operation,
        lambda: event.stream,
        lambda: other.wait(event),
        lambda: stream.record(event=event),
        lambda: aiocuda.gather(event),
    ]
    for use in uses:
        with pytest.raises(StaleHandleError, match="has been released"):
            use()
    with pytest.raises(StaleHandleError):
        await event


async def test_waits_that_were_given_for_it_hold_after_its_release(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    latch.hold(stream)
    event = stream.record()
    waiting = other.wait(event)
    event.release()
    await latch.held()
    await watched(device)
    assert not waiting.done()
    latch.release()
    await quickly(waiting)


@pytest.mark.parametrize("how", ["released", "recorded again"])
async def test_given_up_while_it_is_still_on_the_host(how: str) -> None:
    """Its CUDA event must not serve another loan before it has been recorded: that loan would end too early."""
    async with open_peer(max_in_flight=2) as (_, device):
        stream, other = device.stream(), device.stream()
        with Latch(device) as latch, Latch(device) as second:
            for each in (latch, second):
                each.hold(stream)
                await each.held()
                each.release()
                await stream.synchronize()
            latch.hold(stream)
            stream.synchronize()
            event = stream.record()
            first = event.operation
            assert first.state == "queued"
            if how == "released":
                event.release()
            else:
                stream.record(event=event)
            hold = second.hold(other)  # takes an event from the pool
            await second.held()
            latch.release()
            await quickly(first)
            await quickly(stream.synchronize())
            await watched(device)
            assert not hold.done()
            second.release()
            await quickly(hold)


async def test_event_skipped_before_it_was_recorded_gives_its_cuda_event_back() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        await stream.synchronize()
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        events = [stream.record() for _ in range(10)]
        await until(lambda: events[-1].done(), "the end")
        for event in events:
            event.release()
        with pytest.raises(DriverError):
            await failing
        made = device.statistics().events
        again = [stream.record() for _ in range(10)]
        await again[-1]
        assert device.statistics().events <= made + 1


async def test_recorded_again(stream: Stream, other: Stream, latch: Latch) -> None:
    event = stream.record()
    await event
    first = event.operation
    latch.hold(other)
    assert other.record(event=event) is event
    assert event.operation is not first
    assert event.stream is other
    await latch.held()
    assert (first.done(), event.done()) == (True, False)
    latch.release()
    await quickly(_await(event))


async def test_new_record_does_not_disturb_the_one_before(stream: Stream, other: Stream, latch: Latch) -> None:
    """A waiter for the first record waits for that record, even if the event is recorded again."""
    latch.hold(stream)
    event = stream.record()
    first = event.operation
    waiting = asyncio.create_task(first.wait())
    other.record(event=event)
    await quickly(_await(event))
    assert not first.done()
    await latch.held()
    latch.release()
    await quickly(waiting)


async def test_handle_is_the_drivers_handle(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    event = stream.record()
    await latch.held()
    assert not device.driver.event_query(event.handle)
    latch.release()
    await quickly(_await(event))
    assert device.driver.event_query(event.handle)


async def test_never_recorded(device: Device, stream: Stream) -> None:
    event = EventPool(device).acquire_nowait()
    assert repr(event) == "<Event never recorded>"
    for use in (event.done, event.result, lambda: event.operation, lambda: stream.wait(event)):
        with pytest.raises(InvalidArgumentError, match=r"stream\.record\(event=event\)"):
            use()
    with pytest.raises(InvalidArgumentError):
        await event


async def test_of_another_device() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(0, driver=peer.driver) as first,
            aiocuda.open_device(1, driver=peer.driver) as second,
        ):
            one, two = first.stream(), second.stream()
            event = one.record()
            with pytest.raises(WrongDeviceError):
                two.record(event=event)
            assert await quickly(two.wait(event)) is None  # but waiting for it is fine
            start, end = one.record(timing=True), two.record(timing=True)
            await aiocuda.gather(start.operation, end.operation)
            with pytest.raises(WrongDeviceError, match=r"is of host:0, and .* of host:1: only events of one device"):
                start.elapsed_ms(end)


async def test_what_is_no_event(stream: Stream) -> None:
    with pytest.raises(InvalidTypeError, match=r"must be an aiocuda\.Event"):
        stream.record(event=7)  # type: ignore[arg-type]  # that is the point


async def test_time_is_not_asked_of_an_event_without(device: Device, stream: Stream) -> None:
    pool = EventPool(device)
    timed, plain = pool.acquire_nowait(timing=True), pool.acquire_nowait()
    with pytest.raises(InvalidArgumentError, match=r"pool\.acquire\(timing=True\)"):
        stream.record(timing=True, event=plain)
    for event in (stream.record(event=plain), stream.record(event=timed), stream.record(timing=True, event=timed)):
        await event


async def test_cannot_be_pickled_or_copied(stream: Stream) -> None:
    event = stream.record()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="belongs to this process"):
            attempt(event)
    await event


async def test_failure_of_the_stream_is_its_failure() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        event = stream.record()
        await until(event.done, "the end")
        assert isinstance(event.exception(), aiocuda.SkippedError)
        with pytest.raises(aiocuda.SkippedError):
            await event
        del failing


async def test_dropped_events_are_used_again(device: Device, stream: Stream) -> None:
    for _ in range(10):
        await stream.record(timing=True)
    gc.collect()
    made = device.statistics().events
    for _ in range(200):
        await stream.record(timing=True)
        stream.record()
    await stream.synchronize()
    assert device.statistics().events <= made + 100  # as many as were in flight at the same time
    made = device.statistics().events
    for _ in range(100):
        await stream.record(timing=True)
    assert device.statistics().events <= made + 2


async def test_event_dropped_while_it_is_under_way(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    latch.hold(stream)
    waiting = other.wait(stream.record())
    gc.collect()
    await latch.held()
    filler = [other.record() for _ in range(20)]
    await watched(device)
    assert not waiting.done()
    latch.release()
    await quickly(waiting)
    await quickly(_await(filler[-1]))
