"""Host slots: page-locked memory, each for the samples of one batch on its way to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .._device import Device
from ..memory._pinned import PinnedBuffer
from ._fields import Layout

__all__ = ["HostSlot", "HostSlots"]


class HostSlot:
    """Page-locked memory for the samples of one batch.

    Attributes
    ----------
    number
        Its place in the shared memory of worker processes.
    memory
        The bytes, as an array that the device reads directly; None if no memory is needed yet.
    arrays
        The array of each field, over the memory.
    """

    __slots__ = ("_rows", "arrays", "memory", "number")

    def __init__(self, number: int, memory: PinnedBuffer | None, layout: Layout | None) -> None:
        self.number = number
        self.memory = memory
        self.arrays: dict[Any, npt.NDArray[Any]] = {}
        #: Plain arrays: views of a `PinnedBuffer` take longer to make. Both hold the memory.
        self._rows: dict[Any, npt.NDArray[Any]] = {}
        if memory is not None and layout is not None:
            self.arrays = layout.arrays(memory)
            self._rows = {name: np.asarray(array) for name, array in self.arrays.items()}

    def row(self, row: int) -> Mapping[Any, npt.NDArray[Any]]:
        """Return a writable view of one sample of each field."""
        return Layout.row(self._rows, row)


class HostSlots:
    """The slots of one loader. There are as many as batches are loaded at a time.

    Parameters
    ----------
    device
    layout
        The fields of a slot; None if the arrays of a batch are known only when its samples have been decoded.
    shared
        The memory of each slot, if it is shared with worker processes.
    """

    def __init__(self, device: Device, layout: Layout | None, shared: list[PinnedBuffer] | None = None) -> None:
        self._device = device
        self._layout = layout
        self._made = 0
        self._free = [] if shared is None else [HostSlot(at, part, layout) for at, part in enumerate(shared)]

    def take(self) -> HostSlot:
        """Return a free slot. If there is none, return a new one, whose memory is being page-locked."""
        if self._free:
            return self._free.pop()
        memory = None
        if self._layout is not None and self._layout.nbytes:
            memory = self._device.pinned(self._layout.nbytes, np.uint8)
        self._made += 1
        return HostSlot(self._made, memory, self._layout)

    def give_back(self, slot: HostSlot) -> None:
        """Make a slot free that neither a worker nor the device uses."""
        self._free.append(slot)

    def resize(self, slot: HostSlot, nbytes: int) -> None:
        """Give a slot memory for batches of this size, in place of its present memory."""
        slot.memory = self._device.pinned(nbytes, np.uint8)
