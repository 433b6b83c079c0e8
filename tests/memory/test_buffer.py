"""Buffers as arrays: views, what they refuse, their attributes. `test_views.py` compares views with NumPy's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, DeviceBuffer, InvalidArgumentError, InvalidTypeError, StaleHandleError, Stream

pytestmark = pytest.mark.asyncio


async def test_slice_is_numpys_view(stream: Stream) -> None:
    """On each driver. `test_views.py` has more indices."""
    given = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    buffer = await stream.upload(given)
    indices: tuple[Any, ...] = (
        3,
        slice(1, 3),
        (1, slice(1, 3)),
        (1, 2, slice(1, 3)),
        (1, 2, 3),
        (slice(2, 2), slice(1, 3)),
    )
    for value, index in enumerate(indices, 1000):
        part = buffer[index]
        assert isinstance(part, DeviceBuffer)
        assert part.shape == given[index].shape
        assert np.array_equal(await stream.download(part), given[index])
        await stream.fill(part, value)
        given[index] = value
        assert np.array_equal(await stream.download(buffer), given)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (slice(None, None, 2), InvalidArgumentError, "step 1, not 2"),
        (slice(None, None, -1), InvalidArgumentError, "step 1, not -1"),
        ((slice(None), 0), InvalidArgumentError, "slice the leading dimension only"),
        ((slice(0, 2), slice(0, 2)), InvalidArgumentError, "not contiguous"),
        (4, InvalidArgumentError, "out of range for a dimension of 4"),
        (-5, InvalidArgumentError, "out of range"),
        ((0, 0, 0, 0), InvalidArgumentError, "too many indices"),
        ((Ellipsis, Ellipsis), InvalidArgumentError, "too many indices"),
        (1.0, InvalidTypeError, r"integers and slices, not 1\.0"),
        ("a", InvalidTypeError, "integers and slices"),
        (None, InvalidTypeError, "integers and slices"),
        (True, InvalidTypeError, "integers and slices, not True"),
        ([0, 1], InvalidTypeError, "integers and slices"),
        (np.array([True, False]), InvalidTypeError, "integers and slices"),
        (slice("a", None), InvalidTypeError, "integers and slices"),
    ],
    ids=str,
)
async def test_index_that_makes_no_view(stream: Stream, index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stream.empty((4, 5, 6))[index]


async def test_view_of_a_view(stream: Stream) -> None:
    given = np.arange(100, dtype=np.float32)
    buffer = await stream.upload(given)
    part = buffer[10:90][5:20].reshape(3, 5)[1:]
    assert np.array_equal(await stream.download(part), given[20:30].reshape(2, 5))
    assert part.address == buffer.address + 80


async def test_reshape_by_several_arguments(stream: Stream) -> None:
    assert stream.empty((4, 6)).reshape(2, 12).shape == (2, 12)
    assert stream.empty((0, 6)).reshape(3, 0).shape == (3, 0)
    assert stream.empty(1).reshape(()).shape == ()


@pytest.mark.parametrize("shape", [(5, 5), (-1, -1), (7, -1), (-2, -12), 25])
async def test_reshape_to_another_number_of_items(stream: Stream, shape: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="24 items"):
        stream.empty(24).reshape(shape)


@pytest.mark.parametrize("shape", [(2.0, 12), "24", None, (True, 24)], ids=str)
async def test_reshape_to_what_is_no_shape(stream: Stream, shape: Any) -> None:
    with pytest.raises(InvalidTypeError):
        stream.empty(24).reshape(shape)


async def test_view_as_another_dtype_and_shape(stream: Stream) -> None:
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffer = await stream.upload(given)
    view = buffer.view(np.complex64).reshape((-1, 3))
    assert np.array_equal(await stream.download(view), given.view(np.complex64).reshape(-1, 3))


async def test_view_that_does_not_come_out_even(stream: Stream) -> None:
    with pytest.raises(InvalidArgumentError, match="no whole number"):
        stream.empty((2, 3)).view(np.complex64)
    with pytest.raises(InvalidArgumentError, match="0-d"):
        stream.empty(()).view(np.int32)
    with pytest.raises(InvalidTypeError):
        stream.empty(4).view("O")


async def test_attributes(device: Device, stream: Stream) -> None:
    buffer = stream.empty((3, 4), np.float16)
    assert (buffer.shape, buffer.dtype, buffer.nbytes, buffer.size, buffer.ndim) == (
        (3, 4),
        np.dtype(np.float16),
        24,
        12,
        2,
    )
    assert len(buffer) == 3
    assert buffer.device is device
    assert buffer.address % 16 == 0
    assert repr(buffer) == f"<DeviceBuffer shape=(3, 4) dtype=float16 device={device.driver.name}:0 24 bytes>"
    buffer.free()
    assert repr(buffer) == f"<DeviceBuffer shape=(3, 4) dtype=float16 device={device.driver.name}:0 freed>"
    with pytest.raises(InvalidTypeError, match="0-d"):
        len(stream.empty(()))


@pytest.mark.parametrize(
    ("use", "cure"),
    [
        (np.asarray, r"await stream\.download"),
        (np.array, r"await stream\.download"),
        (bool, r"await stream\.download"),
        (list, r"await stream\.download"),
        (pickle.dumps, r"await stream\.download"),
        (copy.copy, r"await stream\.download"),
        (copy.deepcopy, r"await stream\.download"),
        (lambda buffer: buffer + np.zeros(3), r"await stream\.download"),
        (lambda buffer: buffer.__setitem__(0, 7), r"`stream\.fill\(buffer\[…\], value\)`"),
    ],
)
async def test_what_only_the_host_can_do_is_refused_with_the_cure(stream: Stream, use: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        use(stream.empty(3))


async def test_what_arrays_have_and_buffers_have_not(stream: Stream) -> None:
    buffer: Any = stream.empty(3)
    for name in ("cpu", "get", "mean", "T"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*await stream\.download\(buffer\)"):
            getattr(buffer, name)
    with pytest.raises(AttributeError, match=r"no attribute '_repr_html_'$"):
        _ = buffer._repr_html_


async def test_slices_share_the_life_of_the_whole(stream: Stream) -> None:
    buffer = stream.empty(10)
    part = buffer[2:4]
    part.free()
    assert buffer.freed
    with pytest.raises(StaleHandleError):
        buffer.free()
    with pytest.raises(StaleHandleError):
        stream.fill(buffer, 1)


async def test_slice_holds_the_whole(device: Device, stream: Stream) -> None:
    part = (await stream.upload(np.arange(10, dtype=np.float32)))[2:4]
    stream.empty(1 << 20).free()
    assert np.array_equal(await stream.download(part), [2, 3])
    assert device.memory.statistics().live_bytes == 40
