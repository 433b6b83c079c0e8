"""Memory that a block, an item, a batch or a loan lends is used again only when the operations on it are over.

Each borrower leaves while its operation still runs on the device, and names it or not. The next one works on another
stream, or on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    DeviceFault,
    EventPool,
    Operation,
    Pipeline,
    Slot,
    Stage,
    Stream,
    StreamPool,
    TripleBuffer,
)
from aiocuda.data import DataLoader, to_device
from aiocuda.driver.host import HostDriver
from aiocuda.errors import DeviceOutOfMemory
from aiocuda.pipeline._slot import memory_of
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.testing import Upset
from tests.helpers import PATIENCE, Latch, in_thread, quickly, turns, until
from tests.pipeline.virtual import in_virtual_time, kernel

SIZE = 4

Leave = Callable[[Callable[[asyncio.Event], Any]], Any]


async def cancelled(work: Callable[[asyncio.Event], Any]) -> None:
    """Cancel the task that has borrowed something, once it has enqueued its work."""

    class Begun(asyncio.Event):
        def set(self) -> None:
            task.cancel()

    task = asyncio.create_task(work(Begun()))
    await quickly(asyncio.wait({task}))
    assert task.cancelled()


async def timed_out(work: Callable[[asyncio.Event], Any]) -> None:
    """Let a time-out expire once the work is enqueued."""

    class Begun(asyncio.Event):
        def set(self) -> None:
            limit.reschedule(asyncio.get_running_loop().time())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await work(Begun())


async def failed(work: Callable[[asyncio.Event], Any]) -> None:
    class Begun(asyncio.Event):
        def set(self) -> None:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        await work(Begun())


async def left(work: Callable[[asyncio.Event], Any]) -> None:
    """Leave without an exception."""
    await work(asyncio.Event())


LEAVE = [cancelled, timed_out, failed, left]


async def begin(begun: asyncio.Event) -> None:
    begun.set()
    await begun.wait()


@contextlib.asynccontextmanager
async def rings(kind: str, device: Device) -> AsyncIterator[TripleBuffer]:
    """A ring of one slot."""
    if kind == "given":
        async with TripleBuffer(1, buffers={"x": (SIZE, np.uint32)}, device=device) as ring:
            yield ring
    elif kind == "own":
        yield TripleBuffer(1)
    else:
        async with Pipeline(device, [Stage("nothing", lambda slot: None)], 1) as pipeline:
            yield pipeline.ring


RINGS = ["given", "own", "pipeline"]


def buffer_of(slot: Slot) -> Any:
    return slot.buffer("x", SIZE, np.uint32)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.asyncio
async def test_slot_of_a_block_is_lent_again_after_its_operations(
    device: Device, stream: Stream, other: Stream, latch: Latch, kind: str, leave: Leave, named: bool
) -> None:
    async with rings(kind, device) as ring:

        async def first(begun: asyncio.Event) -> None:
            async with ring.slot("first") as slot:
                slot.stream = stream
                latch.hold(stream)
                operation = stream.fill(buffer_of(slot), 10)
                if named:
                    slot.enter("processing", until=operation)
                await begin(begun)

        async def second() -> Any:
            async with ring.slot("second") as slot:
                slot.stream = other
                other.fill(buffer_of(slot), 2)
                return await other.download(buffer_of(slot))

        await quickly(leave(first))
        assert ring.states != ("free",)
        await latch.held()
        next_one = asyncio.create_task(second())
        await turns()
        assert (ring.busy, other.tail) == (1, None)
        latch.release()
        assert (await quickly(next_one)).tolist() == [2, 2, 2, 2]
        assert ring.states == ("free",)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_pinned_memory_of_a_slot_is_lent_again_after_its_operations(
    device: Device, stream: Stream, latch: Latch, leave: Leave
) -> None:
    """The next one writes it on the host."""
    ring, target = TripleBuffer(1), stream.empty(SIZE, np.uint32)

    async def first(begun: asyncio.Event) -> None:
        async with ring.slot() as slot:
            slot.stream = stream
            pinned = slot.pinned("x", SIZE, np.uint32)
            pinned[:] = 1
            latch.hold(stream)
            stream.copy(target, pinned)
            await begin(begun)

    async def second() -> None:
        async with ring.slot() as slot:
            slot.stream = stream
            slot.pinned("x", SIZE, np.uint32)[:] = 2

    await quickly(leave(first))
    await latch.held()
    next_one = asyncio.create_task(second())
    await turns()
    assert not next_one.done()
    latch.release()
    await quickly(next_one)
    assert (await quickly(stream.download(target))).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_memory_of_the_program_is_used_again_after_the_operations_of_states(
    device: Device, stream: Stream, other: Stream, latch: Latch, leave: Leave
) -> None:
    """The example of `TripleBuffer`: the buffers are not the ring's."""
    ring, buffers = TripleBuffer(1), [stream.empty(SIZE, np.uint32)]

    async def first(begun: asyncio.Event) -> None:
        async with ring.slot(np.full(SIZE, 1, np.uint32)) as slot:
            latch.hold(stream)
            copied = stream.copy(buffers[slot.number], slot.item)
            slot.enter("uploading", until=copied)
            await begin(begun)
            await copied

    async def second() -> Any:
        async with ring.slot(np.full(SIZE, 2, np.uint32)) as slot:
            copied = other.copy(buffers[slot.number], slot.item)
            slot.enter("uploading", until=copied)
            await copied
            return await other.download(buffers[slot.number])

    running = asyncio.create_task(leave(first))
    if leave is not left:
        await quickly(running)
    await latch.held()
    next_one = asyncio.create_task(second())
    await turns()
    assert (ring.busy, next_one.done()) == (1, False)
    latch.release()
    await quickly(running)
    assert (await quickly(next_one)).tolist() == [2] * SIZE


@pytest.mark.parametrize("leave", [cancelled, timed_out, failed])
@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.asyncio
async def test_pinned_memory_that_a_thread_still_writes_is_not_lent_again(
    device: Device, stream: Stream, kind: str, leave: Leave
) -> None:
    """The cancellation of a wait for `Device.offload` does not stop the function."""
    begun, go = threading.Event(), threading.Event()
    tasks, pinned = list[Any](), list[Any]()

    def decode(array: Any) -> None:
        begun.set()
        go.wait(PATIENCE)
        array[:] = 1

    async with rings(kind, device) as ring:

        async def first(leaving: asyncio.Event) -> None:
            async with ring.slot() as slot:
                slot.stream = stream
                tasks.append(asyncio.create_task(device.offload(decode, slot.pinned("x", SIZE, np.uint32))))
                await asyncio.to_thread(begun.wait, PATIENCE)
                await begin(leaving)

        await quickly(leave(first))
        async with ring.slot() as slot:
            slot.stream = stream
            pinned.append(slot.pinned("x", SIZE, np.uint32))
            pinned[0][:] = 2
            go.set()
            await quickly(tasks[0])
            assert pinned[0].tolist() == [2] * SIZE
        async with ring.slot() as slot:  # it is used again if no exception leaves the block
            slot.stream = stream
            assert slot.pinned("x", SIZE, np.uint32) is pinned[0]


@pytest.mark.asyncio
async def test_slot_of_a_block_waits_for_nodes_and_abandoned_operations(
    device: Device, stream: Stream, latch: Latch
) -> None:
    ring, gate = TripleBuffer(1), asyncio.Event()
    async with AsyncCoordinator(device) as coordinator:
        async with ring.slot() as slot:
            latch.hold(stream)
            abandoned = stream.synchronize()
            slot.enter("uploading", until=coordinator.host(gate.wait))
            slot.enter("processing", until=abandoned)
        await latch.held()
        abandoned.abandon()
        gate.set()
        await quickly(coordinator.drain())
        await turns()
        assert ring.busy == 1
        latch.release()
        await until(lambda: ring.states == ("free",))


@pytest.mark.parametrize("memory", ["buffer", "pinned"])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.asyncio
async def test_slot_of_a_block_is_lent_again_after_nodes_that_were_not_submitted(
    device: Device, stream: Stream, kind: str, leave: Leave, memory: str
) -> None:
    """They have no operation yet, and no state names them."""
    gate, nodes = asyncio.Event(), list[Any]()
    async with rings(kind, device) as ring, AsyncCoordinator(device) as coordinator:

        async def first(begun: asyncio.Event) -> None:
            async with ring.slot() as slot:
                slot.stream = stream
                opened = coordinator.host(gate.wait)
                if memory == "buffer":
                    await stream.fill(buffer_of(slot), 1)
                    nodes.append(coordinator.download(buffer_of(slot), after=opened))
                else:
                    pinned = slot.pinned("x", SIZE, np.uint32)
                    pinned[:] = 1
                    nodes.append(coordinator.upload(pinned, after=opened))
                await begin(begun)

        async def second() -> None:
            async with ring.slot() as slot:
                slot.stream = stream
                await stream.fill(buffer_of(slot), 2)
                slot.pinned("x", SIZE, np.uint32)[:] = 2

        await quickly(leave(first))
        assert ring.busy == 1
        next_one = asyncio.create_task(second())
        await turns()
        assert not next_one.done()
        gate.set()
        found = await quickly(nodes[0])
        assert (found if memory == "buffer" else await quickly(stream.download(found))).tolist() == [1, 1, 1, 1]
        await quickly(next_one)


@pytest.mark.parametrize("end", ["skipped", "withdrawn", "dropped"])
@pytest.mark.asyncio
async def test_node_that_never_runs_frees_its_slot(device: Device, stream: Stream, end: str) -> None:
    ring, gate = TripleBuffer(1), asyncio.Event()

    async def fail() -> None:
        await gate.wait()
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        async with AsyncCoordinator(device) as coordinator:
            async with ring.slot() as slot:
                slot.stream = stream
                node = (
                    coordinator.operation("kernel", reads=[buffer_of(slot)])
                    if end == "dropped"
                    else coordinator.download(buffer_of(slot), after=coordinator.host(fail))
                )
            assert (ring.busy, node.done()) == (1, False)
            del node
            if end == "withdrawn":
                raise ZeroDivisionError
            gate.set()
            await until(lambda: ring.states == ("free",))
    await until(lambda: ring.states == ("free",))


@pytest.mark.asyncio
async def test_slot_with_a_node_of_another_loop_takes_other_memory(device: Device, stream: Stream) -> None:
    ring, begun, released = TripleBuffer(1), threading.Event(), threading.Event()
    slot = await ring.acquire()
    slot.stream = stream
    before = buffer_of(slot)
    await quickly(stream.fill(before, 1))

    async def elsewhere() -> Any:
        async with AsyncCoordinator(device) as coordinator:

            async def wait() -> None:
                begun.set()
                await asyncio.to_thread(released.wait, PATIENCE)

            return await coordinator.download(before, after=coordinator.host(wait))

    thread = asyncio.create_task(asyncio.to_thread(in_thread, elsewhere))
    await asyncio.to_thread(begun.wait, PATIENCE)
    ring.release(slot)
    assert ring.upload_slot() is slot
    slot.stream = stream
    assert buffer_of(slot) is not before
    await quickly(stream.fill(buffer_of(slot), 2))
    released.set()
    assert (await quickly(thread)).tolist() == [1, 1, 1, 1]


@pytest.mark.asyncio
async def test_slot_that_is_released_is_lent_again_after_its_operations(stream: Stream, latch: Latch) -> None:
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    latch.hold(stream)
    slot.enter("uploading", until=stream.synchronize())
    ring.release(slot)
    with pytest.raises(aiocuda.StaleHandleError, match="released once"):
        ring.release(slot)
    await latch.held()
    ring.advance()
    assert (ring.upload_slot(), ring.busy, ring.states) == (None, 1, ("uploading",))
    latch.release()
    await until(lambda: ring.states == ("free",))
    assert ring.upload_slot() is slot


@pytest.mark.asyncio
async def test_slot_that_advances_is_lent_again_after_all_its_operations(
    stream: Stream, other: Stream, latch: Latch
) -> None:
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    slot.stream = stream
    latch.hold(other)
    other.fill(buffer_of(slot), 1)  # which no state names
    slot.enter("downloading", until=stream.synchronize())
    await quickly(stream.synchronize())
    ring.advance()
    await latch.held()
    assert ring.upload_slot() is None
    latch.release()
    await until(lambda: ring.states == ("free",))


def test_slot_whose_operation_faults_is_free() -> None:
    async def main(device: Device) -> None:
        async with TripleBuffer(1, buffers={"x": (SIZE, np.uint32)}, device=device) as ring:
            async with device.stream() as stream:
                async with ring.slot() as slot:
                    slot.enter("uploading", until=stream.launch(kernel(1), 1, 1, 0))
                assert ring.busy == 1
                assert (await ring.acquire()).number == slot.number

    with contextlib.suppress(DeviceFault):
        in_virtual_time(main, upsets=[Upset("fault", 1)])


@pytest.mark.asyncio
async def test_slot_that_finds_no_other_memory_is_not_lent_with_its_own() -> None:
    """While another loop still reads that. Its buffer exists again when there is memory."""
    begun, released, nbytes = threading.Event(), threading.Event(), 1 << 19
    buffers = {"x": (nbytes // 4, np.uint32)}
    async with (
        aiocuda.open_device(driver=HostDriver(memory=2 * nbytes)) as device,
        device.stream() as stream,
        TripleBuffer(1, buffers=buffers, device=device) as ring,
    ):
        slot = await ring.acquire()
        before = slot.buffer("x")
        await quickly(stream.fill(before, 1))
        rest = stream.empty(nbytes // 2, np.uint8)

        async def elsewhere() -> Any:
            async with device.stream() as foreign:
                with Latch(device) as latch:
                    latch.hold(foreign)
                    found = foreign.download(before)
                    await latch.held()
                    begun.set()
                    await asyncio.to_thread(released.wait, PATIENCE)
                return await found

        thread = asyncio.create_task(asyncio.to_thread(in_thread, elsewhere))
        await asyncio.to_thread(begun.wait, PATIENCE)
        ring.release(slot)
        assert ring.upload_slot() is slot
        for _ in range(2):
            with pytest.raises(DeviceOutOfMemory):
                slot.buffer("x")
        rest.free()
        await quickly(stream.fill(slot.buffer("x"), 2))
        assert slot.buffer("x") is slot.buffer("x") is not before
        released.set()
        assert set((await quickly(thread)).tolist()) == {1}
        ring.release(slot)


@pytest.mark.parametrize("kind", ["own", "given"])
@pytest.mark.asyncio
async def test_slot_with_an_operation_of_another_loop_takes_other_memory(
    device: Device, stream: Stream, kind: str
) -> None:
    """Nothing calls back, so the ring goes on."""
    async with rings(kind, device) as ring:
        slot = await ring.acquire()
        slot.stream = stream
        before, begun, released = buffer_of(slot), threading.Event(), threading.Event()
        await quickly(stream.fill(before, 0))

        async def elsewhere() -> None:
            async with device.stream() as foreign:
                with Latch(device) as latch:
                    latch.hold(foreign)
                    foreign.fill(before, 1)
                    await latch.held()
                    begun.set()
                    await asyncio.to_thread(released.wait, PATIENCE)
                await foreign.synchronize()

        thread = asyncio.create_task(asyncio.to_thread(in_thread, elsewhere))
        await asyncio.to_thread(begun.wait, PATIENCE)
        ring.release(slot)
        assert ring.upload_slot() is slot
        slot.stream = stream
        assert buffer_of(slot) is not before
        released.set()
        await quickly(thread)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.asyncio
async def test_slot_with_an_operation_of_a_closed_device_is_free(ended: bool) -> None:
    ring = TripleBuffer(1)
    slot = await ring.acquire()
    device = await aiocuda.open_device(driver="host")
    device.drain_timeout = 0.01
    slot.stream = stream = device.stream()
    latch = Latch(device)
    latch.hold(stream)
    slot.enter("uploading", until=stream.fill(buffer_of(slot), 1))
    await latch.held()
    if not ended:
        ring.release(slot)
    with pytest.warns(aiocuda.DrainTimeoutWarning), pytest.raises(ZeroDivisionError):
        async with device:
            raise ZeroDivisionError
    if ended:
        ring.release(slot)
    assert await quickly(ring.acquire()) is slot
    latch.release()


@pytest.mark.asyncio
async def test_ring_with_a_released_slot_serves_the_next_loop() -> None:
    """The loop that would have found the end of the operation has been closed."""
    ring = TripleBuffer(1)
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        with Latch(device) as latch:
            kept: list[Any] = []

            async def elsewhere() -> None:
                foreign = device.stream()
                latch.hold(foreign)
                async with ring.slot() as slot:
                    slot.stream = foreign
                    foreign.fill(buffer_of(slot), 1)
                    kept.extend((foreign, buffer_of(slot)))
                await latch.held()
                assert ring.busy == 1

            await asyncio.to_thread(in_thread, elsewhere)
            slot = await quickly(ring.acquire())
            slot.stream = stream
            assert buffer_of(slot) is not kept[1]
            ring.release(slot)


@pytest.mark.parametrize("released", ["running", "stopped", "closed"])
@pytest.mark.asyncio
async def test_ring_whose_waiters_were_left_with_their_loop_serves_the_next_loop(released: str) -> None:
    """The slot is released in the loop, and its operation still runs at the end; or when the loop has ended."""
    ring, kept = TripleBuffer(1), list[Any]()

    async def borrow(device: Device, latch: Latch) -> None:
        foreign = device.stream()
        ring.advance()
        slot = await ring.acquire()
        slot.stream = foreign
        kept.extend((foreign, slot, buffer_of(slot)))
        kept.extend(asyncio.ensure_future(ring.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        if released == "running":
            latch.hold(foreign)
            foreign.fill(buffer_of(slot), 1)
            ring.release(slot)

    def run(device: Device, latch: Latch) -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(borrow(device, latch))
        if released == "stopped":
            ring.release(kept[1])  # a waiter gets it, and never runs
        loop.close()

    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        with Latch(device) as latch:
            await asyncio.to_thread(run, device, latch)
            if released == "closed":
                ring.release(kept[1])
            slot = await quickly(ring.acquire())
            slot.stream = stream
            assert released != "running" or buffer_of(slot) is not kept[2]
            slot.enter("downloading", until=stream.synchronize())
            assert await quickly(ring.acquire()) is slot
    for waiting in kept[3:]:
        waiting._log_destroy_pending = False  # the loop was closed around the tasks


@pytest.mark.parametrize("abandoned", [True, False])
@pytest.mark.asyncio
async def test_slot_with_an_operation_of_a_stream_that_was_left_is_lent_again(device: Device, abandoned: bool) -> None:
    ring = TripleBuffer(1)
    with Latch(device) as latch:
        with contextlib.suppress(ZeroDivisionError):
            async with device.stream() as stream:
                slot = await ring.acquire()
                slot.stream = stream
                latch.hold(stream)
                operation = stream.fill(buffer_of(slot), 1)
                await latch.held()
                if abandoned:
                    operation.abandon()
                raise ZeroDivisionError
        before = buffer_of(slot)
        ring.release(slot)
        assert ring.states != ("free",) or not memory_of(slot).buffers  # then the next item has other memory
        latch.release()
        await until(lambda: ring.states == ("free",))
        await quickly(operation.settle())
        assert not before.freed


@pytest.mark.asyncio
async def test_recorded_operation_keeps_no_slot(device: Device, stream: Stream) -> None:
    """It does not run by itself."""
    ring = TripleBuffer(1)
    async with ring.slot() as slot:
        slot.stream = stream
        with stream.capture() as graph:
            slot.enter("uploading", until=stream.fill(buffer_of(slot), 1))
    assert ring.states == ("free",)
    graph.close()


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.asyncio
async def test_ring_is_closed_while_a_released_slot_waits(
    device: Device, stream: Stream, latch: Latch, leaves: bool
) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with TripleBuffer(1, buffers={"x": (SIZE, np.uint32)}, device=device) as ring:
            latch.hold(stream)
            async with ring.slot() as slot:
                stream.fill(buffer_of(slot), 1)
            waiting = asyncio.create_task(ring.acquire())
            await latch.held()
            if leaves:
                raise ZeroDivisionError
    with pytest.raises(aiocuda.ClosedError):
        await quickly(waiting)
    latch.release()
    await until(lambda: ring.states == ("free",))


@pytest.mark.asyncio
async def test_waiter_that_is_cancelled_as_its_slot_comes_passes_it_on(stream: Stream, latch: Latch) -> None:
    ring = TripleBuffer(1)
    async with ring.slot() as slot:
        latch.hold(stream)
        slot.enter("uploading", until=stream.synchronize())
    waiting = [asyncio.create_task(ring.acquire(number)) for number in range(2)]
    await latch.held()
    latch.release()
    while ring.busy:
        await asyncio.sleep(0)
    waiting[0].cancel()  # it has the slot, and has not run yet
    assert (await quickly(waiting[1])).item == 1
    assert waiting[0].cancelled()


# -- the other lenders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_slot_of_an_item_is_lent_again_after_its_operations(
    device: Device, stream: Stream, other: Stream, latch: Latch, leave: Leave, graph: bool
) -> None:
    """Or its item has other memory."""
    graphs: list[Any] = []
    first_is_over = asyncio.Event()

    async def compute(slot: Slot) -> Any:
        buffer = buffer_of(slot)
        if slot.item == 2:
            await slot.stream.fill(buffer, 2)
            await first_is_over.wait()
            return await slot.stream.download(buffer)
        if slot.item is None:
            with other.capture() as captured:
                other.fill(buffer, 10)
            graphs.append(captured)
            return None
        latch.hold(other)
        graphs[0].launch(other) if graph else other.fill(buffer, 10)
        del buffer
        return await begin(slot.item)

    async with Pipeline(device, [Stage("compute", compute)], 1) as pipeline:
        if graph:
            await pipeline.execute_iteration(None)
        await quickly(leave(pipeline.execute_iteration))
        await latch.held()
        next_one = asyncio.create_task(pipeline.execute_iteration(2))
        await turns()
        latch.release()
        await quickly(other.synchronize())
        first_is_over.set()
        assert (await quickly(next_one)).tolist() == [2, 2, 2, 2]
        assert pipeline.ring.states == ("free",)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.asyncio
async def test_slot_of_a_batch_is_lent_again_after_its_operations(
    device: Device, stream: Stream, other: Stream, latch: Latch, fails: bool, graph: bool
) -> None:
    """Or its batch has other memory."""
    graphs: list[Any] = []
    first_is_over = asyncio.Event()

    async def infer(batch: Batch[int]) -> Any:
        buffer = buffer_of(batch.slot)
        if batch.items == [0]:
            with other.capture() as captured:
                other.fill(buffer, 10)
            graphs.append(captured)
        elif batch.items == [1]:
            latch.hold(other)
            graphs[0].launch(other) if graph else other.fill(buffer, 10)
            if fails:
                raise ZeroDivisionError
        else:
            await batch.stream.fill(buffer, 2)
            await first_is_over.wait()
            return [await batch.stream.download(buffer)]
        return [0]

    async with MicroBatcher(infer, max_batch_size=1, device=device) as batcher:
        if graph:
            await quickly(batcher.submit(0))
        with contextlib.suppress(ZeroDivisionError):
            await quickly(batcher.submit(1))
        await latch.held()
        next_one = asyncio.create_task(batcher.submit(2))
        await turns()
        latch.release()
        await quickly(other.synchronize())
        first_is_over.set()
        assert (await quickly(next_one)).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_stream_is_lent_again_behind_its_operations(
    device: Device, stream: Stream, latch: Latch, leave: Leave
) -> None:
    buffer = stream.empty(SIZE, np.uint32)
    async with StreamPool(device, 1, 1) as pool:

        async def first(begun: asyncio.Event) -> None:
            async with pool.stream() as lease:
                latch.hold(lease)
                lease.fill(buffer, 10)
                await begin(begun)

        await quickly(leave(first))
        async with pool.stream() as lease:
            second = lease.fill(buffer, 2)
            latch.release()
            await quickly(second)
            assert (await quickly(lease.download(buffer))).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_event_is_lent_again_and_its_waits_stay(
    device: Device, stream: Stream, other: Stream, latch: Latch, leave: Leave
) -> None:
    events, waits = EventPool(device, 1), list[Operation[Any]]()

    async def first(begun: asyncio.Event) -> None:
        async with events.borrow() as event:
            latch.hold(stream)
            stream.record(event=event)
            other.wait(event)
            waits.append(other.synchronize())
            await begin(begun)

    async with device.stream() as third:
        await quickly(leave(first))
        async with events.borrow() as event:
            await quickly(third.record(event=event))
            await latch.held()
            await turns()
            assert not waits[0].done()
            latch.release()
            await quickly(waits[0])


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_host_memory_of_a_copy_is_used_again_after_it(
    device: Device, stream: Stream, other: Stream, latch: Latch, leave: Leave, pinned: bool, nbytes: int
) -> None:
    """Pinned arrays, and the staging memory of other arrays."""
    target, second = stream.empty(nbytes, np.uint8), other.empty(nbytes, np.uint8)

    def array(value: int) -> Any:
        made = device.pinned(nbytes, np.uint8) if pinned else np.empty(nbytes, np.uint8)
        made[:] = value
        return made

    async def first(begun: asyncio.Event) -> None:
        latch.hold(stream)
        stream.copy(target, array(1))
        await begin(begun)

    await quickly(leave(first))
    await latch.held()
    for value in (2, 3):
        other.copy(second, array(value))
    latch.release()
    assert np.unique(await quickly(stream.download(target))).tolist() == [1]
    assert np.unique(await quickly(other.download(second))).tolist() == [3]


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.asyncio
async def test_memory_of_a_batch_is_used_again_behind_its_operations(
    device: Device, stream: Stream, other: Stream, latch: Latch, leave: Leave, loads: bool
) -> None:
    rows = [np.full(SIZE, number, np.uint32) for number in range(8)]
    target = other.empty(SIZE, np.uint32)
    loader: Any = DataLoader(device, rows, decode=np.copy, prefetch=1) if loads else to_device(rows, device, depth=1)
    async with loader as batches:
        batch = aiter(batches)

        async def first(begun: asyncio.Event) -> None:
            latch.hold(other)
            other.copy(target, (await anext(batch))[0].reshape(SIZE))
            await begin(begun)

        await quickly(leave(first))
        await latch.held()

        async def rest() -> list[int]:
            return [int(np.unique(await one.stream.download(one[0]))[0]) async for one in batch]

        found = asyncio.create_task(rest())
        await turns()
        latch.release()
        assert await quickly(found) == [*range(1, 8)]
        assert (await quickly(other.download(target))).tolist() == [0, 0, 0, 0]
