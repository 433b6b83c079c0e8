"""B2, B4, B5: StreamPool: leases, waiting requests, limits and closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    ClosedError,
    DeadlockError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    StreamPool,
    WrongLoopError,
)
from aiocuda.lowlevel import join
from aiocuda.pool import LeasedStream
from tests.helpers import PATIENCE, SAXPY, TRAP, Latch, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def pool(device: Device) -> AsyncIterator[StreamPool]:
    """A pool of up to two streams."""
    async with StreamPool(device, 1, 2) as opened:
        yield opened


@pytest.fixture
def latch(device: Device) -> Any:
    with Latch(device) as opened:
        yield opened


async def take(pool: StreamPool, **wish: Any) -> LeasedStream:
    """Return a lease that lasts until it is released."""
    return await pool.stream(**wish)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Leases


async def test_lease_is_a_stream(device: Device, pool: StreamPool) -> None:
    x = np.arange(8, dtype=np.float32)
    async with pool.stream() as stream:
        assert isinstance(stream, aiocuda.Stream)
        buffer = await stream.upload(x)
        stream.launch(SAXPY, 1, 8, 8, 2.0, buffer, buffer)
        assert (await stream.download(buffer) == 3 * x).all()
        assert stream.statistics().launches == 1
    async with pool.stream() as stream:
        assert stream.statistics().launches == 0


async def test_methods_of_a_returned_lease_are_refused(device: Device, pool: StreamPool) -> None:
    """P14: a lease that has ended cannot use the stream, even if it is leased again."""
    async with pool.stream() as stale:
        buffer = await stale.upload(np.ones(4, np.float32))
        event = stale.record()
        await event
    verbs: list[Callable[[LeasedStream], object]] = [
        lambda s: s.launch(SAXPY, 1, 4, 4, 1.0, buffer, buffer),
        lambda s: s.empty(4),
        lambda s: s.upload(np.ones(4)),
        lambda s: s.copy(buffer, np.ones(4, np.float32)),
        lambda s: s.download(buffer),
        lambda s: s.fill(buffer, 1),
        lambda s: s.record(),
        lambda s: s.wait(event),
        lambda s: s.synchronize(),
        lambda s: s.add_callback(print),
        lambda s: s.release(),
        lambda s: s.tail,
    ]
    async with pool.stream() as current:
        for verb in verbs:
            with pytest.raises(StaleHandleError, match=r"lease 1 of pool-0 has ended: .* pool\.stream\(\)"):
                verb(stale)
        with pytest.raises(StaleHandleError):
            current.wait(stale)
        with pytest.raises(StaleHandleError):
            async with stale:
                raise AssertionError
        assert current.statistics().launches == 0
    assert (stale.name, stale.closed, stale.returned) == ("pool-0", True, True)
    assert repr(stale) == "<LeasedStream pool-0, lease 1: returned>"


async def test_lease_that_ends_while_it_is_captured_is_refused_afterwards(pool: StreamPool) -> None:
    stream = await pool.stream()
    with stream.capture() as graph:
        stream.release()
    graph.close()
    for use in (stream.synchronize, stream.capture, stream.statistics):
        with pytest.raises(StaleHandleError, match="lease 1 of pool-0 has ended"):
            use()


async def test_shared_leases_never_wait(pool: StreamPool) -> None:
    async def use() -> None:
        async with pool.stream():
            await held.wait()

    held = asyncio.Event()
    tasks = [asyncio.create_task(use()) for _ in range(50)]
    await until(lambda: pool.statistics().leases == 50, "all leases")
    found = pool.statistics()
    assert (found.waited, found.waiting, found.streams) == (0, 0, 2)
    held.set()
    await quickly(asyncio.gather(*tasks))
    assert pool.statistics().leases == 0


async def test_exclusive_lease_makes_others_wait(pool: StreamPool) -> None:
    async with pool.stream(exclusive=True) as first, pool.stream(exclusive=True) as second:
        assert first._queue is not second._queue
        waiting = [asyncio.create_task(take(pool, exclusive=alone)) for alone in (True, False)]
        await turns()
        assert (pool.statistics().waiting, pool.statistics().exclusive) == (2, 2)
    alone, shared = [await quickly(task) for task in waiting]
    assert alone._queue is not shared._queue
    assert (alone.exclusive, shared.exclusive) == (True, False)
    alone.release()
    shared.release()
    assert pool.statistics().leases == 0


async def test_requests_are_served_by_priority_then_arrival(device: Device) -> None:
    order: list[str] = []
    async with StreamPool(device, 1, 1) as pool:

        async def use(name: str, priority: Any) -> None:
            async with pool.stream(priority=priority, exclusive=True):
                order.append(name)

        async with pool.stream(exclusive=True):
            tasks = []
            for name, priority in (("a", "low"), ("b", "normal"), ("c", "high"), ("d", "normal"), ("e", "high")):
                tasks.append(asyncio.create_task(use(name, priority)))
                await turns()
        await quickly(asyncio.gather(*tasks))
    assert "".join(order) == "cebda"


async def test_awaited_lease_belongs_to_no_task(device: Device) -> None:
    """The task that has awaited it may wait for another lease, because any task may release it."""
    async with StreamPool(device, maximum=1) as pool:
        first = await pool.stream(exclusive=True)
        asyncio.get_running_loop().call_soon(first.release)
        async with asyncio.timeout(PATIENCE), pool.stream(exclusive=True) as second:
            with pytest.raises(DeadlockError, match="nothing can end this wait"):
                await pool.stream(exclusive=True)
        assert second.returned


async def test_shared_leases_do_not_starve_an_exclusive_request(pool: StreamPool) -> None:
    stop = False

    async def share() -> None:
        while not stop:
            async with pool.stream():
                await asyncio.sleep(0)

    sharers = [asyncio.create_task(share()) for _ in range(6)]
    await turns()
    async with asyncio.timeout(PATIENCE), pool.stream(exclusive=True) as stream:
        await turns()
        assert [place.leases for place in pool._places if place.exclusive] == [1]
        assert stream.exclusive
    stop = True
    await quickly(asyncio.gather(*sharers))


async def test_cancelled_waiters_pass_their_turn_on(device: Device) -> None:
    async with StreamPool(device, 1, 1) as pool:
        async with pool.stream(exclusive=True):
            tasks = [asyncio.create_task(take(pool, exclusive=True)) for _ in range(4)]
            await turns()
            tasks[0].cancel()
        tasks[1].cancel()  # its turn has come, and it has not run
        got = await quickly(tasks[2])
        assert not tasks[3].done()
        got.release()
        (await quickly(tasks[3])).release()
        found = pool.statistics()
        assert (found.leases, found.waiting, found.exclusive) == (0, 0, 0)
        assert tasks[0].cancelled()
        assert tasks[1].cancelled()


async def test_cancelled_exclusive_request_reserves_no_stream(device: Device) -> None:
    async with StreamPool(device, 1, 1) as pool, pool.stream():
        alone = asyncio.create_task(take(pool, exclusive=True))
        await turns()
        shared = asyncio.create_task(take(pool))
        await turns()
        assert not shared.done()  # the only stream is reserved
        alone.cancel()
        (await quickly(shared)).release()


async def test_block_that_fails_returns_its_lease(pool: StreamPool) -> None:
    with pytest.raises(ZeroDivisionError):
        async with pool.stream(exclusive=True):
            raise ZeroDivisionError
    assert pool.statistics().leases == 0


async def test_awaited_lease_lasts_until_it_is_released(pool: StreamPool) -> None:
    leased = await pool.stream(exclusive=True)
    assert np.array_equal(await leased.download(await leased.upload(np.arange(3))), np.arange(3))
    assert pool.statistics().leased == 1
    leased.release()
    assert leased.returned


async def test_pending_lease_is_used_once(pool: StreamPool) -> None:
    leasing = pool.stream()
    async with leasing:
        with pytest.raises(StaleHandleError, match="call it again"):
            await leasing
    with pytest.raises(StaleHandleError, match="call it again"):
        await leasing.__aenter__()
    with pytest.raises(InvalidArgumentError, match="soon"):
        pool.stream(priority="soon")  # type: ignore[arg-type]  # refused where it is asked for


async def test_pending_lease_is_no_stream(pool: StreamPool) -> None:
    leasing: Any = pool.stream()
    with pytest.raises(AttributeError, match=r"no stream yet and has no 'fill': use `async with pool\.stream\(\)"):
        leasing.fill(None, 1)
    with pytest.raises(AttributeError, match=r"has no 'nonsense'$"):
        _ = leasing.nonsense


async def test_lease_ended_early(pool: StreamPool) -> None:
    async with pool.stream() as stream:
        done = stream.synchronize()
        await stream.aclose()
        assert done.done()
        assert pool.statistics().leases == 0
    assert pool.statistics().leases == 0


# An idle stream


async def test_any_ready_leases_an_idle_stream_exclusively(device: Device, pool: StreamPool, latch: Latch) -> None:
    async with pool.stream() as busy, pool.stream() as idle:
        latch.hold(busy)
        await latch.held()
        assert busy.name != idle.name
        assert not pool.has_ready()  # one has work, both are leased
        name = idle.name
    assert pool.has_ready()
    async with await quickly(pool.any_ready(timeout=PATIENCE)) as ready:
        assert (ready.name, ready.exclusive) == (name, True)
        assert not pool.has_ready()
        with pytest.raises(TimeoutError):
            await pool.any_ready(timeout=0.01)
        waiting = asyncio.create_task(pool.any_ready())
        await turns()
        assert not waiting.done()
        latch.release()
        (await quickly(waiting)).release()  # as soon as the operation has ended, which no task awaits
    assert pool.statistics().leases == 0


async def test_any_ready_waits_behind_an_operation_that_is_abandoned_meanwhile(device: Device, latch: Latch) -> None:
    async with StreamPool(device, 1, 1) as pool:
        async with pool.stream() as busy:
            hold = latch.hold(busy)
            await latch.held()
        waiting = asyncio.create_task(pool.any_ready())
        await turns()
        hold.abandon()
        await turns()
        assert not waiting.done()
        latch.release()
        (await quickly(waiting)).release()


async def test_stream_that_only_waits_is_not_idle(device: Device, latch: Latch) -> None:
    """At a barrier it waits on the device, without an operation of its own."""
    held = device.stream()
    async with StreamPool(device, 1, 1) as pool:
        async with pool.stream() as leased:
            latch.hold(held)
            await latch.held()
            join([held._queue, leased._queue])
            assert leased._queue.idle
        assert not pool.has_ready()
        waiting = asyncio.create_task(pool.any_ready())
        await turns()
        assert not waiting.done()
        latch.release()
        (await quickly(waiting)).release()
    await held.aclose()


async def test_any_ready_creates_a_stream(device: Device) -> None:
    async with StreamPool(device, 1, 2) as pool:
        assert pool.has_ready()
        async with await pool.any_ready(timeout=0), await pool.any_ready(timeout=float("inf")):
            assert pool.statistics().streams == 2
            assert not pool.has_ready()


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        (-1, InvalidArgumentError),
        (float("nan"), InvalidArgumentError),
        ("1", InvalidTypeError),
        (True, InvalidTypeError),
    ],
)
async def test_wrong_timeout(pool: StreamPool, limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout"):
        await pool.any_ready(timeout=limit)


# Limits


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0,), InvalidArgumentError),
        ((-1,), InvalidArgumentError),
        ((1, 10**6), InvalidArgumentError),
        ((3, 2), InvalidArgumentError),
        (("2",), InvalidTypeError),
        ((1, 2.0), InvalidTypeError),
        ((True,), InvalidTypeError),
    ],
)
async def test_limits_out_of_range(device: Device, arguments: Any, error: type[Exception]) -> None:
    before = device.statistics().streams_created
    with pytest.raises(error):
        StreamPool(device, *arguments)
    assert device.statistics().streams_created == before


@pytest.mark.parametrize(
    ("strategy", "error"), [("fastest", InvalidArgumentError), (None, InvalidTypeError), (int, InvalidTypeError)]
)
async def test_wrong_strategy(device: Device, strategy: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        StreamPool(device, strategy=strategy)


async def test_never_more_streams_than_hardware_queues(device: Device) -> None:
    queues = device.hardware_queues
    with pytest.raises(InvalidArgumentError, match=f"from 1 to {queues}, the hardware queues"):
        StreamPool(device, 1, queues + 1)
    assert StreamPool(device).statistics().maximum <= queues


async def test_pool_grows_with_the_load(device: Device, latch: Latch) -> None:
    async with StreamPool(device, 1, 3) as pool:
        for _ in range(5):
            async with pool.stream():
                pass
        assert pool.statistics().streams == 1
        for count in (1, 2, 3, 3):
            async with pool.stream() as stream:
                latch.hold(stream)
            assert pool.statistics().streams == count
        assert pool.statistics().utilisation == 1.0
        latch.release()
    assert (pool.statistics().peak, pool.statistics().made) == (3, 3)


async def test_driver_that_fails_to_create_a_stream() -> None:
    async with open_peer() as (peer, device), StreamPool(device, 1, 2) as pool:
        peer.refuse("stream_create")
        with pytest.raises(DriverError):
            async with pool.stream():
                raise AssertionError
        assert (pool.statistics().streams, pool.statistics().leases) == (0, 0)
        async with pool.stream() as stream:
            await stream.synchronize()


# The end


async def test_closing_waits_for_the_work_and_fails_requests(device: Device, latch: Latch) -> None:
    before = device.statistics().streams
    pool = StreamPool(device, 1, 1)
    async with pool.stream(exclusive=True) as stream:
        held = latch.hold(stream)
        waiting = asyncio.create_task(take(pool, exclusive=True))
        await latch.held()
        closing = asyncio.create_task(pool.aclose())
        with pytest.raises(ClosedError, match="this pool has been closed"):
            await quickly(waiting)
        assert not closing.done()
        latch.release()
        await quickly(closing)
        assert held.done()
        with pytest.raises(ClosedError):
            stream.synchronize()
    with pytest.raises(ClosedError):
        async with pool.stream():
            raise AssertionError
    with pytest.raises(ClosedError):
        await pool.any_ready()
    await pool.aclose()
    assert device.statistics().streams == before


async def test_exit_by_an_exception_does_not_wait(device: Device, latch: Latch) -> None:
    before = device.statistics().streams
    with pytest.raises(ZeroDivisionError):
        async with StreamPool(device, 1, 2) as pool:
            async with pool.stream() as stream:
                held = latch.hold(stream)
            await latch.held()
            waiting = asyncio.create_task(take(pool, exclusive=True))
            raise ZeroDivisionError
    assert not held.done()
    with pytest.raises(ClosedError):
        await quickly(waiting)
    latch.release()
    await quickly(held)
    await until(lambda: device.statistics().streams == before, "the streams' end")


async def test_cancelled_closing_withdraws_the_work_of_all_streams(device: Device, latch: Latch) -> None:
    before = device.statistics().streams
    pool = StreamPool(device, 1, 3)
    for _ in range(3):
        async with pool.stream() as stream:
            latch.hold(stream)
    await latch.held()
    closing = asyncio.create_task(pool.aclose())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(closing)
    assert all(place.stream.closed for place in pool._places)
    latch.release()
    await until(lambda: device.statistics().streams == before, "the streams' end")


async def test_closing_the_device_fails_requests() -> None:
    device = await aiocuda.open_device(driver="host")
    pool = StreamPool(device, 1, 1)
    lease = await pool.any_ready()
    waiting = [asyncio.create_task(take(pool, exclusive=alone)) for alone in (True, False)]
    await turns()
    await device.aclose()
    for task in waiting:
        with pytest.raises(ClosedError, match="its streams with it"):
            await quickly(task)
    lease.release()
    assert pool.statistics().leases == 0


async def test_device_fault_fails_requests() -> None:
    """P3: also if the fault comes from another loop, and nothing is in flight in this one."""
    async with open_peer() as (_, device):
        pool = StreamPool(device, 1, 1)
        lease = await pool.any_ready()
        waiting = [asyncio.create_task(take(pool, exclusive=True)) for _ in range(3)]
        await turns()

        async def fault() -> None:
            async with device.stream() as elsewhere:
                with pytest.raises(DeviceFault):
                    await elsewhere.launch(TRAP, 1, 1)

        await asyncio.to_thread(asyncio.run, fault())
        for task in waiting:
            with pytest.raises(DeviceFault):
                await quickly(task)
        with pytest.raises(DeviceFault):
            await lease.synchronize()
        lease.release()
        with pytest.raises(DeviceFault):
            async with pool.stream():
                raise AssertionError
        await pool.aclose()


async def test_pool_of_another_loop(device: Device, pool: StreamPool) -> None:
    async def elsewhere() -> None:
        for use in (lambda: take(pool), pool.any_ready, pool.aclose):
            with pytest.raises(WrongLoopError, match="a pool in each loop"):
                await use()
        with pytest.raises(WrongLoopError):
            pool.has_ready()

    await asyncio.to_thread(in_thread, elsewhere)


async def test_loop_that_ends_with_leases_and_waiters() -> None:
    """P11: its streams have no loop, and are destroyed when the device has finished with them."""
    device = await aiocuda.open_device(driver="host")
    pools: list[StreamPool] = []

    async def elsewhere() -> None:
        pool = StreamPool(device, 1, 1)
        pools.append(pool)  # one that is collected earlier would warn
        lease = await pool.any_ready()
        lease.synchronize()
        asyncio.get_running_loop().create_task(take(pool, exclusive=True))
        await turns()

    await asyncio.to_thread(in_thread, elsewhere)
    await quickly(device.aclose())
    assert device.statistics().streams == 0


async def test_timer_runs_only_while_requests_wait(device: Device, pool: StreamPool) -> None:
    async with pool.stream(exclusive=True), pool.stream(exclusive=True):
        waiting = asyncio.create_task(take(pool))
        await turns()
        assert pool._watch.running
    (await quickly(waiting)).release()
    await until(lambda: not pool._watch.running, "the last look")
