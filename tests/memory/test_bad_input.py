"""Arguments that are refused before any driver call, their errors, and odd arguments that are accepted."""

from __future__ import annotations

import array
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiocuda
from aiocuda import (
    AiocudaError,
    BusyError,
    Device,
    DeviceOutOfMemory,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    WrongDeviceError,
)
from aiocuda.driver.host import HostDriver
from tests.helpers import Latch, Peer, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


class Index:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("shape", [-1, (3, -1), 2**63, 2**64, 10**30, (2**40, 2**40), (2**62, 4), -(10**30)])
async def test_size_out_of_range(stream: Stream, shape: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        stream.empty(shape)


@pytest.mark.parametrize(
    "shape", [True, np.True_, 3.0, "16", b"16", None, float("nan"), (2, 3.0), (True,), [1, "2"], {3}, object()]
)
async def test_size_of_a_wrong_type(stream: Stream, shape: Any) -> None:
    with pytest.raises(InvalidTypeError):
        stream.empty(shape)


@pytest.mark.parametrize(
    "shape", [7, np.int64(7), np.uint8(7), Index(), (7,), [7], np.array(7), (np.int32(7), Index())]
)
async def test_size_that_counts(stream: Stream, shape: Any) -> None:
    buffer = stream.empty(shape, np.uint8)
    assert buffer.nbytes in (7, 49)
    assert all(type(extent) is int for extent in buffer.shape)


async def test_more_than_the_device_has(stream: Stream) -> None:
    with pytest.raises(DeviceOutOfMemory) as caught:
        stream.empty(2**46, np.uint8)
    assert caught.value.requested == 2**46
    assert caught.value.free > 0
    assert f"{2**46:,}" in str(caught.value)
    assert await stream.fill(stream.empty(4), 1) is None


@pytest.mark.parametrize("shape", [0, (0,), (3, 0), (0, 5, 2)])
async def test_nothing_at_all_needs_no_driver(shape: Any) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.calls.clear()
        buffer = stream.empty(shape)
        assert not peer.calls["allocate"]
        assert buffer.nbytes == 0
        assert buffer.address == 0
        assert (await stream.download(buffer)).shape == buffer.shape
        assert await stream.copy(buffer, np.empty(buffer.shape, np.float32)) is None
        assert await stream.fill(buffer, 3) is None
        assert await stream.copy(stream.empty(shape), buffer) is None
        assert (await stream.upload(np.empty(shape, np.float32))).shape == buffer.shape
        assert not {"upload", "download", "fill", "copy", "allocate"} & set(peer.calls)
        buffer.free()
        with pytest.raises(StaleHandleError):
            buffer.free()


async def test_nothing_at_all_has_its_place_in_the_order(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    operation = stream.download(stream.empty(0))
    await latch.held()
    assert not operation.done()
    latch.release()
    assert (await quickly(operation)).size == 0


@pytest.mark.parametrize(
    "dtype",
    ["O", np.dtype([("a", "i4"), ("b", "O")]), ">f4", np.dtype([("a", ">i2")]), "no such", 3, "V0", "S0"],
    ids=str,
)
async def test_dtype_that_means_nothing_there(stream: Stream, dtype: Any) -> None:
    with pytest.raises(InvalidTypeError):
        stream.empty(4, dtype)


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u2", "f2", "f4", "f8", "c8", "c16", "M8[s]", "S5", [("x", "f4"), ("y", "i2", 3)]], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 0)], ids=str)
async def test_dtypes_and_shapes_go_there_and_back(stream: Stream, dtype: Any, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    raw = np.arange(count * np.dtype(dtype).itemsize, dtype=np.uint8) % 2
    given = raw.view(dtype).reshape(shape)
    buffer = await stream.upload(given)
    assert (buffer.shape, buffer.dtype) == (given.shape, given.dtype)
    back = await stream.download(buffer)
    assert (back.shape, back.dtype) == (given.shape, given.dtype)
    assert back.tobytes() == given.tobytes()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"bytes", np.frombuffer(b"bytes", np.uint8)),
        (bytearray(b"bytes"), np.frombuffer(b"bytes", np.uint8)),
        (memoryview(b"bytes"), np.frombuffer(b"bytes", np.uint8)),
        (array.array("d", [1.0, 2.0]), np.array([1.0, 2.0])),
        (np.arange(6, dtype=np.int16).reshape(2, 3).data, np.arange(6, dtype=np.int16).reshape(2, 3)),
        (np.float32(2.5), np.array(2.5, np.float32)),
        (b"", np.empty(0, np.uint8)),
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "memoryview of 2-d", "scalar", "nothing"],
)
async def test_sources_that_are_no_arrays(stream: Stream, given: Any, expected: npt.NDArray[Any]) -> None:
    buffer = await stream.upload(given)
    assert (buffer.shape, buffer.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(await stream.download(buffer), expected)


async def test_mapped_file_as_a_source_and_a_target(stream: Stream) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:5] = b"hello"
        buffer = await stream.upload(memory)
        await stream.copy(buffer, bytes(range(256)) * 16)
        await stream.copy(memory, buffer)
        assert memory[:256] == bytes(range(256))


async def test_writable_buffers_as_targets(stream: Stream) -> None:
    buffer = await stream.upload(b"hello")
    target = bytearray(5)
    assert await stream.copy(target, buffer) is None
    assert target == b"hello"
    view = memoryview(bytearray(5))
    assert await stream.download(buffer, view) is view  # type: ignore[arg-type, comparison-overlap]  # as good as an array
    assert bytes(view) == b"hello"


@pytest.mark.parametrize("target", [b"hello", memoryview(b"hello"), np.frombuffer(b"hello", np.uint8)])
async def test_read_only_target(stream: Stream, target: Any) -> None:
    buffer = await stream.upload(b"world")
    with pytest.raises(InvalidArgumentError, match="read-only"):
        stream.copy(target, buffer)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        stream.download(buffer, target)


async def test_read_only_source_is_fine(stream: Stream) -> None:
    given = np.arange(4, dtype=np.float32)
    given.flags.writeable = False
    assert np.array_equal(await stream.download(await stream.upload(given)), given)


_GRID = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (_GRID[:, ::2], r"np\.ascontiguousarray\(a\)"),
        (_GRID.T, r"Fortran order: pass np\.ascontiguousarray\(a\), or a\.T"),
        (_GRID[::-1], r"its strides are \(-16, 4\): pass np\.ascontiguousarray\(a\)"),
        (np.asfortranarray(_GRID), r"a\.T"),
        (np.broadcast_to(np.float32(1), (3, 4)), r"np\.ascontiguousarray\(a\)"),
    ],
    ids=["strided", "transposed", "reversed", "Fortran", "broadcast"],
)
async def test_layout_is_refused_with_the_cure(stream: Stream, given: npt.NDArray[Any], cure: str) -> None:
    buffer = stream.empty(given.shape)
    for verb in (lambda: stream.upload(given), lambda: stream.copy(buffer, given)):
        with pytest.raises(InvalidArgumentError, match=cure):
            verb()
    if given.flags.writeable:
        with pytest.raises(InvalidArgumentError, match=cure):
            stream.download(buffer, given)
    back = await stream.download(await stream.upload(np.ascontiguousarray(given)))
    assert np.array_equal(back, given)


@pytest.mark.parametrize("given", [np.array([object()]), np.arange(3, dtype=">f4"), np.array(["a", None], object)])
async def test_array_of_a_dtype_that_means_nothing_there(stream: Stream, given: npt.NDArray[Any]) -> None:
    with pytest.raises(InvalidTypeError):
        stream.upload(given)
    with pytest.raises(InvalidTypeError):
        stream.empty_like(given)


@pytest.mark.parametrize("given", [[1.0, 2.0], 3.0, "text", None, {}, object()], ids=lambda given: type(given).__name__)
async def test_source_that_is_no_memory(stream: Stream, given: Any) -> None:
    with pytest.raises(InvalidTypeError, match="pass a NumPy array, a CPU tensor, bytes or a memoryview"):
        stream.upload(given)


async def test_sizes_differ(stream: Stream) -> None:
    buffer = stream.empty((2, 3))
    with pytest.raises(InvalidArgumentError, match=r"24 bytes of shape \(2, 3\).* 16 bytes of shape \(4,\)"):
        stream.copy(buffer, np.zeros(4, np.float32))
    with pytest.raises(InvalidArgumentError, match="sizes differ"):
        stream.copy(np.zeros(4, np.float32), buffer)
    with pytest.raises(InvalidArgumentError, match="sizes differ"):
        stream.download(buffer, np.zeros(4, np.float32))
    with pytest.raises(InvalidArgumentError, match="sizes differ"):
        stream.copy(buffer, stream.empty(4))


async def test_dtypes_differ(stream: Stream) -> None:
    buffer = stream.empty(4)
    verbs: list[Callable[[], object]] = [
        lambda: stream.copy(buffer, np.zeros(4, np.int32)),
        lambda: stream.copy(np.zeros(4, np.int32), buffer),
        lambda: stream.copy(buffer, stream.empty(4, np.int32)),
    ]
    for verb in verbs:
        with pytest.raises(InvalidTypeError, match=r"say so: buffer\.view\('int32'\)"):
            verb()
    assert await stream.copy(buffer, bytes(16)) is None  # bytes are bytes
    assert await stream.copy(buffer.view(np.int32), np.zeros(4, np.int32)) is None


async def test_neither_side_is_device_memory(stream: Stream) -> None:
    with pytest.raises(InvalidArgumentError, match="neither side"):
        stream.copy(np.zeros(4), np.zeros(4))
    with pytest.raises(InvalidTypeError):
        stream.copy([0.0], np.zeros(1))


async def test_source_and_target_overlap(stream: Stream) -> None:
    buffer = stream.empty(10)
    for target, source in ((buffer[:6], buffer[4:]), (buffer[4:], buffer[:6]), (buffer, buffer)):
        with pytest.raises(InvalidArgumentError, match="overlap"):
            stream.copy(target, source)
    assert await stream.copy(buffer[:5], buffer[5:]) is None


async def test_one_array_is_the_target_of_one_copy_at_a_time(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = await stream.upload(np.arange(4, dtype=np.float32))
    out = np.zeros(4, np.float32)
    latch.hold(stream)
    first = stream.download(buffer, out)
    with pytest.raises(BusyError, match="is writing this"):
        stream.download(buffer, out)
    async with device.stream() as third:
        with pytest.raises(BusyError, match="is writing this"):
            third.copy(out, buffer)
        await latch.held()
        latch.release()
        await quickly(first)
        assert await third.download(buffer, out) is out


async def test_source_cannot_shrink_while_it_is_read(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    kept = bytearray(1 << 20)
    operation = stream.upload(kept)
    with pytest.raises(BufferError):
        kept.extend(b"more")
    given = np.zeros(1 << 20, np.uint8)
    other = stream.copy(stream.empty_like(given), given)
    with pytest.raises(ValueError, match="resize"):
        given.resize(4)
    await latch.held()
    latch.release()
    await quickly(other)
    await quickly(operation)
    kept.extend(b"more")


@pytest.mark.parametrize(
    ("value", "dtype", "error"),
    [
        (300, np.uint8, InvalidArgumentError),
        (-1, np.uint8, InvalidArgumentError),
        (np.int64(300), np.uint8, InvalidArgumentError),
        (2**64, np.int64, InvalidArgumentError),
        (1.5, np.int32, InvalidTypeError),
        (float("nan"), np.int32, InvalidTypeError),
        (1j, np.float32, InvalidTypeError),
        ("x", np.float32, InvalidTypeError),
        (None, np.float32, InvalidTypeError),
        (2, np.bool_, InvalidTypeError),
        ([1, 2], np.int32, InvalidArgumentError),
        (1e300, np.float32, InvalidArgumentError),
        (1e6, np.float16, InvalidArgumentError),
    ],
)
async def test_value_that_does_not_fit(stream: Stream, value: Any, dtype: Any, error: type[AiocudaError]) -> None:
    with pytest.raises(error):
        stream.fill(stream.empty(4, dtype), value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0, np.float32),
        (1.5, np.float16),
        (float("inf"), np.float32),
        (float("nan"), np.float16),
        (True, np.bool_),
        (-7, np.int8),
        (0x0102, np.uint16),
        (2**63, np.uint64),
        (1 + 2j, np.complex64),
        (1 + 2j, np.complex128),
        (np.float64(2), np.float32),
        (np.array(3), np.int32),
    ],
)
async def test_fill_writes_the_value(stream: Stream, value: Any, dtype: Any) -> None:
    buffer = stream.empty((3, 5), dtype)
    await stream.fill(buffer, value)
    assert np.array_equal(await stream.download(buffer), np.full((3, 5), value, dtype), equal_nan=True)


async def test_fill_of_what_is_no_buffer(stream: Stream) -> None:
    with pytest.raises(InvalidTypeError, match=r"a\.fill\(value\)"):
        stream.fill(np.zeros(4), 1)  # type: ignore[arg-type]  # that is the point


async def test_download_of_what_is_no_buffer(stream: Stream) -> None:
    with pytest.raises(InvalidTypeError, match="device buffer"):
        stream.download(np.zeros(4))  # type: ignore[arg-type]  # that is the point


async def test_buffer_of_another_device() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(0, driver=peer.driver) as first,
            aiocuda.open_device(1, driver=peer.driver) as second,
        ):
            here, there = first.stream(), second.stream()
            buffer = there.empty(4)
            calls = sum(peer.calls.values())
            for verb in (
                lambda: here.fill(buffer, 1),
                lambda: here.download(buffer),
                lambda: here.copy(buffer, np.zeros(4, np.float32)),
                lambda: buffer.free(here),
            ):
                with pytest.raises(WrongDeviceError):
                    verb()
            assert sum(peer.calls.values()) == calls
            target = here.empty(4)
            await there.fill(buffer, 3)
            await here.copy(target, buffer)  # but a copy between the two is welcome
            assert (await here.download(target) == 3).all()


async def test_buffer_of_another_driver() -> None:
    async with open_peer() as (_, mine), open_peer(Peer(HostDriver(devices=2))) as (_, other):
        stream = mine.stream()
        foreign = other.stream()
        buffer = foreign.empty(4)
        for verb in (
            lambda: stream.fill(buffer, 1),
            lambda: stream.copy(stream.empty(4), buffer),
            lambda: buffer.free(stream),
            lambda: stream.wait(foreign.fill(buffer, 1)),
            lambda: stream.wait(foreign.record()),
        ):
            with pytest.raises(WrongDeviceError):
                verb()
        await foreign.synchronize()


async def test_buffer_of_a_device_that_was_closed() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            gone = stream.empty(4)
            managed = device.unified(4)
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            for buffer in (gone, managed):
                with pytest.raises(StaleHandleError, match="has been closed"):
                    stream.fill(buffer, 1)
                with pytest.raises(StaleHandleError, match="has been closed"):
                    buffer.free()
                with pytest.raises(StaleHandleError, match="has been closed"):
                    buffer.address  # noqa: B018 - it raises
            await stream.synchronize()


async def test_refused_calls_count_for_nothing() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        gone = stream.empty(4)
        gone.free()
        await stream.synchronize()
        await until(lambda: peer.calls["pin"] == 1, "a thread to lock what copies go through")
        before = stream.statistics()
        calls = sum(peer.calls.values())
        for verb in (
            lambda: stream.fill(gone, 1),
            lambda: stream.copy(gone, np.zeros(4, np.float32)),
            lambda: stream.copy(buffer, np.zeros(5, np.float32)),
            lambda: stream.download(gone),
            lambda: stream.copy(buffer, gone),
            lambda: stream.fill(buffer, "x"),
        ):
            with pytest.raises(AiocudaError):
                verb()
        assert stream.statistics() == before
        assert sum(peer.calls.values()) == calls  # nothing was given to the driver


async def test_dtype_that_is_itself_an_array(device: Device, stream: Stream) -> None:
    """NumPy makes three rows of two out of it; a buffer asks for what is meant."""
    for make in (stream.empty, device.pinned, device.unified):
        with pytest.raises(InvalidTypeError, match=r"use float32, and a shape that ends with \(2,\)"):
            make(3, "2f4")
