"""Slot: one place of a ring, and the memory that stays with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .._types import ProcessLocal
from ..completion._operation import Operation
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError
from ..memory._arrays import as_dtype, as_shape
from ..memory._buffer import DeviceBuffer
from ..memory._pinned import PinnedBuffer
from ..stream import Stream
from ..stream._stream import allocate

if TYPE_CHECKING:
    from ._replay import Replay

__all__ = ["TRANSITIONS", "Carrier", "Slot", "SlotState"]

SlotState: TypeAlias = Literal["free", "uploading", "processing", "downloading"]

#: All the steps that there are. A pipeline of one stage only processes, one of two stages does not; and whatever
#: happens to a slot, it becomes free.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    "free": frozenset({"uploading", "processing"}),
    "uploading": frozenset({"uploading", "processing", "downloading", "free"}),
    "processing": frozenset({"processing", "downloading", "free"}),
    "downloading": frozenset({"downloading", "free"}),
}


class Carrier(Protocol):
    """What takes an item through a pipeline, and knows how far it is."""

    @property
    def state(self) -> SlotState: ...

    def result(self, stage: str) -> Any: ...


class _Content:
    """What is in a slot, however many look at it."""

    __slots__ = ("arrays", "asked", "buffers", "carrier", "item", "replays", "steps")

    def __init__(self) -> None:
        self.item: Any = None
        self.carrier: Carrier | None = None
        self.buffers: dict[str, DeviceBuffer] = {}
        #: Shape and dtype that a buffer was last asked for by, as they were given, where neither can change.
        self.asked: dict[str, tuple[object, object, DeviceBuffer]] = {}
        self.arrays: dict[str, PinnedBuffer] = {}
        self.replays: dict[str, Replay] = {}  # by the stage's name: its work, captured
        #: States in order, each with the operations that end it; none: it lasts until the next one is entered.
        self.steps: list[tuple[SlotState, tuple[Operation[Any], ...]]] = []


class Slot(ProcessLocal):
    """One place of a `TripleBuffer`: an item on its way, and the buffers that serve one item after another.

    Stages of a pipeline that are at one item at the same time have a slot each, with the same item and buffers, and
    with the stage's own stream.

    Attributes
    ----------
    number : int
        Which of the ring's slots, from 0.
    """

    __slots__ = ("_content", "_stream", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._stream: Stream | None = None
        self._content = _Content()

    @property
    def item(self) -> Any:
        """What it carries; None while it is free. A stage may put something else in its place for those behind it."""
        return self._content.item

    @item.setter
    def item(self, item: Any) -> None:
        self._content.item = item

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """``"free"``, ``"uploading"``, ``"processing"`` or ``"downloading"``.

        Work that was enqueued ahead counts when the device comes to it: a slot with all its work enqueued is
        uploading until the upload is done. In a pipeline whose stages fork it is what the least advanced of them says.
        """
        steps = self._content.steps
        if self._content.carrier is not None:
            return self._content.carrier.state
        for state, operations in steps:
            if not operations or not all(operation.done() for operation in operations):
                return state
        return steps[-1][0] if steps else "free"

    def enter(self, state: SlotState, until: Operation[Any] | Sequence[Operation[Any]] = ()) -> None:
        """Go on to a state: when what was entered before has ended.

        A pipeline knows by itself how far the item is: there it changes nothing.

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
        steps = self._content.steps
        before: SlotState = steps[-1][0] if steps else "free" if self._content.carrier is None else "uploading"
        if state == "free" or state not in TRANSITIONS[before]:
            raise InvalidArgumentError(f"a slot that is {before} cannot become {state!r}", state=state)
        if steps and not steps[-1][1]:
            steps.pop()
        steps.append((state, (until,) if isinstance(until, Operation) else tuple(until)))

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

    def buffer(
        self, name: str, shape: int | Sequence[int] | None = None, dtype: npt.DTypeLike = np.float32
    ) -> DeviceBuffer:
        """Device memory that stays with the slot: the same name gives the same buffer, item after item.

        It is made anew when shape or dtype changes, uninitialised. Without a shape it is the one that is there.

        Raises
        ------
        InvalidArgumentError
            Without a shape: there is none of that name.
        """
        content = self._content
        asked = content.asked.get(name) if type(name) is str else None
        if asked is not None and dtype is asked[1] and not asked[2]._block.freed:
            if shape is asked[0] or (type(shape) is int and shape == asked[0]):
                return asked[2]  # as for each item before
        buffers = content.buffers
        found = buffers.get(_named(name))
        if shape is None:
            if found is None or found.freed:
                there = ", ".join(sorted(repr(name) for name, each in buffers.items() if not each.freed)) or "none"
                raise InvalidArgumentError(
                    f"the slot has no buffer {name!r}, only {there}: say its shape and dtype to make one", name=name
                )
            return found
        kind, extents = _extents(shape, dtype)
        if found is None or found.freed or found.shape != extents or found.dtype != kind:
            # The old one goes back, in stream order, when the last operation that uses it lets go of it.
            # Also while the stream is captured: the memory is there before the graph is launched.
            found = buffers[name] = allocate(self.stream, extents, kind)
        content.asked.pop(name, None)
        if _constant(shape, dtype):
            content.asked[name] = shape, dtype, found
        return found

    def pinned(self, name: str, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Page-locked host memory that stays with the slot, as `buffer` does: what is read into it goes up by DMA."""
        kind, extents = _extents(shape, dtype)
        arrays = self._content.arrays
        found = arrays.get(_named(name))
        if found is None or found.freed or (found.shape, found.dtype) != (extents, kind):
            found = arrays[name] = self.stream.device.pinned(extents, kind)
        return found

    def result(self, stage: str) -> Any:
        """What an earlier stage of the pipeline has returned for this item, operations replaced by their results.

        Raises
        ------
        InvalidArgumentError
            There is no such stage, or it has not been called yet.
        BusyError
            It enqueued work that is not done: only a stage that awaits, behind it, finds it done.
        """
        carrier = self._content.carrier
        if carrier is None:
            raise BusyError(f"{self!r} is in no pipeline: there are no stages that could have returned anything")
        return carrier.result(stage)

    # -- what the ring and the pipeline do -----------------------------------------------------------------------

    def carry(self, item: Any, carrier: Carrier | None = None) -> None:
        """Take an item, for which the buffers are newly assigned; a carrier, if there is one, says how far it is."""
        content = self._content
        content.item = item
        content.carrier = carrier
        for buffer in content.buffers.values():
            buffer._block.assign()

    def seen_from(self, stream: Stream) -> Slot:
        """The same slot, for a stage with another stream that is at the item at the same time as others."""
        slot = Slot(self.number)
        slot._content, slot._stream = self._content, stream
        return slot

    def clear(self) -> None:
        """The item has gone; the memory stays."""
        content = self._content
        content.item = content.carrier = self._stream = None
        content.steps.clear()

    @property
    def replays(self) -> dict[str, Replay]:
        """Stages' work on the slot's memory that has been captured, by their names."""
        return self._content.replays

    def forget_replays(self) -> None:
        """It is captured anew when it is wanted again."""
        for replay in self._content.replays.values():
            replay.close()
        self._content.replays.clear()

    def free_buffers(self) -> None:
        """Let go of the memory. It goes back when the last operation that uses it has passed."""
        self.forget_replays()
        self._content.buffers.clear()
        self._content.asked.clear()
        self._content.arrays.clear()

    def __repr__(self) -> str:
        return f"<Slot {self.number} {self.state}>"


def _extents(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...]]:
    kind = as_dtype(dtype)
    return kind, as_shape(shape, kind.itemsize)


def _constant(shape: object, dtype: object) -> bool:
    """Does the same object mean the same the next time?"""
    if type(shape) is not int and not (type(shape) is tuple and all(type(one) is int for one in shape)):
        return False
    if isinstance(dtype, type):
        return issubclass(dtype, (np.generic, int, float, complex))  # other classes may say a dtype, and change it
    return isinstance(dtype, str) or (isinstance(dtype, np.dtype) and dtype.names is None)


def _named(name: str) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
    return name
