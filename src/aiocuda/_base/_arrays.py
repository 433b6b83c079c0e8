"""Checks of shapes, sizes and dtypes, before they reach a driver."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["address_of", "as_bytes", "as_dtype", "as_shape", "check_alike", "extent_of"]

#: The largest size in bytes that fits a signed 64-bit integer.
MOST_BYTES = 2**63 - 1

#: Common dtypes that need no check, by themselves and by their scalar types.
_PLAIN: dict[Any, np.dtype[Any]] = {
    key: kind for kind in map(np.dtype, "?bBhHiIlLqQefdFD") for key in (kind, kind.type)
}


def _as_extent(value: object) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise InvalidTypeError(f"a size must be an integer, not {value!r}")
    try:
        extent = operator.index(value)  # type: ignore[arg-type]  # refusing the wrong type is its job
    except TypeError:
        like = "an array: for memory like a, device.pinned(a.shape, a.dtype); `async with device.pin(a)` locks a itself"
        given = like if getattr(value, "shape", None) else repr(value)
        raise InvalidTypeError(f"a size must be an integer, not {given}") from None
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
    """Return a shape as a tuple of Python integers; its size in bytes fits a signed 64-bit integer."""
    if type(shape) is int and 0 <= shape * itemsize <= MOST_BYTES:
        return (shape,)
    if isinstance(shape, (str, bytes)) or shape is None:
        raise InvalidTypeError(f"a shape must be an integer or a tuple of integers, not {shape!r}")
    extents: tuple[Any, ...] = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    for extent in extents:
        if type(extent) is not int or extent < 0:
            extents = tuple(map(_as_extent, extents))
            break
    if math.prod(extents) * itemsize > MOST_BYTES:
        raise InvalidArgumentError(f"shape {extents} of {itemsize}-byte items is more than 2**63 - 1 bytes")
    return extents


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a NumPy dtype; its bytes have the same meaning on the device."""
    try:
        return _PLAIN[dtype]
    except (KeyError, TypeError):  # TypeError: a list of fields cannot be looked up
        pass  # not a common one: check it
    if type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
        raise InvalidTypeError(f"{dtype!r} is of torch: {f'use np.{name}' if hasattr(np, name) else 'NumPy lacks it'}")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is one
        why = "the shape before it is one integer or tuple, such as (4, 3)" if isinstance(dtype, int) else error
        raise InvalidTypeError(f"not a dtype: {dtype!r} ({why})") from None
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
    """Return the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def extent_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the bounds of the items, in bytes from the first one."""
    if 0 in shape:
        return 0, 0
    ends = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + itemsize


def check_alike(device: Any, other: Any) -> None:
    """Raise unless dtypes and shapes agree. Raw bytes fit any dtype, and one item fits any shape of one item."""
    if device.shape == other.shape and device.dtype == other.dtype:
        return
    if device.dtype != other.dtype and not _is_raw(other):
        sizes = "" if device.nbytes == other.nbytes else f", and {device.nbytes} bytes are not {other.nbytes}"
        raise InvalidTypeError(
            f"dtypes differ: {device.dtype} of shape {device.shape} and {other.dtype} of shape {tuple(other.shape)}"
            f"{sizes}; convert by a.astype({str(device.dtype)!r}), make the array or the buffer with that dtype=, or, "
            f"if the same bytes are meant, say so: buffer.view({str(other.dtype)!r})"
        )
    if device.nbytes != other.nbytes:
        raise InvalidArgumentError(
            f"sizes differ: {device.nbytes} bytes of shape {device.shape} {device.dtype} on one side, {other.nbytes} "
            f"bytes of shape {tuple(other.shape)} {other.dtype} on the other: copy a part, such as buffer[:n]"
        )
    if device.shape != other.shape and device.size > 1 and not _is_raw(other):
        raise InvalidArgumentError(
            f"shapes differ: {device.shape} and {tuple(other.shape)} of {device.dtype}; if the items are to stay in "
            f"their order, say so: buffer.reshape({tuple(other.shape)})"
        )


def _is_raw(other: Any) -> bool:
    return other.ndim == 1 and bool(other.dtype == np.uint8)
