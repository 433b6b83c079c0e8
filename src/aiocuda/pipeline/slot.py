"""Slot: one place of a ring, and the memory that stays with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..completion.operation import Operation
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError
from ..memory.arrays import as_dtype, as_shape
from ..memory.buffer import DeviceBuffer
from ..memory.pinned import PinnedBuffer
from ..stream import Stream

__all__ = ["TRANSITIONS", "Slot", "SlotState"]

SlotState: TypeAlias = Literal["free", "uploading", "processing", "downloading"]

#: All the steps that there are. A pipeline of one stage only processes, one of two stages does not; and whatever
#: happens to a slot, it becomes free.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    "free": frozenset({"uploading", "processing"}),
    "uploading": frozenset({"uploading", "processing", "downloading", "free"}),
    "processing": frozenset({"processing", "downloading", "free"}),
    "downloading": frozenset({"downloading", "free"}),
}


class Slot:
    """One place of a `TripleBuffer`: an item on its way, and the buffers that serve one item after another.

    Attributes
    ----------
    number : int
        Which of the ring's slots, from 0.
    item : object
        What it carries; None while it is free.
    """

    __slots__ = ("_arrays", "_buffers", "_steps", "_stream", "item", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.item: Any = None
        self._stream: Stream | None = None
        self._buffers: dict[str, DeviceBuffer] = {}
        self._arrays: dict[str, PinnedBuffer] = {}
        #: States in order, each with the operations that end it; none: it lasts until the next one is entered.
        self._steps: list[tuple[SlotState, tuple[Operation[Any], ...]]] = []

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """``"free"``, ``"uploading"``, ``"processing"`` or ``"downloading"``.

        Work that was enqueued ahead counts when the device comes to it: a slot with all its work enqueued is
        uploading until the upload is done.
        """
        for state, operations in self._steps:
            if not operations or not all(operation.done() for operation in operations):
                return state
        return self._steps[-1][0] if self._steps else "free"

    def enter(self, state: SlotState, until: Operation[Any] | Sequence[Operation[Any]] = ()) -> None:
        """Go on to a state: when what was entered before has ended.

        Parameters
        ----------
        state
            ``"uploading"``, ``"processing"`` or ``"downloading"``; the ring alone makes a slot free.
        until
            Operations whose end is the end of this state. None: it lasts until the next one is entered.

        Raises
        ------
        InvalidArgumentError
            There is no such step from where the slot is.
        """
        before: SlotState = self._steps[-1][0] if self._steps else "free"
        if state == "free" or state not in TRANSITIONS[before]:
            raise InvalidArgumentError(f"a slot that is {before} cannot become {state!r}", state=state)
        if self._steps and not self._steps[-1][1]:
            self._steps.pop()
        self._steps.append((state, (until,) if isinstance(until, Operation) else tuple(until)))

    # -- what a stage uses ---------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream of the stage that has the slot. Outside a pipeline it is set by whoever holds the slot.

        Raises
        ------
        BusyError
            No stage has it.
        """
        if self._stream is None:
            raise BusyError(f"{self!r} has no stream: inside a stage it is the stage's; elsewhere, set slot.stream")
        return self._stream

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        if stream is not None and not isinstance(stream, Stream):
            raise InvalidTypeError(f"slot.stream is an aiocuda.Stream, not {type(stream).__name__}")
        self._stream = stream

    def buffer(self, name: str, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> DeviceBuffer:
        """Device memory that stays with the slot: the same name gives the same buffer, item after item.

        It is made anew when shape or dtype changes, uninitialised.
        """
        kind, extents = _extents(shape, dtype)
        found = self._buffers.get(_named(name))
        if found is None or found.freed or found.shape != extents or found.dtype != kind:
            # The old one goes back, in stream order, when the last operation that uses it lets go of it.
            found = self._buffers[name] = self.stream.empty(extents, kind)
        return found

    def pinned(self, name: str, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Page-locked host memory that stays with the slot, as `buffer` does: what is read into it goes up by DMA."""
        kind, extents = _extents(shape, dtype)
        found = self._arrays.get(_named(name))
        if found is None or found.freed or (found.shape, found.dtype) != (extents, kind):
            found = self._arrays[name] = self.stream.device.pinned(extents, kind)
        return found

    # -- what the ring does --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """The item has gone; the memory stays."""
        self.item = None
        self._stream = None
        self._steps.clear()

    def free_buffers(self) -> None:
        """Let go of the memory. It goes back when the last operation that uses it has passed."""
        self._buffers.clear()
        self._arrays.clear()

    def __repr__(self) -> str:
        return f"<Slot {self.number} {self.state}>"


def _extents(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...]]:
    kind = as_dtype(dtype)
    return kind, as_shape(shape, kind.itemsize)


def _named(name: str) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
    return name
