"""asyncio's own functions accept operations: `asyncio.wait`, `wait_for`, `timeout` and `TaskGroup`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, DriverError, Operation, Stream
from tests.helpers import Latch, open_peer, quickly

pytestmark = pytest.mark.asyncio


async def wait(*operations: Any, **options: Any) -> tuple[set[Any], set[Any]]:
    """Call `asyncio.wait`, which is annotated for futures only."""
    done, pending = await quickly(asyncio.wait(operations, **options))
    return done, pending


@pytest.mark.parametrize("first", [0, 1])
async def test_first_exception_ends_the_wait_at_a_failure(first: int) -> None:
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        peer.refuse("fill")
        with Latch(device) as latch:
            held = latch.hold(stream)
            failed = other.fill(other.empty(4), 1)
            operations = [held, failed] if first else [failed, held]
            done, pending = await wait(*operations, return_when=asyncio.FIRST_EXCEPTION)
            assert (done, pending) == ({failed}, {held})
            with pytest.raises(DriverError):
                failed.result()


async def test_first_exception_waits_for_all_without_a_failure(stream: Stream, other: Stream, latch: Latch) -> None:
    operations = [latch.hold(stream), other.synchronize()]
    waiting = asyncio.ensure_future(wait(*operations, return_when=asyncio.FIRST_EXCEPTION))
    await operations[1]
    await latch.held()
    assert not waiting.done()
    latch.release()
    assert await waiting == (set(operations), set())


async def test_first_exception_ends_the_wait_at_an_abandoned_operation(
    stream: Stream, other: Stream, latch: Latch
) -> None:
    operations = latch.hold(stream), latch.hold(other)
    waiting = asyncio.ensure_future(wait(*operations, return_when=asyncio.FIRST_EXCEPTION))
    await latch.held()
    operations[1].abandon()
    assert await waiting == ({operations[1]}, {operations[0]})


async def test_first_completed_ends_the_wait_at_the_shorter_operation(
    stream: Stream, other: Stream, latch: Latch
) -> None:
    held, short = latch.hold(stream), other.synchronize()
    assert await wait(held, short, return_when=asyncio.FIRST_COMPLETED) == ({short}, {held})


async def test_all_completed_with_and_without_a_timeout(stream: Stream, other: Stream, latch: Latch) -> None:
    held, short = latch.hold(stream), other.synchronize()
    await short
    assert await wait(held, short, timeout=0) == ({short}, {held})
    latch.release()
    assert await wait(held, short) == ({held, short}, set())


async def test_wait_accepts_events_and_nodes(device: Device, stream: Stream, latch: Latch) -> None:
    event = stream.record()
    async with AsyncCoordinator(device) as coordinator:
        node = coordinator.upload(np.ones(4, np.float32))
        for thing in (event, node):
            assert await wait(thing, return_when=asyncio.FIRST_EXCEPTION) == ({thing}, set())


async def test_cancelled_is_always_false(device: Device, stream: Stream, latch: Latch) -> None:
    held: Operation[None] = latch.hold(stream)
    assert not held.cancelled()
    task = asyncio.ensure_future(held.wait())
    await latch.held()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not held.cancelled()
    held.abandon()
    assert not held.cancelled()


async def test_wait_for_zero_seconds_never_returns_a_result(stream: Stream) -> None:
    done = stream.synchronize()
    await done
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(done, 0)
    async with asyncio.timeout(0):
        assert await done is None
    assert done.result() is None


async def test_task_group_takes_the_coroutine_of_an_operation(stream: Stream) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stream.upload(np.arange(3.0)).wait())
    assert isinstance(task.result(), aiocuda.DeviceBuffer)
