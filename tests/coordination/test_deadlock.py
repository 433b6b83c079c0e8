"""E5: deadlocks are found, with names; what only takes long is not one.

`test_late.py` tests what is only still.
"""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, ClosedError, CycleError, DeadlockError, Device, EventPool, SkippedError, Stream
from aiocuda._base._deadlock import waiting
from tests.coordination.graphs import ITEMS
from tests.helpers import SPIN, Latch, quickly, until

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


def check_often(coordinator: AsyncCoordinator) -> None:
    """Check a coordinator as its timer does: often enough to find it still, if it is, and fail what is blocked."""
    for _ in range(4):
        coordinator._scheduler.detector._tick()


#: A `deadlock_timeout` that has passed between any two checks.
INSTANTLY = 1e-9


async def test_edges_that_go_round_are_refused(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator, AsyncCoordinator(device) as another:
        given = coordinator.compute(SPIN, 1, 1, 1000, stream=stream)
        first, second, third = (coordinator.compute(SPIN, 1, 1, 1, description=name) for name in "abc")
        coordinator.add_dependency(first, second)
        coordinator.add_dependency(second, third)
        with pytest.raises(CycleError, match=r"kernel 4 'c' → kernel 2 'a' → kernel 3 'b' → kernel 4 'c'") as caught:
            coordinator.add_dependency(third, first)
        assert caught.value.path == ("kernel 4 'c'", "kernel 2 'a'", "kernel 3 'b'", "kernel 4 'c'")
        with pytest.raises(CycleError, match="'a' → kernel 2 'a'"):
            coordinator.add_dependency(first, first)
        with pytest.raises(ClosedError, match="given to a stream"):
            coordinator.add_dependency(given, first)
        stranger = another.upload(ONES)
        with pytest.raises(ValueError, match="another coordinator"):
            coordinator.add_dependency(stranger, first)
        order: list[str] = []
        for node in (first, second, third):
            node.add_done_callback(lambda node: order.append(node.description))
        latch.release()
        await quickly(coordinator.drain())
        await asyncio.sleep(0)
    assert order == ["c", "b", "a"]


async def test_bracket_that_waits_for_its_own_dependent(device: Device) -> None:
    async with AsyncCoordinator(device, deadlock_timeout=math.inf) as coordinator:  # no timer finds it
        bracket = coordinator.operation("kernel", description="outer")
        with pytest.raises(DeadlockError, match=r"waits for transfer 2 'inner', which waits for kernel 1 'outer'"):
            async with bracket:
                inner = coordinator.upload(ONES, after=bracket, description="inner")
                await inner
        with pytest.raises(SkippedError) as caught:
            await quickly(inner)
        assert isinstance(caught.value.__cause__, DeadlockError)
        assert coordinator.statistics().deadlocks == 1


async def test_bracket_that_waits_through_others(coordinator: AsyncCoordinator) -> None:
    bracket = coordinator.operation("kernel")
    with pytest.raises(DeadlockError):
        async with bracket:
            middle = coordinator.upload(ONES, after=bracket)
            await coordinator.download(middle)


async def test_place_held_by_a_task_that_waits_for_a_later_place(device: Device) -> None:
    async with AsyncCoordinator(device, max_in_flight=1, deadlock_timeout=math.inf) as coordinator:  # no timer finds it
        with pytest.raises(DeadlockError, match=r"none of 1 places is free: held by reduction 1 'holder'"):
            async with coordinator.operation("reduction", description="holder"):
                await coordinator.upload(ONES)
        with pytest.raises(DeadlockError):
            async with coordinator.operation("kernel"), coordinator.operation("kernel"):
                pytest.fail("there is one place")
        assert coordinator.statistics().deadlocks == 2
        np.testing.assert_array_equal(await quickly(coordinator.download(coordinator.upload(ONES))), ONES)


async def test_waiting_tasks_hold_all_places(device: Device) -> None:
    """Two of them, two tasks: the second one closes the circle, and when it has gone the first goes on."""
    async with AsyncCoordinator(device, max_in_flight=2) as coordinator:
        inside = asyncio.Barrier(2)

        async def hold(name: str) -> object:
            async with coordinator.operation("kernel", description=name):
                await inside.wait()
                return await coordinator.upload(ONES)

        told = await quickly(asyncio.gather(hold("a"), hold("b"), return_exceptions=True))
        assert sum(isinstance(one, DeadlockError) for one in told) == 1
        (error,) = (one for one in told if isinstance(one, DeadlockError))
        assert "'a'" in str(error)
        assert "'b'" in str(error)


async def test_waiting_for_running_work_is_no_deadlock(device: Device, stream: Stream, latch: Latch) -> None:
    """A kernel that holds the place ends, however long it takes. So does a bracket whose body does something else."""
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=2, deadlock_timeout=INSTANTLY) as coordinator:
        coordinator.compute(SPIN, 1, 1, 1000, stream=stream)
        async with coordinator.operation("kernel"):
            waiter = asyncio.create_task(coordinator.upload(ONES).wait())
            await asyncio.sleep(0)
            check_often(coordinator)
            assert not waiter.done()
            latch.release()
            await quickly(waiter)
    assert coordinator.statistics().deadlocks == 0


@pytest.mark.slow
async def test_event_that_is_never_recorded(device: Device) -> None:
    event = EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        behind = coordinator.upload(ONES, after=event, description="behind")
        after = coordinator.download(behind)
        with pytest.raises(DeadlockError, match=r"'behind' waits for an event that was never rec"):
            await quickly(behind)
        with pytest.raises(SkippedError):
            await quickly(after)


@pytest.mark.slow
async def test_abandoned_node_with_an_event_that_is_never_recorded_delays_no_drain(device: Device) -> None:
    event = EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        upload, function = coordinator.upload(ONES, after=event), coordinator.host(int, after=event)
        assert (upload.abandon(), function.abandon()) == (True, True)
        await quickly(coordinator.drain())
        assert (upload.state, function.state) == ("abandoned", "abandoned")
        assert coordinator.statistics().deadlocks == 0


async def test_event_that_is_recorded_late_is_waited_for(device: Device, stream: Stream) -> None:
    event = EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device) as coordinator:
        behind = coordinator.upload(ONES, after=[event])
        assert behind.state == "waiting"
        stream.record(event=event)
        await quickly(behind)


async def test_node_of_an_event_is_dropped_after_its_record(device: Device, stream: Stream) -> None:
    event = EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device) as coordinator:
        behind = coordinator.upload(ONES, after=event)
        (node,) = map(weakref.ref, behind.dependencies)
        stream.record(event=event)
        await quickly(behind)
        coordinator.poll()
        gc.collect()
        assert node() is None


@pytest.mark.slow
async def test_bracket_that_is_never_entered(device: Device) -> None:
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        bracket = coordinator.operation("barrier", description="meeting")
        behind = coordinator.upload(ONES, after=bracket)
        with pytest.raises(DeadlockError, match=r"^transfer 2 waits for barrier 1 'meeting'; "):
            await quickly(behind)


class Meeting:
    """A small barrier: each task waits until all have arrived."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.here = 0
        self._met: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        self.here += 1
        if self.here == self.parties:
            self._met.set_result(None)
        own = asyncio.get_running_loop().create_future()
        self._met.add_done_callback(lambda _: own.done() or own.set_result(None))
        with waiting(f"{self.parties - self.here} of {self.parties} parties of a meeting", own):
            await own


@pytest.mark.slow
async def test_party_that_never_comes(device: Device) -> None:
    async with AsyncCoordinator(device, deadlock_timeout=0.5) as coordinator:
        meeting = Meeting(3)

        async def party(name: str) -> None:
            async with coordinator.operation("barrier", description=name):
                await meeting.wait()

        told = await quickly(asyncio.gather(party("a"), party("b"), return_exceptions=True))
        assert [type(error) for error in told] == [DeadlockError] * 2
        assert "1 of 3 parties of a meeting" in str(told[0])


async def test_party_that_is_at_work_is_waited_for(device: Device) -> None:
    async with AsyncCoordinator(device, deadlock_timeout=INSTANTLY) as coordinator:
        meeting = Meeting(2)
        at_work = asyncio.Event()

        async def waits() -> None:
            async with coordinator.operation("barrier"):
                await meeting.wait()

        async def works() -> None:
            async with coordinator.operation("barrier"):
                await at_work.wait()  # a wait outside the library
                await meeting.wait()

        tasks = [asyncio.create_task(waits()), asyncio.create_task(works())]
        await until(lambda: meeting.here == 1)
        check_often(coordinator)
        assert coordinator.statistics().deadlocks == 0
        at_work.set()
        await quickly(asyncio.gather(*tasks))


class Lease:
    """A small exclusive lease that records its holder."""

    def __init__(self) -> None:
        self.holder: asyncio.Task[Any] | None = None
        self._free: asyncio.Future[None] | None = None

    def _can_end(self, stuck: Collection[asyncio.Task[Any]]) -> bool:
        return self.holder not in stuck

    async def __aenter__(self) -> None:
        while self.holder is not None:
            self._free = asyncio.get_running_loop().create_future()
            with waiting(f"a lease that {self.holder.get_name()} holds", self._free, self._can_end):
                await self._free
        self.holder = asyncio.current_task()

    async def __aexit__(self, *exc: object) -> None:
        self.holder = None
        if self._free is not None and not self._free.done():
            self._free.set_result(None)


async def test_lease_waited_for_by_its_holder() -> None:
    lease = Lease()
    with pytest.raises(DeadlockError, match="waits for a lease that me holds"):
        async with lease:
            task = asyncio.current_task()
            assert task is not None
            task.set_name("me")
            async with lease:
                pytest.fail("it is exclusive")
    assert lease.holder is None
    async with lease:
        pass


async def test_two_leases_taken_the_other_way_round() -> None:
    leases = [Lease(), Lease()]
    both = asyncio.Barrier(2)

    async def take(first: Lease, second: Lease) -> str:
        async with first:
            await both.wait()
            async with second:
                return "had both"

    tasks = [asyncio.create_task(take(*pair)) for pair in (leases, leases[::-1])]
    told = await quickly(asyncio.gather(*tasks, return_exceptions=True))
    assert sorted(type(one).__name__ for one in told) == ["DeadlockError", "str"]


async def test_bracket_and_holder_of_a_lease_wait_for_each_other(device: Device) -> None:
    """A cycle of two kinds of waits: a bracket waits for a lease, and the holder of the lease waits for the bracket."""
    async with AsyncCoordinator(device) as coordinator:
        lease = Lease()
        taken = asyncio.Event()
        bracket = coordinator.operation("kernel")

        async def holder() -> str:
            async with lease:
                taken.set()
                await bracket
            return "done"

        async def body() -> None:
            async with bracket:
                await taken.wait()
                await asyncio.sleep(0)
                async with lease:
                    pytest.fail("it is held")

        told = await quickly(asyncio.gather(holder(), body(), return_exceptions=True))
        assert [type(one) for one in told] == [DeadlockError, DeadlockError]
