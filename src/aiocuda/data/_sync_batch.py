"""SyncBatch: a batch for a thread without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from .._base._mistakes import refuses
from .._base._types import ProcessLocal
from ..device import Device
from ..errors import AiocudaError, BusyError, InvalidTypeError, StaleHandleError
from ..lowlevel import handle_of, queue_of, resources_of
from ..memory import DeviceBuffer
from ._batch import LATE, Batch, memory_of
from ._fields import are_positional
from ._names import lacks
from ._tensor_batch import FieldMapping

__all__ = ["HeldBatch", "SyncArray", "SyncBatch"]


class HeldBatch:
    """A batch that another thread has: which streams use it, and whether a library holds it.

    `open` and `close` are for the loop, the other methods for the consumer's thread.

    Attributes
    ----------
    batch
    kept
        True if the program keeps it: then the next request does not free it.
    freed
        True once the program has freed it, or has dropped it.
    is_back
        True once the loader has the batch again, which did not reach the program.
    ended
        True once it has been given back to the loop.
    """

    def __init__(self, batch: Batch, device: Device) -> None:
        self.batch = batch
        self.kept = self.freed = self.ended = self.is_back = False
        self._exports = device.memory.exports
        self._driver = device.driver
        self._device = device.index
        self._holds: list[Any] = []
        self._handles: dict[int, None] = {}  # of the streams that use it
        self._exported = 0
        self._returned: deque[None] = deque()

    # -- the loop ------------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Hold the memory for the other thread."""
        self.batch.keep()
        self._holds = [self._exports.hold(buffer) for buffer in self.batch.values()]
        return self

    def close(self, events: list[int]) -> None:
        """Free the memory after the events, which `end` has recorded."""
        stream = self.batch.stream
        streams = resources_of(stream.device).streams
        for event in events:
            streams.wait_for_event(queue_of(stream), event)
            self._driver.event_destroy(event)
        for export in self._holds:
            self._exports.let_go(export)
        if self.is_back and memory_of(self.batch).released:
            return
        self.batch.used_on(stream)
        if not self.is_back:
            self.batch.free()

    # -- the consumer's thread -----------------------------------------------------------------------------------

    def keep(self) -> None:
        """Leave the free to the program: the next request does not give the batch back."""
        self.kept = True

    def free(self) -> None:
        """The program has freed the batch, or has dropped it: the next request gives it back."""
        self.freed = True

    def put_back(self) -> None:
        """The loader gets the batch again. What has begun to use the memory is waited for, as if it were freed."""
        self.freed = self.is_back = True

    @property
    def is_exported(self) -> bool:
        """True while another library holds one of the arrays."""
        return self._exported > len(self._returned)

    def add_use(self, handle: int) -> None:
        """Let the free wait for the work that the stream has when the batch ends.

        Raises
        ------
        WrongDeviceError, StaleHandleError
            It is no stream of the batch's device.
        """
        if handle in self._handles:
            return
        try:
            self._driver.stream_destroy(self._driver.stream_import(self._device, handle))
        except BusyError:
            pass  # it is being captured: `end` waits until it is not
        self._handles[handle] = None

    def capsule(self, buffer: DeviceBuffer, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> object:
        """Return a DLPack capsule."""
        capsule, handle = self._exports.held_capsule(buffer, self._returned, stream, max_version, dl_device, copy)
        self._exported += 1
        if handle is not None:
            self.add_use(handle)
        return capsule

    def end(self) -> list[int] | None:
        """Record an event in each stream that uses the batch, and return the events.

        None if one cannot be recorded: a stream is being captured, and the event would become part of the graph, or the
        driver has failed. The next request tries again.
        """
        driver = self._driver
        events: list[int] = []
        try:
            for handle in tuple(self._handles):
                stream = driver.stream_import(self._device, handle)
                try:
                    if driver.stream_capturing(stream):
                        raise BusyError(f"stream 0x{handle:x} is being captured into a graph")
                    events.append(driver.event_create(self._device, False))
                    driver.event_record(events[-1], stream)
                finally:
                    driver.stream_destroy(stream)
        except AiocudaError:
            for event in events:
                driver.event_destroy(event)
            return None
        self.ended = True
        return events


@lacks
@refuses(
    "is device memory: compute with torch.from_dlpack(array), or with array.to_host()",
    "__getitem__", "__setitem__", "__iter__", "__bool__", "__float__", "__int__",
)  # fmt: skip
class SyncArray:
    """One array of a `SyncBatch`, on the device.

    Other libraries take it by DLPack, ``torch.from_dlpack(batch["image"])``, without a copy and without a wait; without
    CUDA they get a copy in host memory.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    """

    __slots__ = ("_batch", "_buffer", "_held")

    def __init__(self, batch: SyncBatch, held: HeldBatch, buffer: DeviceBuffer) -> None:
        self._batch = batch
        self._held = held
        self._buffer = buffer

    @property
    def shape(self) -> tuple[int, ...]:
        return self._buffer.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._buffer.dtype

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def __len__(self) -> int:
        return len(self._buffer)

    def __array__(self, dtype: object = None, *, copy: bool | None = None) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is device memory: use array.to_host(), or torch.from_dlpack(array)")

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule. See `DeviceBuffer.__dlpack__`; the memory waits for the work of ``stream``."""
        self._batch.check()
        return self._held.capsule(self._buffer, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (DLPack device type, index)."""
        return self._buffer.__dlpack_device__()

    def to_host(self) -> npt.NDArray[Any]:
        """Return a copy as a NumPy array. The call waits for it."""
        self._batch.check()
        return self._batch.download(self._buffer)

    def __repr__(self) -> str:
        return f"<SyncArray {self.shape} {self.dtype}>"


@lacks
class SyncBatch(ProcessLocal, FieldMapping, Mapping[Any, SyncArray]):
    """A batch on a device for a thread without an event loop: a mapping from field to `SyncArray`.

    Iteration, also by ``for image, label in batches``, is that of a `Batch`.

    It is valid until the next batch is requested. If another library still holds one of its arrays then, the memory is
    not freed before that library has released it.

    Attributes
    ----------
    number : int
        The batch's number in its epoch, from 0.
    indices : tuple of int
        The index of each sample in the source.
    """

    def __init__(self, held: HeldBatch, download: Callable[[Batch, DeviceBuffer], npt.NDArray[Any]]) -> None:
        self.number = held.batch.number
        self.indices = held.batch.indices
        self._held = held
        self._download = download

    def __getitem__(self, field: Any) -> SyncArray:
        return SyncArray(self, self._held, self._held.batch[field])

    def __iter__(self) -> Iterator[Any]:
        """Yield the names of the fields; the arrays, if the fields are 0, 1, …."""
        fields = self.keys()
        return iter(self.values() if are_positional(fields) else fields)

    def __len__(self) -> int:
        return len(self._held.batch)

    def __contains__(self, field: object) -> bool:
        return field in self._held.batch

    # Those of `Mapping` would call `__iter__`.

    def keys(self) -> KeysView[Any]:
        """Return the fields."""
        return self._held.batch.keys()

    def values(self) -> ValuesView[SyncArray]:
        """Return the arrays."""
        return self._arrays().values()

    def items(self) -> ItemsView[Any, SyncArray]:
        """Return the fields with their arrays."""
        return self._arrays().items()

    def _arrays(self) -> dict[Any, SyncArray]:
        return {field: self[field] for field in self.keys()}

    def keep(self) -> Self:
        """Return the batch, which is valid from now on until `free`, or until nothing refers to it."""
        self.check()
        self._held.keep()
        return self

    def used_on(self, stream: Any) -> Self:
        """Return the batch. Its memory is used again after the work that ``stream`` has when the batch ends.

        A stream that took an array by DLPack needs no call.

        Parameters
        ----------
        stream
            A stream's handle, or an object with ``__cuda_stream__``.
        """
        self.check()
        self._held.add_use(handle_of(stream))
        return self

    def free(self) -> None:
        """Free the memory after all work that uses it, when the next batch is requested. Idempotent."""
        self._held.free()

    def check(self) -> None:
        """Raise `StaleHandleError` if the batch is not valid any more."""
        if self._held.freed:
            raise StaleHandleError(f"{self!r} is not valid any more, since it was freed: call batch.free() later")
        if self._held.ended:
            raise StaleHandleError(f"{self!r} is not valid any more, since {LATE}")

    def download(self, buffer: DeviceBuffer) -> npt.NDArray[Any]:
        """Return a buffer of the batch as a NumPy array."""
        return self._download(self._held.batch, buffer)

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            held.free()

    def __repr__(self) -> str:
        state = " freed" if self._held.ended or self._held.freed else " kept" if self._held.kept else ""
        return f"<SyncBatch {self.number} of {len(self.indices)} samples, {', '.join(map(str, self.keys()))}{state}>"
