"""The addresses of device memory that an array of another library lies in."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._base._arrays import extent_of
from . import _array_interface, _dlpack

__all__ = ["bounds_on_device"]

#: DLPack's types of devices with device memory.
_ON_DEVICE = (_dlpack.CUDA, _dlpack.CUDA_MANAGED, _dlpack.EXTENSION)


def bounds_on_device(value: Any) -> tuple[int, int]:
    """Return the bounds of an array of another library on a device; (0, 0) for every other object."""
    kind = type(value)
    found: _array_interface.Interface | _dlpack.Tensor
    try:
        if hasattr(kind, "__cuda_array_interface__"):
            found = _array_interface.read(value.__cuda_array_interface__)
        elif hasattr(kind, "__dlpack__") and value.__dlpack_device__()[0] in _ON_DEVICE:
            found = _dlpack.read(value.__dlpack__(stream=-1))  # -1: the producer need not order any work
        else:
            return 0, 0
    except Exception:  # noqa: BLE001 - code of that library. The object refers to the slot's memory, if it lies there
        return 0, 0
    itemsize = found.dtype.itemsize
    strides = found.strides
    if strides is None:
        first, last = 0, int(np.prod(found.shape, dtype=np.int64)) * itemsize
    else:
        first, last = extent_of(found.shape, strides, itemsize)
    return found.address + first, found.address + last
