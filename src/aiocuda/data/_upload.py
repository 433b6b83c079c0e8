"""The way of a batch from the host to the device: page-locked slots, collated arrays, and the copies of the upload."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype
from .._base._user_code import call
from ..completion import Operation
from ..device import Device, Event
from ..errors import ClosedError, DeviceFault, InvalidTypeError, SkippedError
from ..lowlevel import StreamOperation, pinned_block_of, queue_of, resources_of
from ..memory import PinnedBuffer
from ..stream import Stream
from ._batch import BatchMemory
from ._fields import ALIGNMENT, Layout
from ._tensors import Tensors, check_alike

__all__ = ["BatchUpload", "HostSlot", "HostSlots", "close_stream", "collated", "parts_of"]

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


class BatchUpload:
    """The copies of one batch to the device, on one stream.

    Attributes
    ----------
    stream : Stream
    memory : BatchMemory
        The memory on the device.
    nbytes : int
        Its size.
    copy_seconds : float or None
        The device time of the copies; None until `finish`, and if it is not measured.
    """

    __slots__ = ("_events", "_is_watched", "_operations", "copy_seconds", "memory", "nbytes", "stream")

    def __init__(self, stream: Stream, form: dict[Any, Any] | None = None) -> None:
        self.stream = stream
        self.memory = BatchMemory({}, form)
        self.nbytes = 0
        self.copy_seconds: float | None = None
        self._operations: list[Operation[Any]] = []
        self._events: list[Event] = []  # before and after the copies, if their device time is measured
        self._is_watched = False

    @property
    def has_begun(self) -> bool:
        """True if the device may read the arrays."""
        return bool(self._operations)

    def start(
        self, arrays: Mapping[Any, npt.NDArray[Any]], rows: Sequence[int] | None = None, *, is_timed: bool = False
    ) -> None:
        """Copy the arrays; with ``rows``, only these rows of each, in order and without gaps."""
        stream, buffers = self.stream, self.memory.buffers
        # Not by `stream.empty`: `free_all` frees what the program has allocated, and this memory is the loader's.
        allocate = resources_of(stream.device).allocate
        for name, array in arrays.items():
            shape = array.shape if rows is None else (len(rows), *array.shape[1:])
            buffers[name] = buffer = allocate(queue_of(stream), shape, array.dtype)
            self.nbytes += buffer.nbytes
        if is_timed:
            self._events.append(stream.record(timing=True))
        for name, array in arrays.items():
            target = buffers[name]
            if rows is None or len(rows) == len(array):
                self._operations.append(stream.copy(target, array))
                continue
            at = 0
            for begin, end in _runs(rows):
                part = slice(at, at + end - begin)
                self._operations.append(stream.copy(target[part], array[begin:end]))
                at = part.stop
        if is_timed:
            self._events.append(stream.record(timing=True))
            self._operations.append(self._events[-1].operation)

    @property
    def is_settled(self) -> bool:
        """True if the device does not read the arrays any more. A copy that has failed may be unfinished on it."""
        return all(isinstance(each, StreamOperation) and each.is_settled for each in self._operations)

    def poll(self) -> bool:
        """Query the device. Return True if the last copy has ended."""
        if not self._operations:
            return True
        queue_of(self.stream).poll()
        return self._operations[-1].done()

    def watch(self, wake: Callable[[], object]) -> None:
        """Call a function on the loop when the last copy has ended. Only the first call of `watch` counts."""
        if not self._is_watched:
            self._is_watched = True
            self._operations[-1].add_done_callback(lambda _: wake())

    def finish(self) -> BaseException | None:
        """Return the error of the copies, which have ended, or None. Then nothing refers to the arrays any more."""
        failure: BaseException | None = None
        for operation in self._operations:
            error = operation.exception()
            if error is not None and (failure is None or _is_cause(error, failure)):
                failure = error
        if failure is not None:
            return failure
        self._operations.clear()
        if self._events:
            before, after = self._events
            self._events.clear()
            self.copy_seconds = before.elapsed_ms(after) * 1e-3
        return None

    async def settle(self) -> bool:
        """Wait until the device does not read the arrays any more. Return False if that is unknown."""
        begin = [event.operation for event in self._events[:1]]
        for operation in (*begin, *self._operations):
            try:
                await operation.settle()
            except ClosedError:
                return False
            if operation.done():
                operation.exception()  # nothing awaits it: the loader reports a fault by the batch that is requested
        return True


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
    samples: Sequence[Any],
    indices: Sequence[int],
    collate: Callable[[list[Any]], Any] | None,
    memory: npt.NDArray[np.uint8] | None,
    tensors: Tensors | None = None,
) -> tuple[dict[Any, npt.NDArray[Any]], int, dict[Any, Any] | None]:
    """Return the arrays of a batch, in ``memory`` if they fit there, the bytes that they need there, and their form.

    Raises
    ------
    InvalidTypeError
        A part is no array of numbers.
    InvalidArgumentError
        The samples have different parts.
    ValueError
        Their shapes differ.
    """
    if collate is not None:
        batch = parts_of(call(collate, list(samples)), "the result of collate")
        form, batch = (None, batch) if tensors is None else tensors.split(batch)
        parts = {name: [_array(name, part)] for name, part in batch.items()}
    else:
        every = [parts_of(sample, "a decoded sample") for sample in samples]
        check_alike(every, indices)
        by_name = {name: [one[name] for one in every] for name in every[0]}
        form, by_name = (None, by_name) if tensors is None else tensors.stacked(by_name, indices)
        parts = {name: [_array(name, value) for value in values] for name, values in by_name.items()}
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
    return found, needed, form


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
    try:
        array = np.asarray(value)
    except TypeError as error:
        raise InvalidTypeError(
            f"part {name!r} of a sample, of type {type(value).__name__}, makes no NumPy array ({error}): return a "
            "dense one from decode=, and use output='torch' for dtypes that only PyTorch has"
        ) from error
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


def _is_cause(error: BaseException, failure: BaseException) -> bool:
    """True if an operation failed by itself, and was not skipped as the other one."""
    return isinstance(failure, SkippedError) and not isinstance(error, SkippedError)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive rows: (begin, end)."""
    begin = previous = rows[0]
    for row in rows[1:]:
        if row != previous + 1:
            yield begin, previous + 1
            begin = row
        previous = row
    yield begin, previous + 1


def _nothing() -> None:
    """Do nothing."""


async def close_stream(stream: Stream) -> None:
    """Close a stream of a loader. After a device fault, the consumer and every waiter have received it."""
    with contextlib.suppress(DeviceFault):
        await stream.aclose()
