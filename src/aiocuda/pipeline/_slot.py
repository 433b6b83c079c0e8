"""Slot: one place of a ring, with the item that is in it and the memory that stays with it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype, as_shape
from .._base._checks import several
from .._base._mistakes import lacks, or_none, refuses
from .._base._types import ProcessLocal
from .._base._user_code import add_note
from ..completion import Operation
from ..coordination import Node
from ..device import Event
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, StaleHandleError
from ..lowlevel import StreamOperation, block_of, queue_of, resources_of
from ..memory import DeviceBuffer, PinnedBuffer
from ..stream import Stream
from ._failures import combine
from ._slot_memory import SlotMemory

if TYPE_CHECKING:
    from ._item import PipelineItem

__all__ = ["ENDED", "TRANSITIONS", "Ends", "Slot", "SlotContents", "SlotState", "StageSlot", "checked_name",
           "failure_of_states", "memory_of"]  # fmt: skip

SlotState: TypeAlias = Literal["free", "uploading", "processing", "downloading"]

#: Work that can end a state.
Work: TypeAlias = "Operation[Any] | Node[Any] | Event"

#: The operations and nodes that end a state.
Ends: TypeAlias = "tuple[Operation[Any] | Node[Any], ...]"

#: The states through which `TripleBuffer.advance` moves a slot. After the last one it is free.
FOLLOWING: dict[SlotState, SlotState] = {"uploading": "processing", "processing": "downloading"}

#: The states that may follow each state. A pipeline of one stage only processes; one of two stages does not process.
#: From every state a slot can become free.
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    "free": frozenset({"uploading", "processing"}),
    "uploading": frozenset({"uploading", "processing", "downloading", "free"}),
    "processing": frozenset({"processing", "downloading", "free"}),
    "downloading": frozenset({"downloading", "free"}),
}


class SlotContents:
    """The item and the memory of a slot. All `Slot` objects that show the same slot share it.

    Attributes
    ----------
    item
        The item; None while the slot is free.
    memory : SlotMemory
    progress : PipelineItem or None
        The progress of the item, if a pipeline processes it.
    states : list of tuple
        States in order, each with the operations and nodes that end it. Without any it lasts until the next state.
    views : list of StageSlot
        The other objects that stages of the present item have for the slot.
    watchers : sequence of callable
        Called with the slot when it has entered a state: of a ring, while a task waits for a slot.
    """

    __slots__ = ("item", "memory", "progress", "states", "views", "watchers")

    def __init__(self) -> None:
        self.item: Any = None
        self.memory = SlotMemory()
        self.progress: PipelineItem | None = None
        self.states: list[tuple[SlotState, Ends]] = []
        self.views: list[StageSlot] = []
        self.watchers: Sequence[Callable[[Slot], object]] = ()

    def put(self, item: Any, progress: PipelineItem | None = None) -> None:
        """Put an item in. Its operations begin a new use of the memory.

        For an item of a pipeline the slot lets go of the memory that anything else refers to.
        """
        self.item = item
        self.progress = progress
        memory = self.memory
        # A hot path: `renew` begins with the same comparison.
        if progress is not None and memory.asked:
            memory.asked.clear()
        if progress is not None and [*map(getrefcount, memory.owners)] != memory.own:
            progress.note_replaced(memory.renew())
        for buffer in memory.buffers.values():
            block_of(buffer).assign()

    def unfinished(self) -> Ends:
        """Return the operations and nodes that end states, and are not over."""
        return tuple(end for _, ends in self.states for end in ends if not _is_over(end))

    def in_use(self) -> Iterator[Operation[Any] | Node[Any]]:
        """Yield what ends states, and the operations that use the memory, as far as they are not over.

        An operation that was recorded into a graph does not run by itself.
        """
        for end in (*self.unfinished(), *self.memory.in_use()):
            if not isinstance(end, StreamOperation) or end.status >= 0:
                yield end

    def is_over(self) -> bool:
        """True if operations or nodes end the last state, and they and those of the states before it are over."""
        return bool(self.last_ends) and not self.unfinished()

    @property
    def last_ends(self) -> Ends:
        """What ends the last state."""
        return self.states[-1][1] if self.states else ()

    def advance(self) -> bool:
        """Enter the state after the last one, without an end. Return False if the slot would become free."""
        following = FOLLOWING.get(self.states[-1][0])
        if following is not None:
            self.states = [(following, ())]
        return following is not None

    def stay(self) -> None:
        """Stay in the last state, without an end."""
        self.states = [(self.states[-1][0], ())]


class EndedContents:
    """The contents of a slot whose item, batch or block has ended: each use raises `StaleHandleError`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise StaleHandleError(
            "the item, the batch or the block of this slot has ended, and its memory serves the next one: await the "
            "work before the stage, the function or the block ends; memory that was asked for before stays valid"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        getattr(self, name)
        raise AssertionError


#: `Slot._contents` after the end.
ENDED: Any = EndedContents()


@lacks
@refuses(
    **dict.fromkeys(
        ("__getitem__", "__setitem__"),
        "has no items: slot.buffer(name, shape, dtype) is memory of the device, and slot.pinned(name, shape, dtype) of "
        "the host",
    )
)
class Slot(ProcessLocal):
    """One place of a `TripleBuffer`: an item on its way, and the buffers that serve one item after another.

    A pipeline and a `MicroBatcher` use memory again only if nothing but the slot, and graphs, refers to it: else the
    slot takes other memory under the same name. So ask the slot for its memory for each item.

    When the item of a pipeline, the batch or the block of `TripleBuffer.slot` has ended, each use of the object raises
    `StaleHandleError`: a task that outlives the item reaches no memory of the next one.

    Stages of a pipeline that work on one item at the same time receive different `Slot` objects: the item and the
    buffers are the same, and each has the stream of its stage.

    Attributes
    ----------
    number : int
        The slot's position in its ring, from 0.
    """

    __slots__ = ("_contents", "_stage", "_stream", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._stage = ""  # the name of the only stage that has this object
        self._stream: Stream | None = None
        self._contents = SlotContents()

    @property
    def item(self) -> Any:
        """The item; None while the slot is free. A stage may replace it for the stages after it."""
        return self._contents.item

    @item.setter
    def item(self, item: Any) -> None:
        self._contents.item = item

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SlotState:
        """``"free"``, ``"uploading"``, ``"processing"`` or ``"downloading"``.

        Work that was enqueued ahead counts when the device reaches it: a slot with all its work enqueued is uploading
        until the upload is done. If the stages of a pipeline fork, this is the state of the least advanced branch.
        """
        states = self._contents.states
        if self._contents.progress is not None:
            return self._contents.progress.state
        for state, operations in states:
            if not operations or not all(operation.done() for operation in operations):
                return state
        return states[-1][0] if states else "free"

    def enter(self, state: SlotState, until: Work | Iterable[Work] = ()) -> None:
        """Append a state: the slot has it when the states before it have ended.

        In a pipeline this changes nothing: the state follows from the progress of the item.

        Parameters
        ----------
        state
            ``"uploading"``, ``"processing"`` or ``"downloading"``. Only the ring makes a slot free.
        until
            What ends this state: an operation, a node of a coordinator or a recorded event, or several of them. Without
            it, the state lasts until the next one is entered.

        Raises
        ------
        InvalidArgumentError
            This state cannot follow the slot's last state, or an event was never recorded.
        InvalidTypeError
            ``until`` is, or contains, another object.
        StaleHandleError
            An event has been released.
        """
        ends = () if type(until) is tuple and not until else _ends(until)  # first: it may raise
        states = self._contents.states
        last: SlotState = states[-1][0] if states else "free" if self._contents.progress is None else "uploading"
        if state == "free" or state not in TRANSITIONS[last]:
            cure = "" if state in TRANSITIONS else ": there are 'uploading', 'processing' and 'downloading'"
            raise InvalidArgumentError(f"a slot that is {last} cannot become {state!r}{cure}", state=state)
        if states and not states[-1][1]:
            states.pop()
        states.append((state, ends))
        for watch in self._contents.watchers:
            watch(self)

    # -- what a stage uses ---------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream of the stage that has the slot. Outside a pipeline the program sets it.

        Raises
        ------
        BusyError
            No stage has the slot, and the program has set no stream.
        StaleHandleError
            The item, the batch or the block has ended.
        """
        if self._stream is None:
            _ = self._contents.item  # raises if it has ended
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
        """Return device memory that stays with the slot: the same name gives the same buffer, item after item.

        Its content is undefined when an item begins.

        A changed shape or dtype makes a new, uninitialised buffer. Two stages cannot ask for different ones for one
        item. Without a shape, return the existing buffer.

        A `TripleBuffer` with ``buffers`` has made the buffers of its slots: this returns one of them, and needs no
        stream.

        Raises
        ------
        InvalidArgumentError
            Without a shape: there is no buffer of that name. In a pipeline: another stage has asked for the name with
            another shape or dtype, for this item. In a `TripleBuffer` with ``buffers``: it has no buffer of
            that name, or the buffer has another shape or dtype.
        ClosedError
            The `TripleBuffer` with the buffers has been closed.
        DeviceOutOfMemory
            There is not enough memory for a new buffer.
        """
        contents = self._contents
        memory, progress = contents.memory, contents.progress
        request = memory.requests.get(name) if type(name) is str else None
        if request is not None and dtype is request[1] and not request[2]._block.freed:
            if shape is request[0] or (type(shape) is int and shape == request[0]):
                if progress is not None and name not in memory.asked:
                    memory.asked[name] = self._stage or len(progress.returned)
                return request[2]  # the same request as for the item before
        if memory.scope is not None:
            return self._given(name, shape, dtype)
        buffers = memory.buffers
        found = buffers.get(checked_name(name))
        if progress is not None:
            memory.asked.setdefault(name, self._stage or len(progress.returned))
        if shape is None and found is None:
            shape, dtype = memory.lost(name) or (None, dtype)
        if shape is None:
            if found is None or found.freed:
                raise InvalidArgumentError(
                    f"the slot has no buffer {name!r}, only {_listed(buffers)}: give its shape and dtype to make one",
                    name=name,
                )
            return found
        kind, extents = _dtype_and_extents(shape, dtype)
        if found is None or found.freed or found.shape != extents or found.dtype != kind:
            self._check_asked(name, memory.asked.get(name), found, extents, kind)
            # The old buffer returns in stream order, after the last operation that uses it.
            device = self.stream.device
            # `allocate` works even while the stream is captured: the memory exists when the graph is launched.
            found = buffers[name] = resources_of(device).allocate(queue_of(self.stream), extents, kind)
            memory.note_block(device)
        memory.note_request(name, (shape, dtype, found) if _is_immutable(shape, dtype) else None)
        return found

    def _given(self, name: str, shape: int | Sequence[int] | None, dtype: npt.DTypeLike) -> DeviceBuffer:
        """Return a buffer that the `TripleBuffer` has made."""
        memory = self._contents.memory
        scope, buffers = memory.scope, memory.buffers
        if scope is not None and scope.closed:
            raise scope.closed_error()
        found = memory.given(checked_name(name))
        if found is None:
            raise InvalidArgumentError(
                f"the triple buffer has no buffer {name!r}, only {_listed(buffers)}: add it to TripleBuffer(buffers=…)",
                name=name,
            )
        if found.freed:
            raise StaleHandleError(f"the program has freed the buffer {name!r} of a triple buffer: `aclose` frees it")
        if shape is not None:
            kind, extents = _dtype_and_extents(shape, dtype)
            if found.shape != extents or found.dtype != kind:
                raise InvalidArgumentError(
                    f"the buffer {name!r} of the triple buffer has shape {found.shape} and dtype {found.dtype}, not "
                    f"{extents} and {kind}: leave both out, or change TripleBuffer(buffers=…)", name=name,
                )  # fmt: skip
        return found

    def _check_asked(
        self, name: str, first: str | int | None, found: DeviceBuffer | PinnedBuffer | None, extents: tuple[int, ...],
        kind: np.dtype[Any],
    ) -> None:  # fmt: skip
        """Raise `InvalidArgumentError` if another stage has asked for the memory, for this item, with another shape."""
        progress = self._contents.progress
        if progress is None or first is None or found is None or found.freed:
            return
        second = self._stage or len(progress.returned)
        if first != second:
            raise InvalidArgumentError(
                f"stage {progress.asking_stage(second)!r} asks the slot for {name!r} with shape {extents} and dtype "
                f"{kind}, and stage {progress.asking_stage(first)!r} has its data there for this item, with shape "
                f"{found.shape} and dtype {found.dtype}: use the same, a view, or another name", name=name,
            )  # fmt: skip

    @or_none
    def pinned(self, name: str, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Return page-locked host memory that stays with the slot, as `buffer` does. It is uploaded by DMA."""
        if shape is None:
            named = name if isinstance(name, str) else "x"
            raise InvalidTypeError(f"pinned memory has a name and a shape: slot.pinned({named!r}, shape, dtype)")
        contents = self._contents
        memory, progress = contents.memory, contents.progress
        found = memory.pinned.get(checked_name(name))
        kind, extents = _dtype_and_extents(shape, dtype)
        if progress is not None:
            memory.asked.setdefault((True, name), self._stage or len(progress.returned))
        if found is None or found.freed or (found.shape, found.dtype) != (extents, kind):
            self._check_asked(name, memory.asked.get((True, name)), found, extents, kind)
            found = memory.pinned[name] = self.stream.device.pinned(extents, kind)
            memory.note_block(self.stream.device)
        return found

    def result(self, stage: str) -> Any:
        """Return what an earlier stage of the pipeline has returned for this item, with results for operations.

        The buffer of `Stream.upload` is available as soon as the upload is enqueued, for stages that come after it.

        Raises
        ------
        InvalidArgumentError
            There is no such stage, or it has not been called yet.
        BusyError
            Other work that the stage enqueued is not done. A stage that awaits and comes after it always finds it done.
        """
        progress = self._contents.progress
        if progress is None:
            raise BusyError(f"{self!r} is in no pipeline: there are no stages that could have returned anything")
        return progress.result(stage)

    def free_buffers(self) -> None:
        """Release the slot's memory. A buffer returns to its pool after the last operation that uses it.

        The buffers that a `TripleBuffer` has made stay until its end.
        """
        self._contents.memory.free()

    def __repr__(self) -> str:
        return f"<Slot {self.number} {'ended' if self._contents is ENDED else self.state}>"


class StageSlot(Slot):
    """A slot as one stage sees it that works beside other stages of the same item: with the stream of this stage."""

    __slots__ = ()

    def __init__(self, number: int, contents: SlotContents, stream: Stream, stage: str) -> None:
        self.number = number
        self._stage = stage
        self._stream = stream
        self._contents = contents


#: Return the memory of a slot: for the packages above.
memory_of: Callable[[Slot], SlotMemory] = operator.attrgetter("_contents.memory")


def failure_of_states(states: Iterable[tuple[SlotState, Ends]], number: int) -> BaseException | None:
    """Return the failure of the states' operations, which are over, with a note; ``number`` is the slot's."""
    failures: list[BaseException] = []
    for state, ends in states:
        for error in filter(None, (end.exception() for end in ends)):
            add_note(error, f"in slot {number} of a triple buffer, which was {state}")
            failures.append(error)
    return combine(failures, f"operations of slot {number}") if failures else None


def _is_over(end: Operation[Any] | Node[Any]) -> bool:
    """True if the device, too, is done with it. An abandoned operation is done before that."""
    operation = end if isinstance(end, Operation) else end.operation
    return end.done() and (not isinstance(operation, StreamOperation) or operation.is_settled)


def _listed(buffers: dict[str, DeviceBuffer]) -> str:
    return ", ".join(sorted(repr(name) for name, each in buffers.items() if not each.freed)) or "none"


def _ends(until: Any) -> Ends:
    """Return the operations and nodes that end a state. An event is its operation: it may be recorded again."""
    rule = "a state ends with operations, nodes or events"
    given = [until] if isinstance(until, (Operation, Node, Event)) else several(until, rule)
    for each in given:
        if not isinstance(each, (Operation, Node, Event)):
            raise InvalidTypeError(f"{rule}, not with {each!r}")
    return tuple(each.operation if isinstance(each, Event) else each for each in given)


def _dtype_and_extents(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...]]:
    kind = as_dtype(dtype)
    return kind, as_shape(shape, kind.itemsize)


def _is_immutable(shape: object, dtype: object) -> bool:
    """True if the same two objects always mean the same shape and dtype."""
    if type(shape) is not int and not (type(shape) is tuple and all(type(extent) is int for extent in shape)):
        return False
    if isinstance(dtype, type):
        return issubclass(dtype, (np.generic, int, float, complex))  # another class may have a `dtype` that changes
    return isinstance(dtype, str) or (isinstance(dtype, np.dtype) and dtype.names is None)


def checked_name(name: str) -> str:
    """Return the name of a buffer, a string."""
    if not isinstance(name, str):
        raise InvalidTypeError(
            f"a slot's buffer has a string as its name, not {name!r}: slot.buffer('x', shape, dtype), or "
            "slot.pinned('x', shape, dtype)"
        )
    return name
