"""Host slots: page-locked memory, each for the samples of one batch on its way to the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..device import Device
from ..lowlevel import pinned_block_of
from ..memory import PinnedBuffer
from ._fields import Layout

__all__ = ["HostSlot", "HostSlots"]

#: Slots whose memory is being page-locked at the same time. The driver does not lock two slots twice as fast, and the
#: first of 16 was locked last.
MOST_UNLOCKED = 2


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

    def drop(self) -> None:
        """Refer to the memory no longer."""
        self.memory = None
        self.arrays = {}
        self._rows = {}

    def resize(self, device: Device, nbytes: int) -> None:
        """Have memory for batches of this size, in place of the present memory."""
        self.memory = device.pinned(nbytes, np.uint8)

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
        self._is_shared = shared is not None
        self._made = 0
        self._unlocked = 0  # slots whose memory is being page-locked
        self._on_locked: Callable[[], object] = _nothing
        self._shared = [HostSlot(at, part, layout) for at, part in enumerate(shared or ())]
        self._free = list(self._shared)

    def begin_epoch(self, on_locked: Callable[[], object]) -> None:
        """Call this function on the loop when the memory of a slot has been page-locked, or could not be."""
        self._on_locked = on_locked

    @property
    def is_ready(self) -> bool:
        """True if there is a free slot, or a new one would be page-locked soon."""
        return bool(self._free) or (not self._is_shared and self._unlocked < MOST_UNLOCKED)

    @property
    def is_exhausted(self) -> bool:
        """True if there is no free slot and no new one can be made: those of worker processes are shared memory."""
        return self._is_shared and not self._free

    def take(self) -> HostSlot:
        """Return a free slot. If there is none, return a new one, whose memory is being page-locked."""
        if self._free:
            return self._free.pop()
        assert not self._is_shared  # a worker process would write to the slot that has the number of the new one
        memory = None
        if self._layout is not None and self._layout.nbytes:
            memory = self._device.pinned(self._layout.nbytes, np.uint8)
            self._note_unlocked(memory)
        self._made += 1
        return HostSlot(self._made, memory, self._layout)

    def _note_unlocked(self, memory: PinnedBuffer) -> None:
        block = pinned_block_of(memory)
        region = None if block is None else block.region
        if region is not None:
            self._unlocked += 1
            loop = asyncio.get_running_loop()
            # Not directly: a region that has just been locked calls back at once, when the slot is not in use yet.
            region.when_locked(lambda: loop.call_soon(self._locked), loop)

    def _locked(self) -> None:
        self._unlocked -= 1
        self._on_locked()

    def give_back(self, slot: HostSlot) -> None:
        """Make a slot free that neither a worker nor the device uses."""
        self._free.append(slot)

    def drop_shared(self) -> None:
        """Refer to the memory that is shared with worker processes no longer: they have ended."""
        for slot in self._shared:
            slot.drop()


def _nothing() -> None:
    """Do nothing."""
