"""Places are given by priority. Nodes may change while the scheduler submits. `test_ready_queue.py` has the order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, Device, EventPool, Stream
from aiocuda.coordination import Node
from tests.helpers import SPIN, Latch, quickly


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
