"""``__cuda_array_interface__``: a dictionary that describes a device array. It is written and read here."""

from __future__ import annotations

import math
import operator
from typing import Any, Final, NamedTuple

import numpy as np

from ..._base._arrays import as_dtype, as_shape
from ...errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from ._dlpack import is_bfloat16

__all__ = ["Interface", "read", "write"]

#: The version that is written, and the newest that is read.
VERSION: Final = 3

#: Kinds of dtype that all libraries read alike.
_KINDS: Final = "biufc"


class Interface(NamedTuple):
    """The array that the dictionary describes. Strides are in bytes; None is C order."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    read_only: bool
    stream: int | None  #: 1: the legacy default stream; 2: the calling thread's; None: no wait is needed


def write(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int | None) -> dict[str, Any]:
    """Return the dictionary of a C-contiguous array.

    Raises
    ------
    UnsupportedError
        The interface cannot express this dtype.
    """
    if dtype.kind not in _KINDS:
        cure = "DLPack has one for it" if is_bfloat16(dtype) else "hand out the bytes, buffer.view(np.uint8)"
        raise UnsupportedError(f"__cuda_array_interface__ has no type string for dtype {dtype}: {cure}")
    return {
        "shape": shape,
        "typestr": dtype.str,
        "data": (address if math.prod(shape) else 0, False),
        "version": VERSION,
        "strides": None,
        "stream": stream,
    }


def read(interface: object) -> Interface:
    """Return the described array, after a check of every entry.

    Raises
    ------
    InvalidArgumentError
        An entry is missing, has a wrong type, or contradicts another one.
    InvalidTypeError
        The kind of the dtype is not supported.
    """
    if not isinstance(interface, dict):
        raise InvalidArgumentError(f"__cuda_array_interface__ is a dict, not {type(interface).__name__}")
    version = _integer(_entry(interface, "version"), "version")
    if not 0 <= version <= VERSION:
        raise InvalidArgumentError(
            f"__cuda_array_interface__ of version {version} is not known here: {VERSION} is", version=version
        )
    dtype = _dtype(_entry(interface, "typestr"))
    shape = _integers(_entry(interface, "shape"), "shape")
    as_shape(shape, dtype.itemsize)
    data = _entry(interface, "data")
    if not isinstance(data, tuple) or len(data) != 2:
        raise InvalidArgumentError(f"its 'data' is (address, read-only), not {data!r}")
    address = _integer(data[0], "data address")
    if not isinstance(data[1], (bool, np.bool_)):
        raise InvalidArgumentError(f"the second item of its 'data' (read-only) is True or False, not {data[1]!r}")
    if address < 0 or (address == 0 and 0 not in shape):
        raise InvalidArgumentError(f"it is of shape {shape}, and its address is {address}: it has no memory")
    strides = None
    if interface.get("strides") is not None:
        strides = _integers(interface["strides"], "strides")
        if len(strides) != len(shape):
            raise InvalidArgumentError(f"its strides {strides} are not as many as its shape {shape} has extents")
    if interface.get("mask") is not None:
        raise InvalidArgumentError("it has a mask, and a buffer has none: fill what is masked first")
    stream = interface.get("stream")
    if stream is not None:
        stream = _integer(stream, "stream")
        if stream <= 0:
            raise InvalidArgumentError(f"its stream is {stream}: that is 1, 2, a handle or None (0 is ambiguous)")
    return Interface(address, shape, strides, dtype, bool(data[1]), stream)


def _entry(interface: dict[str, Any], name: str) -> Any:
    try:
        return interface[name]
    except KeyError:
        raise InvalidArgumentError(f"__cuda_array_interface__ has no {name!r}") from None


def _integer(value: object, name: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"its {name} is an integer, not {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # refusing the wrong type is its job
    except TypeError:
        raise InvalidArgumentError(f"its {name} is an integer, not {value!r}") from None


def _integers(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, tuple):
        raise InvalidArgumentError(f"its {name} is a tuple of integers, not {values!r}")
    return tuple(_integer(value, name) for value in values)


def _dtype(typestr: object) -> np.dtype[Any]:
    if not isinstance(typestr, str):
        raise InvalidArgumentError(f"its typestr is a string such as '<f4', not {typestr!r}")
    try:
        dtype = np.dtype(typestr)
    except TypeError:
        raise InvalidArgumentError(f"its typestr is {typestr!r}, and not one such as '<f4'") from None
    if dtype.kind not in _KINDS:
        raise InvalidTypeError(
            f"its items are {typestr!r}, which libraries read differently: hand over their bytes, x.view(uint8), or "
            "use DLPack"
        )
    return as_dtype(dtype)
