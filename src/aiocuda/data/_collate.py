"""Collating: the arrays of a batch from its decoded samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype
from .._base._user_code import call
from ..errors import InvalidTypeError
from ._fields import ALIGNMENT

__all__ = ["collated", "parts_of"]


def parts_of(value: Any, of: str) -> dict[Any, Any]:
    """Return the parts of a sample or of a batch, by name.

    A mapping, a named tuple or a dataclass has names; the parts of another tuple or list are 0, 1, …; and a single
    array is part 0.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    if isinstance(value, list):
        return dict(enumerate(value))
    if value is None:
        raise InvalidTypeError(f"{of} is None: without fields=, decode and collate return their arrays")
    return {0: value}


def collated(
    samples: Sequence[Any], collate: Callable[[list[Any]], Any] | None, memory: npt.NDArray[np.uint8] | None
) -> tuple[dict[Any, npt.NDArray[Any]], int]:
    """Return the arrays of a batch, in ``memory`` if they fit there, and the bytes that they need there.

    Raises
    ------
    InvalidTypeError
        A part is no array of numbers.
    ValueError
        The samples have different parts or shapes.
    """
    if collate is not None:
        batch = parts_of(call(collate, list(samples)), "the result of collate")
        parts = {name: [_array(name, part)] for name, part in batch.items()}
    else:
        every = [parts_of(sample, "a decoded sample") for sample in samples]
        for one in every[1:]:
            if one.keys() != every[0].keys():
                raise ValueError(f"samples of one batch have different parts: {list(every[0])} and {list(one)}")
        parts = {name: [_array(name, one[name]) for one in every] for name in every[0]}
    needed = sum(-(-sum(array.nbytes for array in arrays) // ALIGNMENT) * ALIGNMENT for arrays in parts.values())
    place = memory if memory is not None and needed <= memory.nbytes else None
    found: dict[Any, npt.NDArray[Any]] = {}
    offset = 0
    for name, arrays in parts.items():
        shape = arrays[0].shape if collate is not None else (len(arrays), *arrays[0].shape)
        dtype = np.result_type(*arrays)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if place is None:
            target: npt.NDArray[Any] = np.empty(shape, dtype)
        else:
            target = place[offset : offset + nbytes].view(dtype).reshape(shape)
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        _fill(name, np.asarray(target), arrays, collate is not None)
        found[name] = target
    return found, needed


def _fill(name: Any, target: npt.NDArray[Any], arrays: list[npt.NDArray[Any]], is_whole: bool) -> None:
    if is_whole:
        target[...] = arrays[0]
        return
    for row, array in enumerate(arrays):
        if array.shape != target.shape[1:]:
            raise ValueError(
                f"part {name!r} has shape {array.shape} in one sample and {target.shape[1:]} in the first one of the "
                "batch: make them equal in decode=, or give the loader a collate="
            )
        target[row] = array


def _array(name: Any, value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    try:
        as_dtype(array.dtype)
        is_text = array.dtype.kind in "SU"
    except InvalidTypeError:
        is_text = True
    if is_text:
        raise InvalidTypeError(
            f"part {name!r} of a sample is no array of numbers but {type(value).__name__}: return numbers from "
            "decode=, and find other data by the batch's indices"
        )
    return array
