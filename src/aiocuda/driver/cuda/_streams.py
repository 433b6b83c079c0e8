"""The methods about streams and events."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import BusyError, InvalidArgumentError, StaleHandleError, WrongDeviceError
from .._kept_streams import KeptStreams
from . import _abi
from ._core import WAIT_DEFAULT, EventInfo, StreamInfo, in_context
from ._entry import Calls, reference
from ._native import CudaNative

__all__ = ["CudaStreams"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY
_DEFAULT_STREAMS: Final = (0, _LEGACY, 2)  # the null stream, and CU_STREAM_PER_THREAD


class _CaptureMode(threading.local):
    """The argument of ``cuThreadExchangeStreamCaptureMode``, by thread: the other mode, which the call stores in it."""

    def __init__(self) -> None:
        self.mode: Final = reference(ctypes.c_int(_abi.CU_STREAM_CAPTURE_MODE_RELAXED))


class CudaStreams(CudaNative):
    """`aiocuda.driver.protocol.Streams`."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        self._capture_mode = _CaptureMode()
        self._default_calls: dict[int, Calls] = {}  # by device: calls that make its context current
        self._streams_created = 0
        self._streams_reserved: Final[dict[int, int]] = {}  # by device
        #: The ``CUstream`` of each owned stream that has no owner now and that other libraries may use.
        self._kept: Final[KeptStreams[int]] = KeptStreams()

    # Streams

    def priority_range(self, device: int) -> tuple[int, int]:
        opened = self.opened(device)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        with opened.current:
            code = self.fast.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
            self.check_code("cuCtxGetStreamPriorityRange", code, device)
        self.call_count += 1
        return least.value, greatest.value

    def make_stream(self, device: int, priority: int) -> StreamInfo:
        """Return a new stream that is not in `Core.streams`: for notifiers and graphs."""
        opened = self.opened(device)
        out = ctypes.c_uint64()
        with opened.current:
            # This releases the GIL: sometimes it creates a channel, with a call of the operating system.
            code = self.release_gil.cuStreamCreateWithPriority(ctypes.byref(out), _abi.CU_STREAM_NON_BLOCKING, priority)
            self.check_code("cuStreamCreateWithPriority", code, device)
        self.call_count += 1
        return StreamInfo(self.fast, device, out.value, owned=True, priority=priority)

    def stream_reserve(self, device: int, count: int) -> None:
        """Create so many streams, and destroy them: CUDA keeps the resources of a destroyed stream.

        While a kernel was held, the creation of the 36th, the 79th, the 122nd … stream of the device blocked until the
        kernel ended, and with it the launches of all other threads (measured on an H200). On an idle device, 64 streams
        take 1.3 ms and 35 MB of device memory, 256 take 4.0 ms and 143 MB.
        """
        self.opened(device)
        with self._open_lock:
            if count <= self._streams_reserved.get(device, 0):
                return
            made: list[int] = []
            try:
                for _ in range(count):
                    made.append(self.make_stream(device, 0).handle)  # noqa: PERF401 - those before a failure, too
            finally:
                for handle in made:
                    self.release_gil.cuStreamDestroy(handle)
            self._streams_reserved[device] = count

    def stream_create(self, device: int, priority: int) -> int:
        self.opened(device)
        kept = self._kept.take(device, priority, lambda handle: self._is_free(device, handle))
        if kept is None:
            info = self.make_stream(device, priority)
            self._streams_created += 1
        else:
            info = StreamInfo(self.fast, device, kept, owned=True, priority=priority, exported=True)
        stream = next(self.handles)
        self.streams[stream] = info
        return stream

    def stream_default(self, device: int) -> int:
        """Return a new handle of the device's legacy default stream. It is valid in every context.

        The per-thread default stream is not used, because worker threads make some of the calls.
        """
        return self._default(device, _LEGACY)

    def _default(self, device: int, handle: int) -> int:
        opened = self.opened(device)
        calls = self._default_calls.get(device)
        if calls is None:
            calls = self._default_calls.setdefault(device, in_context(opened.current, self.release_gil))
        stream = next(self.handles)
        self.streams[stream] = StreamInfo(calls, device, handle, owned=False)
        return stream

    def stream_import(self, device: int, handle: int) -> int:
        """Import another library's stream. Each import needs its own `stream_destroy`.

        Calls that name the stream always release the GIL, because its hardware queue may be full. The default streams,
        0, 1 (``CU_STREAM_LEGACY``) and 2 (``CU_STREAM_PER_THREAD``), are those of ``device``, in every context: each
        import of one has a new handle, because several devices may have imported them. Any other handle must be a live
        ``CUstream``, which CUDA dereferences, and is returned.

        Raises
        ------
        WrongDeviceError
            The stream belongs to another device (``cuStreamGetDevice``).
        BusyError
            The stream is being captured into a graph.
        """
        if handle in _DEFAULT_STREAMS:
            return self._default(device, handle)
        opened = self.opened(device)
        if handle < 0 or handle % 2:  # odd handles are this driver's own
            raise StaleHandleError(f"{handle} is not the handle of a CUDA stream", handle=handle)
        known = self.streams.get(handle)
        if known is not None:
            if known.device != device:
                raise WrongDeviceError(f"stream 0x{handle:x} is in use as one of device {known.device}, not {device}")
            with self._import_lock:
                if self.streams.get(handle) is known:  # else another thread has just removed it
                    known.add_import()
                    return handle
        calls = self.release_gil
        status, owner = ctypes.c_int(), ctypes.c_int()
        self.check_code("cuStreamIsCapturing", calls.cuStreamIsCapturing(handle, ctypes.byref(status)), device)
        if status.value:  # `cuStreamGetDevice` would make the capture fail (measured)
            raise BusyError(f"stream 0x{handle:x} is being captured into a graph: end that capture first")
        code = calls.cuStreamGetDevice(handle, ctypes.byref(owner))
        self.check_code("cuStreamGetDevice", code, device)
        self.call_count += 2
        if owner.value != opened.handle:
            raise WrongDeviceError(f"stream 0x{handle:x} is of device {owner.value}, not {device}")
        with self._import_lock:
            known = self.streams.get(handle)
            if known is not None and known.device == device:  # another thread was faster
                known.add_import()
            else:
                self.streams[handle] = StreamInfo(calls, device, handle, owned=False)
        return handle

    def stream_device(self, handle: int) -> int:
        """Return the device of another library's stream; of a default stream that of the current context, or 0.

        Raises
        ------
        BusyError
            The stream is being captured into a graph.
        """
        self.load_library()
        calls, owner, status = self.release_gil, ctypes.c_int(), ctypes.c_int()
        if handle in _DEFAULT_STREAMS:
            context = ctypes.c_uint64()
            self.check_code("cuCtxGetCurrent", calls.cuCtxGetCurrent(ctypes.byref(context)))
            call, code = "cuCtxGetDevice", calls.cuCtxGetDevice(ctypes.byref(owner)) if context.value else 0
        else:
            code = calls.cuStreamIsCapturing(handle, ctypes.byref(status))
            self.check_code("cuStreamIsCapturing", code)
            if status.value:  # as in `stream_import`
                raise BusyError(f"stream 0x{handle:x} is being captured into a graph: end that capture first")
            call, code = "cuStreamGetDevice", calls.cuStreamGetDevice(handle, ctypes.byref(owner))
        self.check_code(call, code)
        self.call_count += 2
        number = owner.value  # that of a device that is not open is its index: `stream_import` checks it
        return next((index for index, opened in list(self.open_devices.items()) if opened.handle == number), number)

    def stream_handle(self, stream: int) -> int:
        info = self.stream_info(stream)
        info.export()
        return info.handle

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        return self.stream_info(stream).handle == handle

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream, or keep it if other libraries may use it. An imported stream is only removed.

        Work that it has accepted still runs. A stream whose ``CUstream`` was read is not destroyed: PyTorch uses the
        handle again when it frees a pinned tensor. With a destroyed stream the process would end (measured: signal 11,
        or ``context is destroyed``).
        """
        info = self.forget_stream(stream)
        if not info.owned:
            return
        if info.exported:
            self._kept.put(info.device, info.priority, info.handle)
            return
        code = self.release_gil.cuStreamDestroy(info.handle)
        if code:
            self.fail_release("cuStreamDestroy", code, info.device)
        else:
            self.call_count += 1

    def _is_free(self, device: int, handle: int) -> bool:
        """True if a kept stream is idle, not imported, and not being captured. False if a query fails.

        A captured stream is not queried, because a query would end the capture.
        """
        if handle in self.streams:
            return False
        status = ctypes.c_int()
        call, code = "cuStreamIsCapturing", self.fast.cuStreamIsCapturing(handle, ctypes.byref(status))
        if not code and not status.value:
            self.begin_queries()
            try:
                call, code = "cuStreamQuery", self.fast.cuStreamQuery(handle)
            finally:
                self.end_queries()
        if code and code != _abi.CUDA_ERROR_NOT_READY:
            error = self.error(call, code, device)
            if self.has_faulted:
                raise error
        return not code and not status.value

    def stream_priority(self, stream: int) -> int:
        info = self.stream_info(stream)
        out = ctypes.c_int()
        code = info.calls.cuStreamGetPriority(info.handle, ctypes.byref(out))
        self.check_code("cuStreamGetPriority", code, info.device)
        self.call_count += 1
        return out.value

    def stream_query(self, stream: int) -> bool:
        info = self.stream_info(stream)
        code = info.calls.cuStreamQuery(info.handle)
        if code and code != _abi.CUDA_ERROR_NOT_READY:
            self.fail("cuStreamQuery", code, info.device)
        self.call_count += 1
        return not code

    def stream_synchronize(self, stream: int) -> None:
        info = self.stream_info(stream)
        # This call must release the GIL. The calls of imported and default streams do.
        calls = self.release_gil if info.calls is self.keep_gil else info.calls
        code = calls.cuStreamSynchronize(info.handle)
        self.check_code("cuStreamSynchronize", code, info.device)
        self.call_count += 1

    def stream_wait(self, stream: int, event: int) -> None:
        try:
            info, awaited = self.streams[stream], self.events[event]
        except KeyError:
            raise self.unknown_stream_or_event(stream, event) from None
        code = info.calls.cuStreamWaitEvent(info.word, awaited.word, WAIT_DEFAULT)
        if code:
            self.fail("cuStreamWaitEvent", code, info.device)
        self.call_count += 1

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        """Return `stream_wait` bound to several streams. The streams are looked up only here."""
        events = self.events
        bound = [(info, info.word) for info in map(self.stream_info, streams)]
        count = len(bound)

        def wait(event: int) -> None:
            try:
                awaited = events[event].word
            except KeyError:
                raise self.unknown_handle("event", event) from None
            for info, word in bound:
                code = info.calls.cuStreamWaitEvent(word, awaited, WAIT_DEFAULT)
                if code:
                    self.fail("cuStreamWaitEvent", code, info.device)
            self.call_count += count

        return wait

    def stream_capturing(self, stream: int) -> bool:
        info = self.stream_info(stream)
        status = ctypes.c_int()
        code = info.calls.cuStreamIsCapturing(info.handle, ctypes.byref(status))
        if code:
            self.fail("cuStreamIsCapturing", code, info.device)
        self.call_count += 1
        return status.value != 0

    # Events

    def event_create(self, device: int, timing: bool) -> int:
        opened = self.opened(device)
        out = ctypes.c_uint64()
        with opened.current:
            code = self.fast.cuEventCreate(ctypes.byref(out), 0 if timing else _abi.CU_EVENT_DISABLE_TIMING)
            if code:
                self.fail("cuEventCreate", code, device)
        self.call_count += 1
        event = next(self.handles)
        self.events[event] = EventInfo(device, out.value, timing)
        return event

    def event_import(self, device: int, handle: int) -> int:
        """Return a new handle for another library's event, which must live until `event_destroy` forgets the handle."""
        self.opened(device)
        event = next(self.handles)
        self.events[event] = EventInfo(device, handle, timing=False, owned=False)
        return event

    def event_destroy(self, event: int) -> None:
        """Destroy an event. An imported event is only forgotten."""
        info = self.events.pop(event, None)
        if info is None:
            raise self.unknown_handle("event", event)
        if not info.owned:
            return
        code = self.fast.cuEventDestroy(info.handle)
        if code:
            self.fail_release("cuEventDestroy", code, info.device)
        else:
            self.call_count += 1

    def event_record(self, event: int, stream: int) -> None:
        # The devices are compared here, which takes 10 ns. CUDA's code 400 would not name the two devices.
        try:
            info, recorded = self.streams[stream], self.events[event]
        except KeyError:
            raise self.unknown_stream_or_event(stream, event) from None
        if recorded.device != info.device:
            self.check_event_device(recorded, info)
        code = info.calls.cuEventRecord(recorded.word, info.word)
        if code:
            self.fail("cuEventRecord", code, info.device)
        self.call_count += 1

    def recorder(self, stream: int) -> Callable[[int], None]:
        """Return `event_record` bound to one stream. The stream is looked up only here."""
        info, events = self.stream_info(stream), self.events
        word, device = info.word, info.device

        def record(event: int) -> None:
            try:
                recorded = events[event]
            except KeyError:
                raise self.unknown_handle("event", event) from None
            if recorded.device != device:
                self.check_event_device(recorded, info)
            code = info.calls.cuEventRecord(recorded.word, word)
            if code:
                self.fail("cuEventRecord", code, device)
            self.call_count += 1

        self.offer_native(record, info)
        return record

    def event_query(self, event: int) -> bool:
        try:
            info = self.events[event]
        except KeyError:
            raise self.unknown_handle("event", event) from None
        code = self.fast.cuEventQuery(info.word)
        if code and code != _abi.CUDA_ERROR_NOT_READY:
            self.fail("cuEventQuery", code, info.device)
        self.call_count += 1
        return not code

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Return the device time between two timing events that are done, in milliseconds.

        Raises
        ------
        InvalidArgumentError
            An event was created without timing, or never recorded.
        BusyError
            An event is not done.
        """
        first, last = self.event_info(start), self.event_info(end)
        if not (first.timing and last.timing):
            raise InvalidArgumentError(f"event {end if first.timing else start} was made without timing=True")
        out = ctypes.c_float()
        code = self.fast.cuEventElapsedTime(ctypes.byref(out), first.handle, last.handle)
        if code == _abi.CUDA_ERROR_INVALID_HANDLE:
            self.call_count += 1
            raise InvalidArgumentError("one of the two events was never recorded: record both, then wait for them")
        if code == _abi.CUDA_ERROR_NOT_READY:
            self.call_count += 1
            raise BusyError("one of the two events is not done: wait for both first")
        self.check_code("cuEventElapsedTime", code, first.device)
        self.call_count += 1
        return out.value

    # Captures of other libraries

    def begin_queries(self) -> None:
        self._exchange_capture_mode()

    def end_queries(self) -> None:
        """Restore the capture mode. The exchange is its own inverse: it has stored the previous mode."""
        if self.fault is None or self._forked:
            self._exchange_capture_mode()

    def _exchange_capture_mode(self) -> None:
        code = self.fast.cuThreadExchangeStreamCaptureMode(self._capture_mode.mode)
        if code:
            self.fail("cuThreadExchangeStreamCaptureMode", code)
        self.call_count += 1
