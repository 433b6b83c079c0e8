"""What the verbs share: the tables of calls, the handles, contexts, the fault latch and the guard against ``fork()``.

A verb costs a dict look-up and a `ctypes` call. Nothing on that path asks whether CUDA has faulted, the process has
forked, or the device is open: in each of those cases every function of both tables has been replaced by one that
answers a negative code of ours without touching the driver, and `Core.fail` turns the code into the right error.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn

from ..._types import DeviceProperties, ProcessLocal
from ...errors import (
    AiocudaError,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    StaleHandleError,
    WrongDeviceError,
)
from .._codes import translate
from ._abi import CU_EVENT_WAIT_DEFAULT
from ._entry import ENTRIES, Call, Calls, Word, chosen_form, word
from ._library import FORKED, Library

__all__ = ["ANY_DEVICE", "WAIT_DEFAULT", "Context", "Core", "EventInfo", "OpenDevice", "StreamInfo", "in_context"]

# Answers of ours, where no driver call was made. A CUresult is never negative.
_NOT_OPEN: Final = -1
_FAULTED: Final = -2
_FORKED: Final = -3
_STALE: Final = -4

#: The device of stream 0, which belongs to whatever device's context is current; and of a fault nobody can place.
ANY_DEVICE: Final = -1


class Context:
    """Makes a device's primary context current for a ``with`` block; any number of threads at once.

    The exit calls the real function whatever the tables say: a fault found inside the block replaces theirs, and the
    thread's context must be what it was all the same.
    """

    __slots__ = ("_core", "_device", "_handle", "_pop")

    def __init__(self, core: Core, device: int, handle: int) -> None:
        self._core = core
        self._device = device
        self._handle = handle
        self._pop = core.fast.cuCtxPopCurrent

    def __enter__(self) -> None:
        code = self._core.fast.cuCtxPushCurrent(self._handle)
        if code:
            self._core.fail("cuCtxPushCurrent", code, self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = self._pop(ctypes.byref(ctypes.c_void_p()))
        if code and error is None:
            self._core.fail("cuCtxPopCurrent", code, self._device)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device that has been opened. Never closed: the driver lives as long as the process."""

    index: int
    handle: int  #: ``CUdevice``
    primary: int  #: ``CUcontext``
    current: Context
    pool: int  #: ``CUmemoryPool``
    properties: DeviceProperties


#: The flags of every wait for an event.
WAIT_DEFAULT: Final = word(CU_EVENT_WAIT_DEFAULT)


@dataclasses.dataclass(slots=True)
class StreamInfo:
    """What a verb must know of a stream."""

    calls: Calls  #: the stale table once it is destroyed, so that a launcher that holds this never names it again
    device: int
    handle: int  #: ``CUstream``
    owned: bool
    imports: int = 1  #: how often it was imported and not forgotten, of one that is not ours
    priority: int = 0  #: as it was asked for, of one that is ours
    exported: bool = False  #: another library may know the handle, so the stream is never destroyed
    word: Word = dataclasses.field(init=False)  #: the handle, as hot calls take it

    def __post_init__(self) -> None:
        self.word = word(self.handle)


@dataclasses.dataclass(slots=True)
class EventInfo:
    """What a verb must know of an event."""

    device: int
    handle: int  #: ``CUevent``
    timing: bool
    word: Word = dataclasses.field(init=False)  #: the handle, as hot calls take it

    def __post_init__(self) -> None:
        self.word = word(self.handle)


def in_context(context: Context, calls: Calls) -> Calls:
    """The same calls, made while a context is current: what a default stream needs."""

    def bind(name: str) -> Call:
        def call(*arguments: object) -> int:
            with context:
                function: Callable[..., int] = getattr(calls, name)  # at each call: a fault replaces it
                return function(*arguments)

        return call

    return Calls({name: bind(name) for name in ENTRIES})


class Core(ProcessLocal):
    """State of one CUDA driver.

    Parameters
    ----------
    library
        The libcuda to load, if it is not to be the system's own. For tests.
    """

    def __init__(self, library: str | None = None) -> None:
        self._path = library
        self._open_lock = threading.Lock()
        self._fault_lock = threading.Lock()
        self._import_lock = threading.Lock()  # around what counts imports
        self.registry: dict[Any, Any] = {}
        self._fault: DeviceFault | None = None
        self._library: Library | None = None
        self._forked = False

        self._stale: Final = Calls.answering(_STALE)
        self.keep_gil: Final = Calls.answering(_NOT_OPEN)
        self.release_gil: Final = Calls.answering(_NOT_OPEN)
        #: For calls that cannot wait.
        self.fast: Final = self.keep_gil if chosen_form() == "keep" else self.release_gil

        self.open_devices: Final[dict[int, OpenDevice]] = {}
        self.streams: Final[dict[int, StreamInfo]] = {0: self._default_stream()}
        self.events: Final[dict[int, EventInfo]] = {}
        #: What our streams and events are called. Never used twice, as the driver's handles are: a new stream may have
        #: the address of one that was destroyed. Odd and above 1: an imported stream is called by its handle, which is
        #: 0, 1, 2 or an address.
        self.handles: Final = itertools.count(3, 2)
        self.call_count = 0  # verbs that call_count the driver; `+= 1` is one step under the GIL
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    # The latch

    @property
    def fault(self) -> DeviceFault | None:
        """The first fault of any device, for good."""
        return self._fault

    def blame(self, operation: str) -> None:
        """Name the operation that saw the fault first. Later names are ignored."""
        with self._fault_lock:
            fault = self._fault
            if fault is not None and fault.operation is None:
                facts = {**fault.__dict__, "operation": operation}
                self._fault = DeviceFault(f"{fault.args[0]} (first seen by {operation})", **facts)

    def _latch(self, fault: DeviceFault) -> None:
        with self._fault_lock:
            if self._fault is None:
                self._fault = fault
                faulted = Calls.answering(_FAULTED)
                self.keep_gil.replace_with(faulted)
                self.release_gil.replace_with(faulted)

    # Errors

    def error(self, call: str, code: int, device: int = ANY_DEVICE) -> AiocudaError:
        """The error for a code, a fault latched. Nothing is raised here, so that a verb can add what it knows."""
        if self._forked:  # a child may have been forked in the middle of a verb
            return ForkedProcessError(FORKED)
        if self._fault is not None:
            return self._fault.again()
        if code == _STALE:
            return StaleHandleError(f"{call}: the stream has been destroyed")
        if code == _NOT_OPEN or self._library is None:
            return InvalidArgumentError(f"{call}: no CUDA device is open: open one first")
        self.call_count += 1
        if device == ANY_DEVICE and len(self.open_devices) == 1:
            (device,) = self.open_devices
        error = translate(code, call, *self._library.describe(code), device)
        if isinstance(error, DeviceFault):
            self._latch(error)
            return (self._fault or error).again()
        return error

    def fail(self, call: str, code: int, device: int = ANY_DEVICE) -> NoReturn:
        """Raise the error for a code."""
        raise self.error(call, code, device)

    def fail_release(self, call: str, code: int, device: int = ANY_DEVICE) -> None:
        """For what gives something back: after a fault that is done by the end of the process, and no error."""
        if code != _FAULTED:
            self.fail(call, code, device)

    @property
    def has_faulted(self) -> bool:
        """Is there nothing left to give back to, because of a fault?"""
        return self._fault is not None and not self._forked

    def check(self) -> None:
        """Raise what any verb must raise now, for verbs that may make no driver call."""
        if self._forked or self._fault is not None:
            self.fail("", _FAULTED)

    # Handles

    def opened(self, device: int) -> OpenDevice:
        """What is known of an open device."""
        self.check()
        try:
            return self.open_devices[device]
        except KeyError:
            raise InvalidArgumentError(f"CUDA device {device} is not open: open it first", device=device) from None

    def unknown_handle(self, kind: str, handle: object) -> AiocudaError:
        """The error for a handle that is not, or no longer, one of ours."""
        try:
            self.check()
        except AiocudaError as error:
            return error
        return StaleHandleError(f"{kind} {handle!r} is unknown or has been destroyed", handle=handle)

    def unknown_stream_or_event(self, stream: int, event: int) -> AiocudaError:
        """The error for the one of the two that is not one of ours."""
        return (
            self.unknown_handle("stream", stream) if stream not in self.streams else self.unknown_handle("event", event)
        )

    def check_event_device(self, event: EventInfo, stream: StreamInfo) -> None:
        """Refuse an event of another device. Stream 0 has the device whose context is current: the driver tells."""
        if stream.device not in (ANY_DEVICE, event.device):
            self.check()
            raise WrongDeviceError(
                f"an event of device {event.device} cannot be recorded on a stream of device {stream.device}: make an "
                f"event of device {stream.device}, or let the stream wait for this one"
            )

    def stream_info(self, stream: int) -> StreamInfo:
        """What is known of a stream."""
        try:
            return self.streams[stream]
        except KeyError:
            raise self.unknown_handle("stream", stream) from None

    def event_info(self, event: int) -> EventInfo:
        """What is known of an event."""
        try:
            return self.events[event]
        except KeyError:
            raise self.unknown_handle("event", event) from None

    def forget_stream(self, stream: int) -> StreamInfo:
        """Take a stream out of use, an imported one at its last import. What still holds its record finds it stale."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        with self._import_lock:
            info = self.streams.get(stream)
            if info is not None and not info.owned and info.imports > 1:
                info.imports -= 1
                return info
            self.streams.pop(stream, None)
            if stream == 0:
                self.streams[0] = self._default_stream()
        if info is None or info.device == ANY_DEVICE:
            raise self.unknown_handle("stream", stream)
        info.calls = self._stale
        return info

    def _default_stream(self) -> StreamInfo:
        """Stream 0 as long as nobody has imported it: that of the device whose context is current."""
        return StreamInfo(self.release_gil, ANY_DEVICE, 0, owned=False)

    # Beginning, and the end of a forked child

    def load_library(self) -> Library:
        """libcuda, loaded and initialised at the first call. May block, the first time."""
        self.check()
        library = self._library
        if library is None:
            with self._open_lock:
                library = self._library
                if library is None:
                    library = Library(self._path)
                    self.keep_gil.replace_with(Calls.keeping(library.addresses))
                    self.release_gil.replace_with(Calls.releasing(library.addresses))
                    self._library = library
        return library

    def _after_fork(self) -> None:
        # They may have been held in the parent.
        self._open_lock, self._fault_lock, self._import_lock = threading.Lock(), threading.Lock(), threading.Lock()
        if self._library is None:
            return  # not initialised by us: the child may
        self._forked = True
        forked = Calls.answering(_FORKED)
        self.keep_gil.replace_with(forked)
        self.release_gil.replace_with(forked)
