"""Waiters are woken in order, once, and at most 256 in one iteration of the loop."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, Kernel, Operation, Stream
from aiocuda._base._wakeups import MOST_WOKEN, Callback, Waiters, Wakes
from aiocuda.pool import NewStream, Offer, Place
from tests.helpers import PATIENCE, Latch, open_peer, quickly, turns

NOTHING = Kernel("nothing", source='extern "C" __global__ void nothing(float *x) {}', host=lambda x: None)

MANY = 500


class Woken:
    """Tasks that wait, and how many of them went on in each iteration of the loop."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.order: list[int] = []
        self.counts: Counter[int] = Counter()
        self.iteration = 0
        self._count_iterations(asyncio.get_running_loop())

    def _count_iterations(self, loop: asyncio.AbstractEventLoop) -> None:
        self.iteration += 1
        loop.call_soon(self._count_iterations, loop)

    async def begin(self, *waits: Callable[[], Awaitable[object]]) -> None:
        for number, wait in enumerate(waits):
            self.tasks.append(asyncio.create_task(self._wait(number, wait)))
        await turns(3)
        assert not self.order

    async def _wait(self, number: int, wait: Callable[[], Awaitable[object]]) -> None:
        try:
            await wait()
        finally:
            self.note(number)

    def note(self, number: int) -> None:
        self.counts[self.iteration] += 1
        self.order.append(number)

    async def check(self, in_order: bool = True) -> list[Any]:
        outcomes: list[Any] = await quickly(asyncio.gather(*self.tasks, return_exceptions=True))
        assert max(self.counts.values()) <= MOST_WOKEN == 256
        assert sorted(self.order) == list(range(len(self.tasks)))
        assert not in_order or self.order == sorted(self.order)
        return outcomes


# -- each structure ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_operation_wakes_256_waiters_an_iteration(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker, woken = stream.synchronize(), Woken()
    await woken.begin(*[marker.wait] * MANY)
    latch.release()
    await woken.check()


@pytest.mark.asyncio
async def test_operation_calls_256_callbacks_an_iteration(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker, woken = stream.synchronize(), Woken()
    for number in range(MANY):
        marker.add_done_callback(lambda _, number=number: woken.note(number))  # type: ignore[misc]
    latch.release()
    await marker
    await turns(10)
    assert woken.order == list(range(MANY))
    assert max(woken.counts.values()) <= MOST_WOKEN


@pytest.mark.asyncio
async def test_abandoned_operations_wake_256_waiters_an_iteration(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    operations, woken = [stream.synchronize() for _ in range(MANY)], Woken()
    await woken.begin(*[each.wait for each in operations])
    for each in operations:
        each.abandon()
    latch.release()
    outcomes = await woken.check()
    assert {type(outcome) for outcome in outcomes} == {aiocuda.ClosedError}


@pytest.mark.asyncio
async def test_fault_wakes_256_waiters_an_iteration() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            woken = Woken()
            await woken.begin(*[stream.synchronize().wait for _ in range(MANY)])
            with peer.inner._lock:
                peer.inner._fail(719, 0, "so says the test", ZeroDivisionError())
            outcomes = await woken.check(in_order=False)
        assert {type(outcome) for outcome in outcomes} == {DeviceFault}


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.asyncio
async def test_stream_pool_serves_256_waiters_an_iteration(device: Device, closed: bool, exclusive: bool) -> None:
    async with aiocuda.StreamPool(device, 1, 1) as pool:
        first, woken = await pool.stream(exclusive=True), Woken()

        async def lease() -> None:
            (await pool.stream(exclusive=exclusive)).release()

        await woken.begin(*[lease] * MANY)
        if closed:
            await pool.aclose()
        else:
            first.release()
        outcomes = await woken.check()
        assert {type(outcome) for outcome in outcomes} == {aiocuda.ClosedError if closed else type(None)}


@pytest.mark.asyncio
async def test_event_pool_notifies_256_waiters_an_iteration_of_the_end() -> None:
    device = await aiocuda.open_device(driver="host")
    pool, woken = aiocuda.EventPool(device, 1), Woken()
    event = pool.acquire_nowait()
    await woken.begin(*[pool.acquire] * MANY)
    await device.aclose()
    outcomes = await woken.check()
    assert {type(outcome) for outcome in outcomes} == {aiocuda.ClosedError}
    event.release()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.asyncio
async def test_barrier_wakes_256_parties_an_iteration(broken: bool) -> None:
    barrier, woken = aiocuda.StreamBarrier(MANY + 1), Woken()
    await woken.begin(*[barrier.wait] * MANY)
    await (barrier.abort() if broken else barrier.wait())
    outcomes = await woken.check()
    assert {type(outcome) for outcome in outcomes} == {aiocuda.BrokenBarrierError if broken else type(None)}


@pytest.mark.asyncio
async def test_drain_wakes_256_waiters_an_iteration(device: Device) -> None:
    async with aiocuda.AsyncCoordinator(device) as coordinator:
        x = await coordinator.upload(np.zeros(4, np.float32))
        with Latch(device) as latch:
            latch.hold(coordinator.compute_stream)
            await latch.held()
            coordinator.compute(NOTHING, 1, 1, x)
            woken = Woken()
            await woken.begin(*[coordinator.drain] * MANY)
        await woken.check()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.asyncio
async def test_node_wakes_256_waiters_an_iteration(device: Device, stream: Stream, called: bool) -> None:
    async with aiocuda.AsyncCoordinator(device) as coordinator:
        event, woken = aiocuda.EventPool(device).acquire_nowait(), Woken()
        node = coordinator.compute(NOTHING, 1, 1, stream.empty(4), after=event)
        if called:
            for number in range(MANY):
                node.add_done_callback(lambda _, number=number: woken.note(number))  # type: ignore[misc]
        else:
            await woken.begin(*[node.wait] * MANY)
        stream.record(event=event)
        await node
        await turns(10)
        await asyncio.gather(*woken.tasks)
        assert sorted(woken.order) == list(range(MANY))
        assert max(woken.counts.values()) <= MOST_WOKEN


@pytest.mark.asyncio
async def test_pinned_memory_wakes_256_waiters_an_iteration() -> None:
    async with open_peer() as (peer, device):
        opened, woken = threading.Event(), Woken()
        peer.before["pin"] = lambda *arguments: opened.wait(PATIENCE)
        array = device.pinned(1 << 20)

        async def locked() -> None:
            await array

        await woken.begin(*[locked] * MANY)
        opened.set()
        await woken.check()


# -- what happens in between -------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_waiter_that_is_cancelled_in_between_leaves_the_others(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker, woken = stream.synchronize(), Woken()
    await woken.begin(*[marker.wait] * MANY)
    marker.abandon()
    await asyncio.sleep(0)  # the first ones have been woken
    for task in woken.tasks[400:500]:
        task.cancel()
    latch.release()
    outcomes = await woken.check(in_order=False)
    found = Counter(type(outcome) for outcome in outcomes)
    assert found == {aiocuda.ClosedError: MANY - 100, asyncio.CancelledError: 100}


@pytest.mark.asyncio
async def test_callback_that_is_added_in_between_is_the_last(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker, called = stream.synchronize(), list[int]()
    for number in range(MANY):
        marker.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]
    marker.abandon()
    marker.add_done_callback(lambda _: called.append(MANY))
    with pytest.raises(aiocuda.ClosedError):
        await marker  # which has finished
    await turns(10)
    assert called == list(range(MANY + 1))


@pytest.mark.asyncio
async def test_callback_that_is_removed_in_between_is_not_called(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker, called = stream.synchronize(), list[Operation[Any]]()
    for _ in range(MANY):
        marker.add_done_callback(called.append)
    marker.abandon()
    removed = marker.remove_done_callback(called.append)
    await turns(10)
    assert removed >= MANY - MOST_WOKEN
    assert removed + len(called) == MANY


@pytest.mark.asyncio
async def test_new_lease_does_not_overtake_those_that_are_being_served(device: Device) -> None:
    async with aiocuda.StreamPool(device, 1, 1) as pool:
        first, woken = await pool.stream(exclusive=True), Woken()

        async def lease() -> None:
            (await pool.stream()).release()

        await woken.begin(*[lease] * MANY)
        first.release()  # 256 are served
        await quickly(lease())
        woken.note(MANY)
        assert woken.order == list(range(MANY + 1))
        await asyncio.gather(*woken.tasks)


@pytest.mark.asyncio
async def test_request_that_is_declined_does_not_hold_up_others(device: Device) -> None:
    class NoCopies:
        name = "no copies"

        def choose(self, offer: Offer) -> Place | NewStream | None:
            return None if offer.workload == "memory" or not offer.free else offer.free[0]

    async with aiocuda.StreamPool(device, 1, 1, strategy=NoCopies()) as pool:
        first = await pool.stream(exclusive=True)
        declined = asyncio.create_task(pool.stream("memory").__aenter__())
        await asyncio.sleep(0)
        other = asyncio.create_task(pool.stream("compute").__aenter__())
        await asyncio.sleep(0)
        first.release()
        (await quickly(other)).release()
        assert not declined.done()
        declined.cancel()


@pytest.mark.asyncio
async def test_gather_of_one_operation_twice(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    marker = stream.synchronize()
    tasks = [asyncio.ensure_future(_gathered(marker, marker)) for _ in range(2)]
    await asyncio.sleep(0)
    latch.release()
    assert await quickly(asyncio.gather(*tasks)) == [[None, None]] * 2


async def _gathered(*operations: Operation[Any]) -> list[Any]:
    return await aiocuda.gather(*operations)


def test_loop_that_closes_in_between_leaves_nothing() -> None:
    calls = list[int]()

    class Thing:
        def __call__(self, number: int) -> None:
            calls.append(number)

    thing = Thing()
    gone = weakref.ref(thing)

    async def main(thing: Thing) -> None:
        Wakes.of(asyncio.get_running_loop()).wake_all(Waiters(*range(MANY)), thing)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main(thing))
    loop.close()
    del thing, loop
    gc.collect()
    assert gone() is None
    assert calls == list(range(MOST_WOKEN))


@pytest.mark.asyncio
async def test_wakes_of_several_calls_share_the_256_of_an_iteration() -> None:
    wakes, woken = Wakes.of(asyncio.get_running_loop()), Woken()
    for start in range(0, MANY, 100):
        wakes.wake_all(Waiters(*range(start, start + 100)), woken.note)
        await asyncio.sleep(0)
    await turns(10)
    assert woken.order == list(range(MANY))
    assert max(woken.counts.values()) <= MOST_WOKEN


@pytest.mark.asyncio
async def test_failure_of_one_wake_up_leaves_the_others() -> None:
    wakes, woken = Wakes.of(asyncio.get_running_loop()), Woken()

    def wake(number: int) -> None:
        woken.note(number)
        if number == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        wakes.wake_all(Waiters(*range(3)), wake)
    await turns(3)
    assert woken.order == [0, 1, 2]


# -- Waiters -------------------------------------------------------------------------------------------------------


def _callback(function: Callable[[Any], object]) -> Callback:
    return Callback(function, contextvars.Context())


def test_waiters_come_out_in_order() -> None:
    waiters = Waiters(*"bcd")
    waiters.add("e")
    waiters.add_first("a")
    assert waiters.discard("c")
    assert not waiters.discard("c")
    assert (waiters.first, len(waiters), "d" in waiters) == ("a", 4, True)
    assert [waiters.pop() for _ in range(4)] == list("abde")
    with pytest.raises(KeyError):
        waiters.pop()


def test_equal_callbacks_are_removed_together() -> None:
    found = list[int]()
    waiters: Waiters[Any] = Waiters(_callback(found.append), "a future", _callback(found.append), _callback(print))
    assert waiters.remove(found.append) == 2  # another bound method, and equal
    waiters.add(_callback(found.append))
    assert [waiters.remove(found.append), waiters.remove(found.append), waiters.remove(print)] == [1, 0, 1]
    assert list(waiters) == ["a future"]


def test_callbacks_without_a_hash_are_removed_too() -> None:
    class Same:
        def __call__(self, operation: object) -> None:
            """Nothing."""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same)

    waiters: Waiters[Any] = Waiters(_callback(print), _callback(Same()))
    assert waiters.remove(len) == 0
    waiters.add(_callback(Same()))
    assert waiters.remove(Same()) == 2
    assert waiters.remove(print) == 1
    waiters.add(_callback(print))
    assert waiters.remove(Same()) == 0
    waiters.add(_callback(Same()))
    assert waiters.remove(Same()) == 1
    assert len(waiters) == 1
