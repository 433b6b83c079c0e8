"""DLPack: the capsules that array libraries pass one another, made and read.

NumPy makes ours: it is given an array over the address, whose bytes it never looks at, and says in the finished capsule
on which device that is. Its destructor and deleter are compiled. They may be called on any thread, with or without the
GIL, while an exception is on its way (one written in Python would replace that by a `SystemError`), and after the end
of the interpreter.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import InvalidArgumentError, InvalidTypeError, StaleHandleError, UnsupportedError, WrongDeviceError

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "EXTENSION", "VERSION", "Held", "Managed", "Tensor",
           "UnsupportedExportError", "device_name", "host_array", "is_bfloat16", "is_capsule", "is_on_host", "make",
           "read", "redirect", "take"]  # fmt: skip

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

#: The newest version that is understood: (major, minor). A minor version changes nothing that is read here.
VERSION: Final = (1, 0)

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_BFLOAT = 4  # kDLBfloat

#: (DLDataTypeCode, bits) → NumPy's type string.
_DTYPES: Final = {
    **{(code, bits): f"{kind}{bits // 8}" for code, kind in enumerate("iu") for bits in (8, 16, 32, 64)},
    **{(2, bits): f"f{bits // 8}" for bits in (16, 32, 64)},
    **{(5, bits): f"c{bits // 8}" for bits in (64, 128)},
    (6, 8): "?",
}


class UnsupportedExportError(UnsupportedError, BufferError):
    """It cannot be handed out in the way that was asked for. A `BufferError`, as array libraries expect."""


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
    """``DLManagedTensor``: what a capsule called "dltensor" holds."""

    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """``DLManagedTensorVersioned``: "dltensor_versioned", since version 1.0."""

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

#: What a capsule is called once somebody has taken what it holds. The capsule keeps the pointer, not the text.
_USED: Final = {name: ctypes.create_string_buffer(b"used_" + name) for name in _FORMS}

# Prototypes of our own: `ctypes.pythonapi` is shared, and others declare the same functions in other ways.
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(("PyCapsule_SetName", ctypes.pythonapi))
#: Releases the GIL: the deleter takes it if it wants it, and may wait for a lock whose holder does.
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tensor(NamedTuple):
    """What a capsule says of its array. Strides are in bytes; None is C order."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    device_type: int
    device_id: int
    read_only: bool


class Held:
    """What a capsule of ours stands on, whoever has it. With the last of its holders it leaves ``token`` behind."""

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
            "data": (address, False),
            "shape": shape,
            "typestr": "<u2" if is_bfloat16(dtype) else dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        # On any thread, in the middle of anything: this one thing.
        self._returned.append(self._token)


class Managed:
    """Somebody else's array, taken out of its capsule: it is given back when this goes."""

    __slots__ = ("_deleter", "_pointer")

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer = pointer
        self._deleter = _DELETER(deleter) if deleter else None  # NULL: there is nothing to give back

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._pointer)


class _Owner:
    """The owner of an array over a producer's memory. NumPy holds it as long as the array, and it holds the memory."""

    __slots__ = ("__array_interface__", "_producer")

    def __init__(self, tensor: Tensor, producer: Managed) -> None:
        self._producer = producer
        self.__array_interface__ = {
            "data": (tensor.address, tensor.read_only),
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
    the read-only flag of the capsule makes the array read-only: a capsule of the form before 1.0 has no such flag.

    Raises
    ------
    InvalidArgumentError
        Its ``__dlpack__`` raises, or what the capsule says cannot be.
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
            f"this {type(thing).__name__} says that it is in host memory, and its capsule is on "
            f"{device_name(tensor.device_type)}"
        )
    owner = _Owner(tensor, take(capsule))
    if 0 in tensor.shape:  # NULL is no address for NumPy
        return np.empty(tensor.shape, tensor.dtype), False
    try:
        array = np.asarray(owner)
    except ValueError as error:  # more bytes than an address can count
        raise InvalidArgumentError(f"a DLPack tensor of shape {tensor.shape}: {error}", shape=tensor.shape) from None
    if is_bfloat16(tensor.dtype):
        array = array.view(tensor.dtype)
    return array, tensor.device_type == CUDA_HOST


def is_capsule(thing: object) -> bool:
    """Is it a bare capsule, rather than an object that makes them?"""
    return type(thing).__name__ == "PyCapsule"


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Is it ml_dtypes' bfloat16, which NumPy knows by that name alone?"""
    return dtype.name == "bfloat16"


def device_name(kind: int) -> str:
    """A ``DLDeviceType`` in words."""
    return f"{_DEVICES.get(kind, 'a device of unknown kind')} (DLPack device type {kind})"


def make(held: Held, dtype: np.dtype[Any], device: tuple[int, int], max_version: tuple[int, int] | None) -> object:
    """A capsule over what `Held` says; of the versioned form if the consumer knows that.

    Raises
    ------
    UnsupportedExportError
        DLPack has no such dtype.
    """
    array = np.asarray(held)
    try:
        capsule = array.__dlpack__(max_version=max_version)
    except BufferError as error:
        raise UnsupportedExportError(
            f"DLPack cannot express dtype {dtype} ({error}): hand out the bytes, buffer.view(np.uint8)"
        ) from None
    redirect(capsule, device)
    tensor = _struct(capsule).dl_tensor
    if is_bfloat16(dtype):
        tensor.dtype.code = _BFLOAT
    if array.size == 0:
        tensor.data = None  # NumPy makes room of its own for nothing at all
    return capsule


def redirect(capsule: object, device: tuple[int, int]) -> None:
    """Say that a capsule of NumPy's, not handed out yet, is on this device: (type, index)."""
    _struct(capsule).dl_tensor.device = DLDevice(*device)


def read(capsule: object) -> Tensor:
    """What a capsule says. Nothing is taken out of it.

    Raises
    ------
    StaleHandleError
        It was used before.
    InvalidArgumentError
        It is no DLPack capsule; its version is unknown; what it says cannot be.
    InvalidTypeError
        NumPy has no dtype for its items.
    """
    managed = _struct(capsule)
    read_only = False
    if isinstance(managed, DLManagedTensorVersioned):
        if managed.major != VERSION[0]:
            raise InvalidArgumentError(
                f"DLPack version {managed.major}.{managed.minor} is not known here, {VERSION[0]}.x is: ask its "
                "producer for max_version=(1, 0)",
                version=(managed.major, managed.minor),
            )
        read_only = bool(managed.flags & _READ_ONLY)
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
    return Tensor(address, shape, strides, dtype, tensor.device.device_type, tensor.device.device_id, read_only)


def take(capsule: object) -> Managed:
    """Take the array out of its capsule, which nobody else can do from now on."""
    name = _name(capsule)
    managed = _struct(capsule)
    _set_name(capsule, ctypes.addressof(_USED[name]))
    return Managed(ctypes.addressof(managed), managed.deleter)


def _name(capsule: object) -> bytes:
    if not is_capsule(capsule):
        raise InvalidTypeError(f"__dlpack__ has returned {type(capsule).__name__}, and not a capsule")
    name: bytes = _get_name(capsule) or b""
    if name in _FORMS:
        return name
    if name.startswith(b"used_dltensor"):
        raise StaleHandleError("this DLPack capsule has been used: it serves once, so take another by x.__dlpack__()")
    raise InvalidArgumentError(f"a capsule called {name.decode(errors='replace')!r} is not one of DLPack's")


def _struct(capsule: object) -> DLManagedTensor | DLManagedTensorVersioned:
    name = _name(capsule)
    return _FORMS[name].from_address(_get_pointer(capsule, name))


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
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
