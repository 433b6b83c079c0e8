"""E15: `after=` takes nodes of other coordinators of the loop, of any device of the driver."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    CycleError,
    DeadlockError,
    Device,
    InvalidArgumentError,
    SkippedError,
    Stream,
    WrongLoopError,
)
from aiocuda.driver.host import HostDriver
from tests.coordination.graphs import ITEMS
from tests.helpers import SPIN, Latch, quickly, until

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_node_runs_after_a_node_of_another_coordinator(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device) as first, AsyncCoordinator(device) as second:
        before = first.compute(SPIN, 1, 1, 1000, stream=stream)
        behind = second.upload(ONES, after=before)
        last = second.host(threading.get_ident, after=[behind, before])
        assert behind.dependencies == (before,)
        await asyncio.sleep(0)
        assert not behind.done()
        latch.release()
        await quickly(last)
        assert before.done()
        assert behind.done()


async def test_node_waits_for_one_that_has_no_place_yet(device: Device, stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as first, AsyncCoordinator(device) as second:
        running = first.compute(SPIN, 1, 1, 1000, stream=stream)
        waiting = first.upload(ONES, after=running)
        download = second.download(waiting.buffer, after=waiting)
        late = second.upload(ONES)
        second.add_dependency(download, late)
        assert (waiting.state, download.state) == ("waiting", "waiting")
        latch.release()
        np.testing.assert_array_equal(await quickly(download), ONES)


async def test_nodes_of_two_devices() -> None:
    driver = HostDriver(devices=2)
    order: list[int] = []
    async with aiocuda.open_device(0, driver=driver) as one, aiocuda.open_device(1, driver=driver) as other:
        async with AsyncCoordinator(one) as first, AsyncCoordinator(other) as second:
            node: Any = ()
            for number in range(20):
                coordinator = (first, second)[number % 2]
                node = coordinator.upload(ONES, after=node)
                node = coordinator.host(order.append, number, after=node)
            await quickly(node)
    driver.close()
    assert order == list(range(20))


async def test_failure_skips_dependents_elsewhere_and_is_delivered_once(device: Device) -> None:
    async with AsyncCoordinator(device) as first, AsyncCoordinator(device) as second:
        failing = first.host(lambda: 1 // 0, description="failing")
        skipped = second.upload(ONES, after=failing)
        with pytest.raises(SkippedError, match="'failing' failed before it") as caught:
            await quickly(skipped)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("entered", [False, True])
async def test_coordinator_that_is_left_skips_dependents_elsewhere(device: Device, entered: bool) -> None:
    async with AsyncCoordinator(device) as second:
        with pytest.raises(KeyError):
            async with AsyncCoordinator(device) as first:
                event = aiocuda.EventPool(device).acquire_nowait()
                withdrawn = first.upload(ONES, after=event, description="withdrawn")
                skipped = second.upload(ONES, after=withdrawn)
                waiter = asyncio.create_task(skipped.wait()) if entered else None
                await asyncio.sleep(0)
                raise KeyError
        with pytest.raises(SkippedError, match="'withdrawn'") as caught:
            await quickly(skipped if waiter is None else waiter)
        assert isinstance(caught.value.__cause__, ClosedError)


async def test_bracket_that_is_never_entered_skips_dependents_elsewhere(device: Device) -> None:
    async with AsyncCoordinator(device) as second:
        with pytest.raises(ClosedError, match="'meeting' was never entered"):
            async with AsyncCoordinator(device) as first:
                bracket = first.operation("barrier", description="meeting")
                skipped = second.upload(ONES, after=bracket)
        with pytest.raises(SkippedError, match="'meeting'"):
            await quickly(skipped)


async def test_cycle_through_two_coordinators(device: Device, stream: Stream) -> None:
    event = aiocuda.EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device) as first, AsyncCoordinator(device) as second:
        one = first.upload(ONES, after=event, description="one")
        two = second.upload(ONES, after=one, description="two")
        three = first.upload(ONES, after=two, description="three")
        with pytest.raises(CycleError, match=r"'one' → .*'three' → .*'two' → .*'one'"):
            first.add_dependency(one, three)
        with pytest.raises(CycleError, match=r"'one' → .*'two' → .*'one'"):
            first.add_dependency(one, two)
        stream.record(event=event)
        await quickly(three)


async def test_task_that_holds_the_place_of_a_prerequisite_elsewhere(device: Device) -> None:
    """The node has a place, but the node that it waits for gets none before the task leaves its block."""
    async with AsyncCoordinator(device, max_in_flight=1) as first, AsyncCoordinator(device) as second:
        with pytest.raises(DeadlockError, match=r"waits for transfer 2, for which none of 1 places .* 'holder'"):
            async with first.operation("kernel", description="holder"):
                without_place = first.upload(ONES)
                await second.upload(ONES, after=without_place)
        await quickly(second.upload(ONES))


async def test_tasks_that_hold_places_of_both(device: Device) -> None:
    async with (
        AsyncCoordinator(device, max_in_flight=1) as first,
        AsyncCoordinator(device, max_in_flight=1) as second,
        AsyncCoordinator(device) as third,
    ):
        inside = asyncio.Barrier(2)

        async def hold(own: AsyncCoordinator, other: AsyncCoordinator) -> None:
            async with own.operation("kernel"):
                await inside.wait()
                await third.upload(ONES, after=other.upload(ONES))

        told = await quickly(asyncio.gather(hold(first, second), hold(second, first), return_exceptions=True))
        assert sorted(type(one).__name__ for one in told) == ["DeadlockError", "NoneType"]


async def test_task_of_a_bracket_elsewhere_that_is_at_work_blocks_nothing(device: Device) -> None:
    async with (
        AsyncCoordinator(device) as first,
        AsyncCoordinator(device, deadlock_timeout=1e-9) as second,
    ):
        async with first.operation("kernel") as bracket:
            behind = second.upload(ONES, after=bracket)
            waiter = asyncio.create_task(behind.wait())
            await asyncio.sleep(0)
            for _ in range(4):
                second._scheduler.detector._tick()
            assert not waiter.done()
        await quickly(waiter)
        assert second.statistics().deadlocks == 0


async def test_device_that_closes_waits_for_nodes_on_another_one() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(0, driver=driver) as one:
        async with AsyncCoordinator(one, max_in_flight=1) as first:
            latch, stream = Latch(one), one.stream()
            latch.hold(stream)
            await latch.held()
            other = await aiocuda.open_device(1, driver=driver)
            second = AsyncCoordinator(other)
            running = first.compute(SPIN, 1, 1, 1000, stream=stream)
            behind = second.upload(ONES, after=first.upload(ONES, after=running))
            closing = asyncio.create_task(other.aclose())
            await until(lambda: second._scheduler.closing)
            latch.release()
            await quickly(closing)
            assert behind.state == "done"
    driver.close()


async def test_nodes_that_no_node_can_wait_for(device: Device) -> None:
    async with AsyncCoordinator(device) as closed:
        node = closed.upload(ONES)
    async with AsyncCoordinator(device) as coordinator:
        with pytest.raises(ClosedError, match="has been closed"):
            coordinator.upload(ONES, after=node)
        async with AsyncCoordinator(device) as another:
            stranger = another.upload(ONES)
            with pytest.raises(InvalidArgumentError, match="another coordinator"):
                coordinator.download(stranger)
            with pytest.raises(InvalidArgumentError, match="another coordinator"):
                another.add_dependency(coordinator.upload(ONES), stranger)
        async with aiocuda.open_device(driver=HostDriver()) as far, AsyncCoordinator(far) as foreign:
            with pytest.raises(InvalidArgumentError, match="another driver"):
                coordinator.upload(ONES, after=foreign.upload(ONES))

        async def elsewhere() -> None:
            async with AsyncCoordinator(device) as own:
                own.upload(ONES, after=coordinator.upload(ONES))

        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(asyncio.run, elsewhere())


async def test_long_chain_through_two_coordinators(device: Device) -> None:
    async def step() -> None:
        """Take no thread: a busy machine starts 4 000 jobs of threads in minutes."""

    event = aiocuda.EventPool(device).acquire_nowait()
    async with AsyncCoordinator(device) as first, AsyncCoordinator(device) as second, device.stream() as stream:
        node: Any = event
        for _ in range(2000):
            node = second.host(step, after=first.host(step, after=node))
        stream.record(event=event)
        await quickly(node)
