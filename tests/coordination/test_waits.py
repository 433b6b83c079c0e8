"""Waits at barriers and for leases take part in the search for deadlocks, with their names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import pytest

from aiocuda import (
    AsyncCoordinator,
    BrokenBarrierError,
    ClosedError,
    DeadlockError,
    Device,
    StaleHandleError,
    Stream,
    StreamBarrier,
    StreamPool,
)
from aiocuda._base._deadlock import waiting
from aiocuda.coordination._deadlock_detector import LEAST_CHECK_SECONDS
from tests.coordination.test_deadlock import INSTANTLY, check_often
from tests.helpers import SPIN, Latch, Reports, block_until, quickly, until

pytestmark = pytest.mark.asyncio


@pytest.mark.slow
async def test_party_of_a_stream_barrier_that_never_arrives(device: Device) -> None:
    """A party that waits in a bracket gets a `DeadlockError` with names; the others, that a party has left."""
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        barrier = StreamBarrier(4)

        async def party(name: str) -> None:
            async with coordinator.operation("barrier", description=name) as bracket:
                assert bracket.stream is not None
                await barrier.wait(bracket.stream)

        told = await quickly(asyncio.gather(party("a"), party("b"), barrier.wait(), return_exceptions=True))
        assert [type(error) for error in told] == [DeadlockError, DeadlockError, BrokenBarrierError]
        assert "1 of 4 parties of <StreamBarrier: 3 of 4 have come>" in str(told[0])
        assert (barrier.broken, barrier.n_waiting, coordinator.statistics().deadlocks) == (True, 0, 2)


@pytest.mark.slow
async def test_unobserved_operations_do_not_hide_a_deadlock(device: Device) -> None:
    """An operation that has passed without a notification is not in flight."""
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        async with coordinator.operation("kernel"):
            pass
        barrier = StreamBarrier(2)
        with pytest.raises(DeadlockError):
            async with coordinator.operation("barrier"):
                await barrier.wait()


async def test_party_with_a_timeout_waits_as_long_as_that(device: Device) -> None:
    async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
        barrier = StreamBarrier(2)
        async with coordinator.operation("barrier"):
            asyncio.get_running_loop().call_soon(check_often, coordinator)
            with pytest.raises(TimeoutError):
                await barrier.wait(timeout=0.25)
    assert coordinator.statistics().deadlocks == 0


async def test_party_that_waits_for_a_stream_of_its_own_is_waited_for(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """The device works: a task that waits for it may then do the missing action."""
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
        barrier = StreamBarrier(2)

        async def works() -> None:
            await stream.launch(SPIN, 1, 1, 1)
            await barrier.wait()

        async def waits() -> None:
            async with coordinator.operation("barrier"):
                await barrier.wait()

        tasks = [asyncio.create_task(works()), asyncio.create_task(waits())]
        await until(lambda: barrier.n_waiting == 1)
        check_often(coordinator)
        latch.release()
        await quickly(asyncio.gather(*tasks))
    assert coordinator.statistics().deadlocks == 0


async def test_task_that_has_just_been_woken_is_waited_for(device: Device, stream: Stream, latch: Latch) -> None:
    """The check itself finds that the device has finished: the task that waits for it has not run yet."""
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
        barrier = StreamBarrier(2)

        async def works() -> None:
            await stream.synchronize()
            await barrier.wait()

        async def waits() -> None:
            async with coordinator.operation("barrier"):
                await barrier.wait()

        tasks = [asyncio.create_task(works()), asyncio.create_task(waits())]
        await until(lambda: barrier.n_waiting == 1)
        latch.release()
        block_until(lambda: device.driver.stream_query(stream._queue.handle))
        detector = coordinator._scheduler.detector
        detector.stop()  # its timer is overdue
        detector._tick()
        await quickly(asyncio.gather(*tasks))
    assert coordinator.statistics().deadlocks == 0


async def test_task_that_needs_more_iterations_of_a_busy_loop_is_waited_for(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """The timer of the next check is overdue in each of them: time alone does not tell that no task will come."""
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
        barrier = StreamBarrier(2)

        async def works() -> None:
            await stream.synchronize()
            for _ in range(4):
                await asyncio.sleep(0)
                time.sleep(3 * LEAST_CHECK_SECONDS)  # noqa: ASYNC251, TID251 -- the loop is busy
            await barrier.wait()

        async def waits() -> None:
            async with coordinator.operation("barrier"):
                await barrier.wait()

        tasks = [asyncio.create_task(works()), asyncio.create_task(waits())]
        await until(lambda: barrier.n_waiting == 1)
        latch.release()
        block_until(lambda: device.driver.stream_query(stream._queue.handle))
        detector = coordinator._scheduler.detector
        detector.stop()  # its timer is overdue
        detector._tick()
        await quickly(asyncio.gather(*tasks))
    assert coordinator.statistics().deadlocks == 0


async def test_lease_of_a_pool_waited_for_by_its_holder(device: Device) -> None:
    async with StreamPool(device, 1, 1) as pool:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("me")
        async with pool.stream(exclusive=True):
            for wish in (pool.stream(), pool.stream(exclusive=True)):
                with pytest.raises(DeadlockError, match=r"me waits for .* lease of <StreamPool .*, held by me"):
                    await wish.__aenter__()
        async with pool.stream():
            with pytest.raises(DeadlockError):
                await pool.any_ready()
            with pytest.raises(TimeoutError):
                await pool.any_ready(timeout=0.01)
        async with pool.stream() as shared, pool.stream(exclusive=False):  # no waiter that left reserves the stream
            assert not shared.exclusive
        assert (pool.statistics().waiting, pool.statistics().leases) == (0, 0)


async def test_lease_that_another_task_can_end_is_waited_for(device: Device) -> None:
    """`any_ready` returns a lease without a holder until a task opens a block with it."""
    async with StreamPool(device, 1, 1) as pool:
        lease = await pool.any_ready()
        other = asyncio.create_task(asyncio.sleep(0))
        other.add_done_callback(lambda _: lease.release())
        async with pool.stream(exclusive=True):
            assert lease.returned


async def test_two_pools_leased_the_other_way_round(device: Device) -> None:
    async with StreamPool(device, 1, 1) as left, StreamPool(device, 1, 1) as right:
        both = asyncio.Barrier(2)

        async def take(first: StreamPool, second: StreamPool) -> str:
            async with first.stream(exclusive=True):
                await both.wait()
                async with second.stream(exclusive=True):
                    return "had both"

        tasks = [asyncio.create_task(take(*pair)) for pair in ((left, right), (right, left))]
        told = await quickly(asyncio.gather(*tasks, return_exceptions=True))
        assert sorted(type(one).__name__ for one in told) == ["DeadlockError", "str"]


@pytest.mark.parametrize("how", ["closed", "returned"])
async def test_stream_that_ends_while_its_party_waits_breaks_the_barrier(device: Device, how: str) -> None:
    async with StreamPool(device, 2, 2) as pool, device.stream() as last:
        barrier = StreamBarrier(2)
        stream: Stream = device.stream() if how == "closed" else await pool.any_ready()
        first = asyncio.create_task(barrier.wait(stream))
        await until(lambda: barrier.n_waiting == 1)
        await stream.aclose()
        with pytest.raises(ClosedError if how == "closed" else StaleHandleError, match=r"has been closed|has ended"):
            await barrier.wait(last)
        with pytest.raises(BrokenBarrierError):
            await quickly(first)
        await quickly(last.synchronize())


async def test_bracket_that_ends_after_its_coordinator_was_left(device: Device) -> None:
    """Its waiters are woken. Its stream is closed, and gets no more work."""
    go_on = asyncio.Event()

    async def body() -> None:
        async with bracket:
            await go_on.wait()
            raise LookupError

    with Reports() as reports, pytest.raises(ZeroDivisionError):
        async with AsyncCoordinator(device) as coordinator:
            bracket = coordinator.operation("kernel")
            inside = asyncio.create_task(body())
            await until(lambda: bracket.state == "open")
            waiter = asyncio.create_task(bracket.wait())
            raise ZeroDivisionError
    go_on.set()
    with pytest.raises(LookupError):
        await inside
    with pytest.raises(LookupError):
        await quickly(waiter)
    assert coordinator.statistics().in_flight == 0
    assert reports.contexts == []


async def test_bracket_withdrawn_before_it_was_entered_is_counted(device: Device) -> None:
    async with AsyncCoordinator(device) as coordinator:
        bracket = coordinator.operation("reduction")
        assert bracket.abandon()
        counted = coordinator.statistics()
        assert (counted.registered, counted.abandoned, counted.waiting) == (1, 1, 0)
        assert counted.by_kind == {"reduction": 1}


async def test_deadlock_check_does_not_visit_all_waits() -> None:
    """A thousand tasks that wait for one that works must not ask each other, each time one more comes."""
    worker = asyncio.current_task()
    asked = 0

    def can_end(stuck: Collection[asyncio.Task[Any]]) -> bool:
        nonlocal asked
        asked += 1
        return worker not in stuck

    async def waits(future: asyncio.Future[None]) -> None:
        with waiting("the worker", future, can_end):
            await future

    futures = [asyncio.get_running_loop().create_future() for _ in range(100)]
    tasks = [asyncio.create_task(waits(future)) for future in futures]
    await asyncio.sleep(0)
    assert asked == len(tasks)
    for future in futures:
        future.set_result(None)
    await quickly(asyncio.gather(*tasks))
