"""EventPool lends a limited number of events."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    QueueFullError,
    StaleHandleError,
    Stream,
)
from tests.helpers import PATIENCE, TRAP, Latch, Peer, block_until, open_peer, quickly, turns, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("limit", [0, -1, 2**40])
async def test_limit_out_of_range(device: Device, limit: int) -> None:
    with pytest.raises(InvalidArgumentError, match=str(limit)):
        EventPool(device, limit)


@pytest.mark.parametrize("limit", ["8", 8.0, None, True])
async def test_limit_of_a_wrong_type(device: Device, limit: Any) -> None:
    with pytest.raises(InvalidTypeError):
        EventPool(device, limit)


async def test_lend_and_give_back(device: Device, stream: Stream) -> None:
    pool = EventPool(device, 4)
    event = await pool.acquire()
    stream.record(event=event)
    await event
    pool.release(event)
    with pytest.raises(StaleHandleError):
        pool.release(event)
    with pytest.raises(StaleHandleError):
        stream.record(event=event)
    statistics = pool.statistics()
    assert (statistics.limit, statistics.lent, statistics.acquired, statistics.peak) == (4, 0, 1, 1)


async def test_statistics(device: Device) -> None:
    pool = EventPool(device, 4)
    kept = [pool.acquire_nowait(timing=bool(index % 2)) for index in range(3)]
    statistics = pool.statistics()
    assert (statistics.lent, statistics.lent_timing, statistics.peak, statistics.acquired) == (3, 1, 3, 3)
    assert statistics.utilisation == 0.75
    kept[0].release()
    assert (pool.statistics().lent, pool.statistics().peak) == (2, 3)
    del kept


async def test_timing(device: Device, stream: Stream) -> None:
    pool = EventPool(device, 4)
    async with pool.borrow(timing=True) as start, pool.borrow(timing=True) as end:
        stream.record(event=start)
        stream.record(event=end)
        await end
        assert start.elapsed_ms(end) >= 0
    assert pool.statistics().lent == 0


async def test_acquire_waits_at_the_limit(device: Device) -> None:
    pool = EventPool(device, 2)
    kept = [pool.acquire_nowait() for _ in range(2)]
    with pytest.raises(QueueFullError, match="all 2 events are lent"):
        pool.acquire_nowait()
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    kept[0].release()
    event = await quickly(waiting)
    assert pool.statistics().waited == 1
    assert pool.statistics().lent == 2
    event.release()
    kept[1].release()


async def test_first_come_first_served(device: Device) -> None:
    pool = EventPool(device, 1)
    order: list[int] = []

    async def use(index: int) -> None:
        async with pool.borrow():
            order.append(index)
            await asyncio.sleep(0)

    await quickly(asyncio.gather(*(use(index) for index in range(20))))
    assert order == list(range(20))
    assert pool.statistics().peak == 1


async def test_cancelled_waiters_pass_their_turn_on(device: Device) -> None:
    pool = EventPool(device, 1)
    event = pool.acquire_nowait()
    waiting = [asyncio.create_task(pool.acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    event.release()  # goes to the next one
    waiting[1].cancel()  # it is cancelled at the same moment
    got = await quickly(waiting[2])
    assert not waiting[3].done()
    got.release()
    await quickly(waiting[3])
    waiting[3].result().release()
    (await quickly(waiting[4])).release()
    assert pool.statistics().lent == 0


async def test_cancelled_just_after_its_turn_came(device: Device) -> None:
    pool = EventPool(device, 1)
    event = pool.acquire_nowait()
    first, second = (asyncio.create_task(pool.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    event.release()
    await asyncio.sleep(0)  # the turn has come, the task has not run
    first.cancel()
    got = await quickly(second) if first.cancelled() or not first.done() else first.result()
    got.release()
    for task in (first, second):
        if not task.done():
            (await quickly(task)).release()
    assert pool.statistics().lent == 0
    pool.acquire_nowait().release()


async def test_dropped_event_comes_back(device: Device, stream: Stream) -> None:
    pool = EventPool(device, 1)
    stream.record(event=pool.acquire_nowait())
    await stream.synchronize()
    gc.collect()
    assert pool.statistics().lent == 0
    waiting = asyncio.create_task(pool.acquire())
    (await quickly(waiting)).release()


async def test_dropped_event_of_unfinished_work_stays_lent(device: Device, stream: Stream, latch: Latch) -> None:
    """The operation keeps the event that the program has dropped."""
    pool = EventPool(device, 1)
    latch.hold(stream)
    stream.record(event=pool.acquire_nowait())
    gc.collect()
    await latch.held()
    waiting = asyncio.create_task(pool.acquire())
    wakes = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
    assert not waiting.done()
    latch.release()
    (await quickly(waiting)).release()


async def test_event_returned_by_another_thread(device: Device) -> None:
    pool = EventPool(device, 1)
    kept = [pool.acquire_nowait()]
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    await asyncio.to_thread(kept.clear)  # a finaliser runs wherever it likes
    (await quickly(waiting)).release()


async def test_driver_that_fails_to_create_an_event() -> None:
    async with open_peer() as (peer, device):
        pool = EventPool(device, 1)
        peer.refuse("event_create")
        with pytest.raises(DriverError):
            pool.acquire_nowait()
        assert pool.statistics().lent == 0
        pool.acquire_nowait().release()


async def test_pool_of_a_closed_device() -> None:
    async with open_peer() as (peer, device):
        pool = EventPool(device, 2)
        kept = pool.acquire_nowait()
        await device.drain()
    calls = peer.calls["event_create"]
    with pytest.raises(ClosedError):
        pool.acquire_nowait()
    with pytest.raises(ClosedError):
        await pool.acquire()
    assert peer.calls["event_create"] == calls
    kept.release()
    assert peer.calls["event_create"] == calls


@pytest.mark.parametrize("waiting", [1, 3])
async def test_closing_the_device_fails_waiting_tasks(waiting: int) -> None:
    device = await aiocuda.open_device(driver="host")
    pool = EventPool(device, 1)
    kept = pool.acquire_nowait()
    tasks = [asyncio.create_task(pool.acquire()) for _ in range(waiting)]
    await asyncio.sleep(0)
    await device.aclose()
    for task in tasks:
        with pytest.raises(ClosedError, match="its events with it"):
            await quickly(task)
    kept.release()
    assert pool.statistics().lent == 0


async def test_device_fault_fails_waiting_tasks() -> None:
    """P3: also in a loop without operations in flight."""
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            pool = EventPool(device, 1)
            kept = pool.acquire_nowait()
            tasks = [asyncio.create_task(pool.acquire()) for _ in range(3)]
            await asyncio.sleep(0)

            async def fault() -> None:
                async with device.stream() as elsewhere:
                    with pytest.raises(DeviceFault):
                        await elsewhere.launch(TRAP, 1, 1)

            await asyncio.to_thread(asyncio.run, fault())
            for task in tasks:
                with pytest.raises(DeviceFault):
                    await quickly(task)
            assert kept.timing is False


async def test_closing_the_device_fails_waiting_tasks_of_a_later_loop() -> None:
    """The timer of a loop that was closed while a task waited is gone."""
    device = await aiocuda.open_device(driver="host")
    pool = EventPool(device, 1)
    kept = pool.acquire_nowait()

    async def give_up() -> None:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        waiting.cancel()

    await asyncio.to_thread(asyncio.run, give_up())
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    await device.aclose()
    with pytest.raises(ClosedError):
        await quickly(waiting)
    kept.release()


async def test_watch_runs_only_while_tasks_wait(device: Device) -> None:
    pool = EventPool(device, 1)
    event = pool.acquire_nowait()
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    assert pool._watch.running
    event.release()
    (await quickly(waiting)).release()
    await until(lambda: not pool._watch.running, "the last look")


async def test_release_refuses_events_of_others(device: Device, stream: Stream) -> None:
    pool, another = EventPool(device, 1), EventPool(device, 1)
    foreign, recorded = another.acquire_nowait(), stream.record()
    for event in (foreign, recorded):
        with pytest.raises(InvalidArgumentError, match=r"this pool has not lent <Event .*>: .*event\.release\(\)"):
            pool.release(event)
    with pytest.raises(InvalidTypeError, match="not int"):
        pool.release(7)  # type: ignore[arg-type]  # that is the point
    await recorded
    assert another.statistics().lent == 1
    another.release(foreign)
    assert (pool.statistics().lent, another.statistics().lent) == (0, 0)


async def test_many_users(device: Device, stream: Stream, other: Stream) -> None:
    pool = EventPool(device, 8)

    async def use(index: int) -> None:
        on, off = (stream, other) if index % 2 else (other, stream)
        async with pool.borrow() as event:
            on.record(event=event)
            off.wait(event)
            await event

    await quickly(asyncio.gather(*(use(index) for index in range(200))))
    assert pool.statistics().lent == 0
    assert pool.statistics().peak == 8
    await until(lambda: device.statistics().in_flight == 0, "the waits")


@pytest.mark.parametrize("events", [1000, 4000])
async def test_thousands_of_events_in_one_wake(events: int) -> None:
    """D3: one notification for any number of awaited events, and one query for every 256 that finish."""
    async with aiocuda.open_device(driver="host", policy="efficient", max_in_flight=8192) as device:
        pool = EventPool(device, 4096)
        async with device.stream() as stream:
            with Latch(device) as latch:
                latch.hold(stream)
                lent = [pool.acquire_nowait(timing=bool(number % 2)) for number in range(events)]
                for event in lent:
                    stream.record(event=event)
                await latch.held()
                waiting = asyncio.gather(*(event.wait() for event in lent))
                told = asyncio.gather(*(asyncio.wait_for(event, PATIENCE) for event in lent[::10]))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                before = device.statistics()
                latch.release()
                block_until(lambda: device.driver.event_query(lent[-1].handle), "the device")
                await quickly(waiting)
                await quickly(told)
                after = device.statistics()
        assert after.notifications - before.notifications <= 2
        assert after.polls - before.polls <= events // 256 + 10
        for event in lent:
            pool.release(event)
        assert (pool.statistics().peak, pool.statistics().lent) == (events, 0)


# Limits by kind


async def test_kinds_have_limits_of_their_own(device: Device) -> None:
    pool = EventPool(device, 4, timing=1, plain=2)
    held = [pool.acquire_nowait(timing=True), pool.acquire_nowait(), pool.acquire_nowait()]
    for timing, says in ((True, "all 1 events with timing are lent"), (False, "all 2 events without timing are lent")):
        with pytest.raises(QueueFullError, match=says):
            pool.acquire_nowait(timing)
    waiting = [asyncio.create_task(pool.acquire(timing)) for timing in (True, True, False)]
    await turns(3)
    held[1].release()
    assert (await quickly(waiting[2])).timing is False  # although the others came first
    assert not any(task.done() for task in waiting[:2])
    held[0].release()
    first = await quickly(waiting[0])
    assert first.timing
    assert not waiting[1].done()
    first.release()
    await quickly(waiting[1])
    assert (pool.statistics().limit, pool.statistics().lent, pool.statistics().lent_timing) == (4, 3, 1)


async def test_limit_of_both_is_shared_in_order_of_arrival(device: Device) -> None:
    pool = EventPool(device, 2, timing=1)
    held = [pool.acquire_nowait(timing=True), pool.acquire_nowait()]
    with pytest.raises(QueueFullError, match="all 2 events are lent"):
        pool.acquire_nowait()
    order: list[bool] = []

    async def take(timing: bool) -> None:
        async with pool.borrow(timing) as event:
            order.append(event.timing)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(take(timing)) for timing in (True, False, True, False)]
    await turns(3)
    held[0].release()
    await quickly(asyncio.gather(*tasks))
    assert order == [True, False, True, False]
    held[1].release()
    assert pool.statistics().lent == 0


async def test_kind_with_room_does_not_wait_behind_the_other(device: Device) -> None:
    """Not even while a task of the other kind has been woken, and one behind it waits."""
    pool = EventPool(device, timing=1)
    held = pool.acquire_nowait(timing=True)
    waiting = [asyncio.create_task(pool.acquire(timing=True)) for _ in range(3)]
    await turns(3)
    held.release()
    plain = await quickly(pool.acquire())
    waiting[0].cancel()  # it may have been woken: then its turn goes to the next one
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        assert done
        for task in done:
            waiting.remove(task)
            if not task.cancelled():
                (await task).release()
    plain.release()
    assert pool.statistics().lent == 0


@pytest.mark.parametrize("limits", [{"timing": 0}, {"plain": -1}, {"timing": 5}, {"plain": 5}])
async def test_limit_of_a_kind_out_of_range(device: Device, limits: dict[str, int]) -> None:
    name = next(iter(limits))
    with pytest.raises(InvalidArgumentError, match=f"{name} is from 1 to 4, and this is {limits[name]}"):
        EventPool(device, 4, **limits)
