"""SlotRanges: the addresses of a slot's memory, and whether an array of any library lies there."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .._base._arrays import extent_of
from ..errors import UnsupportedError
from ..lowlevel import block_of, bounds_on_device
from ..memory import DeviceBuffer, PinnedBuffer

__all__ = ["SlotRanges"]


class SlotRanges:
    """The addresses of some memory of a slot at one moment.

    Arrays are compared by their bounds, and not by the objects that they refer to: a library may have made a view from
    the address alone.

    Attributes
    ----------
    tensor_type : type or tuple
        PyTorch's class of tensors; an empty tuple, for `isinstance`, if the program has not imported PyTorch.
    """

    __slots__ = ("_clean", "_host", "_on_device", "tensor_type")

    def __init__(self, pinned: Iterable[PinnedBuffer], buffers: Iterable[DeviceBuffer]) -> None:
        self._host: list[npt.NDArray[Any]] = list(pinned)
        self._on_device: list[tuple[int, int]] = []
        for block in map(block_of, buffers):
            if not block.freed:
                self._on_device.append((block.address, block.address + block.nbytes))
        self._clean: object = None  # the last array that views were of, and that is not in the memory
        self.tensor_type: Any = getattr(sys.modules.get("torch"), "Tensor", ())

    def shares(self, value: Any) -> bool:
        """Return whether an array, a buffer, a memoryview or a tensor lies in the memory. Other objects do not.

        Raises
        ------
        UnsupportedError
            It is an array of another library in the slot's device memory. In host memory there is no such error: the
            array refers to the slot's, so the slot gets other memory.
        """
        kind = type(value)  # the `__class__` of a mock is that of its `spec`
        if issubclass(kind, (np.ndarray, np.void)):
            return self._is_view(value)
        if issubclass(kind, DeviceBuffer):
            if value.freed:
                return False
            return _overlaps(value.address, value.address + value.nbytes, self._on_device)
        if kind is memoryview:
            array = _array_of(value)
            return array is not None and self._is_view(array)
        if issubclass(kind, self.tensor_type):
            return _overlaps(*_bounds_of_tensor(value), [*self._on_device, *map(_bounds, self._host)])
        if self._on_device and _overlaps(*bounds_on_device(value), self._on_device):
            raise UnsupportedError(
                f"a result is a {kind.__module__}.{kind.__qualname__} in the device memory of its slot, which is used "
                "again, and aiocuda cannot copy it: return a copy of it, `array.copy()`, or download it"
            )
        return False

    def _is_view(self, value: Any) -> bool:
        if value.flags.owndata:
            return False
        base = value.base
        if base is not None and base is self._clean:
            return False  # a view of the same array: NumPy checks that it lies within
        array = value if type(value) is np.ndarray else np.asarray(value)
        for host in self._host:
            if np.may_share_memory(array, host):
                return True
        if type(base) is np.ndarray and not self._is_view(base):
            self._clean = base
        return False


def _array_of(view: memoryview) -> npt.NDArray[Any] | None:
    """Return an array over the memory of a memoryview; None if it was released, or NumPy does not support its items."""
    try:
        return np.asarray(view)
    except (ValueError, TypeError, BufferError):
        return None


def _overlaps(start: int, stop: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return start < stop and any(start < last and first < stop for first, last in ranges)


def _bounds(array: npt.NDArray[Any]) -> tuple[int, int]:
    address: int = array.__array_interface__["data"][0]
    return address, address + array.nbytes


def _bounds_of_tensor(tensor: Any) -> tuple[int, int]:
    """Return the bounds of a tensor of PyTorch; (0, 0) if it has no memory of its own, as a sparse one."""
    try:
        address, itemsize = tensor.data_ptr(), tensor.element_size()
        first, last = extent_of(tensor.shape, [stride * itemsize for stride in tensor.stride()], itemsize)
    except Exception:  # noqa: BLE001 - sparse, nested, fake …: PyTorch has an error for each
        return 0, 0
    return address + first, address + last
