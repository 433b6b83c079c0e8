"""A kernel's host implementation raises: the host device faults, and every waiter gets the fault."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, DeviceBuffer, DeviceFault, EventPool, Operation, PinnedBuffer, Stream
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Port
from aiocuda.memory import Adaptor
from aiocuda.memory._staging import CHUNK_BYTES
from tests.helpers import (
    AFFINE,
    PATIENCE,
    SAXPY,
    SPIN,
    TRAP,
    Latch,
    Peer,
    Reports,
    block_until,
    in_thread,
    open_peer,
    quickly,
    until,
    until_gone,
)
from tests.stream.methods import World, methods_of

pytestmark = pytest.mark.asyncio


async def trapped(peer: Peer) -> None:
    """The trap is loaded: from here on its launch goes straight to the stream."""
    await asyncio.to_thread(TRAP.load, peer.driver, 0)


@contextlib.asynccontextmanager
async def open_trapped(*, polls_freely: bool = False, **options: Any) -> AsyncIterator[tuple[Peer, Device]]:
    """A device, and its driver, with the trap loaded."""
    async with open_peer(Peer(polls_freely=polls_freely), **options) as (peer, device):
        await trapped(peer)
        yield peer, device


@pytest.mark.parametrize("polls_freely", [False, True])
async def test_everything_pending_fails_awaited_or_not(polls_freely: bool) -> None:
    with Reports() as reports:
        async with open_trapped(polls_freely=polls_freely, max_in_flight=8) as (_, device):
            streams = [device.stream() for _ in range(6)]
            large = np.zeros(9 << 20, np.uint8)
            operations: list[Operation[Any]] = []
            told: list[Operation[Any]] = []
            with Latch(device) as latch:
                for stream in streams[:3]:
                    latch.hold(stream)
                    await latch.held()
                for stream in streams:
                    buffer = stream.empty(4)
                    operations += [stream.fill(buffer, value) for value in range(12)]  # some of them on the host
                    operations += [stream.download(buffer), stream.upload(large), stream.record().operation]
                ending = operations[len(operations) // 2 :]
                for stream in streams[3:]:  # these were not held: what they have ends before the fault
                    latch.hold(stream)
                    operations.append(stream.synchronize())
                await until(lambda: latch.running == 6, "the other holds")
                await until(lambda: all(operation.done() for operation in ending), "what was not held")
                pending = [operation for operation in operations if not operation.done()]
                awaited = [asyncio.create_task(operation.wait()) for operation in pending[::3]]
                for operation in pending[1::3]:
                    operation.add_done_callback(told.append)
                async with device.stream() as another:
                    trap = another.launch(TRAP, 1, 1)
                    with pytest.raises(DeviceFault) as caught:
                        await quickly(trap)
                assert caught.value.code == 719
                assert caught.value.device == 0
                assert isinstance(caught.value.__cause__, ZeroDivisionError)
                done, _ = await asyncio.wait(awaited, timeout=PATIENCE)
                assert len(done) == len(awaited)
                for task in awaited:
                    error = task.exception()
                    assert isinstance(error, DeviceFault)
                    assert isinstance(error.__cause__, ZeroDivisionError)
                    assert (error.code, error.device, error.operation) == (719, 0, caught.value.operation)
                    assert error.operation is not None
                for operation in pending:
                    assert operation.state == "failed"
                    assert isinstance(operation.exception(), DeviceFault)
                await asyncio.sleep(0)
                assert sorted(operation.id for operation in told) == [operation.id for operation in pending[1::3]]
                assert device.statistics().in_flight == 0
        gc.collect()
        assert not reports.contexts


async def test_watchdog_sees_a_fault_without_waiters() -> None:
    async with open_trapped() as (_, device):
        stream, other = device.stream(), device.stream()
        with Latch(device) as latch:
            latch.hold(other)
            await latch.held()
            operations = [other.fill(other.empty(4), 1), stream.launch(TRAP, 1, 1)]
            await until(lambda: all(operation.done() for operation in operations), "the watchdog")
        assert {type(operation.exception()) for operation in operations} == {DeviceFault}


async def test_later_calls_raise_the_same_without_touching_the_driver() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            await trapped(peer)
            stream, other = device.stream(), device.stream()
            buffer, second = await stream.upload(np.zeros(4, np.float32)), stream.empty(4)
            pinned, managed = await device.pinned(4), device.unified(4)
            await stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, second)
            world = await World.make(device, stream, other)
            pool = EventPool(device)
            start = stream.record(timing=True)
            await start
            with pytest.raises(DeviceFault) as first:
                await quickly(stream.launch(TRAP, 1, 1))
            calls = peer.inner.statistics()["calls"]
            verbs: list[Callable[[], object]] = [
                *methods_of(world).values(),
                lambda: stream.launch(SAXPY, 1, 4, 4, 1.0, buffer, second),
                lambda: stream.launch(AFFINE, 1, 4, buffer.view(np.uint32), 4, 1, 1),
                lambda: stream.upload(np.zeros(1 << 20)),
                lambda: stream.download(buffer),
                lambda: stream.copy(buffer, second),
                lambda: stream.empty(4),
                lambda: stream.__cuda_stream__(),
                lambda: buffer.free(),
                lambda: second.free(other),
                lambda: managed.free(),
                lambda: device.stream(),
                lambda: device.pinned(4),
                lambda: device.unified(4),
                lambda: pool.acquire_nowait(),
                lambda: start.elapsed_ms(start),
            ]
            for verb in verbs:
                with pytest.raises(DeviceFault) as later:
                    verb()
                assert later.value is not first.value
                assert (later.value.code, later.value.device, later.value.operation) == (
                    first.value.code,
                    first.value.device,
                    first.value.operation,
                )
                assert isinstance(later.value.__cause__, ZeroDivisionError)
            for attempt in (stream.lend(), device.pin(np.zeros(4)), pool.borrow()):
                with pytest.raises(DeviceFault):
                    async with attempt:
                        pass
            del attempt, later
            assert peer.inner.statistics()["calls"] == calls
            device.statistics()
            device.memory.statistics()
            pinned.free()
        assert peer.inner.statistics()["calls"] == calls


async def test_error_pickles() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        with pytest.raises(DeviceFault) as caught:
            await quickly(stream.launch(TRAP, 1, 1))
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.args, again.code, again.device, again.operation) == (
            caught.value.args,
            caught.value.code,
            caught.value.device,
            caught.value.operation,
        )


@pytest.mark.parametrize("how", ["normally", "by the fault", "by another exception", "cancelled"])
async def test_leaving_does_not_hang(how: str) -> None:
    with Peer() as peer:

        async def main() -> None:
            async with aiocuda.open_device(driver=peer.driver) as device:
                await trapped(peer)
                stream, other = device.stream(), device.stream()
                with Latch(device) as latch:
                    latch.hold(other)
                    await latch.held()
                    for value in range(20):
                        other.fill(other.empty(4), value)
                    other.upload(np.zeros(9 << 20, np.uint8))
                    trap = stream.launch(TRAP, 1, 1)
                    if how == "normally":
                        return
                    if how == "by the fault":
                        await trap
                    if how == "by another exception":
                        raise ZeroDivisionError
                    await asyncio.Event().wait()

        with Reports():  # the failures are never read
            task = asyncio.create_task(main())
            if how == "cancelled":
                await until(lambda: peer.fault, "the fault")
                task.cancel()
            outcome = (await quickly(asyncio.gather(task, return_exceptions=True)))[0]
            assert (
                type(outcome)
                is {
                    "normally": DeviceFault,
                    "by the fault": DeviceFault,
                    "by another exception": ZeroDivisionError,
                    "cancelled": asyncio.CancelledError,
                }[how]
            )
            del outcome
            gc.collect()


async def test_new_host_device_opens_after_a_fault() -> None:
    for _ in range(3):
        async with aiocuda.open_device(driver="host") as device:
            stream = device.stream()
            with pytest.raises(DeviceFault):
                await quickly(stream.launch(TRAP, 1, 1))
        async with aiocuda.open_device(driver="host") as device:
            stream = device.stream()
            assert (await stream.download(await stream.upload(np.ones(4)))).sum() == 4


async def test_devices_of_one_driver_share_the_fault() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(0, driver=peer.driver) as first,
            aiocuda.open_device(1, driver=peer.driver) as second,
        ):
            one, two = first.stream(), second.stream()
            with Latch(second) as latch:
                latch.hold(two)
                await latch.held()
                behind = two.fill(two.empty(4), 1)
                waiter = asyncio.create_task(behind.wait())
                with pytest.raises(DeviceFault):
                    await quickly(one.launch(TRAP, 1, 1))
                with pytest.raises(DeviceFault) as caught:
                    await quickly(waiter)
                assert caught.value.device == 0
                with pytest.raises(DeviceFault):
                    second.stream()


async def test_fault_reaches_other_loops() -> None:
    async with open_trapped() as (_, device):
        latch = Latch(device)
        entered = asyncio.Event()
        kept: list[Stream] = []  # while the device is open
        loop = asyncio.get_running_loop()

        async def elsewhere() -> str:
            stream = device.stream()
            kept.append(stream)
            latch.hold(stream)
            await latch.held()
            operation = stream.fill(stream.empty(4), 1)
            loop.call_soon_threadsafe(entered.set)
            try:
                await quickly(operation)
            except DeviceFault:
                return "told"
            return "not told"

        there = asyncio.create_task(asyncio.to_thread(in_thread, elsewhere))
        await quickly(entered.wait())
        stream = device.stream()
        with pytest.raises(DeviceFault):
            await quickly(stream.launch(TRAP, 1, 1))
        assert await quickly(there) == "told"
        latch.release()


async def test_illegal_address_of_a_freed_buffer() -> None:
    """A use after free in the program's own kernel, here with a raw address, as another library would hold it."""
    async with aiocuda.open_device(driver="host") as device:
        device.memory.use(Adaptor)  # without the free lists, which would keep the memory
        stream = device.stream()
        buffer = stream.empty(16)
        address = buffer.address
        buffer.free()
        await stream.synchronize()
        device.driver.fill(stream._queue.handle, address, b"\0", 16)
        with pytest.raises(DeviceFault) as caught:
            await quickly(stream.synchronize())
        assert caught.value.code == 700


async def test_fault_seen_while_a_full_stream_is_asked_for_room() -> None:
    with Reports():
        async with open_trapped(max_in_flight=4) as (peer, device):
            stream = device.stream()
            buffer = stream.empty(4)
            await stream.synchronize()
            stream.fill(buffer, 0)
            stream.launch(TRAP, 1, 1)
            operations: list[Operation[Any]] = []
            block_until(lambda: peer.inner.fault, "the fault")
            for value in range(10):
                try:
                    operations.append(stream.fill(buffer, value))
                except DeviceFault:
                    break
            for operation in operations:
                with pytest.raises(DeviceFault):
                    await quickly(operation)
            await until(lambda: stream._queue.idle, "the fault")
            assert device.statistics().in_flight == 0
        gc.collect()


async def test_unread_failures_are_reported_once_per_stream() -> None:
    async def fail(peer: Peer) -> None:
        async with aiocuda.open_device(driver=peer.driver) as device:
            await trapped(peer)
            streams = [device.stream() for _ in range(3)]
            await streams[0].launch(SPIN, 1, 1, 1)
            for stream in streams[:2]:
                stream.launch(SPIN, 1, 1, 50_000_000)
                for value in range(5):
                    stream.fill(stream.empty(4), value)
            streams[2].launch(TRAP, 1, 1)
            await until(lambda: device.statistics().in_flight == 0, "the fault")

    with Peer() as peer, Reports() as reports:
        with pytest.raises(DeviceFault):
            await fail(peer)
        await until(lambda: (gc.collect(), len(reports.failures) == 2)[1], "the reports")  # and one is raised
        assert len(reports.failures) == 2
        assert {type(failure) for failure in reports.failures} == {DeviceFault}


async def test_streams_of_abandoned_work_have_nothing_to_report() -> None:
    with Reports() as reports:
        async with open_trapped() as (_, device):
            stream, other = device.stream(), device.stream()
            with Latch(device) as latch:
                latch.hold(other)
                await latch.held()
                latch.release()
                await other.synchronize()
                hold = latch.hold(other)
                await latch.held()
                hold.abandon()
                closing = asyncio.create_task(other.aclose())
                await asyncio.sleep(0)
                with pytest.raises(DeviceFault):
                    await quickly(stream.launch(TRAP, 1, 1))
                await quickly(closing)
        gc.collect()
        assert not reports.contexts


async def test_nothing_that_failed_holds_itself() -> None:
    """Operations, and the arrays that they read and write, are released when no reference is left."""
    async with open_trapped() as (peer, device):
        await asyncio.to_thread(SAXPY.load, peer.driver, 0)
        stream, other = device.stream(), device.stream()
        own = np.zeros((2, 100), np.float32)
        uses: list[Callable[[DeviceBuffer, PinnedBuffer], Operation[Any]]] = [
            lambda buffer, pinned: stream.copy(buffer, pinned[1]),
            lambda buffer, pinned: stream.upload(pinned[:1]),
            lambda buffer, pinned: stream.download(buffer, pinned.reshape(200)[:100]),
            lambda buffer, pinned: stream.copy(buffer.view(np.int32), pinned[0].view(np.int32)),
            lambda buffer, pinned: stream.launch(SAXPY, 1, 32, 100, 1.0, buffer, pinned[1][:]),
            lambda buffer, pinned: stream.copy(buffer, own[1]),
        ]
        things: list[weakref.ref[Any]] = []
        operations: list[Operation[Any]] = []
        async with device.pin(own) as borrowed:
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                for use in uses:
                    for pinned in (device.pinned((2, 100)), await device.pinned((2, 100)), borrowed):
                        operations.append(use(stream.empty(100), pinned))  # each the last to use its memory
                        things.append(weakref.ref(pinned))
                        del pinned
                for _ in range(2):
                    large = np.zeros(1 << 28, np.uint8)  # more than all chunks together
                    operations.append(stream.upload(large))
                    things.append(weakref.ref(large))
                    del large
                with pytest.raises(DeviceFault):
                    await quickly(other.launch(TRAP, 1, 1))
            for operation in operations:
                assert isinstance(operation.exception(), DeviceFault)
            things += map(weakref.ref, operations)
            del operations, operation, borrowed, use
        await until_gone(things)


async def test_chunk_that_a_fault_forestalls_holds_nothing() -> None:
    """The loop learns of the fault from the first chunk of a copy, which could not be locked any more."""
    async with open_trapped() as (peer, device):
        stream, other = device.stream(), device.stream()
        await stream.upload(np.zeros(4))
        refused = threading.Event()

        def behind_the_fault(address: int, nbytes: int) -> None:
            if nbytes == CHUNK_BYTES:
                block_until(lambda: peer.inner.fault, "the fault")

        def tell(work: Callable[[], object], port: Port, tag: int) -> None:
            peer.inner.offload(lambda: (work(), refused.set()), port, tag)

        peer.before["pin"] = behind_the_fault
        peer.__dict__["offload"] = tell
        large = np.zeros(1 << 22, np.uint8)
        upload = stream.upload(large)
        trap = other.launch(TRAP, 1, 1)
        block_until(refused.is_set, "the refusal")
        await until(upload.done, "the fault")
        for operation in (upload, trap):
            assert isinstance(operation.exception(), DeviceFault)
        things: list[weakref.ref[Any]] = [weakref.ref(large), weakref.ref(upload)]
        del large, upload, operation
        await until_gone(things)


@pytest.mark.parametrize("failing", [False, True])
async def test_bracket_that_ends_after_a_fault_makes_no_driver_call(failing: bool) -> None:
    """P4: its own failure propagates through the block; otherwise the block raises the fault."""
    async with open_trapped() as (peer, device):
        coordinator = AsyncCoordinator(device)
        stream = device.stream()
        with pytest.raises(LookupError if failing else DeviceFault):
            async with coordinator.operation("kernel"):
                with contextlib.suppress(DeviceFault):
                    await quickly(stream.launch(TRAP, 1, 1))
                calls = peer.calls.copy()
                if failing:
                    raise LookupError
        assert set(peer.calls - calls) <= {"now", "blame"}
