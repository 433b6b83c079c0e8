"""Events: rows D1 to D5 of docs/reference/features.md, on every driver."""

from __future__ import annotations

import asyncio

import pytest

import aiocuda
from aiocuda import Device, EventPool, InvalidArgumentError, QueueFullError, StaleHandleError
from tests.helpers import PATIENCE, SPIN, Latch, quickly, until

pytestmark = pytest.mark.asyncio


async def test_pool_lends_within_a_limit_and_takes_back_by_itself(device: Device) -> None:
    """D1: timing events and others, by name; released or dropped, each makes room; and what is lent is known."""
    pool = EventPool(device, limit=2)
    timing, plain = await pool.acquire(timing=True), pool.acquire_nowait()
    assert (timing.timing, plain.timing) == (True, False)
    assert pool.statistics().utilisation == 1.0
    assert pool.statistics().lent_timing == 1
    with pytest.raises(QueueFullError):
        pool.acquire_nowait()
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    pool.release(timing)
    third = await quickly(waiting)
    del plain, waiting
    async with pool.borrow() as event, device.stream() as stream:
        await stream.record(event=event)
    third.release()
    found = pool.statistics()
    assert (found.lent, found.peak, found.acquired, found.waited, found.utilisation) == (0, 2, 4, 1, 0.0)


async def test_pool_makes_no_event_where_one_is_idle(device: Device) -> None:
    """D1: the pool grows with the number of simultaneous loans, not with the total number of loans."""
    pool = EventPool(device, limit=64)
    async with device.stream() as stream:
        for _ in range(4):
            async with pool.borrow() as event:
                await stream.record(event=event)
        events = device.statistics().events
        for _ in range(100):
            async with pool.borrow() as event:
                await stream.record(event=event)
        assert device.statistics().events == events


async def test_elapsed_time_between_timing_events(device: Device) -> None:
    """D2: device time, of at least what the kernel takes; an event made without timing is refused."""
    async with device.stream() as stream:
        await stream.launch(SPIN, 1, 1, 1000)
        start = stream.record(timing=True)
        stream.launch(SPIN, 1, 1, 20_000_000)
        end = stream.record(timing=True)
        await end
        await start
        assert start.elapsed_ms(end) >= 20
        plain = stream.record()
        await plain
        with pytest.raises(InvalidArgumentError, match="timing=True"):
            start.elapsed_ms(plain)


async def test_event_is_awaited_called_back_timed_out_and_cancelled(device: Device, latch: Latch) -> None:
    """D3: each way to wait for one event, side by side."""
    told: list[str] = []
    async with device.stream() as stream:
        latch.hold(stream)
        event = stream.record()
        event.add_done_callback(lambda operation: told.append(operation.state))
        await latch.held()
        patient, impatient = (asyncio.create_task(event.wait()) for _ in range(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(event, 0.002)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert not event.done()
        assert not told
        latch.release()
        await asyncio.wait_for(event, PATIENCE)
        await quickly(patient)
        await until(lambda: told, "the callback")
    assert told == ["done"]


async def test_many_events_take_few_wake_ups() -> None:
    """D3: a hundred events that pass together are resolved together, not by one notification each."""
    async with aiocuda.open_device(driver="host", policy="efficient") as device, device.stream() as stream:
        with Latch(device) as latch:
            latch.hold(stream)
            events = [stream.record() for _ in range(100)]
            all_of_them = asyncio.gather(*(event.wait() for event in events))
            await latch.held()
            before = device.statistics().notifications
            latch.release()
            await quickly(all_of_them)
        assert device.statistics().notifications - before <= 10


async def test_stale_or_unrecorded_event_never_answers_for_another(device: Device) -> None:
    """D4: a released event raises, also when its CUDA event is already in use again."""
    pool = EventPool(device)
    async with device.stream() as stream:
        stale = pool.acquire_nowait()
        with pytest.raises(InvalidArgumentError, match="never recorded"):
            stale.done()
        with pytest.raises(InvalidArgumentError, match="never recorded"):
            stream.wait(stale)
        await stream.record(event=stale)
        lease = stale._lease
        pool.release(stale)
        heir = pool.acquire_nowait()
        assert heir._lease is lease  # the very same CUDA event
        await stream.record(event=heir)
        assert heir.done()
        for use in (stale.done, stale.result, stale.release, lambda: stream.wait(stale)):
            with pytest.raises(StaleHandleError, match="released"):
                use()


async def test_events_with_timing_and_others_have_separate_limits(device: Device) -> None:
    """D5: loans of one kind do not wait for the other."""
    pool = EventPool(device, timing=1, plain=2)
    held = [pool.acquire_nowait(timing) for timing in (True, False, False)]
    for timing, says in ((True, "all 1 events with timing"), (False, "all 2 events without timing")):
        with pytest.raises(QueueFullError, match=says):
            pool.acquire_nowait(timing)
    first = asyncio.create_task(pool.acquire(timing=True))
    second = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    held[2].release()
    assert not (await quickly(second)).timing
    assert not first.done()
    held[0].release()
    assert (await quickly(first)).timing
