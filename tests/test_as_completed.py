"""`aiocuda.as_completed`: operations in the order of their completion."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    Operation,
    Pipeline,
    Slot,
    Stage,
    Stream,
    WrongLoopError,
)
from tests.helpers import TRAP, Latch, Peer, in_thread, open_peer, quickly, turns

pytestmark = pytest.mark.asyncio


async def listed(things: Any) -> list[Any]:
    return [thing async for thing in aiocuda.as_completed(things)]


def completions(*things: Any) -> AsyncGenerator[Any, None]:
    """Call `aiocuda.as_completed` with objects of several types, which have no common type."""
    return aiocuda.as_completed(things)


async def first_of(completed: AsyncGenerator[Any, None]) -> Any:
    return await quickly(anext(completed))


async def test_the_order_is_that_of_completion(device: Device, stream: Stream, other: Stream) -> None:
    async with device.stream() as third:
        with Latch(device) as one, Latch(device) as two:
            late, middle, early = one.hold(stream), two.hold(other), third.synchronize()
            behind = other.record()
            completed = completions(late, behind, middle, early)
            assert await first_of(completed) is early
            two.release()
            assert {await first_of(completed), await first_of(completed)} == {middle, behind}
            one.release()
            assert await first_of(completed) is late
            with pytest.raises(StopAsyncIteration):
                await first_of(completed)


async def test_finished_operations_come_first_in_the_order_of_the_argument(stream: Stream, latch: Latch) -> None:
    operations = [stream.synchronize() for _ in range(5)]
    await aiocuda.gather(*operations)
    held = latch.hold(stream)
    completed = aiocuda.as_completed([held, *reversed(operations)])
    assert [await first_of(completed) for _ in operations] == operations[::-1]
    latch.release()
    assert await first_of(completed) is held


async def test_nothing_is_an_iteration_without_items(stream: Stream) -> None:
    assert await quickly(listed([])) == []
    assert await quickly(listed(iter(()))) == []


async def test_several_devices_and_coordinators() -> None:
    with Peer() as peer:
        async with (
            aiocuda.open_device(driver=peer.driver) as device,
            aiocuda.open_device(driver=peer.driver) as second,
            device.stream() as stream,
            second.stream() as distant,
            AsyncCoordinator(device) as coordinator,
            AsyncCoordinator(second) as distant_coordinator,
        ):
            things = [
                stream.synchronize(),
                distant.record(),
                coordinator.upload(np.ones(4, np.float32)),
                distant_coordinator.host(int),
                aiocuda.gather(stream.synchronize(), distant.synchronize()),
            ]
            found = await quickly(listed(things))
            assert len(found) == len(things)
            assert set(found) == set(things)
            assert all(thing.done() for thing in found)


async def test_failed_and_abandoned_operations_are_yielded_as_others() -> None:
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        peer.refuse("fill")
        with Latch(device) as latch:
            failing = stream.fill(stream.empty(4), 1)
            held, abandoned = latch.hold(other), other.synchronize()
            gathered = aiocuda.gather(failing, held)
            completed = completions(held, abandoned, failing, gathered)
            assert {await first_of(completed), await first_of(completed)} == {failing, gathered}
            each: Any
            for each in (failing, gathered):
                with pytest.raises(DriverError):
                    await each
            abandoned.abandon()
            assert await first_of(completed) is abandoned
            with pytest.raises(ClosedError):
                await abandoned
            latch.release()
            assert await first_of(completed) is held


async def test_tickets_of_a_pipeline(device: Device, latch: Latch) -> None:
    def hold(slot: Slot) -> Operation[None]:
        if slot.item == 1:
            latch.hold(slot.stream)
        return slot.stream.fill(slot.buffer("x", 4), slot.item)

    async with Pipeline(device, [Stage("hold", hold)]) as pipeline:
        quick, held = [await quickly(pipeline.submit(item)) for item in range(2)]
        completed = aiocuda.as_completed([held, quick])
        assert await quickly(anext(completed)) is quick
        latch.release()
        assert [item async for item in completed] == [held]


async def test_withdrawn_and_skipped_nodes_are_yielded(device: Device) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    async with AsyncCoordinator(device) as coordinator:
        gate = coordinator.operation("kernel")
        withdrawn = coordinator.host(int, after=gate)
        failing = coordinator.host(fails)
        completed = aiocuda.as_completed([withdrawn, failing])
        assert await first_of(completed) is failing
        with pytest.raises(ZeroDivisionError):
            await failing
        withdrawn.abandon()
        assert await first_of(completed) is withdrawn
        gate.abandon()


async def test_a_device_fault_yields_everything() -> None:
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        await asyncio.to_thread(TRAP.load, peer.driver, 0)
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            event = other.record()
            things = [other.synchronize(), event, aiocuda.gather(other.synchronize()), stream.launch(TRAP, 1, 1)]
            found = await quickly(listed(things))
            assert set(found) == set(things)
            for thing in found:
                with pytest.raises(DeviceFault):
                    await thing


@pytest.mark.parametrize("ending", ["break", "raise", "cancel", "aclose", "drop"])
async def test_leaving_early_abandons_nothing_and_leaves_no_callback(
    device: Device, stream: Stream, other: Stream, latch: Latch, ending: str
) -> None:
    async with AsyncCoordinator(device) as coordinator:
        early, held = other.synchronize(), latch.hold(stream)
        await latch.held()
        gathered = aiocuda.gather(held, stream.synchronize())
        event = stream.record()
        node = coordinator.download(stream.empty(4), stream=stream)
        things = [early, held, event, gathered, node]
        reached = asyncio.Event()

        async def iterate() -> None:
            async for thing in completions(*things):
                assert thing is early
                reached.set()
                if ending == "break":
                    break
                if ending == "raise":
                    raise ZeroDivisionError

        if ending == "break":
            await quickly(iterate())
        elif ending == "raise":
            with pytest.raises(ZeroDivisionError):
                await quickly(iterate())
        elif ending == "cancel":
            task = asyncio.create_task(iterate())
            await quickly(reached.wait())
            await turns(3)
            assert held.is_awaited
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif ending == "aclose":
            async with contextlib.aclosing(completions(*things)) as completed:
                assert await first_of(completed) is early
            assert not held.is_awaited
        else:
            completed = completions(*things)
            assert await first_of(completed) is early
            del completed
            gc.collect()
        await turns(3)
        assert [thing.state for thing in (held, event.operation)] == ["submitted", "submitted"]
        assert not any(thing.is_awaited for thing in (held, event.operation))
        assert not node.callbacks  # type: ignore[attr-defined]  # of `ScheduledNode`
        latch.release()
        assert await quickly(aiocuda.gather(held, event)) == [None, None]
        assert await quickly(gathered) == [None, None]
        await quickly(node)
    assert device.statistics().abandoned == 0


async def test_an_event_that_is_recorded_again_or_released_counts_as_it_was(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    pool = aiocuda.EventPool(device, 2)
    again, released = await pool.acquire(), await pool.acquire()
    latch.hold(stream)
    await latch.held()
    for event in (again, released):
        stream.record(event=event)
    operations = again.operation, released.operation
    waiting = asyncio.ensure_future(listed([again, released]))
    await turns(3)
    other.record(event=again)
    released.release()
    await quickly(again)
    assert not waiting.done()
    latch.release()
    assert await quickly(waiting) == [again, released]
    again.release()
    latch.hold(stream)
    await latch.held()
    event = stream.record()
    async with contextlib.aclosing(completions(operations[0], event)) as left:
        assert await first_of(left) is operations[0]
        unfinished = event.operation
        event.release()
    assert not unfinished.is_awaited
    latch.release()


async def test_refused_items_leave_no_callbacks_behind(stream: Stream, latch: Latch) -> None:
    held = latch.hold(stream)
    await latch.held()
    with pytest.raises(InvalidArgumentError, match="was given twice"):
        await quickly(listed([held, stream.record(), held]))
    assert not held.is_awaited
    latch.release()


async def test_another_loop(device: Device, stream: Stream, latch: Latch) -> None:
    held = latch.hold(stream)
    await latch.held()
    async with AsyncCoordinator(device) as coordinator:
        nodes = [coordinator.host(int)]
        await quickly(nodes[0])
        for thing in (held, stream.record(), aiocuda.gather(held), nodes[0]):

            async def elsewhere(thing: Any = thing) -> None:
                with pytest.raises(WrongLoopError, match="belongs to another event loop"):
                    await listed([thing])

            await asyncio.to_thread(in_thread, elsewhere)
    assert not held.is_awaited
    latch.release()


@pytest.mark.slow
async def test_many_operations_take_linear_time_and_do_not_block_the_loop(device: Device, stream: Stream) -> None:
    with Latch(device) as latch:
        latch.hold(stream)
        await latch.held()
        operations = [stream.synchronize() for _ in range(10_000)]
        found = asyncio.ensure_future(listed(operations))
        await turns(3)
        latch.release()
        assert await quickly(found) == operations


async def test_callbacks_see_the_context_of_the_iteration_and_user_errors_pass(stream: Stream) -> None:
    class Interruption(BaseException):
        pass

    with pytest.raises(Interruption):
        async for _ in aiocuda.as_completed([stream.synchronize(), stream.synchronize()]):
            raise Interruption
    await stream.synchronize()
