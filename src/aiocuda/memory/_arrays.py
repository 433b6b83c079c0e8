"""What is asked of shapes, dtypes and arrays before any of them reaches a driver."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..completion._operation import Operation
from ..errors import InvalidArgumentError, InvalidTypeError, WrongDeviceError
from . import _dlpack

if TYPE_CHECKING:
    from ._pinned import PinnedPool

__all__ = ["address_of", "as_bytes", "as_dtype", "as_shape", "as_source", "as_target", "check_awaited"]

#: Bytes that an address can count.
MOST_BYTES = 2**63 - 1

#: dtypes that every program uses, by themselves and by their scalar types: there is nothing to check.
_PLAIN: dict[Any, np.dtype[Any]] = {
    key: kind for kind in map(np.dtype, "?bBhHiIlLqQefdFD") for key in (kind, kind.type)
}


def _as_extent(value: object) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise InvalidTypeError(f"a size must be an integer, not {value!r}")
    try:
        extent = operator.index(value)  # type: ignore[arg-type]  # refusing the wrong type is its job
    except TypeError:
        raise InvalidTypeError(f"a size must be an integer, not {value!r}") from None
    if extent < 0:
        raise InvalidArgumentError(f"a size must not be negative, and this is {extent}", size=extent)
    return extent


def as_bytes(value: object, what: str) -> int:
    """Return a number of bytes as a Python integer, not negative."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        nbytes = operator.index(value)  # type: ignore[arg-type]  # refusing the wrong type is its job
    except TypeError:  # an array has `__index__`, and refuses it unless it is a scalar
        raise InvalidTypeError(f"{what} must be an integer number of bytes, not {value!r}") from None
    if nbytes < 0:
        raise InvalidArgumentError(f"{what} must not be negative, and this is {nbytes}", size=nbytes)
    return nbytes


def as_shape(shape: object, itemsize: int = 1) -> tuple[int, ...]:
    """A shape as a tuple of Python integers whose bytes an address can count."""
    if type(shape) is int and 0 <= shape * itemsize <= MOST_BYTES:
        return (shape,)
    if isinstance(shape, (str, bytes)) or shape is None:
        raise InvalidTypeError(f"a shape must be an integer or a tuple of integers, not {shape!r}")
    extents: tuple[Any, ...] = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    checked = tuple(_as_extent(extent) for extent in extents)
    if math.prod(checked) * itemsize > MOST_BYTES:
        raise InvalidArgumentError(f"shape {checked} of {itemsize}-byte items is more than 2**63 - 1 bytes")
    return checked


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype whose bytes mean the same on the device."""
    try:
        return _PLAIN[dtype]
    except (KeyError, TypeError):  # TypeError: a list of fields cannot be looked up
        pass  # there is more to look at
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is one
        raise InvalidTypeError(f"not a dtype: {dtype!r} ({error})") from None
    if found.hasobject:
        raise InvalidTypeError(f"dtype {found} holds Python objects: their addresses mean nothing on a device")
    if not found.isnative:
        raise InvalidTypeError(f"dtype {found} is not in native byte order: use {found.newbyteorder('=')}")
    if found.subdtype is not None:
        base, extents = found.subdtype
        raise InvalidTypeError(f"dtype {found} is itself an array: use {base}, and a shape that ends with {extents}")
    if found.itemsize == 0:
        raise InvalidTypeError(f"dtype {found} has items of no bytes: give it a length")
    return found


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's first byte is."""
    address: int = array.__array_interface__["data"][0]
    return address


def _check_layout(array: npt.NDArray[Any], role: str) -> None:
    as_dtype(array.dtype)
    if array.flags.c_contiguous:
        return
    if array.flags.f_contiguous:
        cure = "it is in Fortran order: pass np.ascontiguousarray(a), or a.T if the kernel reads it so"
    else:
        cure = f"its strides are {array.strides}: pass np.ascontiguousarray(a)"
    raise InvalidArgumentError(f"the {role} array must be C-contiguous; {cure}", strides=array.strides)


def check_awaited(thing: object, role: str) -> None:
    """An operation was passed where its result is meant."""
    if isinstance(thing, Operation):
        raise InvalidTypeError(
            f"{role} is an Operation: await it first, and pass its result. It is {thing!r}"
        ) from None


def _exported(thing: object, way: str, cure: str, pool: PinnedPool | None) -> npt.NDArray[Any]:
    """Return the memory that an object exports by the buffer protocol or by DLPack, as an array."""
    try:
        return np.asarray(memoryview(thing))  # type: ignore[arg-type]  # refusing is its job
    except (TypeError, ValueError, NotImplementedError):
        pass  # no buffer protocol
    check_awaited(thing, f"what is to be copied {way}")
    if hasattr(thing, "_argument"):
        raise InvalidTypeError(
            f"{thing!r} is on the device already: copy it by stream.copy(target, buffer), or download it"
        )
    if hasattr(type(thing), "__dlpack__"):
        if _dlpack.is_on_host(thing):
            array, pinned = _dlpack.host_array(thing)
            return pool.borrow_pinned(array) if pinned and pool is not None else array
        _check_cuda(thing, way)
    if hasattr(thing, "__dlpack__") or hasattr(thing, "__cuda_array_interface__"):
        cure = f"the buffer that stream.adopt(x) makes of it; or {cure}"
    raise InvalidTypeError(f"cannot copy {way} {type(thing).__name__}: pass {cure}")


def _check_cuda(thing: Any, way: str) -> None:
    """Refuse an object that is neither in host memory nor on a device that `Stream.adopt` can use."""
    kind = int(thing.__dlpack_device__()[0])
    if kind not in (_dlpack.CUDA, _dlpack.CUDA_MANAGED, _dlpack.EXTENSION):
        raise WrongDeviceError(
            f"cannot copy {way} {type(thing).__name__} on {_dlpack.device_name(kind)}: bring it to host memory first"
        )


def as_source(source: object, pool: PinnedPool | None = None) -> npt.NDArray[Any]:
    """Return the array to copy from: of an array, a scalar, or an object with a buffer or ``__dlpack__`` on the host.

    With ``pool``, the pinned memory of another library becomes a `PinnedBuffer`, which the device reads directly.
    """
    if not isinstance(source, np.ndarray):
        if isinstance(source, np.generic):
            source = np.asarray(source)
        elif isinstance(source, (bytes, bytearray)):
            source = np.frombuffer(source, np.uint8)
        else:
            source = _exported(source, "from", "a NumPy array, a CPU tensor, bytes or a memoryview", pool)
    _check_layout(source, "source")
    return source


def as_target(target: object, pool: PinnedPool | None = None) -> npt.NDArray[Any]:
    """Return the array to copy into: of a writable array, or an object with a writable buffer or ``__dlpack__``.

    ``pool`` is that of `as_source`.
    """
    if not isinstance(target, np.ndarray):
        target = _exported(target, "into", "a NumPy array, a CPU tensor or a writable memoryview", pool)
    _check_layout(target, "target")
    if not target.flags.writeable:
        freed = getattr(target, "_pinned_block", None)
        if freed is not None:
            freed()  # raises, if that is why
        raise InvalidArgumentError(
            f"the target array of shape {target.shape} {target.dtype} is read-only: pass a writable one, such as "
            "np.empty_like(a)"
        )
    return target
