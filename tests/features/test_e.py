"""The coordinator and asyncio: rows E1 to E16 of docs/reference/features.md, on every driver.

More of them in tests/coordination and tests/completion.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    BusyError,
    ClosedError,
    CycleError,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    Stream,
    WrongDeviceError,
    open_device,
)
from aiocuda.coordination._node import KINDS, PRIORITIES
from aiocuda.driver.host import HostDriver
from tests.coordination.graphs import BUMP, ITEMS
from tests.helpers import PATIENCE, quickly

pytestmark = pytest.mark.asyncio

ONES = np.ones(ITEMS, np.uint32)


async def test_what_was_registered_can_be_read(device: Device, stream: Stream) -> None:
    """E1: kind, priority, stream, dependencies, description, and when it was registered and given."""
    async with AsyncCoordinator(device) as coordinator:
        first = coordinator.upload(ONES)
        for kind in KINDS[:-1]:
            for priority in PRIORITIES:
                node = coordinator.compute(
                    BUMP, 1, 32, first, 1, ITEMS, kind=kind, priority=priority, stream=stream, description="bump"
                )
                assert (node.kind, node.priority, node.stream, node.description) == (kind, priority, stream, "bump")
                assert first.id < node.id
                assert 0 < node.registered_at
        await quickly(node)
        assert node.registered_at <= node.given_at
        async with coordinator.operation("all-reduce", after=[node], description="ours") as bracket:
            behind = coordinator.download(first, after=bracket)
            assert behind.dependencies[-1] is bracket or bracket in behind.dependencies
        assert bracket.name.endswith("'ours'")
        await quickly(behind)
        assert (node.operation is not None and node.operation.stream) is stream


async def test_streams_polling_waiting_and_draining(device: Device) -> None:
    """E3: the verbs, the streams, `poll`, `wait` and `drain`."""
    async with AsyncCoordinator(device) as coordinator:
        up = coordinator.upload(ONES)
        kernel = coordinator.compute(BUMP, 1, 32, up, 1, ITEMS, after=[up])
        down = coordinator.download(up, after=kernel)
        np.testing.assert_array_equal(await quickly(coordinator.wait(down)), 6 * ONES)
        assert up.stream is coordinator.upload_stream
        assert kernel.stream is coordinator.compute_stream
        assert down.stream is coordinator.download_stream
        assert set(coordinator.poll()) <= {up, kernel, down}  # some of them may have been seen before
        assert coordinator.statistics().done == 3
        assert coordinator.poll() == []
        nodes = [coordinator.download(up) for _ in range(5)]
        failing = coordinator.host(lambda: 1 // 0)
        skipped = coordinator.download(up, after=failing)
        withdrawn = coordinator.host(int, after=nodes)
        assert withdrawn.abandon()
        await quickly(coordinator.drain())
        assert all(node.done() for node in nodes)
        polled = coordinator.poll()
        assert [node for node in polled if node in nodes] == nodes
        assert len(polled) == 8
        assert {*polled} == {*nodes, failing, skipped, withdrawn}
        assert coordinator.poll() == []
        assert isinstance(failing.exception(), ZeroDivisionError)


async def test_classes_are_stream_priorities(device: Device) -> None:
    """E4: critical and high, normal, low and cleanup."""
    async with AsyncCoordinator(device) as coordinator:
        found = []
        for priority in PRIORITIES:
            node = coordinator.upload(ONES, priority=priority)
            await quickly(node)
            assert node.stream is not None
            found.append(node.stream.priority)
    assert found == ["high", "high", "normal", "low", "low"]


async def test_figures(device: Device) -> None:
    """E7: totals by state and by kind, and what it cost."""
    async with AsyncCoordinator(device) as coordinator:
        for _ in range(40):
            up = coordinator.upload(ONES)
            coordinator.compute(BUMP, 1, 32, up, 1, ITEMS)
        with pytest.raises(ZeroDivisionError):
            async with coordinator.operation("reduction", writes=[up.buffer]):
                raise ZeroDivisionError
        skipped = coordinator.download(up)
        await coordinator.drain()
        found = coordinator.statistics()
        assert found.by_kind == {"transfer": 41, "kernel": 40, "reduction": 1}
        assert (found.registered, found.done, found.failed, found.skipped) == (82, 80, 1, 1)
        assert (found.waiting, found.in_flight, found.abandoned, found.deadlocks) == (0, 0, 0, 0)
        assert found.average_overhead > 0
        assert skipped.state == "skipped"


async def test_an_operation_exists_from_its_creation(device: Device) -> None:
    """E11: registered, with its dependencies, in the totals and in cycle detection, before a task enters its block."""
    async with AsyncCoordinator(device) as coordinator:
        up = await quickly(coordinator.upload(ONES))
        first = coordinator.operation("reduction", writes=[up])
        second = coordinator.operation("broadcast", reads=[up])
        assert second.dependencies == (first,)
        found = coordinator.statistics()
        assert (found.registered, found.waiting) == (3, 2)
        assert found.by_kind == {"transfer": 1, "reduction": 1, "broadcast": 1}
        with pytest.raises(CycleError):
            coordinator.add_dependency(first, second)
        async with first:
            assert first.stream is not None
            first.stream.fill(up, 3)
        down = coordinator.download(up, after=second)
        del second  # it is not entered: `down` needs it
        with pytest.raises(SkippedError, match="was dropped before a task entered its block") as caught:
            await quickly(down)
        assert isinstance(caught.value.__cause__, ClosedError)


async def test_priority_of_a_waiting_operation_can_be_changed(device: Device) -> None:
    """E12: it takes the place of an operation of that priority; after its submission the priority is fixed."""
    async with AsyncCoordinator(device, 1) as coordinator:
        async with coordinator.operation("kernel"):  # holds the only place
            first, second, third = (coordinator.upload(ONES, priority="low") for _ in range(3))
            third.priority = "critical"
            assert (third.priority, third.state) == ("critical", "waiting")
        await quickly(coordinator.drain())
        assert third.given_at < first.given_at < second.given_at
        assert third.stream is not None
        assert third.stream.priority == "high"
        with pytest.raises(BusyError, match="has ended"):
            third.priority = "low"


async def test_wrong_shapes_dtypes_and_devices_are_refused_at_registration() -> None:
    """E13: by upload, compute and download; no operation is registered."""
    driver = HostDriver(devices=2)
    async with open_device(0, driver=driver) as one, open_device(1, driver=driver) as other:
        async with AsyncCoordinator(one) as coordinator, one.stream() as stream, other.stream() as distant:
            near, short = stream.empty(ITEMS, np.uint32), stream.empty(3, np.uint32)
            floats, far = stream.empty(ITEMS, np.float32), distant.empty(ITEMS, np.uint32)
            calls: list[tuple[type[Exception], Callable[[], object]]] = [
                (InvalidArgumentError, lambda: coordinator.upload(ONES, short)),
                (InvalidTypeError, lambda: coordinator.upload(ONES, floats)),
                (WrongDeviceError, lambda: coordinator.upload(ONES, far)),
                (WrongDeviceError, lambda: coordinator.upload(ONES, near, stream=distant)),
                (InvalidTypeError, lambda: coordinator.compute(BUMP, 1, 32, near)),
                (InvalidTypeError, lambda: coordinator.compute(BUMP, 1, 32, floats, 1, ITEMS)),
                (WrongDeviceError, lambda: coordinator.compute(BUMP, 1, 32, far, 1, ITEMS)),
                (InvalidArgumentError, lambda: coordinator.download(near, np.empty(3, np.uint32))),
                (InvalidTypeError, lambda: coordinator.download(near, np.empty(ITEMS, np.float32))),
                (WrongDeviceError, lambda: coordinator.download(far)),
            ]
            for error, call in calls:
                with pytest.raises(error):
                    call()
            assert coordinator.statistics().registered == 0
            await quickly(coordinator.upload(ONES, far, stream=distant))
    driver.close()


async def test_after_takes_nodes_of_other_coordinators() -> None:
    """E15: of the loop, and of any device of the driver."""
    order: list[int] = []
    driver = HostDriver(devices=2)
    async with open_device(0, driver=driver) as one, open_device(1, driver=driver) as other:
        async with AsyncCoordinator(one) as first, AsyncCoordinator(other) as second:
            before = first.host(order.append, 1, after=first.upload(ONES))
            await quickly(second.host(order.append, 2, after=[before, second.upload(ONES)]))
    driver.close()
    assert order == [1, 2]


def captured(stream: Stream) -> Any:
    buffer = stream.empty(4)
    with stream.capture() as graph:
        stream.fill(buffer, 1)
    return graph


#: What the library returns, made with a coordinator and a stream.
AWAITABLES: dict[str, Callable[[AsyncCoordinator, Stream], Any]] = {
    "operation": lambda coordinator, stream: stream.synchronize(),
    "event": lambda coordinator, stream: stream.record(),
    "node": lambda coordinator, stream: coordinator.upload(ONES),
    "gathering": lambda coordinator, stream: aiocuda.gather(stream.synchronize(), stream.record()),
    "pinned buffer": lambda coordinator, stream: stream.device.pinned(4096),
    "graph": lambda coordinator, stream: captured(stream),
}

#: Those that have no callbacks: `asyncio.wait` takes tasks of them.
WITHOUT_CALLBACKS = ("pinned buffer", "graph")


async def by_gather(thing: Any) -> Any:
    first, second = await asyncio.gather(thing, thing)
    assert first is second or first == second
    return first


async def by_wait(thing: Any) -> Any:
    waited = thing if hasattr(thing, "add_done_callback") else asyncio.create_task(thing.wait())
    for when in (asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION, asyncio.ALL_COMPLETED):
        assert await asyncio.wait([waited], return_when=when) == ({waited}, set())
    return waited.result()


async def by_as_completed(thing: Any) -> Any:
    (found,) = [await each for each in asyncio.as_completed([thing])]
    return found


async def by_task_group(thing: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(thing.wait())
    return task.result()


async def by_timeout(thing: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await thing


async def by_wait_for(thing: Any) -> Any:
    return await asyncio.wait_for(thing, PATIENCE)


async def by_shield(thing: Any) -> Any:
    return await asyncio.shield(thing)


WAYS: tuple[Callable[[Any], Coroutine[Any, Any, Any]], ...] = (
    by_gather, by_wait, by_as_completed, by_task_group, by_timeout, by_wait_for, by_shield,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AWAITABLES)
async def test_what_the_library_returns_works_with_asyncio(
    device: Device, name: str, way: Callable[[Any], Coroutine[Any, Any, Any]]
) -> None:
    """E16: each kind of awaitable with each function of asyncio."""
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        thing = AWAITABLES[name](coordinator, stream)
        found = await quickly(way(thing))
        expected = await quickly(thing)
        assert found is expected or found == expected
        waiting = thing.wait()
        assert inspect.iscoroutine(waiting)
        waiting.close()


async def test_as_completed_yields_what_it_was_given(device: Device) -> None:
    """E16: operations, events, nodes and gatherings themselves; other awaitables are refused with the cure."""
    async with AsyncCoordinator(device) as coordinator, device.stream() as stream:
        things = {name: make(coordinator, stream) for name, make in AWAITABLES.items()}
        others = [things.pop(name) for name in WITHOUT_CALLBACKS]
        found = [thing async for thing in aiocuda.as_completed(things.values())]
        assert set(found) == set(things.values())
        for thing in others:
            with pytest.raises(InvalidTypeError, match=r"asyncio\.as_completed takes"):
                await quickly(anext(aiocuda.as_completed([thing])))
            await quickly(thing)


async def test_pinned_buffers_are_keys(device: Device) -> None:
    """E16: by their identity, whatever is in them."""
    one, two = device.pinned(4), device.pinned(4)
    one[:] = two[:] = 1
    assert len({one, two, one}) == 2
    assert {one: 1, two: 2}[two] == 2
    assert await quickly(one.wait()) is one


async def test_collectives(device: Device) -> None:
    """E14: broadcast, reduction and all-reduce are operations of these kinds, in the order of their buffers' uses."""
    arrays = [np.arange(ITEMS, dtype=np.float32) / np.float32(divisor) for divisor in (3, 7, 11)]
    want = (arrays[0] + arrays[1]) + arrays[2]
    async with AsyncCoordinator(device) as coordinator:
        parts = [coordinator.upload(array) for array in arrays]
        total, copy = (coordinator.compute_stream.empty(ITEMS) for _ in range(2))
        nodes = [
            coordinator.reduce(parts, total),
            coordinator.broadcast(total, [copy]),
            coordinator.all_reduce(parts),
        ]
        assert [node.kind for node in nodes] == ["reduction", "broadcast", "all-reduce"]
        written: list[Any] = [total, copy, *parts]
        for buffer in written:
            found = await quickly(coordinator.download(buffer).wait())
            assert found.tobytes() == want.tobytes()
