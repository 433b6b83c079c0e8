"""DLPack: capsules with which array libraries exchange arrays. They are made, read and taken here.

NumPy makes the capsules: of an array over the device's address. It never reads the bytes. Then the device is written
into the finished capsule. NumPy's destructor and deleter are compiled. They may be called on any thread, with or
without the GIL, while an exception is propagating (a deleter in Python would replace it by a `SystemError`), and after
the end of the interpreter.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np

from ...errors import InvalidArgumentError, InvalidTypeError, StaleHandleError, UnsupportedError, WrongDeviceError

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "EXTENSION", "VERSION", "ExportedArray", "TakenTensor", "Tensor",
           "UnsupportedExportError", "device_name", "host_array", "is_bfloat16", "is_capsule", "is_on_host", "make",
           "make_copy", "read", "set_device", "take"]  # fmt: skip

# DLDeviceType
CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
EXTENSION: Final = 12
CUDA_MANAGED: Final = 13

_DEVICES: Final = {CPU: "host memory", CUDA: "CUDA", CUDA_HOST: "CUDA pinned memory", 4: "OpenCL", 7: "Vulkan",
                   8: "Metal", 9: "VPI", 10: "ROCm", 11: "ROCm pinned memory", EXTENSION: "an extension device",
                   CUDA_MANAGED: "CUDA managed memory", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon",
                   17: "MAIA"}  # fmt: skip

#: The newest supported version: (major, minor). Minor versions do not change the fields that are read here.
VERSION: Final = (1, 0)

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_IS_COPIED = 2  # DLPACK_FLAG_BITMASK_IS_COPIED
_BFLOAT = 4  # kDLBfloat

#: In place of the address 0 of an array of no bytes, which NumPy before 2.4 takes for no array. Nothing reads it.
_NO_BYTES: Final = 64

#: (DLDataTypeCode, bits) → NumPy's type string.
_DTYPES: Final = {
    **{(code, bits): f"{kind}{bits // 8}" for code, kind in enumerate("iu") for bits in (8, 16, 32, 64)},
    **{(2, bits): f"f{bits // 8}" for bits in (16, 32, 64)},
    **{(5, bits): f"c{bits // 8}" for bits in (64, 128)},
    (6, 8): "?",
}


class UnsupportedExportError(UnsupportedError, BufferError):
    """The requested export is not supported. It is a `BufferError`, too, as array libraries expect."""


class DLDevice(ctypes.Structure):
    """``DLDevice`` of dlpack.h."""

    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    """``DLDataType``."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    """``DLTensor``. Strides are in items, and may be NULL: C order."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    """``DLManagedTensor``: the content of a capsule named "dltensor"."""

    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """``DLManagedTensorVersioned``: of a capsule named "dltensor_versioned", since version 1.0."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


_FORMS: Final[dict[bytes, type[DLManagedTensor | DLManagedTensorVersioned]]] = {
    b"dltensor": DLManagedTensor,
    b"dltensor_versioned": DLManagedTensorVersioned,
}

#: The names of used capsules. A capsule stores the pointer, so these buffers must stay.
_USED: Final = {name: ctypes.create_string_buffer(b"used_" + name) for name in _FORMS}

# Prototypes of our own: all modules share `ctypes.pythonapi`, and others may declare the functions differently.
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(("PyCapsule_SetName", ctypes.pythonapi))
#: Releases the GIL: the deleter may take it, or wait for a lock that another thread holds while it waits for the GIL.
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tensor(NamedTuple):
    """The array that a capsule describes. Strides are in bytes; None is C order."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    device_type: int
    device_id: int
    read_only: bool
    is_copy: bool  #: what is written there does not reach the producer's array


class ExportedArray:
    """The exported memory that a capsule describes. Once nothing refers to it, it appends ``token`` to ``returned``."""

    __slots__ = ("__array_interface__", "_returned", "_token")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        token: object,
        returned: list[Any] | deque[Any],
    ):
        self._token = token
        self._returned = returned
        self.__array_interface__ = {
            "data": (address or _NO_BYTES, False),
            "shape": shape,
            "typestr": "<u2" if is_bfloat16(dtype) else dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        # This may run on any thread, at any point of the program: it must do nothing else.
        self._returned.append(self._token)


class TakenTensor:
    """The tensor of another library, taken from its capsule. Its deleter is called when this object is deleted."""

    __slots__ = ("_deleter", "_pointer")

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer = pointer
        self._deleter = _DELETER(deleter) if deleter else None  # NULL: the producer needs no call

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._pointer)


class _HostTensor:
    """The base of a NumPy array over a producer's host memory. It holds the producer's tensor."""

    __slots__ = ("__array_interface__", "_producer")

    def __init__(self, tensor: Tensor, producer: TakenTensor) -> None:
        self._producer = producer
        self.__array_interface__ = {
            "data": (tensor.address, tensor.read_only or tensor.is_copy),
            "shape": tensor.shape,
            "strides": tensor.strides,
            "typestr": "<u2" if is_bfloat16(tensor.dtype) else tensor.dtype.str,
            "version": 3,
        }


def is_on_host(thing: Any) -> bool:
    """Return whether an object with ``__dlpack__`` is in host memory, pageable or pinned.

    Raises
    ------
    InvalidArgumentError
        Its ``__dlpack_device__`` raises, or returns something else than a device.
    """
    try:
        kind, _ = (int(part) for part in thing.__dlpack_device__())
    except Exception as error:
        raise InvalidArgumentError(
            f"__dlpack_device__ of this {type(thing).__name__} gives no device: {error}"
        ) from error
    return kind in (CPU, CUDA_HOST)


def host_array(thing: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """Return an array over the host memory of an object with ``__dlpack__``, and whether that memory is pinned.

    Nothing is copied. The array holds the producer's memory. Unlike `numpy.from_dlpack`, this takes bfloat16, and only
    the flags of the capsule make the array read-only, also that of a copy: a capsule of the form before 1.0 has none.

    Raises
    ------
    InvalidArgumentError
        Its ``__dlpack__`` raises, or the capsule contradicts itself.
    InvalidTypeError
        NumPy has no dtype for the items, or ``__dlpack__`` returns no capsule.
    StaleHandleError
        The capsule was used before.
    WrongDeviceError
        The capsule is not in host memory.
    """
    try:
        try:
            capsule = thing.__dlpack__(max_version=VERSION)
        except TypeError:  # older than DLPack 1.0
            capsule = thing.__dlpack__()
    except Exception as error:
        raise InvalidArgumentError(f"__dlpack__ of this {type(thing).__name__} fails: {error}") from error
    tensor = read(capsule)
    if tensor.device_type not in (CPU, CUDA_HOST):
        raise WrongDeviceError(
            f"this {type(thing).__name__} reports host memory, but its capsule is on {device_name(tensor.device_type)}"
        )
    base = _HostTensor(tensor, take(capsule))
    if 0 in tensor.shape:  # NULL is no address for NumPy
        return np.empty(tensor.shape, tensor.dtype), False
    try:
        array = np.asarray(base)
    except ValueError as error:  # more bytes than an address can count
        raise InvalidArgumentError(f"a DLPack tensor of shape {tensor.shape}: {error}", shape=tensor.shape) from None
    if is_bfloat16(tensor.dtype):
        array = array.view(tensor.dtype)
    return array, tensor.device_type == CUDA_HOST


def is_capsule(thing: object) -> bool:
    """True for a capsule; False for an object that makes capsules."""
    return type(thing).__name__ == "PyCapsule"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """True for the bfloat16 of ml_dtypes. NumPy has only its name."""
    return dtype.name == "bfloat16"


def device_name(kind: int) -> str:
    """Return the name of a ``DLDeviceType``."""
    return f"{_DEVICES.get(kind, 'a device of unknown kind')} (DLPack device type {kind})"


def make(
    exported: ExportedArray, dtype: np.dtype[Any], device: tuple[int, int], max_version: tuple[int, int] | None
) -> object:
    """Return a capsule over exported memory; of the versioned form if the consumer supports that.

    Raises
    ------
    UnsupportedExportError
        DLPack has no such dtype.
    """
    return _made(np.asarray(exported), dtype, device, max_version)


def make_copy(array: np.ndarray[Any, Any], max_version: tuple[int, int] | None) -> object:
    """Return a capsule over a copy of an array, in host memory; of the versioned form if the consumer supports that.

    Raises
    ------
    UnsupportedExportError
        DLPack has no such dtype.
    """
    known = array.view(np.uint16) if is_bfloat16(array.dtype) else array
    return _made(known, array.dtype, (CPU, 0), max_version, copy=True)


def _made(
    array: np.ndarray[Any, Any],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    max_version: tuple[int, int] | None,
    copy: bool | None = None,
) -> object:
    try:
        capsule = array.__dlpack__(max_version=max_version, copy=copy)
    except BufferError as error:
        raise UnsupportedExportError(
            f"DLPack cannot express dtype {dtype} ({error}): hand out the bytes, buffer.view(np.uint8)"
        ) from None
    set_device(capsule, device)
    tensor = _struct(capsule).dl_tensor
    if is_bfloat16(dtype):
        tensor.dtype.code = _BFLOAT
    if array.size == 0:
        tensor.data = None  # NumPy allocates memory of its own for an empty array
    return capsule


def set_device(capsule: object, device: tuple[int, int]) -> None:
    """Write the device, (type, index), into a capsule of NumPy that no consumer has yet."""
    _struct(capsule).dl_tensor.device = DLDevice(*device)


def read(capsule: object) -> Tensor:
    """Return the array that a capsule describes. The capsule stays usable.

    Raises
    ------
    StaleHandleError
        It was used before.
    InvalidArgumentError
        It is no DLPack capsule, its version is not supported, or it contradicts itself.
    InvalidTypeError
        NumPy has no dtype for its items.
    """
    managed = _struct(capsule)
    flags = 0
    if isinstance(managed, DLManagedTensorVersioned):
        if managed.major != VERSION[0]:
            raise InvalidArgumentError(
                f"DLPack version {managed.major}.{managed.minor} is not known here, {VERSION[0]}.x is: ask its "
                "producer for max_version=(1, 0)",
                version=(managed.major, managed.minor),
            )
        flags = managed.flags
    tensor = managed.dl_tensor
    ndim = tensor.ndim
    if not 0 <= ndim <= 64 or (ndim and not tensor.shape):
        raise InvalidArgumentError(f"a DLPack tensor of {ndim} dimensions{' without a shape' * (0 <= ndim <= 64)}")
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    if any(extent < 0 for extent in shape):
        raise InvalidArgumentError(f"a DLPack tensor of shape {shape}", shape=shape)
    dtype = _dtype(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if not tensor.data and 0 not in shape:
        raise InvalidArgumentError(f"a DLPack tensor of shape {shape} at address 0: it has no memory", shape=shape)
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides[:ndim]) if ndim and tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Tensor(
        address, shape, strides, dtype, tensor.device.device_type, tensor.device.device_id,
        read_only=bool(flags & _READ_ONLY), is_copy=bool(flags & _IS_COPIED),
    )  # fmt: skip


def take(capsule: object) -> TakenTensor:
    """Take the tensor from its capsule, which is marked as used."""
    name = _name(capsule)
    managed = _struct(capsule)
    _set_name(capsule, ctypes.addressof(_USED[name]))
    return TakenTensor(ctypes.addressof(managed), managed.deleter)


def _name(capsule: object) -> bytes:
    """Return the name of a usable DLPack capsule."""
    if not is_capsule(capsule):
        raise InvalidTypeError(f"__dlpack__ has returned {type(capsule).__name__}, and not a capsule")
    name: bytes = _get_name(capsule) or b""
    if name in _FORMS:
        return name
    if name.startswith(b"used_dltensor"):
        raise StaleHandleError(
            "this DLPack capsule has been used: each one serves once, so make another by x.__dlpack__()"
        )
    raise InvalidArgumentError(f"a capsule called {name.decode(errors='replace')!r} is not one of DLPack's")


def _struct(capsule: object) -> DLManagedTensor | DLManagedTensorVersioned:
    """Return the structure in a capsule."""
    name = _name(capsule)
    return _FORMS[name].from_address(_get_pointer(capsule, name))


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """Return NumPy's dtype for a ``DLDataType``."""
    if lanes != 1:
        raise InvalidTypeError(f"a DLPack tensor whose items are vectors of {lanes}: NumPy has no dtype for them")
    if (code, bits) == (_BFLOAT, 16):
        try:
            found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        except ImportError:
            raise InvalidTypeError(
                "NumPy's dtype for bfloat16 comes from ml_dtypes: install that, or reinterpret the items as int16 "
                "(x.view(torch.int16)) before they are handed over"
            ) from None
        return found
    try:
        return np.dtype(_DTYPES[code, bits])
    except KeyError:
        raise InvalidTypeError(
            f"a DLPack tensor with items of type code {code} and {bits} bits: NumPy has no dtype for them; hand over "
            "their bytes, x.view(torch.uint8)"
        ) from None
