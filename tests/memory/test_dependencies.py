"""What a free waits for besides the uses of its memory: dependencies that a program adds."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, Device, InvalidTypeError, StaleHandleError, Stream, WrongDeviceError, WrongLoopError
from aiocuda.device._resources import resources_of
from aiocuda.memory import SizeClassResource
from tests.helpers import Latch, Peer, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("what", ["operation", "event"])
async def test_a_free_waits_on_the_device_for_what_was_added(
    device: Device, stream: Stream, other: Stream, latch: Latch, what: str
) -> None:
    """G4: the memory is used again after it, and the host does not wait."""
    device.memory.use(SizeClassResource)  # so that the memory is certainly used again
    buffer = await stream.upload(np.arange(1000, dtype=np.float32))
    address = buffer.address
    assert buffer.satisfied
    latch.hold(other)
    held = other.synchronize()
    buffer.add_dependency(held if what == "operation" else other.record())
    assert not buffer.satisfied
    await latch.held()
    buffer.free()
    heir = stream.empty(1000)
    assert heir.address == address
    filled = stream.fill(heir, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(filled.wait(), 0.03)
    latch.release()
    await quickly(filled)
    await held


async def test_cleared_they_are_not_waited_for(device: Device, stream: Stream, other: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.zeros(1000, np.float32))
    latch.hold(other)
    buffer.add_dependency(other.synchronize())
    buffer[10:].add_dependency(other.synchronize())  # of the same memory
    assert not buffer.satisfied
    buffer.clear_dependencies()
    assert buffer.satisfied
    await latch.held()
    buffer.free()
    await quickly(stream.fill(stream.empty(1000), 1))
    latch.release()


async def test_uses_stay_when_dependencies_are_cleared(stream: Stream, other: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.zeros(1000, np.float32))
    latch.hold(other)
    other.fill(buffer, 1)
    buffer.clear_dependencies()
    assert not buffer.satisfied
    latch.release()
    await quickly(other.synchronize())
    assert buffer.satisfied


async def test_passed_dependency_is_satisfied_and_not_held(stream: Stream, other: Stream) -> None:
    buffer, source = stream.empty(1000), stream.empty(1000)
    await aiocuda.gather(stream.synchronize(), other.synchronize())
    operation = other.download(source)
    buffer.add_dependency(operation)
    buffer.add_dependency(operation)
    result = weakref.ref(await operation)
    assert buffer.satisfied
    del operation
    gc.collect()
    assert result() is None
    buffer.free()


async def test_a_buffer_that_is_dropped_waits_for_them_too(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    buffer = await stream.upload(np.zeros(1000, np.float32))
    live = device.memory.statistics().live_bytes
    latch.hold(other)
    held = other.synchronize()
    await latch.held()
    buffer.add_dependency(held)
    del buffer
    gc.collect()

    def swept() -> bool:
        device.memory.sweep(resources_of(device).loop_states.here().reactor)
        return device.memory.statistics().live_bytes < live

    assert not swept()
    latch.release()
    await quickly(held)
    gc.collect()
    await until(swept, "the memory")


async def test_a_dependency_that_is_still_on_the_host() -> None:
    async with open_peer(max_in_flight=2) as (_, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(1000)
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            live = device.memory.statistics().live_bytes
            operations = [other.synchronize() for _ in range(6)]
            assert operations[-1].state == "queued"
            buffer.add_dependency(operations[-1])
            buffer.free()
            assert device.memory.statistics().live_bytes == live  # it would not wait for it yet
            latch.release()
            await quickly(operations[-1])
        await until(lambda: device.memory.statistics().live_bytes < live or stream.empty(1).free(), "the free")


async def test_an_event_that_is_released_before_it_is_recorded() -> None:
    """Its end of the loan does not take the dependency along."""
    async with open_peer(max_in_flight=2) as (_, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(1000)
        await stream.synchronize()
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            for _ in range(4):
                other.synchronize()
            event = other.record()
            block = weakref.ref(buffer._block)
            buffer.add_dependency(event)
            event.release()
            del buffer, event
            gc.collect()
            assert block() is not None
            latch.release()
            await quickly(other.synchronize())
        gc.collect()
        assert block() is None


@pytest.mark.parametrize("end", ["abandoned", "failed", "withdrawn"])
async def test_a_dependency_that_does_not_succeed(end: str) -> None:
    """The memory comes back all the same."""
    async with open_peer(max_in_flight=4) as (peer, device):
        stream, other = device.stream(), device.stream()
        buffer = stream.empty(1000)
        target = other.empty(4)
        await other.synchronize()
        live = device.memory.statistics().live_bytes
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            if end == "failed":
                peer.refuse("fill")
            fills = [other.fill(target, 1) for _ in range(6)]
            operation = fills[0] if end != "withdrawn" else fills[-1]
            buffer.add_dependency(operation)
            if end == "withdrawn":
                other._queue.rare.withdraw_all()
            elif end == "abandoned":
                operation.abandon()
            buffer.free()
            latch.release()
            with pytest.raises(aiocuda.AiocudaError):
                await quickly(operation)
            await other._queue.rare.settle()
            for fill in fills[1:]:
                if not fill.done() or fill.state == "failed":
                    with pytest.raises(aiocuda.AiocudaError):
                        await quickly(fill)
        await until(lambda: device.memory.statistics().live_bytes < live or stream.empty(1).free(), "the free")


async def test_what_cannot_be_a_dependency(stream: Stream) -> None:
    buffer = stream.empty(4)
    wrong: Any
    for wrong in (None, 3, stream, buffer, np.zeros(4)):
        with pytest.raises(InvalidTypeError, match="an operation or an event"):
            buffer.add_dependency(wrong)
    event = stream.record()
    event.release()
    with pytest.raises(StaleHandleError):
        buffer.add_dependency(event)
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as foreign:
            with pytest.raises(WrongDeviceError, match="another driver"):
                buffer.add_dependency(foreign.synchronize())
    await stream.synchronize()
    assert buffer.satisfied


async def test_an_operation_of_another_loop_is_refused() -> None:
    async with open_peer() as (_, device):
        home = device.stream()
        operation = home.synchronize()

        async def elsewhere() -> None:
            async with device.stream() as stream:
                with pytest.raises(WrongLoopError):
                    stream.empty(4).add_dependency(operation)

        await asyncio.to_thread(in_thread, elsewhere)
        await operation


async def test_what_was_captured_is_none(device: Device, stream: Stream) -> None:
    """It is never enqueued, and would keep the memory for ever; the graph's launches are what runs."""
    buffer, target = stream.empty(4), stream.empty(4)
    with stream.capture() as graph:
        captured = stream.fill(target, 1)
        with pytest.raises(BusyError, match=r"add what graph\.launch\(stream\) returns"):
            buffer.add_dependency(captured)
    with pytest.raises(BusyError, match="does not run by itself"):
        buffer.add_dependency(captured)
    buffer.add_dependency(graph.launch(stream))
    buffer.free()
    await quickly(stream.synchronize())
    await until(lambda: (stream.synchronize(), device.memory.live_bytes)[-1] == target.nbytes)
