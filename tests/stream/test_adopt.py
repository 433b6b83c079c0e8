"""L7: arrays of other libraries as buffers."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DeviceBuffer,
    DeviceFault,
    InvalidArgumentError,
    InvalidTypeError,
    Kernel,
    PinnedBuffer,
    StaleHandleError,
    Stream,
    WrongDeviceError,
)
from aiocuda.driver.host import HostDriver
from aiocuda.memory.interchange import _dlpack
from aiocuda.memory.interchange._dlpack import CPU, CUDA_HOST, EXTENSION
from aiocuda.memory.interchange._exports import Exports
from tests.helpers import AFFINE, Latch, Peer, open_peer, quickly, until
from tests.memory.others import Interfaced, Producer, handle, sweep

pytestmark = pytest.mark.asyncio


async def filled(stream: Stream, value: int, shape: Any = 64) -> DeviceBuffer:
    buffer = stream.empty(shape, np.uint32)
    await stream.fill(buffer, value)
    return buffer


async def test_round_trip(stream: Stream, other: Stream) -> None:
    """Buffer and array have the same contents, shape and dtype; each shows what is written through the other."""
    theirs = await filled(stream, 3, (4, 8))
    for array in (Producer(theirs), Interfaced(theirs), Producer(theirs, max_version=None)):
        ours = other.adopt(array)
        assert type(ours) is DeviceBuffer
        assert (ours.address, ours.shape, ours.dtype) == (theirs.address, theirs.shape, theirs.dtype)
        assert ours.device is stream.device
        await other.fill(ours, 5)
        assert (await stream.download(theirs) == 5).all()
        await stream.fill(theirs, 6)
        assert (await other.download(ours[1:3]) == 6).all()
        await other.launch(AFFINE, 1, 32, ours, 32, 2, 1)
        assert (await other.download(ours) == 13).all()


async def test_our_stream_is_the_one_that_the_producer_is_asked_to_wait_with(stream: Stream, other: Stream) -> None:
    array = Producer(await filled(stream, 1))
    other.adopt(array)
    assert array.asked == [{"stream": handle(other), "max_version": (1, 0)}]


async def test_producer_that_is_older_than_version_1(stream: Stream, other: Stream) -> None:
    theirs = await filled(stream, 1)

    class Old:
        def __dlpack__(self, stream: int | None = None) -> Any:
            return theirs.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> tuple[int, int]:
            return theirs.__dlpack_device__()

    assert (await other.download(other.adopt(Old())) == 1).all()


@pytest.mark.parametrize("by", ["dlpack", "interface"])
async def test_producers_work_is_waited_for_on_the_device(
    by: str, device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    """L7: by the stream that adopts, and by every other one that uses the buffer. The host waits for nothing."""
    theirs = await filled(stream, 1)
    async with device.stream() as third:
        latch.hold(stream)
        await quickly(latch.held())
        stream.fill(theirs, 9)
        ours = other.adopt(Producer(theirs) if by == "dlpack" else Interfaced(theirs, handle(stream)))
        seen = [third.download(ours), other.download(ours)]
        async with device.stream() as bystander:
            await quickly(bystander.fill(bystander.empty(4), 1))
        assert not any(operation.done() for operation in seen)
        latch.release()
        for operation in seen:
            assert (await quickly(operation) == 9).all()


def owns(device: Device, address: int) -> bool:
    """True if another library holds the buffer at this address."""
    exports = device.memory.exports
    assert isinstance(exports, Exports)
    return exports.owns(address)


@pytest.mark.parametrize("ending", ["drop", "free"])
@pytest.mark.parametrize("by", ["dlpack", "interface"])
async def test_producer_is_held_until_everything_that_uses_it_has_passed(
    by: str, ending: str, device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    """Dropped, or freed: neither brings it back to the producer before the device is done with it."""
    theirs = await filled(stream, 1)
    held = Interfaced(theirs)
    alive = weakref.ref(held)

    def is_held() -> bool:
        sweep(stream)
        return owns(device, theirs.address) if by == "dlpack" else alive() is not None

    adopted = other.adopt(Producer(theirs) if by == "dlpack" else held)
    del held
    latch.hold(other)
    await quickly(latch.held())
    last = other.fill(adopted, 2)
    if ending == "free":
        adopted.free()
        for use in (lambda: other.fill(adopted, 3), adopted.free):
            with pytest.raises(StaleHandleError, match="has been freed"):
                use()
    else:
        del adopted
    assert is_held()
    latch.release()
    await quickly(last)
    await until(lambda: not is_held(), "the producer to be let go")
    assert (await stream.download(theirs) == 2).all()


async def test_producer_is_let_go_on_the_loop(stream: Stream) -> None:
    """The finaliser runs anywhere, and only leaves it in a list: what the producer does then is not ours to judge."""
    theirs = await filled(stream, 1)
    held = Interfaced(theirs)
    producer = weakref.ref(held)
    adopted = [stream.adopt(held)]
    del held

    def let_go() -> bool:
        adopted.clear()
        return producer() is not None  # before the loop turns again, which may sweep

    assert await asyncio.to_thread(let_go)
    sweep(stream)
    assert producer() is None


async def test_array_of_another_kind_of_memory_is_refused(stream: Stream, other: Stream) -> None:
    memory = stream.device.memory
    theirs = await filled(stream, 1)
    before = memory.statistics()
    ours = other.adopt(Producer(theirs))
    assert memory.statistics() == before
    ours.free(other)
    sweep(stream)
    assert memory.statistics().live_bytes == before.live_bytes
    assert (await stream.download(theirs) == 1).all()


async def test_capsule_serves_once(stream: Stream) -> None:
    """Row 27."""
    theirs = await filled(stream, 4)
    capsule = theirs.__dlpack__(stream=-1)
    assert (await stream.download(stream.adopt(capsule)) == 4).all()
    with pytest.raises(StaleHandleError, match="this DLPack capsule has been used"):
        stream.adopt(capsule)


class Elsewhere:
    """An array on some other device. Asking for its capsule is an error."""

    def __init__(self, kind: int, index: int = 0) -> None:
        self.device = (kind, index)

    def __dlpack__(self, **options: object) -> None:
        raise AssertionError("its device says enough")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (10, "ROCm"),
        (14, "oneAPI"),
        (8, "Metal"),
        (99, "unknown kind"),
        (CPU, r"await stream\.upload\(x\)"),
    ],
)
async def test_array_on_another_kind_of_device_is_refused_by_name(stream: Stream, kind: int, says: str) -> None:
    """Row 28."""
    with pytest.raises(WrongDeviceError, match=says):
        stream.adopt(Elsewhere(kind))


async def test_host_arrays_and_other_things_are_refused(stream: Stream) -> None:
    with pytest.raises(WrongDeviceError, match=r"stream\.upload"):
        stream.adopt(np.zeros(4))
    with pytest.raises(InvalidTypeError, match="neither __dlpack__ nor"):
        stream.adopt([1, 2])
    with pytest.raises(InvalidTypeError, match="is an Operation: await it first"):
        stream.adopt(stream.upload(np.zeros(4)))
    await stream.synchronize()


async def test_array_of_another_device_is_refused() -> None:
    driver = HostDriver(devices=2)
    try:
        async with aiocuda.open_device(0, driver=driver) as near, aiocuda.open_device(1, driver=driver) as far:
            stream, distant = near.stream(), far.stream()
            theirs = await filled(distant, 1)
            with pytest.raises(WrongDeviceError, match="is on device 1, the stream on device 0") as caught:
                stream.adopt(Producer(theirs))
            assert (caught.value.device, caught.value.expected) == (1, 0)  # type: ignore[attr-defined]
            with pytest.raises(WrongDeviceError, match="is on device 1, the stream on device 0"):
                stream.adopt(Interfaced(theirs))
            with pytest.raises(WrongDeviceError, match="a buffer of another device already"):
                stream.adopt(theirs)
    finally:
        driver.close()


async def test_extension_device_of_another_driver_is_refused() -> None:
    """Two drivers without CUDA may use the same addresses for different memory."""
    async with aiocuda.open_device(driver="host") as one, aiocuda.open_device(driver="host") as two:
        stream, distant = one.stream(), two.stream()
        theirs = await filled(distant, 1)

        class Third:
            def __dlpack__(self, **options: object) -> Any:
                return theirs.__dlpack__(stream=-1)

            def __dlpack_device__(self) -> tuple[int, int]:
                return (EXTENSION, 0)

        with pytest.raises(WrongDeviceError, match="an extension device that is not"):
            stream.adopt(Third())


@pytest.mark.parametrize(
    ("entries", "error", "says"),
    [
        ({"shape": (65,)}, InvalidArgumentError, "from byte 0 to 260 of an allocation of 256"),
        ({"strides": (8,)}, InvalidArgumentError, "from byte 0 to 508 of"),
        ({"shape": (32,), "strides": (8,)}, InvalidArgumentError, "not C-contiguous"),
        ({"data": (64, False)}, InvalidArgumentError, "where there is no memory of a device"),
        ({"typestr": "|V4"}, InvalidTypeError, "which libraries read differently"),
    ],
)
async def test_interface_that_cannot_be_is_refused_by_name(
    entries: dict[str, Any], error: type[Exception], says: str
) -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        theirs = await filled(stream, 1)
        calls = peer.calls.copy()
        with pytest.raises(error, match=says):
            stream.adopt(Interfaced(theirs, **entries))
        assert set(peer.calls - calls) <= {"locate"}


async def test_array_that_is_not_contiguous_is_refused_with_the_cure(stream: Stream) -> None:
    theirs = await filled(stream, 1, (4, 6))
    capsule = theirs.__dlpack__(stream=-1)
    tensor, strides = _dlpack._struct(capsule).dl_tensor, (ctypes.c_int64 * 2)(1, 1)
    tensor.strides = strides  # NumPy before 2.4 gives none
    with pytest.raises(InvalidArgumentError, match=r"strides are \(4, 4\) bytes: pass x\.contiguous\(\)"):
        stream.adopt(capsule)
    strides[0] = 6
    stream.adopt(capsule)  # a refusal takes nothing out of it


async def test_read_only_array_is_taken_on_the_callers_word(stream: Stream) -> None:
    theirs = await filled(stream, 1)
    capsule = theirs.__dlpack__(stream=-1, max_version=(1, 0))
    _dlpack._struct(capsule).flags = 1
    for array in (capsule, Interfaced(theirs, data=(theirs.address, True))):
        with pytest.raises(InvalidArgumentError, match=r"stream\.adopt\(x, read_only=True\)"):
            stream.adopt(array)
        assert (await stream.download(stream.adopt(array, read_only=True)) == 1).all()


async def test_array_of_no_bytes(stream: Stream) -> None:
    theirs = stream.empty((0, 3), np.float64)
    await stream.synchronize()
    for array in (Producer(theirs), Interfaced(theirs)):
        ours = stream.adopt(array)
        assert (ours.shape, ours.nbytes, ours.dtype) == ((0, 3), 0, np.float64)
        assert (await stream.download(ours)).shape == (0, 3)


async def test_managed_memory_is_adopted_as_device_memory(device: Device, stream: Stream) -> None:
    theirs = device.unified(16, np.uint32)
    await stream.fill(theirs, 8)
    held = Interfaced(theirs)
    producer = weakref.ref(held)
    ours = stream.adopt(held)
    del held
    assert type(ours) is DeviceBuffer
    assert (await quickly(stream.download(ours)) == 8).all()
    await quickly(stream.fill(ours, 9))
    ours.free()
    sweep(stream)
    assert producer() is None
    assert (theirs.array == 9).all()


async def test_pinned_memory_is_adopted_as_that(device: Device, stream: Stream) -> None:
    pinned = device.pinned((2, 4), np.int16)
    pinned[:] = 6
    await quickly(pinned)

    class Locked:
        def __dlpack__(self, **options: Any) -> Any:
            return pinned.__dlpack__(**options | {"dl_device": (CUDA_HOST, 0)})

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA_HOST, 0)

    ours = stream.adopt(Locked())
    assert type(ours) is PinnedBuffer
    assert (ours.address, ours.shape, str(ours.dtype)) == (pinned.address, (2, 4), "int16")
    before = stream.device.statistics().submitted
    buffer = await stream.upload(ours)
    assert stream.device.statistics().submitted == before + 1  # by DMA: nothing was staged
    assert (await stream.download(buffer) == 6).all()
    ours.free()
    sweep(stream)
    assert (pinned == 6).all()
    assert device.pinned((2, 4), np.int16).address != pinned.address  # which is still ours


async def test_producers_stream_that_is_being_captured_is_left_alone() -> None:
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as owner:
        theirs = await filled(stream, 1)
        imported = Stream.from_handle(device, handle(owner))
        await owner.aclose()
        peer.inner.__dict__["stream_capturing"] = lambda _: True
        calls = peer.calls.copy()
        with pytest.raises(BusyError, match="being captured"):
            stream.adopt(Interfaced(theirs, handle(imported)))
        assert (peer.calls - calls)["event_record"] == 0
        del peer.inner.__dict__["stream_capturing"]
        stream.adopt(Interfaced(theirs, handle(imported)))


async def test_adopting_while_our_own_stream_still_has_work_on_the_host() -> None:
    """The producer enqueues its wait ahead of what is queued here: a wait too many for that, and none too few."""
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        theirs = await filled(stream, 1)
        target = other.empty(1 << 20, np.uint8)
        with peer.holding_jobs():
            staged = other.copy(target, np.ones(1 << 20, np.uint8))
            for array in (Producer(theirs), Interfaced(theirs, handle(stream))):
                seen = other.download(other.adopt(array))
                assert seen.state == "queued"
        await quickly(staged)
        assert (await quickly(seen) == 1).all()


async def test_freed_elsewhere_or_closed(stream: Stream) -> None:
    device = stream.device
    theirs = await filled(stream, 1)
    ours = stream.adopt(Producer(theirs))
    async with aiocuda.open_device(driver="host") as another, another.stream() as foreign:
        with pytest.raises(WrongDeviceError, match="a stream of another device"):
            ours.free(foreign)
    del ours, theirs
    gc.collect()
    async with device.stream() as closed:
        pass
    with pytest.raises(ClosedError):
        closed.adopt(Interfaced(await filled(stream, 1)))


async def test_what_a_lost_device_may_touch_stays_with_us() -> None:
    """After a fault no memory returns to its producer, because the device may still use it."""
    async with open_peer() as (_, device):
        stream = device.stream()
        held = Interfaced(await filled(stream, 1))
        producer = weakref.ref(held)
        ours = stream.adopt(held)
        del held
        with pytest.raises(DeviceFault):
            await quickly(stream.launch(Kernel("bad", source="__global__ void bad();", host=_fail), 1, 1))
        with pytest.raises(DeviceFault):
            ours.free()
        with pytest.raises(DeviceFault):
            stream.adopt(Interfaced.__new__(Interfaced))
        del ours
        sweep(stream)
        assert producer() is not None
    gc.collect()
    assert producer() is not None


def _fail() -> None:
    raise ValueError("on purpose")


async def test_producers_go_when_the_device_closes() -> None:
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        stream = device.stream()
        held = Interfaced(await filled(stream, 1))
        producer = weakref.ref(held)
        ours = stream.adopt(held)
        stream.fill(ours, 2)
        del held
        await device.aclose()
        with pytest.raises(StaleHandleError, match="was freed with its device"):
            _ = ours.address
        del ours
        gc.collect()
        await until(lambda: producer() is None, "the producer to be let go")


async def test_what_we_took_from_ourselves_is_no_leftover_when_the_device_closes() -> None:
    """A buffer that went out and came in again, and is still held: a warning would be of ourselves."""
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        ours = stream.adopt(Producer(await filled(stream, 1)))
        await stream.fill(ours, 2)
    assert device.memory.statistics().live_bytes == 0
    with pytest.raises(StaleHandleError, match="was freed with its device"):
        _ = ours.address


async def test_refusals_name_the_function_to_use(stream: Stream) -> None:
    theirs = Interfaced(await filled(stream, 1))
    for call in (
        lambda: stream.upload(theirs),
        lambda: stream.copy(theirs.buffer, theirs),
        lambda: stream.launch(AFFINE, 1, 1, theirs, 1, 1, 1),
    ):
        with pytest.raises(InvalidTypeError, match=r"stream\.adopt\(x\)"):
            call()


class Known:
    """A stream of another library."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


async def test_stream_of_another_library_is_imported_unchanged(device: Device, stream: Stream) -> None:
    """`__cuda_stream__`, as CuPy and cuda.core have it; and what it belongs to lives as long as our name for it."""
    theirs = Known((0, handle(stream)))
    alive = weakref.ref(theirs)
    imported = Stream.from_handle(device, theirs)
    assert handle(imported) == handle(stream)
    del theirs
    gc.collect()
    assert alive() is not None
    assert await quickly(imported.fill(imported.empty(4), 1)) is None
    del imported
    gc.collect()
    assert alive() is None
    assert handle(Stream.from_handle(device, stream)) == handle(stream)
    for answer in ((1, 5), 5, (0, "5"), (0, None)):
        with pytest.raises(InvalidTypeError, match=r"__cuda_stream__"):
            Stream.from_handle(device, Known(answer))
