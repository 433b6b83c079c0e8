"""Batch: the arrays of some samples on a device, until the consumer requests the next ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Literal, Self

from .._base._log import log
from .._base._types import ProcessLocal
from ..device import Device
from ..errors import ClosedError, DeviceFault, StaleHandleError
from ..lowlevel import block_of, handle_of, queue_of, resources_of
from ..memory import DeviceBuffer
from ..stream import Stream
from ._fields import are_positional
from ._tensor_batch import FieldMapping

if TYPE_CHECKING:
    from ..lowlevel import Queue

__all__ = ["LATE", "Batch", "BatchMemory", "Delivery", "memory_of"]

#: Why the buffers of a batch have been freed.
LATE = "the next batch was requested, or the loader closed: call batch.keep() before that"


class BatchMemory:
    """The device memory of a batch: whether it is still valid, and what uses it.

    Attributes
    ----------
    buffers
        By field.
    form
        Where the buffers belong in a batch of tensors, see `Tensors`; None if each is a field of its own.
    is_past
        True once the next batch has been requested.
    kept
        True if the program keeps it: then the next request does not free it.
    released
        True once the batch is not valid any more.
    """

    __slots__ = ("_used_on", "buffers", "form", "is_past", "kept", "released")

    def __init__(self, buffers: dict[Any, DeviceBuffer], form: dict[Any, Any] | None = None) -> None:
        self.buffers = buffers
        self.form = form
        self.kept = False
        self.released = False
        self.is_past = False
        #: By CUDA's handle, functions that return the queue of the stream. The queue itself may be forgotten meanwhile,
        #: when another stream is imported: only a public `Stream` or unfinished work keeps an imported one.
        self._used_on: dict[int, Callable[[], Queue]] = {}

    def add_use(self, handle: int, queue_of: Callable[[], Queue]) -> None:
        """Let the free wait for the work that the stream has then."""
        self._used_on[handle] = queue_of
        if self.is_past:
            self._mark_uses()  # the buffers may be dropped without a call of `free`

    def keep(self) -> None:
        """Leave the free to the program: the next request does not free the memory."""
        self.kept = True

    def take_back(self) -> None:
        """The batch did not reach the program: it is delivered again."""
        self.kept = False

    def release(self) -> Literal["freed", "kept", "exported"]:
        """End the batch at the next request, unless the program or another library keeps it."""
        if self.released:
            return "freed"
        self.is_past = True
        if self.kept:
            self._mark_uses()
            return "kept"
        for buffer in self.buffers.values():
            if block_of(buffer).is_exported:
                self._mark_uses()
                self.keep()
                return "exported"
        for buffer in self.buffers.values():
            block_of(buffer).explain(LATE)
        self.free()
        return "freed"

    def free(self) -> None:
        """Free the memory after all work that uses it."""
        if self.released:
            return
        if self._used_on:
            self._mark_uses()
        self.released = True
        for buffer in self.buffers.values():
            try:
                buffer.free()
            except StaleHandleError:
                pass  # the program has freed it, or its device has been closed
            except (ClosedError, DeviceFault):
                return  # the memory ends with its device

    def _mark_uses(self) -> None:
        """Let a free of the memory wait for the streams that `add_use` has named."""
        for used in self._used_on.values():
            queue = used()
            end = queue.mark()
            if end is None:
                end = queue.tail()
            if end is not None and not end.is_settled:
                for buffer in self.buffers.values():
                    block_of(buffer).depend(end)


class Batch(ProcessLocal, FieldMapping, Mapping[Any, DeviceBuffer]):
    """The arrays of some samples on a device: a mapping from field to `DeviceBuffer`.

    If the fields are 0, 1, …, iteration yields the values, as that of a tuple: ``async for image, label in loader``.
    All else, such as ``keys()``, ``in`` and ``dict(batch)``, is that of a mapping.

    Any stream may use them without a wait, since their uploads are complete. They are valid until the next batch of the
    loader is requested, or the loader is closed. The memory is used again, in the order of the device, after the work
    of all streams of aiocuda that used the batch, of the streams that it was exported to by DLPack, and of the streams
    that `used_on` names. Without CUDA, other libraries get copies of the arrays in host memory.

    Attributes
    ----------
    number : int
        The batch's number in its epoch, from 0.
    indices : tuple of int
        The index of each sample in the source.
    stream : Stream
        A stream for work on the batch. Work there does not delay the upload of the next batch.
    """

    __slots__ = ("_memory", "indices", "number", "stream")

    def __init__(self, number: int, indices: tuple[int, ...], stream: Stream, memory: BatchMemory) -> None:
        self.number = number
        self.indices = indices
        self.stream = stream
        self._memory = memory

    def __getitem__(self, field: Any) -> DeviceBuffer:
        try:
            return self._memory.buffers[field]
        except KeyError:
            raise KeyError(f"the batch has no field {field!r}, only {list(self._memory.buffers)}") from None

    def __iter__(self) -> Iterator[Any]:
        """Yield the names of the fields; the buffers, if the fields are 0, 1, …."""
        buffers = self._memory.buffers
        return iter(buffers.values() if are_positional(buffers) else buffers)

    def __len__(self) -> int:
        return len(self._memory.buffers)

    def __contains__(self, field: object) -> bool:
        return field in self._memory.buffers

    # Those of `Mapping` would call `__iter__`.

    def keys(self) -> KeysView[Any]:
        """Return the fields."""
        return self._memory.buffers.keys()

    def values(self) -> ValuesView[DeviceBuffer]:
        """Return the buffers."""
        return self._memory.buffers.values()

    def items(self) -> ItemsView[Any, DeviceBuffer]:
        """Return the fields with their buffers."""
        return self._memory.buffers.items()

    def keep(self) -> Self:
        """Return the batch, which is valid from now on until `free`, or until nothing refers to its buffers.

        Raises
        ------
        StaleHandleError
            The next batch has been requested already.
        """
        self._check()
        self._memory.keep()
        return self

    def used_on(self, stream: Any) -> Self:
        """Return the batch. Its memory is used again after the work that ``stream`` has when the batch is released.

        This is for work that aiocuda does not know: of a library that got the address of a buffer. Work on streams of
        aiocuda, and on streams that a buffer was exported to by DLPack, needs no call. A batch of `keep` that is
        dropped without `free` waits for the work that the stream has when the next batch is requested, or at the call
        of `used_on`, whichever is later.

        Parameters
        ----------
        stream
            A `Stream`, or a stream of another library as `Stream.from_handle` takes it: its handle, or an object with
            ``__cuda_stream__``.

        Raises
        ------
        StaleHandleError
            The batch has been released already.
        InvalidTypeError
            ``stream`` is no stream.
        """
        self._check()
        find = functools.partial(_queue_of, self.stream.device, stream)
        self._memory.add_use(resources_of(self.stream.device).streams.handle_of(find()), find)
        return self

    def free(self) -> None:
        """Free the memory after all enqueued work that uses it. The call does not wait. Idempotent."""
        self._memory.free()

    def _check(self) -> None:
        if self._memory.released:
            why = LATE if self._memory.is_past else "it was freed: call batch.free() later"
            raise StaleHandleError(f"{self!r} is not valid any more, since {why}")

    def __repr__(self) -> str:
        state = " freed" if self._memory.released else " kept" if self._memory.kept else ""
        return f"<Batch {self.number} of {len(self.indices)} samples, {', '.join(map(str, self.keys()))}{state}>"


#: Returns the memory of a batch.
memory_of: Callable[[Batch], BatchMemory] = operator.attrgetter("_memory")


class Delivery:
    """The batch that the consumer has. It is freed when the next one is requested, unless something keeps it.

    Attributes
    ----------
    kept : int
        Batches that another library still held then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._resources = resources_of(device)
        self._memory: BatchMemory | None = None
        self.kept = 0

    def deliver(self, number: int, indices: tuple[int, ...], stream: Stream, memory: BatchMemory) -> Batch:
        """Return a batch for the consumer, with its stream and its memory."""
        self._memory = memory
        self._device.memory.exports.note_complete(memory.buffers.values())
        return Batch(number, indices, stream, memory)

    def take_back(self) -> None:
        """The batch did not reach the consumer: the loader has it again."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.take_back()

    def release(self) -> None:
        """End the consumer's batch: the next one is requested, or the loader is closed."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        exports = self._device.memory.exports
        if exports.returned and not self._resources.closed:
            exports.sweep(self._resources.open_reactor())  # takes back what other libraries have released
        if memory.release() == "exported":
            self.kept += 1
            if self.kept == 1:
                log(
                    "warning", "batch_kept", device=self._device.name,
                    reason="another library still held a batch when the next one was requested: it is freed later",
                )  # fmt: skip


def _queue_of(device: Device, stream: Any) -> Queue:
    """Return the queue of a stream of aiocuda or of another library."""
    if isinstance(stream, Stream):
        return queue_of(stream)
    return resources_of(device).imports.queue_of(handle_of(stream))
