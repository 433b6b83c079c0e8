"""NvtxInstrument: operations as ranges of NVTX, for Nsight Systems and other tools."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Final, Self

import nvtx

from .._base._label import printable
from ..completion import INTERNAL, Operation
from ..device import Device
from ..errors import InvalidTypeError
from ._drawing import COLOURS, OTHER

__all__ = ["NvtxInstrument"]

#: Characters of a name and of a label in a range.
MOST_NAME: Final = 60
MOST_LABEL: Final = 60

#: NVTX keeps each text until the process ends. After so many texts, the labels of further ones are left out.
MOST_TEXTS: Final = 4096


class NvtxInstrument:
    """Shows each operation as a range of NVTX, from its submission until it is resolved.

    ::

        with NvtxInstrument(device):
            await work(device)

    The ranges belong to the domain ``aiocuda``. The text of a range is the name of the kernel, or the kind of the
    operation, and its label: ``saxpy [request-17]``. The category is the kind. Ranges overlap, because operations of
    several tasks are in flight at the same time, so they are start/end ranges, and not push/pop ranges. When the block
    ends, the ranges of operations that are in flight end, too.

    If no tool is attached, such as ``nsys profile``, it does not listen and costs nothing. NVTX keeps texts until the
    process ends, so the labels of further ranges are left out after 4 096 different texts.

    Parameters
    ----------
    device
        The device of the streams, of all event loops.

    Raises
    ------
    InvalidTypeError
        The argument is no device.
    BusyError
        On entering: it has been entered already.
    """

    def __init__(self, device: Device) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"an NvtxInstrument takes an aiocuda.Device, not {type(device).__name__}")
        self.device = device
        self._lock = threading.RLock()  # loops of several threads may use the device; the collector may run inside
        self._domain: Any = None  # untyped, as nvtx is; set while it listens
        self._attributes: dict[tuple[str, str], Any] = {}  # by kind and text
        self._ranges: dict[int, Any] = {}  # by operation id
        self._copies: dict[int, weakref.ref[Operation[Any]]] = {}  # copies with chunks, by id
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Self:
        domain = nvtx.get_domain("aiocuda") if nvtx.enabled() else None
        if getattr(domain, "handle", None) is None:  # no tool is attached
            return self
        self._listening.enter_context(self.device.listen(self))
        with self._lock:
            self._domain = domain
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()
        with self._lock:
            for number in list(self._ranges):
                self._end(number)
            self._domain = None  # a hook that another thread has called before begins no range after this

    def __repr__(self) -> str:
        return f"<NvtxInstrument of {self.device.name}: {len(self._ranges)} ranges>"

    def on_submit(self, operation: Operation[Any]) -> None:
        """Begin a range. The hook of `Device.listen`."""
        if operation.kind is not INTERNAL:
            self._begin(operation)
            return
        copy = operation.part_of
        if copy is not None and copy.id not in self._ranges:
            self._begin(copy)
            # A copy that is withdrawn between two chunks is never resolved.
            number = copy.id
            self._copies[number] = weakref.ref(copy, lambda _: self._end(number))

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        """End the range. The hook of `Device.listen`."""
        self._end(operation.id)

    def _begin(self, operation: Operation[Any]) -> None:
        with self._lock:
            if self._domain is not None and operation.id not in self._ranges:
                self._ranges[operation.id] = self._domain.start_range(self._attributes_of(operation))

    def _end(self, number: int) -> None:
        with self._lock:
            started = self._ranges.pop(number, None)
            self._copies.pop(number, None)
            if started is not None:
                self._domain.end_range(started)

    def _attributes_of(self, operation: Operation[Any]) -> Any:
        kind = operation.kind
        name = text = printable(operation.kernel or kind, MOST_NAME)
        if operation.label is not None:
            text = f"{name} [{printable(operation.label, MOST_LABEL)}]"
        found = self._attributes.get((kind, text))
        if found is None and len(self._attributes) >= MOST_TEXTS:
            text = name
            found = self._attributes.get((kind, text))
        if found is None:
            colour = 0xFF000000 | int(COLOURS.get(kind, OTHER)[1:], 16)
            found = self._domain.get_event_attributes(text, colour, kind)
            self._attributes[kind, text] = found
        return found
