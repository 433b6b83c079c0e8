"""ResultCopies: results without the memory of a slot, which the slot uses again."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..completion import Operation, gather
from ..lowlevel import queue_of, resources_of
from ..memory import DeviceBuffer, PinnedBuffer
from ..stream import Stream
from ._result_search import holder_of_array
from ._slot_memory import SlotMemory
from ._slot_ranges import SlotRanges

__all__ = ["PLAIN", "ResultCopies", "own_array"]

#: Types of objects that share no memory and contain no other objects.
PLAIN: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {np.dtype(code).type for code in np.typecodes["All"] if code not in "VO"}
)

#: Bytes that the loop copies itself: 0.1 ms. More are copied on a thread, to which handing them takes 50 µs.
LOOP_BYTES: Final = 1 << 20


def own_array(value: Any, memory: SlotMemory) -> Any:
    """Return an array of NumPy, or a copy of it if it lies in the memory; None if this takes `ResultCopies`.

    That is so for large arrays and all other objects. This is the quick way for the usual results of a pipeline.
    """
    kind = type(value)
    if (kind is not np.ndarray and kind is not PinnedBuffer) or value.nbytes > LOOP_BYTES or value.dtype.kind == "O":
        return None
    if not value.flags.owndata:
        for array in memory.pinned.values():
            if np.may_share_memory(value, array):
                return _host_copy(value)
    return value


class ResultCopies:
    """Copies the parts of results that lie in a slot's memory, and rebuilds the containers around them.

    Parts are arrays of NumPy, memoryviews, tensors of PyTorch and device buffers. Containers are lists, tuples, named
    tuples, dicts, dataclasses and arrays of objects. All work on the memory has ended. `find` looks for parts, for each
    result; `make` copies them; `owned` returns the results with the copies.

    Parameters
    ----------
    memory
        The slot's.
    stream
        Copies on the device are enqueued here.
    """

    def __init__(self, memory: SlotMemory, stream: Stream) -> None:
        self._memory = memory
        self._ranges = SlotRanges(memory.pinned.values(), memory.buffers.values())
        self._stream = stream
        self._parts: dict[int, Any] = {}  # by id
        self._plain: dict[int, Any] = {}  # containers of plain objects by id: many results may have the same one
        self._copies: dict[int, Any] = {}  # by the id of the part
        #: Other objects by id: the original, which so keeps its id, and the object in its place.
        self._rebuilt: dict[int, tuple[Any, Any]] = {}

    def is_array(self, value: Any) -> bool:
        """True for an array of NumPy or a tensor of PyTorch, unless it is an array of objects."""
        kind = type(value)
        if issubclass(kind, np.ndarray):
            return bool(value.dtype.kind != "O")
        return issubclass(kind, self._ranges.tensor_type)

    def find(self, result: Any) -> bool:
        """Return whether a result has parts in the slot's memory.

        Raises
        ------
        UnsupportedError
            A part in device memory belongs to another library, and cannot be copied here.
        """
        found = False
        seen: set[int] = set()
        values = [result]
        for value in values:  # it grows, and keeps the objects, so that no other one gets the id of one of them
            kind = type(value)
            if kind in PLAIN or id(value) in seen or id(value) in self._plain:
                continue
            seen.add(id(value))
            inner = value if kind is list or kind is tuple else value.values() if kind is dict else _inner(value)
            if inner is not None:
                others = [each for each in inner if type(each) not in PLAIN]
                values += others
                if not others:
                    self._plain[id(value)] = value
            elif self._ranges.shares(value):
                self._parts[id(value)] = value
                found = True
        return found

    async def make(self) -> None:
        """Copy the parts: in host memory on the loop, or on a thread if they are large; on the device by the stream.

        Raises
        ------
        DeviceFault
            The device has faulted. There are other errors of the copies, such as `DeviceOutOfMemory`, too.
        """
        host: dict[int, Any] = {}
        enqueued: dict[int, Operation[Any]] = {}
        for key, part in self._parts.items():
            if isinstance(part, DeviceBuffer):
                resources = resources_of(self._stream.device)
                self._copies[key] = target = resources.allocate(queue_of(self._stream), part.shape, part.dtype)
                enqueued[key] = self._stream.copy(target, part)
            elif self._is_on_gpu(part):
                enqueued[key] = self._stream.submit(_clone, part, self._handle())
            else:
                host[key] = part
        parts = list(host.values())
        if sum([part.nbytes for part in parts]) <= LOOP_BYTES:
            copies = _host_copies(parts)
        else:
            copies = await self._stream.device.offload(_host_copies, parts)
        self._copies.update(zip(host, copies, strict=True))
        if enqueued:
            await gather(*enqueued.values())
        for key, operation in enqueued.items():
            if key not in self._copies:
                self._copies[key] = _for_current_stream(operation.result())

    def _is_on_gpu(self, part: Any) -> bool:
        return issubclass(type(part), self._ranges.tensor_type) and part.is_cuda

    def _handle(self) -> int:
        """Return CUDA's handle of the stream."""
        device = self._stream.device
        return device.driver.stream_handle(resources_of(device).streams.handle_of(queue_of(self._stream)))

    async def leak(self, results: Sequence[Any]) -> str | None:
        """Return why a result would change with the slot's next item; None if none would. The parts were copied.

        Objects that are no containers are passed on as they are, and the slot lets go of memory that one of them holds.
        It cannot do that if a graph of the program uses the memory. The reference counts do not show whether a result
        holds it: the graph and the program do so, too.
        """
        pinned, buffers = self._memory.of_graphs()
        if not (pinned or buffers):
            return None
        holder = await holder_of_array(results, SlotRanges(pinned, buffers), PLAIN)
        if holder is None:
            return None
        kind = type(holder)
        return (
            f"a result is a {kind.__module__}.{kind.__qualname__} that holds an array in the memory of its slot, which "
            "a graph uses, so it would change with the next launch. aiocuda copies arrays only in lists, tuples, dicts "
            "and dataclasses: return an array, or put a copy into the object, `array.copy()`"
        )

    def owned(self, value: Any) -> Any:
        """Return a result with copies for its parts. Containers of parts are new ones; all other objects are the same.

        An object that the result contains several times is copied once. In a cycle, the reference that closes it goes
        to the original.
        """
        if type(value) in PLAIN:
            return value
        key = id(value)
        if key in self._copies:
            return self._copies[key]
        if key not in self._rebuilt:
            self._rebuilt[key] = value, value  # for a cycle
            inner = _inner(value)
            if inner is not None:
                changed = {at: new for at, old in enumerate(inner) if (new := self.owned(old)) is not old}
                if changed:
                    self._rebuilt[key] = value, _with(value, changed)
        return self._rebuilt[key][1]


def _inner(value: Any) -> Sequence[Any] | None:
    """Return the objects in a container; None if the value is no container."""
    kind = type(value)  # the `__class__` of a mock is that of its `spec`
    if issubclass(kind, list):
        return list.__getitem__(value, slice(None))  # and not the methods of the program's class
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, np.ndarray):
        return list(value.flat) if value.dtype.kind == "O" else None
    if not hasattr(kind, "__dataclass_fields__"):
        return None
    try:
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    except Exception:  # noqa: BLE001 - code of the program's class. Memory that it still refers to is not used again
        return None


def _with(value: Any, changed: dict[int, Any]) -> Any:
    """Return a container like this one, with other objects at some of the positions of `_inner`."""
    kind = type(value)
    if issubclass(kind, tuple):
        inner = [changed.get(at, each) for at, each in enumerate(_inner(value) or ())]
        if kind is tuple:
            return tuple(inner)
        make = getattr(kind, "_make", kind)  # of a named tuple; the tuples of C, as `torch.max` returns, have none
        return make(inner)
    new = copy.copy(value)
    if issubclass(kind, list):
        for at, each in changed.items():
            list.__setitem__(new, at, each)
    elif issubclass(kind, dict):
        keys = list(dict.keys(value))
        for at, each in changed.items():
            dict.__setitem__(new, keys[at], each)
    elif issubclass(kind, np.ndarray):
        for at, each in changed.items():
            new.flat[at] = each
    else:
        fields = dataclasses.fields(value)
        for at, each in changed.items():
            object.__setattr__(new, fields[at].name, each)  # also of a frozen one
    return new


def _host_copies(parts: Iterable[Any]) -> list[Any]:
    """Return copies of parts in host memory. Any thread."""
    return [part.copy() if type(part) is np.ndarray else _host_copy(part) for part in parts]


def _host_copy(part: Any) -> Any:
    if isinstance(part, memoryview):
        view = memoryview(np.asarray(part).copy())  # type: ignore[arg-type]  # an ndarray exports a buffer
        return view.toreadonly() if part.readonly else view
    if isinstance(part, PinnedBuffer):
        return np.asarray(part).copy()  # an ordinary array: page-locked memory is scarce, and slow to make
    return part.copy() if isinstance(part, (np.ndarray, np.void)) else part.clone()


def _clone(tensor: Any, handle: int) -> Any:
    """Return a copy of a tensor of PyTorch, enqueued on the stream with this handle."""
    cuda: Any = sys.modules["torch"].cuda
    with cuda.stream(cuda.ExternalStream(handle, device=tensor.device)):
        return tensor.clone()


def _for_current_stream(tensor: Any) -> Any:
    """Return the tensor. PyTorch keeps its memory for the work of its current stream, when the receiver drops it."""
    tensor.record_stream(sys.modules["torch"].cuda.current_stream(tensor.device))
    return tensor
