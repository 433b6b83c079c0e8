"""The work for 4n waiters, streams or buffers is at most 6 × the work for n, counted in calls."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, Kernel, Stream
from aiocuda.pipeline._resources import OrderedGate
from tests.helpers import Latch, quickly

NOTHING = Kernel("nothing", source='extern "C" __global__ void nothing(float *x) {}', host=lambda x: None)

FEW = 40

#: In these tests the work that does not depend on n would hide the cost of 40.
MORE = {
    "queue behind a queue": 80,
    "stream pool, any_ready cancelled": 100,
    "coordinator, drain": 100,
    "coordinator, drain cancelled in reverse": 100,
    "coordinator, node cancelled in reverse": 80,
}

Tasks: TypeAlias = list[asyncio.Task[Any]]
Grow: TypeAlias = Callable[[Device, int], Awaitable[None]]


class Compared(asyncio.Future[Any]):
    """A future with `__eq__` in Python, so that a search through a list makes calls."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = asyncio.Future.__hash__


class Loop(asyncio.SelectorEventLoop):
    """A loop that makes `Compared` futures."""

    def create_future(self) -> asyncio.Future[Any]:
        return Compared(loop=self)


class Function:
    """A callback with `__eq__` in Python."""

    def __call__(self, operation: object) -> None:
        """Do nothing."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def calls(grow: Grow, *numbers: int) -> list[int]:
    """Return the calls of Python and C functions that the loop's thread makes for each of these numbers."""
    made: list[int] = []

    async def main() -> None:
        async with aiocuda.open_device(driver="host", max_in_flight=4) as device:
            await device.load(NOTHING)
            for n in numbers:
                profile = cProfile.Profile()
                profile.enable()
                try:
                    await quickly(grow(device, n))
                finally:
                    profile.disable()
                made.append(sum(entry.callcount for entry in profile.getstats()))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    return made


async def begin(n: int, wait: Callable[[], Awaitable[object]]) -> Tasks:
    """Start n tasks that wait."""

    async def each() -> None:
        await wait()

    tasks = [asyncio.create_task(each()) for _ in range(n)]
    await asyncio.sleep(0)
    return tasks


@contextlib.asynccontextmanager
async def held(device: Device) -> AsyncIterator[Stream]:
    """Open a stream that is held until the block ends."""
    async with device.stream() as stream:
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            yield stream


async def end(tasks: Tasks, cancelled: int = 0) -> None:
    """Wait for the tasks; cancel them first, in order (1) or in reverse order (-1)."""
    if cancelled:
        for task in tasks[::cancelled]:
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) == bool(cancelled) for outcome in outcomes), outcomes[:3]
    assert not any(isinstance(outcome, Exception) for outcome in outcomes)


# -- operations ------------------------------------------------------------------------------------------------------


def operation(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        async with held(device) as stream:
            marker = stream.synchronize()
            tasks = await begin(n, marker.wait)
            if cancelled:
                await end(tasks, cancelled)
        if not cancelled:
            await end(tasks)

    return grow


async def callbacks(device: Device, n: int) -> None:
    async with held(device) as stream:
        marker = stream.synchronize()
        functions = [Function() for _ in range(n)]
        for function in functions:
            marker.add_done_callback(function)
        assert sum(map(marker.remove_done_callback, reversed(functions))) == n


async def completed(device: Device, n: int) -> None:
    async with held(device) as stream:
        markers = [stream.synchronize() for _ in range(n)]

        async def iterate() -> None:
            assert [marker async for marker in aiocuda.as_completed(markers)] == markers

        left = await begin(1, iterate)
        tasks = await begin(1, iterate)
        await end(left, -1)
    await end(tasks)


async def gathers(device: Device, n: int) -> None:
    async with held(device) as stream:
        markers = [stream.synchronize() for _ in range(3)]

        async def gather() -> None:
            await aiocuda.gather(*markers)

        await end(await begin(n, gather), -1)


async def settles(device: Device, n: int) -> None:
    async with held(device) as stream:
        tasks = await begin(n, stream.synchronize().settle)
    await end(tasks)


# -- the submission queue --------------------------------------------------------------------------------------------


async def queue(device: Device, n: int) -> None:
    async with held(device) as stream:
        buffer = stream.empty(4)
        tasks = [asyncio.create_task(stream.fill(buffer, 1).wait()) for _ in range(n)]
        await asyncio.sleep(0)
    await end(tasks)


async def queue_abandoned(device: Device, n: int) -> None:
    async with held(device) as stream:
        operations = [stream.synchronize() for _ in range(n)]
        for each in reversed(operations):
            each.abandon()


async def queue_behind_a_queue(device: Device, n: int) -> None:
    async with device.stream() as other, held(device) as stream:
        for _ in range(n):
            last = stream.synchronize()
        other.wait(last)
        for _ in range(n):
            other.synchronize()


# -- pools -----------------------------------------------------------------------------------------------------------


def streams(cancelled: int = 0, *, ready: bool = False, exclusive: bool = True, closed: bool = False) -> Grow:
    async def grow(device: Device, n: int) -> None:
        async with aiocuda.StreamPool(device, 1, 1) as pool:
            first = await pool.stream(exclusive=True)

            async def lease() -> None:
                try:
                    lease = await (pool.any_ready() if ready else pool.stream(exclusive=exclusive))
                except aiocuda.ClosedError:
                    assert closed
                else:
                    lease.release()

            tasks = await begin(n, lease)
            if closed:
                await pool.aclose()
            elif not cancelled:
                first.release()
            await end(tasks, cancelled)

    return grow


async def streams_of_a_holder_that_waits(device: Device, n: int) -> None:
    async with aiocuda.StreamPool(device, 1, 1) as pool, aiocuda.StreamPool(device, 1, 1) as other:
        first = await other.stream(exclusive=True)

        async def hold() -> None:
            async with pool.stream(exclusive=True), other.stream(exclusive=True):
                pass

        async def lease() -> None:
            async with pool.stream(exclusive=True):
                pass

        tasks = [*await begin(1, hold), *await begin(n, lease)]
        first.release()
        await end(tasks)


async def shared_leases(device: Device, n: int) -> None:
    async with aiocuda.StreamPool(device, 1, 1) as pool:
        leases = [await (await pool.stream()).__aenter__() for _ in range(n)]
        for lease in reversed(leases):
            lease.release()


def events(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        pool = aiocuda.EventPool(device, 1)
        first = pool.acquire_nowait()

        async def acquire() -> None:
            pool.release(await pool.acquire())

        tasks = await begin(n, acquire)
        if not cancelled:
            pool.release(first)
        await end(tasks, cancelled)

    return grow


# -- pipelines -------------------------------------------------------------------------------------------------------


def slots(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        ring = aiocuda.TripleBuffer(1)
        first = await ring.reserve()

        async def acquire() -> None:
            ring.release(await ring.acquire())

        tasks = await begin(n, acquire)
        if not cancelled:
            ring.release(first)
        await end(tasks, cancelled)

    return grow


async def ordered_gate(device: Device, n: int) -> None:
    turns = OrderedGate()

    async def enter(number: int) -> None:
        await turns.enter(number)
        turns.leave(number)

    await end([asyncio.create_task(enter(number)) for number in reversed(range(n))])


async def pipeline(device: Device, n: int) -> None:
    stages = [aiocuda.Stage("fill", lambda slot: slot.stream.fill(slot.buffer("x", 4), 1)) for _ in range(1)]
    async with aiocuda.Pipeline(device, stages, depth=n) as running:
        async for _ in running.run(range(2 * n)):
            pass


# -- coordination ----------------------------------------------------------------------------------------------------


def barrier(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        meeting = aiocuda.StreamBarrier(n + bool(cancelled))
        await end(await begin(n, meeting.wait), cancelled)

    return grow


async def barrier_of_streams(device: Device, n: int) -> None:
    meeting = aiocuda.StreamBarrier(n)
    async with aiocuda.StreamGroup(device, n) as group:
        await end([asyncio.create_task(meeting.wait(stream)) for stream in group])


def drain(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        async with aiocuda.AsyncCoordinator(device) as coordinator:
            node = await coordinator.upload(np.zeros(4, np.float32))
            with Latch(device) as latch:
                latch.hold(coordinator.compute_stream)
                await latch.held()
                coordinator.compute(NOTHING, 1, 1, node)
                tasks = await begin(n, coordinator.drain)
                if cancelled:
                    await end(tasks, cancelled)
            if not cancelled:
                await end(tasks)

    return grow


def node(cancelled: int) -> Grow:
    async def grow(device: Device, n: int) -> None:
        async with aiocuda.AsyncCoordinator(device) as coordinator, device.stream() as stream:
            event = aiocuda.EventPool(device).acquire_nowait()
            waits = coordinator.compute(NOTHING, 1, 1, stream.empty(4), after=event)
            tasks = await begin(n, waits.wait)
            if cancelled:
                await end(tasks, cancelled)
            stream.record(event=event)
            if not cancelled:
                await end(tasks)

    return grow


async def node_callbacks(device: Device, n: int) -> None:
    async with aiocuda.AsyncCoordinator(device) as coordinator, device.stream() as stream:
        event = aiocuda.EventPool(device).acquire_nowait()
        waits = coordinator.compute(NOTHING, 1, 1, stream.empty(4), after=event)
        functions = [Function() for _ in range(n)]
        for function in functions:
            waits.add_done_callback(function)
        assert sum(map(waits.remove_done_callback, reversed(functions))) == n
        stream.record(event=event)


async def room(device: Device, n: int) -> None:
    async with aiocuda.AsyncCoordinator(device, max_in_flight=4) as coordinator:
        buffer = await coordinator.upload(np.zeros(4, np.float32))

        async def produce() -> None:
            await coordinator.room()
            coordinator.compute(NOTHING, 1, 1, buffer)

        await end(await begin(n, produce))


async def chain_that_is_awaited(device: Device, n: int) -> None:
    async with aiocuda.AsyncCoordinator(device, max_in_flight=4) as coordinator:
        buffer = await coordinator.upload(np.zeros(4, np.float32))
        with Latch(device) as latch:
            latch.hold(coordinator.compute_stream)
            await latch.held()
            nodes = [coordinator.compute(NOTHING, 1, 1, buffer) for _ in range(n)]
            tasks = [asyncio.create_task(each.wait()) for each in nodes]
            await asyncio.sleep(0)
        await end(tasks)


def edges_between_nodes(order: int, *, later: bool = False, implied: bool = False) -> Grow:
    """A chain in which each node depends on the one before it, or on the one that was made after it."""

    async def grow(device: Device, n: int) -> None:
        async with aiocuda.AsyncCoordinator(device) as coordinator, device.stream() as stream:
            event = aiocuda.EventPool(device).acquire_nowait()
            buffers = [stream.empty(4)] * n if implied else [stream.empty(4) for _ in range(n)]
            nodes = [coordinator.compute(NOTHING, 1, 1, buffer, after=event) for buffer in buffers]
            if later:
                nodes.reverse()
            for index in range(1, n)[::order]:
                coordinator.add_dependency(nodes[index], nodes[index - 1])
            stream.record(event=event)

    return grow


def edges_between_streams(edges: Callable[[int], list[tuple[int, int]]]) -> Grow:
    async def grow(device: Device, n: int) -> None:
        async with aiocuda.StreamGroup(device, [f"stream {number}" for number in range(n)]) as group:
            for dependent, prerequisite in edges(n):
                group.add_dependency(dependent, prerequisite)

    return grow


# -- deferred frees --------------------------------------------------------------------------------------------------


async def frees(device: Device, n: int) -> None:
    async with held(device) as stream:
        for _ in range(n):
            buffer = stream.empty(4)
            stream.fill(buffer, 1)
            buffer.free()
    assert device.memory.statistics().live_bytes == 0


async def frees_of_managed_memory(device: Device, n: int) -> None:
    async with held(device) as stream:
        for _ in range(n):
            buffer = device.unified(4)
            stream.prefetch(buffer)
            buffer.free()
    assert device.memory.statistics().live_bytes == 0


async def frees_of_pinned_memory(device: Device, n: int) -> None:
    arrays = [await device.pinned(4) for _ in range(n)]
    async with held(device) as stream:
        target = stream.empty(4)
        for array in arrays:
            stream.copy(target, array)
            array.free()


async def dependencies_of_buffers(device: Device, n: int) -> None:
    async with held(device) as stream:
        buffers = [stream.empty(4) for _ in range(n)]
        marker = stream.synchronize()
        for buffer in buffers:
            buffer.add_dependency(marker)
    assert all(buffer.satisfied for buffer in buffers)


GROWING: dict[str, Grow] = {
    "operation": operation(0),
    "operation, cancelled in order": operation(1),
    "operation, cancelled in reverse": operation(-1),
    "operation, callbacks removed": callbacks,
    "operation, gathers cancelled": gathers,
    "operation, as_completed": completed,
    "operation, settled": settles,
    "queue": queue,
    "queue, abandoned": queue_abandoned,
    "queue behind a queue": queue_behind_a_queue,
    "stream pool": streams(),
    "stream pool, cancelled in order": streams(1),
    "stream pool, cancelled in reverse": streams(-1),
    "stream pool, closed": streams(closed=True),
    "stream pool, shared": streams(exclusive=False),
    "stream pool, any_ready": streams(ready=True),
    "stream pool, any_ready cancelled": streams(-1, ready=True),
    "stream pool, holder waits": streams_of_a_holder_that_waits,
    "stream pool, leases of one stream": shared_leases,
    "event pool": events(0),
    "event pool, cancelled in reverse": events(-1),
    "ring": slots(0),
    "ring, cancelled in reverse": slots(-1),
    "ordered_gate": ordered_gate,
    "pipeline": pipeline,
    "barrier": barrier(0),
    "barrier, cancelled in reverse": barrier(-1),
    "barrier, streams": barrier_of_streams,
    "coordinator, drain": drain(0),
    "coordinator, drain cancelled in reverse": drain(-1),
    "coordinator, node": node(0),
    "coordinator, node cancelled in reverse": node(-1),
    "coordinator, node's callbacks removed": node_callbacks,
    "coordinator, room": room,
    "coordinator, chain awaited": chain_that_is_awaited,
    "coordinator, edges forwards": edges_between_nodes(1),
    "coordinator, edges backwards": edges_between_nodes(-1),
    "coordinator, edges to later ones forwards": edges_between_nodes(1, later=True),
    "coordinator, edges to later ones backwards": edges_between_nodes(-1, later=True),
    "coordinator, edges that are implied": edges_between_nodes(1, implied=True),
    "group, chain forwards": edges_between_streams(lambda n: [(i, i - 1) for i in range(1, n)]),
    "group, chain backwards": edges_between_streams(lambda n: [(i, i - 1) for i in range(n - 1, 0, -1)]),
    "group, chain from pairs": edges_between_streams(
        lambda n: [(i, i - 1) for i in [*range(1, n, 2), *range(2, n, 2)]]
    ),
    "group, star": edges_between_streams(lambda n: [(0, i) for i in range(1, n)]),
    "group, star of dependents": edges_between_streams(lambda n: [(i, 0) for i in range(1, n)]),
    "frees": frees,
    "frees of managed memory": frees_of_managed_memory,
    "frees of pinned memory": frees_of_pinned_memory,
    "dependencies of buffers": dependencies_of_buffers,
}


@pytest.mark.parametrize("name", GROWING)
def test_four_times_as_many_cost_at_most_six_times_as_much(name: str) -> None:
    n = MORE.get(name, FEW)
    few, many = calls(GROWING[name], n, 4 * n)
    assert many <= 6 * few, f"{few} calls for {n}, {many} for {4 * n}"
