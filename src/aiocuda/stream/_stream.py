"""Stream: an order of work on a device, every step of it an awaitable."""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from .._checks import check_callback, flag
from .._event import Event
from .._mistakes import lacks
from .._statistics import StreamStatistics
from .._types import Priority, ProcessLocal, caller
from ..completion._operation import Operation, new_operation
from ..completion._prediction import INSTANT
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError, ClosedError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ..interchange._host_arrays import as_source, as_target
from ..interchange._streams import handle_of, lend
from ..kernels import Kernel
from ..memory._arrays import check_awaited
from ..memory._buffer import DeviceBuffer
from ..memory._unified import UnifiedBuffer
from . import _closing
from ._launches import NOTHING, Launches
from ._transfers import Transfers

if TYPE_CHECKING:
    from .._device import Device
    from ..graph import Capture

__all__ = ["Stream"]


_SYNCHRONIZE = "`await stream.synchronize()` waits for its work"
_HANDLE = "`async with stream.lend() as handle` gives CUDA's handle to another library"


@lacks(
    sync=_SYNCHRONIZE,
    wait_stream="stream.wait(other) makes it wait for another stream",
    wait_event="stream.wait(event) makes it wait for an event",
    record_event="stream.record() returns an event",
    query="stream.tail is None if all its work is done",
    cuda_stream=_HANDLE,
    ptr=_HANDLE,
    handle=_HANDLE,
    close="`await stream.aclose()` closes it, or `async with device.stream() as stream`",
    auto_synchronize="`async with device.stream() as stream` waits for its work at the end",
    launch_host_func="stream.add_callback(function) runs a function behind its work",
)
class Stream(ProcessLocal):
    """Work in order, on one device, for one event loop.

    Made by `aiocuda.Device.stream`. Every verb enqueues at once and returns an `Operation` to await; what one stream is
    given runs in that order, what several are given runs side by side. ``async with`` closes it at the end, after its
    work; left by an exception or a cancellation it waits for nothing, see `aclose`. Otherwise it is closed with its
    device.

    Attributes
    ----------
    name : str
    device : Device
    priority : str
        ``"high"``, ``"normal"`` or ``"low"``.
    """

    def __init__(self, device: Device, queue: StreamQueue, priority: Priority, opened_at: str) -> None:
        self.device = device
        self.priority = priority
        self._opened_at = opened_at
        self._owner: object = None
        self._queue = queue
        self._memory = device.memory
        self._launches = Launches(device, queue)
        self._transfers = Transfers(device, queue)
        queue.face(self)

    # -- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> DeviceBuffer:
        """Device memory, uninitialised, there at once. ``cuMemAllocFromPoolAsync``.

        Raises
        ------
        DeviceOutOfMemory
            No room, after a trim and one retry.
        """
        queue = self._queue
        queue.check()
        return self._memory.empty(queue, shape, dtype)

    def empty_like(self, array: npt.ArrayLike | DeviceBuffer) -> DeviceBuffer:
        """Device memory of an array's shape and dtype."""
        if isinstance(array, (np.ndarray, DeviceBuffer)):
            return self.empty(array.shape, array.dtype)
        source = as_source(array)
        return self.empty(source.shape, source.dtype)

    # -- copies --------------------------------------------------------------------------------------------------

    def upload(self, array: Any) -> Operation[DeviceBuffer]:
        """Copy an array to the device; the result is a new buffer.

        Parameters
        ----------
        array
            A C-contiguous NumPy array of any shape and any native dtype without objects; bytes or a memoryview; an
            object with ``__dlpack__`` in host memory, such as a CPU tensor of PyTorch. It is borrowed until the
            operation is done. The device reads pinned memory directly. ``cuMemcpyHtoDAsync``.
        """
        source = as_source(array, self.device._pinned)
        queue = self._queue
        queue.check()
        target = self._memory.empty(queue, source.shape, source.dtype, marked=False)
        try:
            operation = self._transfers.up(target, source, target)
        except BaseException:
            target._block.allocation_event = queue.mark()  # nobody has it, and it goes back behind its allocation
            raise
        if source.nbytes:
            # Its event, if it has one by now, stands behind the allocation as well; what waits on the host may never.
            target._block.allocation_event = operation if operation._lease is not None else queue.mark()
        return operation

    def copy(self, target: Any, source: Any) -> Operation[None]:
        """Copy between host and device, or between device buffers, of one device or of two.

        Both sides have the same dtype and the same shape; raw bytes, one-dimensional uint8, fit any of as many bytes.
        The host side is what `upload` takes, and writable if it is the target. It is borrowed until the operation is
        done.

        Raises
        ------
        InvalidArgumentError
            Sizes or shapes differ; the two overlap; an array is not C-contiguous, or read-only and to be written;
            neither side is device memory.
        InvalidTypeError
            Dtypes differ, or something that cannot be copied.
        BusyError
            The array, or part of it, is being written by another copy. (A pinned one may be read by the device behind
            that, in the order of streams.)
        """
        return self._transfers.copy(target, source)

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None) -> Operation[npt.NDArray[Any]]:
        """Copy a buffer to the host; the result is ``out``, or a new array. ``cuMemcpyDtoHAsync``."""
        if not isinstance(buffer, DeviceBuffer):
            check_awaited(buffer, "the buffer to download")
            raise InvalidTypeError(
                f"download takes a device buffer, as stream.empty and `await stream.upload(array)` make, not "
                f"{type(buffer).__name__}"
            )
        array: npt.NDArray[Any] = (
            np.empty(buffer.shape, buffer.dtype) if out is None else as_target(out, self.device._pinned)
        )
        return self._transfers.down(array, buffer, array if out is None else out)

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        """Set every item of a buffer to a value of its dtype. ``cuMemsetD8Async`` and its kin."""
        return self._transfers.fill(buffer, value)

    def prefetch(self, buffer: UnifiedBuffer, to: Any = "device") -> Operation[None]:
        """Bring managed memory to where it will be used next. ``cuMemPrefetchAsync``.

        Parameters
        ----------
        to
            ``"device"`` for this stream's, ``"host"``, a `Device`, or a device's index.

        Raises
        ------
        UnsupportedError
            The device cannot (``concurrentManagedAccess`` is 0): ask ``device.properties.concurrent_managed_access``.
        """
        return self._transfers.prefetch(buffer, to)

    # -- work ----------------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
    ) -> Operation[None]:
        """Run a kernel. ``cuLaunchKernelEx``.

        Parameters
        ----------
        kernel
            Compiled and loaded when it is first launched, on a worker thread; until then it waits in its place.
        grid, block
            Blocks, and threads per block: an integer, or one to three of them.
        *args
            One for each of the kernel's parameters: buffers for pointers, numbers for scalars.
        shared_bytes
            Dynamic shared memory per block.
        """
        launches = self._launches
        bound = launches.last
        if (
            bound is None
            or kernel is not bound.kernel
            or grid is not bound.grid
            or block is not bound.block
            or shared_bytes is not bound.shared_bytes
        ):
            bound = launches.find(kernel, grid, block, shared_bytes)
            if bound is None:
                return launches.launch_new(kernel, grid, block, args, shared_bytes)
        if bound.pointers:
            return launches.launch(bound, args)
        values = (bound.bind(args),) if args or bound.takes_any else NOTHING
        queue = self._queue
        operation: Operation[None] = new_operation(queue, "launch", bound.estimate, args)
        queue.submit(operation, bound.launcher, values)
        launches.launches += 1
        return operation

    # -- order ---------------------------------------------------------------------------------------------------

    def record(self, timing: bool = False, *, event: Event | None = None) -> Event:
        """An event behind all work enqueued so far. ``cuEventRecord``.

        Parameters
        ----------
        timing
            Make an event that can be asked for elapsed time.
        event
            Record this one, from an `aiocuda.EventPool`, instead of a new one; its timing is as it was acquired.
        """
        queue = self._queue
        queue.check()
        if event is None:
            event = Event(queue.device_state, flag(timing, "timing"))
        elif not isinstance(event, Event):
            raise InvalidTypeError(f"event must be an aiocuda.Event, not {type(event).__name__}")
        elif event._device_state is not queue.device_state:
            raise WrongDeviceError(f"{event!r} belongs to another device: an event is recorded on its own")
        elif not event.timing and flag(timing, "timing"):
            raise InvalidArgumentError(f"{event!r} was made without timing: pool.acquire(timing=True) makes one")
        event._record(queue)
        return event

    def wait(self, other: Operation[Any] | Event | Stream) -> Operation[None]:
        """Later work of this stream waits, on the device, for an operation, an event or all of another stream.

        ``cuStreamWaitEvent``. The host waits for nothing.
        """
        queue = self._queue
        queue.check()
        operation: Operation[Any] | None
        if isinstance(other, Operation):
            operation, theirs = other, other._queue
        elif isinstance(other, Event):
            operation = other.operation
            theirs = operation._queue
        elif isinstance(other, Stream):
            operation, theirs = other._end(), other._queue
        else:
            raise InvalidTypeError(
                f"a stream waits for an operation, an event or a stream, not {type(other).__name__}; "
                f"a raw handle becomes a stream by Stream.from_handle(device, handle)"
            )
        if theirs._driver is not queue._driver:
            raise WrongDeviceError(f"{other!r} belongs to another driver: await it, or copy over the host")
        if operation is not None and operation._state < 0:  # recorded into a graph, and never enqueued
            return self.device._capture_too(self, operation)
        if operation is None or operation._passed:
            failure = None if operation is None else operation._failure
            if operation is None or failure is None or failure.delivered:
                return queue.enqueue("wait", INSTANT, _nothing, ())
        operation._queue.check_loop()
        return queue.wait(operation)

    def _end(self) -> Operation[Any] | None:
        """What another stream waits for that waits for all of this one."""
        queue = self._queue
        if queue.shared and not queue.closed:
            queue.check()
        else:
            queue.check_loop()
        return queue.end()

    def synchronize(self) -> Operation[None]:
        """Done when everything enqueued so far is."""
        return self._queue.enqueue("synchronize", INSTANT, _nothing, ())

    def add_callback(
        self, fn: Callable[[Operation[None]], object], *, context: contextvars.Context | None = None
    ) -> Operation[None]:
        """Run ``fn(operation)`` on the event loop when all work enqueued so far has finished, failed or not; once."""
        check_callback(fn, context)
        operation = self._queue.enqueue("callback", INSTANT, _nothing, ())
        operation.add_done_callback(fn, context=context)
        return operation

    def capture(self) -> Capture:
        """Record what the stream is given into a graph, as long as a ``with`` block lasts; nothing runs meanwhile.

        See `aiocuda.Graph`. A stream that waits for something captured is captured, too.
        """
        return self.device._capture(self)

    # -- others --------------------------------------------------------------------------------------------------

    @classmethod
    def from_handle(cls, device: Device, handle: Any) -> Stream:
        """A stream that somebody else made: work enqueued here and there shares its order.

        It is never closed by us, and never queues on the host: what it cannot take at once raises `BusyError`. So load
        a kernel first, by `aiocuda.Device.load`. Nor does it disturb a capture of somebody else's: while there is one,
        every verb raises `BusyError`, and nothing reaches the stream.

        Parameters
        ----------
        handle
            CUDA's handle, an integer; or an object with ``__cuda_stream__``, which is held as long as the stream.
        """
        if not hasattr(type(device), "_face"):
            raise InvalidTypeError(f"a stream is imported on an aiocuda.Device, not on {type(device).__name__}")
        queue = device._imports.import_queue(device._loop_state(), handle_of(handle))
        stream = device._face(queue, "normal", caller(2))
        stream._owner = handle  # CUDA's stream may end with it
        return stream

    def adopt(self, array: Any, *, read_only: bool = False) -> Any:
        """Return a buffer over another library's array, at once: the same memory, nothing is copied.

        This stream waits, on the device, for the work that the producer has enqueued. The buffer holds the array. It
        releases the array once it has been freed, or nothing refers to it, and all operations that use it are done.

        Parameters
        ----------
        array
            Any object with ``__dlpack__`` or ``__cuda_array_interface__``, such as an array of PyTorch or CuPy. It is
            C-contiguous and on this stream's device. A bare DLPack capsule names no producer that could make this
            stream wait: order its work by `wait`.
        read_only
            Accept an array that its producer marks as read-only. The caller promises that no operation writes it.

        Returns
        -------
        DeviceBuffer
            Also for managed memory; a `PinnedBuffer` for page-locked host memory. For that the producer's work must be
            done: DLPack orders host memory by no stream.

        Raises
        ------
        InvalidArgumentError
            The array is not contiguous, or read-only, or its description contradicts itself.
        InvalidTypeError
            It is no device array, or NumPy has no dtype for its items.
        WrongDeviceError
            It is on another device, or on another kind of device.
        StaleHandleError
            A capsule that was used before.
        BusyError
            A buffer of aiocuda that an operation on the host still uses; or the producer's stream is being captured.
        """
        return self._memory.foreign.adopt(self._queue, array, read_only)

    def lend(self) -> AbstractAsyncContextManager[int]:
        """The stream's CUDA handle for another library to enqueue on, during an ``async with`` block.

        Operations that wait on the host are submitted first. Until the block ends no operation may wait on the host, so
        that both sides see one order. While another library captures the stream, the methods of this stream raise
        `BusyError`; the capture has to end before the block does.

        The CUDA stream is never destroyed afterwards, as the other library may still use it: PyTorch does when it frees
        a pinned tensor. Once this stream is closed, a later one may have the same handle.
        """
        return lend(self._queue, functools.partial(_closing.returned, self.device))

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (0, handle): CUDA's stream protocol, version 0. As after `lend`, the stream is never destroyed."""
        self._queue.check()
        if self._queue.host_queue.entries:
            raise BusyError(f"{self._queue.name} still has work on the host: use `async with stream.lend()`")
        return (0, self._queue.device_state.driver.stream_handle(self._queue.handle))

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in reports."""
        return self._queue.name

    @property
    def closed(self) -> bool:
        """Has it been closed?"""
        return self._queue.closed

    @property
    def tail(self) -> Operation[Any] | None:
        """The newest operation that the device is not known to be done with; None if there is none."""
        return self._queue.tail()

    def statistics(self) -> StreamStatistics:
        """What went through it so far."""
        self.device.memory.look()
        latencies = np.fromiter(self._queue.latencies, float)
        average, p50, p99 = (0.0, 0.0, 0.0)
        if latencies.size:
            average = float(latencies.mean()) * 1e3
            p50, p99 = (float(value) * 1e3 for value in np.percentile(latencies, (50, 99)))
        transfers = self._transfers
        return StreamStatistics(
            operations=self._queue.enqueued,
            launches=self._launches.launches,
            uploads=transfers.uploads,
            downloads=transfers.downloads,
            copies=transfers.copies,
            fills=transfers.fills,
            bytes_uploaded=transfers.bytes_uploaded,
            bytes_downloaded=transfers.bytes_downloaded,
            bytes_copied=transfers.bytes_copied,
            average_ms=average,
            p50_ms=p50,
            p99_ms=p99,
            live_bytes=self._queue.live_bytes,
            peak_bytes=self._queue.peak_bytes,
        )

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for the work that it has accepted, then close it.

        Buffers made by it live on. A second call waits for the first. A cancellation meanwhile leaves it, as an
        exception leaves ``async with``: what is still on the host is withdrawn, what it has accepted runs on, and
        nothing is waited for. The device's end waits for it.

        Raises
        ------
        BusyError
            It is lent.
        """
        await _closing.close(self.device, self._queue)

    if not TYPE_CHECKING:  # a type checker reports it by itself

        def __enter__(self) -> NoReturn:
            raise InvalidTypeError(
                f"{self!r} is closed by `async with`, not `with`: use `async with device.stream() as stream`"
            )

        def __exit__(self, *exc: object) -> None: ...

    async def __aenter__(self) -> Self:
        if self._queue.closed:
            raise ClosedError(f"stream {self.name!r} has been closed: make another one by device.stream()")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            _closing.leave(self.device, self._queue)

    def __del__(self) -> None:
        queue = getattr(self, "_queue", None)
        if queue is not None and not queue.closed and not queue.imported and not self.device.closed:
            warnings.warn(
                f"unclosed {self!r}, opened at {self._opened_at}: use `async with device.stream() as stream`, "
                "or keep it as long as the device",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        state = (
            "closed" if self._queue.closed else f"{len(self._queue.pending) + len(self._queue.host_queue)} unfinished"
        )
        return f"<Stream {self.name} on {self.device.name}: {state}>"


def _nothing() -> None:
    """For operations that are only a place in the order."""
