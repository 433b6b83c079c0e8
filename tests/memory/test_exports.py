"""L7: buffers that other libraries hold. Both sides wait for each other on the device, never on the host."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BusyError,
    CleanupWarning,
    Device,
    DeviceBuffer,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    UnsupportedError,
)
from aiocuda.driver.host import HostDriver
from aiocuda.memory import Adaptor
from aiocuda.memory.interchange._dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, EXTENSION, read
from tests.helpers import Latch, Peer, Reports, in_thread, open_peer, quickly, until
from tests.memory.others import Producer, handle, sweep

pytestmark = pytest.mark.asyncio


class Cuda(Peer):
    """A driver that claims to be CUDA's, so that its memory may be exported as CUDA's."""

    name = "cuda"


class Rig(NamedTuple):
    driver: Peer
    device: Device
    first: Stream
    second: Stream
    third: Stream


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    async with open_peer(Cuda()) as (peer, device):
        rig = Rig(peer, device, *(device.stream() for _ in range(3)))
        yield rig


async def hold(latch: Latch, *streams: Stream) -> None:
    """Now, and not once the kernel is loaded: else later operations would wait on the host."""
    for held in streams:
        latch.hold(held)
    await quickly(latch.held())


def taken(buffer: DeviceBuffer, consumer: Stream) -> Any:
    """A capsule that a consumer holds, which works on a stream of its own."""
    return buffer.__dlpack__(stream=handle(consumer), max_version=(1, 0))


async def test_consumer_comes_behind_us_on_the_device(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    """L7: it is exported while the operation that fills it is held; only the consumer's stream waits for that."""
    buffer = stream.empty(1000, np.float32)
    await hold(latch, stream)
    stream.fill(buffer, 7)
    seen = other.download(other.adopt(Producer(buffer)))
    async with device.stream() as bystander:
        await quickly(bystander.fill(bystander.empty(4), 1))
    assert not seen.done()
    latch.release()
    assert (await quickly(seen) == 7).all()


async def test_memory_goes_back_behind_what_the_consumer_has_enqueued() -> None:
    """On the host driver an access to memory that is freed too early is a fault."""
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream, device.stream() as consumer:
        device.memory.use(Adaptor)  # without the free lists
        buffer = stream.empty(1000, np.uint8)
        await stream.synchronize()
        capsule = taken(buffer, consumer)
        address = read(capsule).address
        buffer.free()
        sweep(stream)
        assert device.memory.statistics().live_bytes == 1000
        with Latch(device) as latch:
            await hold(latch, consumer)
            device.driver.fill(consumer._queue.handle, address, b"\x01", 1000)  # the consumer does that, not we
            del capsule
            sweep(stream)
            assert device.memory.statistics().live_bytes == 0  # freed in order: the host has not waited
            assert device.driver.locate(address) is None
            latch.release()
            await quickly(consumer.synchronize())
        await quickly(stream.synchronize())
        assert device.driver.fault is None


async def test_buffer_that_is_only_dropped_lives_with_its_capsule(stream: Stream, other: Stream) -> None:
    memory = stream.device.memory
    buffer = await stream.upload(np.arange(8, dtype=np.int32))
    adopted = other.adopt(Producer(buffer))
    assert adopted.address == buffer.address
    del buffer
    sweep(stream)
    assert memory.statistics().live_bytes == 32
    assert (await other.download(adopted) == np.arange(8)).all()
    del adopted
    await until(lambda: (sweep(stream), memory.statistics().live_bytes == 0)[1], "the memory to go back")


async def test_part_of_a_buffer_is_handed_out(stream: Stream, other: Stream) -> None:
    buffer = await stream.upload(np.arange(24, dtype=np.int16).reshape(4, 6))
    adopted = other.adopt(Producer(buffer[1:3]))
    assert (adopted.address, adopted.shape, adopted.dtype) == (buffer.address + 12, (2, 6), np.int16)
    await other.fill(adopted, 5)
    assert (await stream.download(buffer))[:, 0].tolist() == [0, 5, 5, 18]


async def test_it_is_handed_on(stream: Stream, other: Stream) -> None:
    """An adopted buffer is exported again, and all of it is released in the end."""
    memory = stream.device.memory
    buffer = await stream.upload(np.full(8, 3.0))
    second = stream.adopt(Producer(other.adopt(Producer(buffer))))
    del buffer
    gc.collect()
    assert (await stream.download(second) == 3).all()
    second.free()
    await until(lambda: (sweep(stream), memory.statistics().live_bytes == 0)[1], "the memory to go back")


async def test_what_is_still_on_the_host_cannot_be_handed_out() -> None:
    async with open_peer(Cuda()) as (peer, device):
        stream = device.stream()
        buffer = stream.empty(1 << 20, np.uint8)
        with peer.holding_jobs():
            staged = stream.copy(buffer, np.ones(1 << 20, np.uint8))
            calls = peer.calls.copy()
            for ask in (
                lambda: buffer.__dlpack__(stream=1),
                lambda: buffer.__dlpack__(stream=-1),
                lambda: buffer.__cuda_array_interface__,
            ):
                with pytest.raises(BusyError, match=f"Operation {staged.id} upload.* still on the host") as caught:
                    ask()
                assert isinstance(caught.value, BufferError)
            assert (peer.calls - calls)["stream_wait"] == 0
        await quickly(staged)
        assert buffer.__cuda_array_interface__["stream"] is None


async def test_consumer_without_a_stream(rig: Rig) -> None:
    """-1: it orders itself. None: the legacy stream, or for managed memory no stream, so that nothing may run."""
    driver, device, legacy, stream, _ = rig
    assert handle(legacy) == 1  # what CUDA calls its own
    buffer, managed = stream.empty(8), device.unified(8)
    with Latch(device) as latch:
        await hold(latch, stream)
        stream.fill(buffer, 1)
        stream.fill(managed, 1)
        calls = driver.calls.copy()
        assert read(buffer.__dlpack__(stream=-1)).device_type == CUDA
        assert (driver.calls - calls)["stream_wait"] == 0
        assert read(buffer.__dlpack__()).device_type == CUDA
        assert (driver.calls - calls)["stream_wait"] >= 1
        behind = legacy.synchronize()
        for host in (None, (CPU, 0)):
            with pytest.raises(BusyError, match=r"fill.* names no stream"):
                managed.__dlpack__(dl_device=host)
        await quickly(rig.third.synchronize())
        assert not behind.done()
        latch.release()
        await quickly(behind)
    await quickly(stream.synchronize())
    assert (np.from_dlpack(managed) == 1).all()


@pytest.mark.parametrize("stream_key", [0, -2, True, 1.0, "1"])
async def test_stream_that_is_none_is_refused(rig: Rig, stream_key: Any) -> None:
    buffer = rig.first.empty(4)
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match="1, 2, a handle, -1 or None"):
        buffer.__dlpack__(stream=stream_key)


async def test_devices_that_may_be_asked_for(rig: Rig) -> None:
    _, device, stream, *_ = rig
    buffer, managed = stream.empty(4), device.unified(4)
    await stream.synchronize()
    assert (buffer.__dlpack_device__(), managed.__dlpack_device__()) == ((CUDA, 0), (CUDA_MANAGED, 0))
    told = [(kind, read(managed.__dlpack__(stream=-1, dl_device=kind)).device_type) for kind in ((CPU, 0), (CUDA, 0))]
    assert [kind[0] for kind, _ in told] == [found for _, found in told]
    for options in ({"dl_device": (CPU, 0)}, {"dl_device": (CUDA, 1)}, {"copy": True}):
        with pytest.raises(UnsupportedError, match=r"stream\.copy") as caught:
            buffer.__dlpack__(stream=-1, **options)
        assert isinstance(caught.value, BufferError)
    assert read(buffer.__dlpack__(stream=-1, dl_device=(CUDA, 0), copy=False)).shape == (4,)


async def test_without_cuda_no_other_library_can_take_it(stream: Stream) -> None:
    if stream.device.driver.name == "cuda":
        assert stream.empty(4).__dlpack_device__() == (CUDA, 0)
        return
    buffer = await stream.upload(np.ones(4))
    assert buffer.__dlpack_device__() == (EXTENSION, 0)
    assert not hasattr(buffer, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="not CUDA's memory"):
        _ = buffer.__cuda_array_interface__
    with pytest.raises(UnsupportedError, match=r"no other library can use it: `await stream\.download\(buffer\)`"):
        np.from_dlpack(buffer)


async def test_freed_buffer_is_not_handed_out(rig: Rig) -> None:
    buffer = rig.first.empty(4)
    buffer.free()
    for ask in (lambda: buffer.__dlpack__(stream=-1), lambda: buffer.__cuda_array_interface__):
        with pytest.raises(StaleHandleError, match="has been freed"):
            ask()


async def test_interface_names_a_stream_that_is_behind_all(rig: Rig) -> None:
    driver, device, first, second, third = rig
    buffer = first.empty((2, 3), np.int16)
    await first.synchronize()
    assert buffer.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<i2",
        "data": (buffer.address, False),
        "version": 3,
        "strides": None,
        "stream": None,
    }
    with Latch(device) as latch:
        await hold(latch, first)
        first.fill(buffer, 1)
        calls = driver.calls.copy()
        assert buffer.__cuda_array_interface__["stream"] == handle(first)
        assert (driver.calls - calls)["stream_wait"] == 0
        second.fill(buffer, 2)
        third.synchronize()
        calls = driver.calls.copy()
        assert buffer.__cuda_array_interface__["stream"] == handle(second)  # the newest use's
        assert (driver.calls - calls)["stream_wait"] == 1  # and it waits for the other one
        behind = Stream.from_handle(device, handle(second)).synchronize()
        await quickly(third.synchronize())
        assert not behind.done()
        latch.release()
        await quickly(behind)


async def test_interface_of_what_a_closed_stream_still_does(rig: Rig) -> None:
    device = rig.device
    with Latch(device) as latch:
        with pytest.raises(KeyError):
            async with device.stream() as left:
                buffer = left.empty(4)
                await hold(latch, left)
                filled = left.fill(buffer, 1)
                raise KeyError
        with pytest.raises(BusyError, match="its stream has been closed"):
            _ = buffer.__cuda_array_interface__
        latch.release()
        await quickly(filled.settle())
    assert buffer.__cuda_array_interface__["stream"] is None


async def test_stream_that_is_being_captured_is_left_alone(rig: Rig) -> None:
    driver, device, stream, owner, _ = rig
    buffer = stream.empty(4)
    await stream.synchronize()
    imported = Stream.from_handle(device, handle(owner))
    await owner.aclose()  # only they hold it from here on, as far as we know
    theirs = handle(imported)
    driver.inner.__dict__["stream_capturing"] = lambda stream: stream == theirs
    capsule = buffer.__dlpack__(stream=theirs)  # nothing to wait for
    with Latch(device) as latch:
        await hold(latch, stream)
        stream.fill(buffer, 1)
        with pytest.raises(BusyError, match="being captured"):
            buffer.__dlpack__(stream=theirs)
        latch.release()
        await quickly(stream.synchronize())
    calls = driver.calls.copy()
    buffer.free()
    del capsule
    sweep(stream)
    assert (driver.calls - calls)["event_record"] == 0
    assert device.memory.statistics().live_bytes == 16
    del driver.inner.__dict__["stream_capturing"]
    sweep(stream)
    assert device.memory.statistics().live_bytes == 0


async def test_consumer_lets_go_on_another_thread(rig: Rig) -> None:
    """A finaliser makes no driver call: the loop does, in its next sweep."""
    driver, device, stream, other, _ = rig
    buffer = stream.empty(4)
    await stream.synchronize()
    capsules = [taken(buffer, other)]
    del buffer
    calls = driver.calls.copy()
    thread = threading.Thread(target=lambda: (capsules.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert set(driver.calls - calls) <= {"pin", "now"}  # which are of the memory for staging
    sweep(stream)
    assert (driver.calls - calls)["event_record"] == 1
    await quickly(other.synchronize())
    sweep(stream)
    assert device.memory.statistics().live_bytes == 0


async def test_it_comes_back_by_itself(stream: Stream, other: Stream) -> None:
    """The watchdog sweeps while anything is unfinished, and an allocation does."""
    memory = stream.device.memory
    buffer = stream.empty(1 << 20, np.uint8)
    capsule = taken(buffer, other)
    buffer.free()
    del capsule
    gc.collect()
    for _ in range(2):
        stream.empty(1, np.uint8).free()
    assert memory.statistics().live_bytes < 1 << 20


async def test_closed_stream_gets_no_event(stream: Stream) -> None:
    device = stream.device
    buffer = stream.empty(16, np.uint8)
    async with device.stream() as consumer:
        capsule = taken(buffer, consumer)
    del capsule
    buffer.free()
    with Reports() as reports:
        sweep(stream)
    assert reports.contexts == []
    assert device.memory.statistics().live_bytes == 0


async def test_memory_is_freed_after_the_borrower_of_a_stream_that_was_left(rig: Rig) -> None:
    driver, device, stream, other, _ = rig
    buffer, target = stream.empty(16, np.uint8), other.empty(16, np.uint8)
    await quickly(other.synchronize())
    with Latch(device) as latch:
        async with stream.lend():
            capsule = taken(buffer, stream)
            with contextlib.suppress(RuntimeError):
                async with stream:
                    raise RuntimeError
            await hold(latch, other)
            borrowed = driver.inner.event_create(0, False)
            driver.inner.event_record(borrowed, other._queue.handle)
            driver.inner.stream_wait(stream._queue.handle, borrowed)  # what the borrower does takes its time
            driver.inner.copy(stream._queue.handle, target.address, buffer.address, 16)
            del capsule
            recorded: list[int] = []
            waited: list[int] = []
            driver.before["event_record"] = lambda event, where: recorded.append(event)
            driver.before["stream_wait"] = lambda where, event: waited.append(event)
            sweep(other)
            assert len(recorded) == 1  # after the borrower's copy
            buffer.free()
            assert recorded[0] in waited
            driver.before.clear()
            latch.release()
    driver.inner.event_destroy(borrowed)


async def test_release_while_the_device_closes_does_no_harm(rig: Rig) -> None:
    """Other threads let go whenever they do."""
    exports = rig.device.memory.exports
    late = taken(rig.first.empty(4), rig.second)

    class Returned:
        @property
        def queue(self) -> None:
            nonlocal late
            late = None

    returned: Any = Returned()
    exports.returned.append(returned)  # in its place another thread takes its turn
    assert len(exports.addresses()) == 1
    exports.returned.pop(0)


async def test_destroyed_stream_keeps_the_memory_and_is_reported_once(rig: Rig) -> None:
    driver, device, stream, *_ = rig
    theirs = driver.inner.stream_create(0, 0)
    buffer = stream.empty(16, np.uint8)
    capsule = buffer.__dlpack__(stream=theirs)
    await stream.synchronize()
    Stream.from_handle(device, handle(stream))  # forgets the import of their stream
    driver.inner.stream_destroy(theirs)
    del capsule
    buffer.free()
    with Reports() as reports:
        sweep(stream)
        sweep(stream)
    (failure,) = reports.failures
    assert isinstance(failure, StaleHandleError)
    assert device.memory.statistics().live_bytes == 16
    with pytest.warns(CleanupWarning, match="1 buffers outlive their device"):
        await device.aclose()


async def test_device_that_is_closed_under_a_consumer_keeps_the_memory() -> None:
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        stream = device.stream()
        kept, let_go = stream.empty(16), stream.empty(16)
        address = kept.address
        capsule = taken(kept, stream)
        other = taken(let_go, stream)
        del other
        with pytest.warns(CleanupWarning, match="1 buffers outlive their device because other libraries hold them"):
            await device.aclose()
        assert peer.inner.locate(address) is not None
        with pytest.raises(StaleHandleError):
            taken(let_go, stream)
        del capsule  # the device is closed, and nothing happens
        gc.collect()


async def test_what_came_back_is_no_leftover_when_the_device_closes() -> None:
    """Letting go right before the end is in time: draining takes it back, and waits for what the consumer does."""
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        stream, consumer = device.stream(), device.stream()
        buffer = stream.empty(16)
        address = buffer.address
        capsule = taken(buffer, consumer)
        del capsule, buffer
        await device.aclose()
        assert peer.inner.locate(address) is None


async def test_loop_that_handed_it_out_is_gone() -> None:
    """Another loop of the device takes it back."""
    driver = HostDriver()
    kept: list[Any] = []
    try:
        async with aiocuda.open_device(driver=driver) as device:

            async def main() -> None:
                stream = device.stream()
                buffer = stream.empty(64, np.uint8)
                kept.append(taken(buffer, stream))
                await stream.synchronize()

            with pytest.warns(ResourceWarning):
                in_thread(main)
                gc.collect()
            stream = device.stream()
            sweep(stream)
            assert device.memory.statistics().live_bytes == 64
            kept.clear()
            await until(lambda: (sweep(stream), device.memory.statistics().live_bytes == 0)[1], "the memory")
    finally:
        driver.close()


async def test_it_is_handed_out_on_a_loop_only(rig: Rig) -> None:
    buffer = rig.first.empty(4)

    def ask() -> None:
        with pytest.raises(aiocuda.NoEventLoopError):
            buffer.__dlpack__(stream=5)

    await asyncio.to_thread(ask)


async def test_after_a_fault_nothing_is_handed_out(rig: Rig) -> None:
    stream = rig.first
    buffer = stream.empty(4)
    with pytest.raises(aiocuda.DeviceFault):
        await quickly(stream.launch(aiocuda.Kernel("bad", source="__global__ void bad();", host=_fail), 1, 1))
    for ask in (lambda: buffer.__dlpack__(stream=-1), lambda: buffer.__cuda_array_interface__):
        with pytest.raises(aiocuda.DeviceFault):
            ask()


def _fail() -> None:
    raise ValueError("on purpose")


async def test_pinned_memory_is_exported_as_host_memory(device: Device, stream: Stream) -> None:
    pinned = device.pinned((2, 3), np.int32)
    pinned[:] = 4
    assert pinned.__dlpack_device__() == (CPU, 0)
    array = np.from_dlpack(pinned)
    assert array.ctypes.data == pinned.address
    assert read(pinned.__dlpack__(dl_device=(CUDA_HOST, 0), max_version=(1, 0))).device_type == CUDA_HOST
    buffer = await stream.upload(pinned)
    with Latch(device) as latch:
        await hold(latch, stream)
        operation = stream.download(buffer, out=pinned)
        with pytest.raises(BusyError, match=f"Operation {operation.id} download.* may read it now") as caught:
            np.from_dlpack(pinned)
        assert isinstance(caught.value, BufferError)
        latch.release()
        await quickly(operation)
    np.from_dlpack(pinned)


async def test_capsule_of_pageable_memory_never_claims_pinned_memory(device: Device) -> None:
    pinned = device.pinned(5, np.float32)
    pinned[:] = 2
    copied = pinned.copy()
    assert copied.freed  # its memory is NumPy's
    for array, copy in ((copied, None), (copied, False), (pinned, True)):
        with pytest.raises(UnsupportedError, match="not pinned") as caught:
            array.__dlpack__(dl_device=(CUDA_HOST, 0), max_version=(1, 0), copy=copy)
        assert isinstance(caught.value, BufferError)
    assert read(copied.__dlpack__(max_version=(1, 0))).device_type == CPU
    assert read(pinned.__dlpack__(max_version=(1, 0), copy=True)).device_type == CPU
    assert read(pinned[1:].__dlpack__(dl_device=(CUDA_HOST, 0), max_version=(1, 0))).device_type == CUDA_HOST


async def test_numpy_takes_page_locked_capsules(device: Device) -> None:
    pinned = device.pinned(5, np.float32)
    pinned[:] = 2

    class Locked:
        def __dlpack__(self, **options: Any) -> Any:
            return pinned.__dlpack__(**options | {"dl_device": (CUDA_HOST, 0)})

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA_HOST, 0)

    assert np.from_dlpack(Locked()).tolist() == [2.0] * 5
