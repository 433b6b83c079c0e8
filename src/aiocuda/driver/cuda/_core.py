"""`Core`: the state that all methods share: tables of calls, handles, contexts, the fault latch, ``fork()``.

A method costs a dict look-up and a `ctypes` call. It does not test whether CUDA has faulted, whether the process has
forked, or whether a device is open. In each of these cases, all functions of both tables are replaced by functions that
return a negative code and do not call the NVIDIA driver. `Core.fail` translates that code into the right error.
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

from ..._base._faults import FAULTS
from ..._base._types import DeviceProperties, ProcessLocal
from ...errors import (
    AiocudaError,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    StaleHandleError,
    WrongDeviceError,
)
from .._codes import translate
from ._abi import CU_EVENT_WAIT_DEFAULT, CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE
from ._entry import ENTRIES, Call, Calls, Word, chosen_form, reference, word
from ._library import FORKED, Library

__all__ = [
    "ANY_DEVICE", "WAIT_DEFAULT", "Context", "Core", "EventInfo", "NativeState", "OpenDevice",
    "RelaxedCapture", "StreamInfo", "in_context",
]  # fmt: skip

# Codes of this package, without a call of the NVIDIA driver. A CUresult is never negative.
_NOT_OPEN: Final = -1
_FAULTED: Final = -2
_FORKED: Final = -3
_STALE: Final = -4

#: The device of stream 0, which belongs to the device of the current context; and of a fault on an unknown device.
ANY_DEVICE: Final = -1


class Context:
    """Makes a device's primary context current for a ``with`` block. Several threads may use it simultaneously.

    The exit always calls the real function, because the thread's previous context must be restored even if a fault in
    the block has replaced the functions of the tables.
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


class RelaxedCapture:
    """Keeps the calls of one ``with`` block from ending a capture of another library on any thread.

    ``cuThreadExchangeStreamCaptureMode``: in its other modes a capture refuses these calls, and ends.
    """

    __slots__ = ("_calls", "_core", "_mode")

    def __init__(self, core: Core, calls: Calls | None = None) -> None:
        self._core = core
        self._calls = calls or core.release_gil
        self._mode = reference(ctypes.c_int(CU_STREAM_CAPTURE_MODE_RELAXED))

    def __enter__(self) -> None:
        code = self._calls.cuThreadExchangeStreamCaptureMode(self._mode)
        if code:
            self._core.fail("cuThreadExchangeStreamCaptureMode", code)

    def __exit__(self, *_: object) -> None:
        self._calls.cuThreadExchangeStreamCaptureMode(self._mode)  # the first exchange stored the previous mode


@dataclasses.dataclass(frozen=True, slots=True)
class OpenDevice:
    """An open device. It is never closed, because the driver lives as long as the process."""

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
    """A stream of `Core.streams`."""

    calls: Calls  #: after `stream_destroy`, functions that fail: a launcher then cannot use the destroyed stream
    device: int
    handle: int  #: ``CUstream``
    owned: bool  #: True if this driver created the stream; False for imported and default streams
    imports: int = 1  #: the number of imports that were not destroyed; only for imported streams
    priority: int = 0  #: the requested priority; only for owned streams
    exported: bool = False  #: True if another library may use the handle: the stream is then never destroyed
    word: Word = dataclasses.field(init=False)  #: the handle, converted for hot calls
    closed: ctypes.c_int64 = dataclasses.field(init=False)  #: not 0 after `end`, for `NativeCall`

    def __post_init__(self) -> None:
        self.word = word(self.handle)
        self.closed = ctypes.c_int64(0)

    def add_import(self) -> None:
        """The stream is imported once more."""
        self.imports += 1

    def end_import(self) -> bool:
        """An import is destroyed. Return True if others are left, and the stream stays known."""
        if self.owned or self.imports <= 1:
            return False
        self.imports -= 1
        return True

    def export(self) -> None:
        """Another library may use the handle from now on."""
        self.exported = True

    def end(self, stale: Calls) -> None:
        """The stream is destroyed: launchers that still hold it get functions that fail."""
        self.calls = stale
        self.closed.value = 1


@dataclasses.dataclass(slots=True)
class EventInfo:
    """An event of `Core.events`."""

    device: int
    handle: int  #: ``CUevent``
    timing: bool
    owned: bool = True  #: True if this driver created the event; False for imported ones
    word: Word = dataclasses.field(init=False)  #: the handle, converted for hot calls

    def __post_init__(self) -> None:
        self.word = word(self.handle)


class NativeState:
    """The words of `NativeCall` that all streams of a driver share.

    Attributes
    ----------
    closed : c_int64
        Not 0 after a fault and in a forked child.
    calls : c_int64
        The number of calls that were made without a method of the driver.
    """

    __slots__ = ("calls", "closed")

    def __init__(self) -> None:
        self.closed = ctypes.c_int64(0)
        self.calls = ctypes.c_int64(0)


def in_context(context: Context, calls: Calls) -> Calls:
    """Return the same calls, each made while a context is current. Default streams need this."""

    def bind(name: str) -> Call:
        def call(*arguments: object) -> int:
            with context:
                function: Callable[..., int] = getattr(calls, name)  # read at each call, because a fault replaces it
                return function(*arguments)

        return call

    return Calls({name: bind(name) for name in ENTRIES})


class Core(ProcessLocal):
    """State of one CUDA driver.

    Attributes
    ----------
    keep_gil, release_gil
        The two tables of calls: the functions that keep the GIL, and those that release it.
    fast
        One of the two, as ``AIOCUDA_GIL`` selects: for calls that cannot wait.
    streams, events
        By this driver's handles.

    Parameters
    ----------
    library
        The libcuda to load instead of the system's. For tests.
    """

    def __init__(self, library: str | None = None) -> None:
        self._path = library
        self._open_lock = threading.Lock()
        self._fault_lock = threading.Lock()
        self._import_lock = threading.Lock()  # around what counts imports
        self.registry: dict[Any, Any] = {}
        self.fault: DeviceFault | None = None
        self._library: Library | None = None
        self._forked = False

        self._stale: Final = Calls.answering(_STALE)
        self.keep_gil: Final = Calls.answering(_NOT_OPEN)
        self.release_gil: Final = Calls.answering(_NOT_OPEN)
        #: For calls that cannot wait.
        self.fast: Final = self.keep_gil if chosen_form() == "keep" else self.release_gil

        self.open_devices: Final[dict[int, OpenDevice]] = {}
        #: 0 is the default stream of the device of the current context.
        self.streams: Final = {0: StreamInfo(self.release_gil, ANY_DEVICE, 0, owned=False)}
        self.events: Final[dict[int, EventInfo]] = {}
        #: The handles of streams, events, functions and graphs that this driver creates. They are never used twice;
        #: CUDA's are: a new stream may have the address of a destroyed one. They are odd and above 1, because the
        #: handle of an imported stream is its ``CUstream``, an address; 0 is the default stream, see below.
        self.handles: Final = itertools.count(3, 2)
        self.call_count = 0  # method calls that reached CUDA; `+= 1` is one step under the GIL
        self.native: Final = NativeState()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    # The latch

    def blame(self, operation: str) -> None:
        with self._fault_lock:
            fault = self.fault
            if fault is not None and fault.operation is None:
                facts = {**fault.__dict__, "operation": operation}
                self.fault = DeviceFault(f"{fault.args[0]} (first seen by {operation})", **facts)

    def _latch(self, fault: DeviceFault) -> None:
        with self._fault_lock:
            if self.fault is not None:
                return
            self.fault = fault
            faulted = Calls.answering(_FAULTED)
            self.native.closed.value = 1
            self.keep_gil.replace_with(faulted)
            self.release_gil.replace_with(faulted)
        FAULTS.report(fault, ends_process=self._path is None)  # the other libraries are those of tests

    # Errors

    def error(self, call: str, code: int, device: int = ANY_DEVICE) -> AiocudaError:
        """Return the error for a code; latch a fault. It is not raised here, so that a method can add details."""
        if self._forked:  # a child may have been forked in the middle of a method
            return ForkedProcessError(FORKED)
        if self.fault is not None:
            return AiocudaError.again(self.fault)  # the program may not get this one
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
            return AiocudaError.again(self.fault or error)
        return error

    def copy_again(self, name: str, code: int, info: StreamInfo, *arguments: int) -> None:
        """Make a copy that CUDA has refused once more, in the context of its stream, or raise the error.

        If the context of another device is current, CUDA refuses the memory of a pool that the device cannot access.
        Contexts are not exchanged before each copy, which would take as long as the copy.
        """
        if code == CUDA_ERROR_INVALID_VALUE and info.device in self.open_devices:
            with self.open_devices[info.device].current:
                code = getattr(self.release_gil, name)(*arguments)
        if code:
            self.fail(name, code, info.device)

    def fail(self, call: str, code: int, device: int = ANY_DEVICE) -> NoReturn:
        """Raise the error for a code."""
        raise self.error(call, code, device)

    def check_code(self, call: str, code: int, device: int = ANY_DEVICE) -> None:
        """Raise the error for a code, unless it is 0. Hot methods test the code themselves, without this call."""
        if code:
            self.fail(call, code, device)

    def fail_release(self, call: str, code: int, device: int = ANY_DEVICE) -> None:
        """Raise the error for a code of a call that releases something. After a fault such a call does not fail."""
        if code != _FAULTED:
            self.fail(call, code, device)

    @property
    def has_faulted(self) -> bool:
        """True after a fault: nothing can be released then, and the end of the process releases everything."""
        return self.fault is not None and not self._forked

    def check(self) -> None:
        """Raise if the process has forked or a fault is latched. For methods that may not call CUDA."""
        if self._forked or self.fault is not None:
            self.fail("", _FAULTED)

    # Handles

    def opened(self, device: int) -> OpenDevice:
        """Return an open device."""
        self.check()
        try:
            return self.open_devices[device]
        except KeyError:
            raise InvalidArgumentError(f"CUDA device {device} is not open: open it first", device=device) from None

    def unknown_handle(self, kind: str, handle: object) -> AiocudaError:
        """Return the error for a handle that is unknown or stale."""
        try:
            self.check()
        except AiocudaError as error:
            return error
        return StaleHandleError(f"{kind} {handle!r} is unknown or has been destroyed", handle=handle)

    def unknown_stream_or_event(self, stream: int, event: int) -> AiocudaError:
        """Return the error for the first of two handles that is unknown."""
        return (
            self.unknown_handle("stream", stream) if stream not in self.streams else self.unknown_handle("event", event)
        )

    def check_event_device(self, event: EventInfo, stream: StreamInfo) -> None:
        """Raise for an event of another device. CUDA itself checks stream 0."""
        if stream.device not in (ANY_DEVICE, event.device):
            self.check()
            raise WrongDeviceError(
                f"an event of device {event.device} cannot be recorded on a stream of device {stream.device}: make an "
                f"event of device {stream.device}, or let the stream wait for this one"
            )

    def stream_info(self, stream: int) -> StreamInfo:
        """Return the data of a stream."""
        try:
            return self.streams[stream]
        except KeyError:
            raise self.unknown_handle("stream", stream) from None

    def event_info(self, event: int) -> EventInfo:
        """Return the data of an event."""
        try:
            return self.events[event]
        except KeyError:
            raise self.unknown_handle("event", event) from None

    def forget_stream(self, stream: int) -> StreamInfo:
        """Remove a stream, an imported one at its last import. Launchers that still hold its data then fail."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        with self._import_lock:
            info = self.streams.get(stream)
            if info is None or stream == 0:
                raise self.unknown_handle("stream", stream)
            if info.end_import():
                return info
            del self.streams[stream]
        info.end(self._stale)
        return info

    # Loading, and forks

    def load_library(self) -> Library:
        """Return libcuda. The first call loads and initialises it, and may block."""
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
        # Another thread of the parent may hold the locks.
        self._open_lock, self._fault_lock, self._import_lock = threading.Lock(), threading.Lock(), threading.Lock()
        if self._library is None:
            return  # CUDA was not initialised here, so the child may do it
        self._forked = True
        forked = Calls.answering(_FORKED)
        self.native.closed.value = 1
        self.keep_gil.replace_with(forked)
        self.release_gil.replace_with(forked)
