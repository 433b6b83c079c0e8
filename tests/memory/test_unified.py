"""Managed memory: one address for the host and the device."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    CleanupWarning,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    Stream,
    UnifiedBuffer,
    WrongDeviceError,
)
from aiocuda.memory._managed import MANY_VIEWS
from tests.helpers import SAXPY, Latch, Peer, open_peer, quickly

pytestmark = pytest.mark.asyncio


async def test_host_and_device_see_the_same(device: Device, stream: Stream) -> None:
    x, y = device.unified((10, 10)), device.unified((10, 10))
    assert isinstance(x, UnifiedBuffer)
    x.array[:], y.array[:] = 2, 3
    await stream.launch(SAXPY, 1, 128, 100, 4.0, x, y)
    assert (y.array == 11).all()
    assert (np.asarray(y) == 11).all()
    assert (np.array(y[2:4]) == 11).all()
    assert y[2:4].array.shape == (2, 10)
    y[5].array[:] = 0
    with pytest.raises(InvalidTypeError, match=r"`buffer\.array\[…\] = value`"):
        y[5] = 0
    assert np.array_equal(await stream.download(y), y.array)


async def test_views_are_of_their_part(device: Device) -> None:
    whole = device.unified(100, np.int32)
    whole.array[:] = np.arange(100)
    assert np.array_equal(whole[10:20].array, np.arange(10, 20))
    assert np.array_equal(whole.reshape(10, 10)[3].array, np.arange(30, 40))
    assert whole[4:4].array.shape == (0,)
    assert whole.view(np.uint8).array.shape == (400,)


async def test_asarray_reads_and_array_writes(device: Device) -> None:
    buffer = device.unified(100, np.int32)
    buffer.array[:] = 7
    if device.properties.concurrent_managed_access:
        view = np.asarray(buffer)
        assert view.ctypes.data == buffer.address
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 8
        assert np.array(buffer, copy=False).ctypes.data == buffer.address
    copied = np.array(buffer, dtype=np.int64)
    copied[:] = 9
    assert (buffer.array == 7).all()


async def test_view_holds_the_memory(device: Device, stream: Stream) -> None:
    view = device.unified(100, np.int32).array
    view[:] = 7
    gc.collect()
    stream.empty(1).free()
    await stream.synchronize()
    assert (view == 7).all()
    assert device.memory.statistics().live_bytes == 400


@pytest.mark.parametrize("to", ["device", "host", 0])
async def test_prefetch(device: Device, stream: Stream, to: str | int) -> None:
    buffer = device.unified(1 << 16, np.uint8)
    buffer.array[:] = 5
    assert await stream.prefetch(buffer, to) is None
    assert await stream.prefetch(buffer[:100], to) is None
    assert await stream.prefetch(buffer[:0], to) is None
    assert (buffer.array == 5).all()
    assert await stream.prefetch(buffer, device) is None


async def test_prefetch_of_other_memory(device: Device, stream: Stream) -> None:
    for memory in (stream.empty(4), device.pinned(4), np.zeros(4)):
        with pytest.raises(InvalidArgumentError, match=r"device\.unified"):
            stream.prefetch(memory)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("disk", InvalidArgumentError),
        (99, InvalidArgumentError),
        (-2, InvalidArgumentError),
        (1.0, InvalidTypeError),
        (None, InvalidTypeError),
        (True, InvalidTypeError),
        ([], InvalidTypeError),
    ],
)
async def test_prefetch_to_nowhere(device: Device, stream: Stream, to: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        stream.prefetch(device.unified(4), to)


async def test_prefetch_to_a_device_of_another_driver(device: Device, stream: Stream) -> None:
    async with open_peer() as (_, other):
        with pytest.raises(WrongDeviceError):
            stream.prefetch(device.unified(4), other)


async def test_free(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = device.unified(1000)
    latch.hold(stream)
    stream.fill(buffer, 3)
    await latch.held()
    buffer.free()
    with pytest.raises(StaleHandleError):
        buffer.free()
    with pytest.raises(StaleHandleError):
        buffer.array  # noqa: B018 - it raises
    latch.release()
    await quickly(stream.synchronize())
    assert device.driver.fault is None


async def test_free_while_the_host_looks(device: Device) -> None:
    """A view of freed memory reads other data, or ends the process."""
    buffer = device.unified(100, np.int32)
    view = buffer[10:20].array
    view[:] = 7
    with pytest.raises(BusyError, match="NumPy arrays over this managed memory exist"):
        buffer.free()
    assert (view == 7).all()
    del view
    buffer.free()


async def test_one_view_of_many_counts(device: Device) -> None:
    """Views that have gone are forgotten, and the one that lives is not."""
    buffer = device.unified(100, np.int32)
    view = buffer.array
    for _ in range(10 * MANY_VIEWS):
        buffer.array[:] = 1
    assert len(buffer._managed._views) <= MANY_VIEWS
    with pytest.raises(BusyError, match="NumPy arrays over this managed memory exist"):
        buffer.free()
    assert (view == 1).all()
    del view
    buffer.free()


async def test_view_outlives_its_device() -> None:
    with Peer() as peer:
        with pytest.warns(CleanupWarning, match=r"1 arrays of managed memory outlive their device.*`del array`"):
            async with aiocuda.open_device(driver=peer.driver) as device:
                view = device.unified(100, np.int32).array
                view[:] = 7
                device.unified(100, np.int32).array[:] = 8
        assert peer.calls["managed_deallocate"] == 1  # the other one
        assert device.memory.statistics().live_bytes == 400
    gc.collect()
    assert (view == 7).all()


async def test_of_no_bytes(device: Device, stream: Stream) -> None:
    buffer = device.unified((3, 0))
    assert buffer.array.shape == (3, 0)
    assert (await stream.download(buffer)).shape == (3, 0)
    buffer.free()
