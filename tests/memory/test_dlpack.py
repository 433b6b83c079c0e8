"""Capsules, and NumPy as the one who makes and takes them: what lies in them, and who owns it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import threading
from typing import Any

import numpy as np
import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError, StaleHandleError, UnsupportedError
from aiocuda.memory.interchange import _dlpack
from aiocuda.memory.interchange._dlpack import CPU, CUDA, EXTENSION, ExportedArray, make, read, take

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
FORMS = [None, (0, 8), (1, 0), (1, 7)]


def capsule_of(array: np.ndarray[Any, Any], version: Any = (1, 0)) -> Any:
    return array.__dlpack__(max_version=version)


def struct(capsule: object) -> Any:
    """What a capsule holds, to be spoilt."""
    return _dlpack._struct(capsule)


class Producer:
    """Hands a capsule to NumPy."""

    def __init__(self, capsule: object, device: tuple[int, int] = (CPU, 0)) -> None:
        self.capsules = [capsule]
        self.device = device

    def __dlpack__(self, **options: object) -> Any:
        return self.capsules.pop()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("version", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_numpy_hands_out_is_read(dtype: str, version: tuple[int, int] | None) -> None:
    array = np.zeros((2, 3, 4), dtype)[1:]
    tensor = read(capsule_of(array, version))
    assert (tensor.address, tensor.shape, tensor.dtype) == (array.ctypes.data, (1, 3, 4), array.dtype)
    assert (tensor.device_type, tensor.device_id, tensor.read_only) == (CPU, 0, False)
    assert tensor.strides in (None, array.strides)


@pytest.mark.parametrize("version", FORMS)
def test_strides_and_the_read_only_flag_are_read(version: tuple[int, int] | None) -> None:
    array = np.zeros((4, 6), "i2")[::2, ::-3]
    assert read(capsule_of(array, version)).strides == (24, -6)
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    if version is None or version < (1, 0):
        with pytest.raises(BufferError):
            capsule_of(fixed, version)  # the old form has no flag for it
    else:
        assert read(capsule_of(fixed, version)).read_only


@pytest.mark.parametrize("version", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_made_here_numpy_takes(dtype: str, version: tuple[int, int] | None) -> None:
    data = np.arange(12).astype(dtype)
    left: list[str] = []
    held = ExportedArray(data.ctypes.data, (3, 4), data.dtype, "token", left)
    capsule = make(held, data.dtype, (CPU, 0), version)
    del held
    array = np.from_dlpack(Producer(capsule))
    assert array.ctypes.data == data.ctypes.data
    assert array.dtype == data.dtype
    np.testing.assert_array_equal(array, data.reshape(3, 4))
    del capsule
    gc.collect()
    assert not left
    del array
    assert list(left) == ["token"]


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_what_is_made_here_is_read_here(version: tuple[int, int] | None) -> None:
    address = 1 << 60  # the memory is not read
    capsule = make(ExportedArray(address, (5, 0, 2), np.dtype("f4"), None, []), np.dtype("f4"), (EXTENSION, 3), version)
    tensor = read(capsule)
    assert (tensor.address, tensor.shape, tensor.device_type, tensor.device_id) == (0, (5, 0, 2), EXTENSION, 3)
    capsule = make(ExportedArray(address, (), np.dtype("f8"), None, []), np.dtype("f8"), (CUDA, 1), version)
    assert read(capsule)[:2] == (address, ())


def test_unused_capsule_releases_the_memory() -> None:
    left: list[int] = []
    capsule = make(ExportedArray(4096, (1,), np.dtype("u1"), 1, left), np.dtype("u1"), (CUDA, 0), (1, 0))
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(Producer(capsule, (CUDA, 0)))  # it may not read that memory
    del capsule
    gc.collect()
    assert list(left) == [1]


def test_consumer_that_dies_of_an_error_lets_go_and_keeps_the_error() -> None:
    """A deleter written in Python would be called with the error set, and replace it by a `SystemError`."""
    left: list[int] = []

    def fail(capsules: list[object]) -> None:
        capsule = capsules.pop()
        raise KeyError(type(capsule).__name__)

    with pytest.raises(KeyError, match="PyCapsule"):
        fail([make(ExportedArray(4096, (1,), np.dtype("u1"), 1, left), np.dtype("u1"), (CUDA, 0), None)])
    gc.collect()
    assert list(left) == [1]


def test_consumer_lets_go_on_any_thread() -> None:
    left: list[int] = []
    data = np.zeros(8, np.uint8)
    held = ExportedArray(data.ctypes.data, (8,), data.dtype, 7, left)
    arrays = [np.from_dlpack(Producer(make(held, data.dtype, (CPU, 0), None)))]
    del held
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert list(left) == [7]


def test_taken_tensor_is_released_once_and_cannot_be_taken_again() -> None:
    left: list[int] = []
    capsule = make(ExportedArray(4096, (1,), np.dtype("u1"), 1, left), np.dtype("u1"), (CUDA, 0), (1, 0))
    managed = take(capsule)
    for again in (read, take):
        with pytest.raises(StaleHandleError, match="has been used"):
            again(capsule)
    del capsule
    gc.collect()
    assert not left
    del managed
    assert list(left) == [1]


def test_producer_without_a_deleter() -> None:
    capsule = capsule_of(np.zeros(3))
    struct(capsule).deleter = None
    managed = take(capsule)
    del managed  # there is nothing to call


def spoilt(field: str, value: object, version: tuple[int, int] | None = (1, 0)) -> object:
    capsule = capsule_of(np.zeros((2, 3), "f4"), version)
    holder = struct(capsule)
    for name in field.split(".")[:-1]:
        holder = getattr(holder, name)
    setattr(holder, field.rsplit(".", 1)[-1], value)
    return capsule


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        ("major", 2, InvalidArgumentError, r"DLPack version 2\.0 is not known"),
        ("major", 0, InvalidArgumentError, r"version 0\.0"),
        ("dl_tensor.ndim", -1, InvalidArgumentError, "-1 dimensions"),
        ("dl_tensor.ndim", 65, InvalidArgumentError, "65 dimensions"),
        ("dl_tensor.shape", None, InvalidArgumentError, "without a shape"),
        ("dl_tensor.data", None, InvalidArgumentError, "at address 0"),
        ("dl_tensor.dtype.lanes", 4, InvalidTypeError, "vectors of 4"),
        ("dl_tensor.dtype.code", 3, InvalidTypeError, "type code 3 and 32 bits"),  # an opaque handle
        ("dl_tensor.dtype.code", 17, InvalidTypeError, "type code 17"),
        ("dl_tensor.dtype.bits", 4, InvalidTypeError, "4 bits"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object, error: type[Exception], says: str) -> None:
    """Rows 24 and 25 of the table of bad inputs, for capsules."""
    with pytest.raises(error, match=says):
        read(spoilt(field, value))


def test_negative_extent_is_refused() -> None:
    capsule = capsule_of(np.zeros((2, 3), "f4"))
    struct(capsule).dl_tensor.shape[1] = -3
    with pytest.raises(InvalidArgumentError, match=r"shape \(2, -3\)"):
        read(capsule)


def test_offset_in_bytes_is_added() -> None:
    array = np.zeros(8, "u1")
    capsule = capsule_of(array)
    struct(capsule).dl_tensor.byte_offset = 3
    assert read(capsule).address == array.ctypes.data + 3


def test_what_is_no_capsule_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="returned int, and not a capsule"):
        read(7)
    with pytest.raises(InvalidArgumentError, match=r"'datetime\.datetime_CAPI' is not one of DLPack's"):
        read(__import__("_datetime").datetime_CAPI)


def test_dtype_that_dlpack_lacks_is_refused() -> None:
    dtype = np.dtype("M8[s]")
    with pytest.raises(UnsupportedError, match="cannot express dtype datetime64") as caught:
        make(ExportedArray(4096, (1,), dtype, None, []), dtype, (CUDA, 0), None)
    assert isinstance(caught.value, BufferError)


def test_bfloat16_is_taken_where_ml_dtypes_is_and_refused_by_name_where_not() -> None:
    capsule = spoilt("dl_tensor.dtype", _dlpack.DLDataType(4, 16, 1))
    if importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(InvalidTypeError, match="bfloat16 comes from ml_dtypes"):
            read(capsule)
        return
    dtype = read(capsule).dtype
    assert dtype.name == "bfloat16"
    exported = make(ExportedArray(4096, (1,), dtype, None, []), dtype, (CUDA, 0), (1, 0))  # owns its struct
    assert ctypes.string_at(ctypes.addressof(struct(exported).dl_tensor.dtype), 4) == bytes((4, 16, 1, 0))


def test_no_loop_is_needed_to_let_go() -> None:
    """`asyncio` is of no concern to a finaliser: it appends to a list."""
    assert asyncio.events._get_running_loop() is None
    left: list[int] = []
    del_me = ExportedArray(4096, (1,), np.dtype("u1"), 5, left)
    del del_me
    assert list(left) == [5]
