"""Places: by rank, in the order of registration; a node overtaken 64 times rises; no node is overtaken forever."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, Device, EventPool, Stream
from aiocuda.coordination import Node
from aiocuda.coordination._node import PRIORITIES
from aiocuda.coordination._ready_queue import RISES_AFTER, ReadyQueue
from aiocuda.coordination._scheduled_node import ScheduledNode
from aiocuda.coordination._scheduler import Scheduler
from aiocuda.testing import Latch
from tests.helpers import SPIN, quickly

CRITICAL, HIGH, NORMAL, LOW, CLEANUP = range(len(PRIORITIES))


class Desk:
    """Registers nodes and gives them places; counts the overtakings of each node one by one."""

    def __init__(self) -> None:
        self.ready: ReadyQueue[ScheduledNode[Any]] = ReadyQueue()
        self.number = 0
        self.overtaken: dict[ScheduledNode[Any], int] = {}

    def register(self, rank: int) -> ScheduledNode[Any]:
        self.number += 1
        node: ScheduledNode[Any] = ScheduledNode(
            cast("Scheduler", None), self.number, "kernel", "compute", rank, "", None, 0.0
        )
        self.ready.push(node)
        self.overtaken[node] = 0
        return node

    def serve(self) -> ScheduledNode[Any]:
        node = self.ready.pop()
        del self.overtaken[node]
        for other in self.overtaken:
            self.overtaken[other] += other.id < node.id
        self.ready.served(node)
        return node


def test_overtaken_64_times_it_rises_one_class() -> None:
    desk = Desk()
    low = desk.register(LOW)
    for count in range(1, 3 * RISES_AFTER + 1):
        desk.register(CRITICAL)
        assert desk.serve() is not low
        assert low.rank == LOW - count // RISES_AFTER
    desk.register(CRITICAL)
    assert desk.serve() is low


@pytest.mark.parametrize("rank", range(len(PRIORITIES)))
def test_endless_critical_work_overtakes_a_node_at_most_256_times(rank: int) -> None:
    desk = Desk()
    waiting = [desk.register(rank) for _ in range(50)]
    served = []
    for _ in range(1000):
        desk.register(CRITICAL)
        served.append(desk.serve())
        assert max(desk.overtaken.values(), default=0) <= 256
    assert [node for node in served if node in waiting] == waiting
    assert served.index(waiting[0]) == RISES_AFTER * rank


def test_nodes_registered_later_are_not_overtaken() -> None:
    """A thousand critical nodes that were registered first are served first, and no node rises."""
    desk = Desk()
    for _ in range(1000):
        desk.register(CRITICAL)
    low = desk.register(LOW)
    for _ in range(1000):
        desk.serve()
    assert (low.rank, desk.serve()) == (LOW, low)


@pytest.mark.parametrize("seed", range(20))
def test_no_node_is_overtaken_more_than_256_times(seed: int) -> None:
    chance = random.Random(seed)
    removals = chance.choice((0.02, 0.6))
    desk = Desk()
    for _ in range(1500):
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            desk.register(chance.choices(range(5), (8, 4, 2, 1, 1))[0])
        if desk.overtaken:
            if chance.random() < removals:
                node = chance.choice(list(desk.overtaken))
                desk.ready.remove(node)
                del desk.overtaken[node]
            else:
                desk.serve()
        assert desk.ready.size == len(desk.overtaken)
        assert max(desk.overtaken.values(), default=0) <= 256
        for node, times in desk.overtaken.items():  # never later than it should
            assert node.rank <= max(0, PRIORITIES.index(node.priority) - times // RISES_AFTER)
    left = list(desk.overtaken)
    assert {desk.serve() for _ in left} == set(left)


@pytest.mark.asyncio
async def test_low_work_is_served_beside_an_endless_stream_of_critical(
    device: Device, stream: Stream, latch: Latch
) -> None:
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        coordinator.compute(SPIN, 1, 1, 1, stream=stream)
        low = coordinator.compute(SPIN, 1, 1, 1, priority="low")
        latch.release()
        before = 0
        while not low.done():
            node = coordinator.compute(SPIN, 1, 1, 1, priority="critical")
            again = coordinator.compute(SPIN, 1, 1, 1, priority="critical")  # there is always one that waits
            await quickly(node)
            before += 2
            assert before < 1000, "it starves"
            del again
        assert low.given_at > 0


@pytest.mark.asyncio
async def test_critical_work_goes_before_a_thousand_that_were_there(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """It has the next place that there is, and a stream of high priority."""
    await device.load(SPIN)
    latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device, max_in_flight=4) as coordinator:
        for _ in range(4):
            coordinator.compute(SPIN, 1, 1, 1, stream=stream)
        lows = [coordinator.compute(SPIN, 1, 1, 1, priority="low") for _ in range(200)]
        critical = coordinator.compute(SPIN, 1, 1, 1, priority="critical")
        latch.release()
        await quickly(critical)
        assert critical.stream is not None
        assert critical.stream.priority == "high"
        ahead = sum(0 < low.given_at < critical.given_at for low in lows)
        assert ahead == 0
        await quickly(coordinator.drain())
        given = np.array([low.given_at for low in lows])
        assert (np.diff(given) >= 0).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["kernel", "host"])
@pytest.mark.parametrize("change", ["abandon", "add_dependency"])
async def test_node_changes_while_the_scheduler_submits(device: Device, stream: Stream, kind: str, change: str) -> None:
    """A task factory, or an eager task, runs code of the program while the scheduler submits ready nodes."""
    await device.load(SPIN)
    loop, pool = asyncio.get_running_loop(), EventPool(device, limit=2)
    async with (
        pool.borrow() as event,
        pool.borrow() as later,
        AsyncCoordinator(device, max_in_flight=2) as coordinator,
    ):
        calls: list[str] = []
        host = coordinator.host(lambda: None, after=coordinator.compute(SPIN, 1, 1, 1))
        gate = coordinator.compute(SPIN, 1, 1, 1, after=event)
        node: Node[Any]
        if kind == "host":
            node = coordinator.host(lambda: calls.append("node"), after=event)
        else:
            node = coordinator.compute(SPIN, 1, 1, 1, after=event)
        others = [coordinator.compute(SPIN, 1, 1, 1, after=event) for _ in range(4)]
        last = coordinator.compute(SPIN, 1, 1, 1, after=later)

        def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
            loop.set_task_factory(None)
            stream.record(event=event)
            assert not others[-1].done()
            if change == "abandon":
                assert node.abandon()
            else:
                coordinator.add_dependency(node, last)
            return asyncio.Task(coroutine, loop=loop, **options)

        loop.set_task_factory(factory)  # called for `host`
        await host  # without another task
        for other in (gate, *others):
            await quickly(other)
        if change == "abandon":
            assert (node.state, calls) == ("abandoned", [])
        else:
            assert (node.state, calls) == ("waiting", [])
        stream.record(event=later)
        await quickly(last)
        if change == "add_dependency":
            await quickly(node)
        await quickly(coordinator.drain())
        statistics = coordinator.statistics()
        assert (statistics.waiting, statistics.in_flight, statistics.abandoned) == (0, 0, int(change == "abandon"))
