"""Stream: work in order on one device. Each method enqueues, and returns an awaitable."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..._base._checks import as_integer, check_callback, check_integer
from ..._base._label import labelled
from ..._base._launch import read_launch
from ..._base._log import log
from ..._base._mistakes import lacks, or_none, refuses
from ..._base._owner import Outcome, Owner
from ..._base._percentiles import mean_p50_p99
from ..._base._scope import Scope
from ..._base._shared import copied
from ..._base._statistics import StreamStatistics
from ..._base._types import Priority, SourceLine
from ..._core import ENDED, INSTANT, EnqueuingStream, Operation, Ring, StreamOperation, nothing
from ...completion._foreign_work import handle_of
from ...errors import BusyError, ClosedError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ...kernels import Kernel
from ...memory._allocations import Allocations
from ...memory._buffer import DeviceBuffer
from ...memory._unified import UnifiedBuffer
from ...memory.interchange._host_arrays import as_source
from ...memory.interchange._loan import Loan
from .._event import Event, record_event
from .._loop_state import LoopState
from .._resources import DeviceResources, resources_of
from ._checker import CheckingHook
from ._hook import RecordedOperation, StreamHook
from ._launches import Launches
from ._memory_access import MemoryAccess
from ._submissions import Submissions, check_submittable
from ._transfers import Transfers

if TYPE_CHECKING:
    from .._device import Device
    from ..graphs._graph import Capture

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["CheckedStream", "Stream", "StreamView", "launch_converted", "open_stream", "submit_call"]

_CURE = "use `async with device.stream() as stream`, or keep it as long as the device"

_LAUNCH = "launch takes grid=, block=, n=, shared_bytes= and label=; the kernel's own arguments have no keywords"
_LAUNCH_KEYWORDS = {
    "cluster": "write `__cluster_dims__(x, y, z)` after `__global__` in the kernel's source",
    "cooperative": "no launch of this library is cooperative. Split the kernel where its blocks wait for each other, "
    "into two launches of one stream; or launch it by cuda.core, in `stream.submit(function)`",
    **dict.fromkeys(("shared", "shared_mem"), "it is called shared_bytes"),
    "size": "use n=",
    "stream": "the stream is the object whose launch is called, `stream.launch(kernel, grid, block, *arguments)`",
    "timeout": "`async with asyncio.timeout(seconds)` limits the await",
}


@lacks
@refuses(__enter__="is closed by `async with`, not `with`: use `async with device.stream() as stream`")
class Stream(EnqueuingStream, Owner):
    """Work in order, on one device, for one event loop.

    Made by `aiocuda.Device.stream`. Every method enqueues at once and returns an `Operation` to await. Work of one
    stream runs in the order of the calls, work of several streams runs side by side. ``async with`` closes the stream
    at the end, after its work; after an exception or a cancellation it does not wait, see `aclose`. A stream that is
    not closed is closed with its device.

    ``label=`` names one operation in errors, log events, timelines and profiles; `aiocuda.label` names all operations
    of a block. The functions of `submit` take arguments of any name, so it has no ``label=``.
    """

    _scope: Scope | None = None  # for the end
    _closed_by = ""  # its owner, if the program must not close the stream

    if TYPE_CHECKING:
        _hook: StreamHook | None
        _launches: Launches
        _transfers: Transfers

        @overload  # type: ignore[override]  # that of the core takes any keyword
        def launch(
            self, kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], *args: Any,
            shared_bytes: int = 0, label: str | None = None,
        ) -> Operation[None]: ...  # fmt: skip

        @overload
        def launch(
            self, kernel: Kernel, *args: Any, n: int, block: int = 256, shared_bytes: int = 0, label: str | None = None
        ) -> Operation[None]: ...

        def launch(self, *args: Any, **options: Any) -> Operation[None]: ...

    @or_none
    def __init__(
        self, resources: DeviceResources, queue: Ring, priority: Priority, opened_at: str, owner: object = None
    ) -> None:
        if not isinstance(resources, DeviceResources):
            raise InvalidTypeError("a stream is made by its device: `async with device.stream() as stream`")
        self.device: Device = resources.device  #: the device that it belongs to
        self.priority = priority  #: ``"high"``, ``"normal"`` or ``"low"``
        self._resources = resources
        self._opened_at = opened_at
        self._owner = owner  # of an imported stream's handle: the CUDA stream may be destroyed with it
        self._is_owned = False
        self._hook = None if resources.checker is None else CheckingHook(resources.checker, queue)
        self._queue = queue
        self._memory = resources.memory
        self._access = MemoryAccess(resources, queue)
        self._launches = Launches(resources, queue, self._access)
        self._newest = self._launches.newest
        self._transfers = Transfers(resources, queue, self._access)
        self._submissions = Submissions(queue, self._access)
        queue.rare.set_stream(self)
        queue.rare.opened_at = opened_at

    def _put_hook(self, hook: StreamHook | None) -> StreamHook | None:
        """Run this hook in place of the methods from now on. Return the former one."""
        former, self._hook = self._hook, hook
        return former

    def _hand_over(self, made_at: SourceLine | None, closed_by: str) -> Self:
        """Return the stream, which another object closes: see `owned`."""
        if made_at is not None:
            self._opened_at = str(made_at)
        self._is_owned = True
        self._closed_by = closed_by
        return self

    # -- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> DeviceBuffer:
        """Return new device memory, uninitialised, without waiting. ``cuMemAllocFromPoolAsync``.

        Raise `DeviceOutOfMemory` if the device has not enough memory, also after a trim and one retry.
        """
        queue = self._queue
        queue.check()
        if self._hook is not None:
            buffer = self._hook.call("empty", functools.partial(self._memory.empty, queue), shape, dtype)
        else:
            buffer = self._memory.empty(queue, shape, dtype)
        allocations = self._transfers.allocations
        allocations.references.append(weakref.ref(buffer._block))
        if len(allocations.references) > allocations.most:
            allocations.live()
        return buffer

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> DeviceBuffer:
        """Return new device memory whose bytes are 0, without waiting: `empty`, then a `fill` in the stream's order.

        Any dtype is possible. Another stream has to `wait` for this one before it uses the memory, as for other work.
        """
        buffer = self.empty(shape, dtype)
        self.fill(buffer.reshape(-1).view(np.uint8), 0)
        return buffer

    def empty_like(self, array: npt.ArrayLike | DeviceBuffer) -> DeviceBuffer:
        """Return new device memory of an array's shape and dtype."""
        if isinstance(array, (np.ndarray, DeviceBuffer)):
            return self.empty(array.shape, array.dtype)
        source = as_source(array)
        return self.empty(source.shape, source.dtype)

    # -- copies --------------------------------------------------------------------------------------------------

    def upload(self, array: Any, *, label: str | None = None) -> Operation[DeviceBuffer]:
        """Copy an array to the device; the result is a new buffer. ``cuMemcpyHtoDAsync``.

        Parameters
        ----------
        array
            A C-contiguous NumPy array of any shape and any native dtype without objects; bytes or a memoryview; an
            object with ``__dlpack__`` in host memory, such as a CPU tensor of PyTorch. It is borrowed until the
            operation is done. The device reads pinned memory directly.
        """
        if label is not None:
            return labelled(label, self.upload, array)
        if self._hook is not None:
            return self._hook.call("upload", self._transfers.upload, array)
        return self._transfers.upload(array)

    def _copy_unusual(self, target: Any, source: Any, label: str | None) -> Operation[None]:
        """Do a copy with a label, or by the hook of the stream."""
        if label is not None:
            return labelled(label, self.copy, target, source)
        assert self._hook is not None
        return self._hook.call("copy", self._transfers.copy, target, source)

    def download(
        self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None, *, label: str | None = None
    ) -> Operation[npt.NDArray[Any]]:
        """Copy a buffer to the host; the result is ``out``, or a new array. ``cuMemcpyDtoHAsync``."""
        if label is not None:
            return labelled(label, self.download, buffer, out)
        if self._hook is not None:
            return self._hook.call("download", self._transfers.download, buffer, out)
        return self._transfers.download(buffer, out)

    def fill(self, buffer: DeviceBuffer, value: object, *, label: str | None = None) -> Operation[None]:
        """Set every item of a buffer to a value of its dtype. ``cuMemsetD8Async``, ``cuMemsetD16Async`` …"""
        if label is not None:
            return labelled(label, self.fill, buffer, value)
        if self._hook is not None:
            return self._hook.call("fill", self._transfers.fill, buffer, value)
        return self._transfers.fill(buffer, value)

    def prefetch(self, buffer: UnifiedBuffer, to: Any = "device", *, label: str | None = None) -> Operation[None]:
        """Move managed memory to the place of its next use. ``cuMemPrefetchAsync``.

        ``to`` is ``"device"`` for this stream's, ``"host"``, a `Device`, or a device's index.
        Raise `UnsupportedError` if ``device.properties.concurrent_managed_access`` is False.
        """
        if label is not None:
            return labelled(label, self.prefetch, buffer, to)
        if self._hook is not None:
            return self._hook.call("prefetch", self._transfers.prefetch, buffer, to)
        return self._transfers.prefetch(buffer, to)

    # -- work ----------------------------------------------------------------------------------------------------

    def _launch_unusual(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int, label: str | None,
        unknown: dict[str, Any],
    ) -> Operation[None]:  # fmt: skip
        """Do a launch with keywords, or by the hook of the stream."""
        if unknown:
            kernel, grid, block, args = read_launch(
                "Stream.launch", (kernel, grid, block, *args), unknown, _LAUNCH, _LAUNCH_KEYWORDS
            )
            if not grid and "n" in unknown:
                self._launches.check_empty(kernel, block, args, shared_bytes)
                return self.synchronize(label=label)
            return self.launch(kernel, grid, block, *args, shared_bytes=shared_bytes, label=label)
        if label is not None:
            return labelled(label, self.launch, kernel, grid, block, *args, shared_bytes=shared_bytes)
        assert self._hook is not None
        return self._hook.call("launch", self._launches.enqueue, kernel, grid, block, args, shared_bytes)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        """Call a function that enqueues work of another library on this stream; the result is what it returns.

        The function is called once, on the loop's thread, when the host queue of the stream has reached it: normally at
        once. The operation is done when the device has finished everything that the function enqueued. The arguments
        and the result are held until then. At most ``submit_ahead`` submissions (see `Device.stream`) are on the device
        and unfinished; the others wait on the host, because a function may enqueue more than a hardware queue holds.

        On the host and simulated drivers the function runs on a thread of the driver, in stream order, so that a
        library that computes on the host does its work there.

        Parameters
        ----------
        function
            A plain function. Stream methods raise `BusyError` inside it; exporting a buffer is allowed. The context
            variables of this call are visible in it.
        *args, **kwargs
            Its arguments. A `DeviceBuffer` counts as read and written.

        Raises
        ------
        InvalidTypeError
            ``function`` is a coroutine function, or not callable.

        Notes
        -----
        An exception of the function fails the operation, and later operations of the stream are skipped, as after every
        failed submission; the device has not faulted.
        """
        check_submittable(function)
        if self._hook is not None:
            return self._hook.call("submit", self._submissions.enqueue, function, args, kwargs)
        return self._submissions.enqueue(function, args, kwargs)

    # -- order ---------------------------------------------------------------------------------------------------

    def record(self, timing: bool = False, *, event: Event | None = None, label: str | None = None) -> Event:
        """Record an event after all work enqueued so far. ``cuEventRecord``.

        Parameters
        ----------
        timing
            Make an event that can be asked for elapsed time.
        event
            Record this event, from an `aiocuda.EventPool`, instead of a new one; its timing is as it was acquired.
        """
        if label is not None:
            return labelled(label, self.record, timing, event=event)
        if self._hook is not None:
            return self._hook.call("record", functools.partial(record_event, self._queue), timing, event)
        return record_event(self._queue, timing, event)

    def wait(self, other: Operation[Any] | Event | Stream, *, label: str | None = None) -> Operation[None]:
        """Let later work of this stream wait, on the device, for an operation, an event or all work of a stream.

        ``cuStreamWaitEvent``. The host does not wait.
        """
        if label is not None:
            return labelled(label, self.wait, other)
        if self._hook is not None:
            return self._hook.call("wait", self._wait, other)
        return self._wait(other)

    def _wait(self, other: Operation[Any] | Event | Stream) -> Operation[None]:
        queue = self._queue
        queue.check()
        operation: StreamOperation[Any] | None
        if isinstance(other, Event):
            other = other.operation
        if isinstance(other, StreamOperation):
            operation, theirs = other, other.queue

        elif isinstance(other, Stream):
            operation, theirs = other._last_work(), other._queue
        else:
            if isinstance(other, (list, tuple)):
                cure = "call it for each of them"
            elif isinstance(other, Awaitable):
                cure = "await it first; in a coordinator, after= orders operations"
            else:
                cure = "a raw handle becomes a stream by Stream.from_handle(device, handle)"
            raise InvalidTypeError(
                f"a stream waits for an operation, an event or a stream, not {type(other).__name__}: {cure}"
            )
        if theirs.driver is not queue.driver:
            raise WrongDeviceError(f"{other!r} belongs to another driver: await it, or copy over the host")
        if isinstance(operation, RecordedOperation):
            return operation.joined_by(self)
        if operation is None or operation.is_settled:
            failure = None if operation is None else operation.failure
            if operation is None or failure is None or failure.delivered:
                return queue.enqueue("wait", INSTANT, nothing, ())
        operation.queue.check_loop()
        waiting: Operation[None] = queue.rare.wait(operation)
        return waiting

    def _last_work(self) -> StreamOperation[Any] | None:
        """Return the operation to wait for in order to wait for all work of this stream; None if nothing is left."""
        queue = self._queue
        if queue.shared and not queue.closed:
            queue.check()
        else:
            queue.check_loop()
        return queue.end() if self._hook is None else self._hook.call("end", queue.end)

    def synchronize(self, *, label: str | None = None) -> Operation[None]:
        """Return an operation that is done when all work enqueued so far is."""
        if label is not None:
            return labelled(label, self.synchronize)
        if self._hook is not None:
            return self._hook.call(
                "synchronize", functools.partial(self._queue.enqueue, "synchronize", INSTANT, nothing, ())
            )
        return self._queue.enqueue("synchronize", INSTANT, nothing, ())

    def _awaited(self) -> tuple[Operation[None]]:
        """Return what `aiocuda.wait` waits for."""
        queue = self._queue
        if queue.recorded or (queue.shared and queue.rare.is_captured()):
            raise UnsupportedError(f"{self.name} is being captured into a graph: wait for a launch of the graph")
        return (self.synchronize(),)

    def add_callback(
        self,
        fn: Callable[[Operation[None]], object],
        *,
        context: contextvars.Context | None = None,
        label: str | None = None,
    ) -> Operation[None]:
        """Run ``fn(operation)`` on the event loop when all work enqueued so far has finished, failed or not; once."""
        if label is not None:
            return labelled(label, self.add_callback, fn, context=context)
        check_callback(fn, context)
        enqueue = functools.partial(self._queue.enqueue, "callback", INSTANT, nothing, ())
        operation = enqueue() if self._hook is None else self._hook.call("add_callback", enqueue)
        operation.add_done_callback(fn, context=context)
        return operation

    def capture(self) -> Capture:
        """Record the work of the stream into a graph, for the duration of a ``with`` block. Nothing runs in the block.

        See `aiocuda.Graph`. A stream that waits for a captured operation is captured, too.
        """
        capture: Callable[[], Capture] = functools.partial(self._resources.capture, self._resources, self)
        return capture() if self._hook is None else self._hook.call("capture", capture)

    # -- imported streams ----------------------------------------------------------------------------------------

    @classmethod
    def from_handle(cls, device: Device, handle: Any) -> Stream:
        """Import a stream that another library has created: work of both sides shares its order.

        aiocuda never destroys it, and holds no work for it on the host: work that the stream cannot take at once raises
        `BusyError`. So load a kernel first, by `aiocuda.Device.load`. While the other library captures the stream into
        a graph, every method raises `BusyError` and nothing reaches the stream, so that the capture is not disturbed.

        Parameters
        ----------
        handle
            CUDA's handle, an integer; or an object with ``__cuda_stream__``, which is held as long as the stream.
        """
        resources = resources_of(device)
        number = handle._export(_handle) if isinstance(handle, Stream) else handle_of(handle)
        queue = resources.imports.import_queue(resources.loop_state(), number)
        return _new_stream(resources, queue, "normal", str(SourceLine.of_caller()), handle)

    def adopt(self, array: Any, *, read_only: bool = False) -> Any:
        """Return a buffer over another library's array, without waiting and without a copy: the same memory.

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
        """Return the stream's CUDA handle for another library to enqueue on, during an ``async with`` block.

        Operations that wait on the host are submitted first. Until the block ends no operation may wait on the host, so
        that both sides see one order. While another library captures the stream, the methods of this stream raise
        `BusyError`; the capture has to end before the block does.

        The CUDA stream is never destroyed afterwards, as the other library may still use it: PyTorch does when it frees
        a pinned tensor. Once this stream is closed, a later one may have the same handle.
        """
        loan = functools.partial(Loan, self._queue, self._resources.streams.loan_ended)
        return loan() if self._hook is None else self._hook.call("lend", loan)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (0, handle): CUDA's stream protocol, version 0. As after `lend`, the stream is never destroyed.

        Raises
        ------
        UnsupportedError
            The stream's device is no GPU: another library would take the handle for a stream of CUDA. `from_handle`
            takes the stream itself.
        BusyError
            The stream still has work on the host.
        ClosedError, NoEventLoopError, WrongLoopError, StaleHandleError
            As for each method of the stream.
        """
        return (0, self._export(_handle_of_cuda))

    def _export(self, handle_of_queue: Callable[[Ring], int]) -> int:
        self._queue.check()
        if self._queue.rare.host_queue.entries:
            raise BusyError(f"{self._queue.name} still has work on the host: use `async with stream.lend()`")
        export = functools.partial(handle_of_queue, self._queue)
        return export() if self._hook is None else self._hook.call("__cuda_stream__", export)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The stream's name in reports."""
        return self._queue.name

    @property
    def _allocations(self) -> Allocations:
        """What the program has allocated through this object, for `DeviceMemory.free_all`."""
        return self._transfers.allocations

    @property
    def closed(self) -> bool:
        """True if it refuses new work: it has been closed, or is being closed."""
        return self._queue.closed

    @property
    def tail(self) -> Operation[Any] | None:
        """The newest operation that is not known to have finished; None if there is none."""
        return self._queue.tail()

    def record_memory(self, nbytes: int) -> None:
        """Count memory that another library holds on this stream in ``live_bytes`` and ``peak_bytes`` of `statistics`.

        Nothing is allocated or freed, and `DeviceMemory.statistics` does not count it.

        Parameters
        ----------
        nbytes
            Bytes that the library has allocated; a negative number: that it has released.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            More bytes would be released than were recorded; no integer.
        ClosedError, NoEventLoopError, WrongLoopError, StaleHandleError
            As for each method of the stream.
        """
        nbytes = as_integer(nbytes)
        check_integer(nbytes, "nbytes")
        self._queue.rare.record_memory(nbytes)

    def statistics(self) -> StreamStatistics:
        """Return counts of the stream's work so far."""
        self._resources.memory.look()
        average, p50, p99 = (seconds * 1e3 for seconds in mean_p50_p99(copied(self._queue.latencies)))
        transfers = self._transfers
        return StreamStatistics(
            operations=self._queue.enqueued, launches=self._newest.launches,
            uploads=transfers.uploads, downloads=transfers.downloads, copies=transfers.copies, fills=transfers.fills,
            bytes_uploaded=transfers.bytes_uploaded, bytes_downloaded=transfers.bytes_downloaded,
            bytes_copied=transfers.bytes_copied, average_ms=average, p50_ms=p50, p99_ms=p99,
            live_bytes=self._queue.live_bytes, peak_bytes=self._queue.peak_bytes,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for the work that the stream has accepted, then close it.

        Its buffers stay valid. A second call waits for the first. A cancelled wait leaves the stream, as an exception
        leaves ``async with``: work that is still on the host is withdrawn, work that the device has accepted
        runs on, and nothing waits for it but the device's own `Device.aclose`. Raise `BusyError` if the stream is lent,
        or if it is that of a batch, of a stage or of a coordinator, which still need it.
        """
        await (self._close() if self._hook is None else self._hook.call("aclose", self._close))

    async def _close(self) -> None:
        queue = self._queue
        if queue.obstacles & ENDED:
            return
        if self._closed_by:
            raise self._owned_error()
        if queue.rare.lent:
            self._resources.streams.check_not_lent(queue)
        await self._life().aclose(self)

    def _life(self) -> Scope:
        """Return the scope of the stream, for its end. Before that, its queue makes all checks."""
        if self._scope is None:
            queue = self._queue
            self._scope = Scope(
                queue.name, "make a stream in each loop, share the device", "make another one by device.stream()",
                loop=queue.loop, wrong_loop=queue.device_state.wrong_loop,
            )  # fmt: skip
        return self._scope

    def _refuse(self) -> None:
        queue = self._queue
        if not queue.obstacles & ENDED:
            queue.rare.refuse()

    def _unfinished(self) -> int:
        queue = self._queue
        if queue.obstacles & ENDED or not (queue.pending or queue.on_host):
            return 0
        return len(queue.pending) + len(queue.rare.host_queue)

    async def _drain(self) -> None:
        await self._resources.streams.drain([self._queue])

    async def _release(self, outcome: Outcome) -> None:
        queue = self._queue
        if not queue.obstacles & ENDED and (outcome == "done" or not queue.rare.draining):
            self._resources.streams.end(queue)

    def _owned_error(self) -> BusyError:
        return BusyError(
            f"stream {self.name!r} is closed by {self._closed_by}, which still needs it: use it without `async with` "
            "and aclose(); `await stream.synchronize()` waits for its work"
        )

    async def __aenter__(self) -> Self:
        if self._queue.closed:
            raise ClosedError(f"stream {self.name!r} has been closed: make another one by device.stream()")
        if self._closed_by:
            raise self._owned_error()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
            self._queue.rare.unseen.raise_it()
        elif not self._queue.ended:
            await self._life().leave(self)

    def __del__(self) -> None:
        if _CURE is None:
            return  # at the exit of free-threaded Python, the names of this module are gone
        queue = getattr(self, "_queue", None)
        if queue is not None and not queue.closed and not queue.rare.imported and not self._resources.closed:
            if not self._is_owned:
                warnings.warn(
                    f"unclosed {self!r}, opened at {self._opened_at}: {_CURE}",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
            self._report_left_open(queue)

    def _report_left_open(self, queue: Ring) -> None:
        """Log that the stream was left open, on its loop: the garbage collector may run anywhere, also in a handler."""
        name, device, opened_at = self.name, self.device.name, str(self._opened_at)

        def report() -> None:
            log("warning", "stream_left_open", device=device, stream=name, opened_at=opened_at)

        with contextlib.suppress(RuntimeError):  # the loop is closed: then the `ResourceWarning` is all
            queue.loop.call_soon_threadsafe(report)

    def __repr__(self) -> str:
        state = "closed" if self._queue.closed else f"{self._unfinished()} unfinished"
        return f"<Stream {self.name} on {self.device.name}: {state}>"


class CheckedStream(Stream):
    """A stream whose accesses are checked. Made by `aiocuda.Device.stream` if the device has a checker."""


class StreamView(Stream):
    """Enqueues on another `Stream`'s queue, in the same order of work, and has counters of its own.

    It is closed with that stream, and never by itself. It shares the launches that the stream has bound, and its hook.
    """

    def __init__(self, stream: Stream) -> None:
        self.device = stream.device
        self.priority = stream.priority
        self._resources = stream._resources
        self._opened_at = stream._opened_at
        self._hook = stream._hook
        self._queue = stream._queue
        self._memory = stream._memory
        self._access = stream._access
        self._launches = Launches(stream._resources, stream._queue, stream._access, bound=stream._launches.bound)
        self._newest = self._launches.newest
        self._transfers = Transfers(stream._resources, stream._queue, stream._access)
        self._submissions = stream._submissions

    def _replace_stream(self) -> None:
        """Let operations name this object as their stream, from now on."""
        self._queue.rare.set_stream(self)

    def __del__(self) -> None:
        pass  # the stream itself warns if it was not closed


def _handle(queue: Ring) -> int:
    return queue.driver.stream_handle(queue.handle)


def _handle_of_cuda(queue: Ring) -> int:
    if queue.driver.name != "cuda":
        raise UnsupportedError(
            f"{queue.name} belongs to the {queue.driver.name} driver and is no stream of CUDA: open the device with "
            "driver='cuda', or import the stream by Stream.from_handle(device, stream)"
        )
    return _handle(queue)


def owned(stream: Stream, made_at: SourceLine | None = None, *, closed_by: str = "") -> Stream:
    """Return a stream that another object closes, made at this line. If it is left open, the owner warns.

    With ``closed_by``, the words for the owner, `Stream.aclose` raises `BusyError`; the owner takes the words back by a
    call without them.
    """
    return stream._hand_over(made_at, closed_by)


def _new_stream(
    resources: DeviceResources, queue: Ring, priority: Priority, opened_at: str, owner: object = None
) -> Stream:
    kind = Stream if resources.checker is None else CheckedStream
    return kind(resources, queue, priority, opened_at, owner)


def open_stream(
    resources: DeviceResources, loop_state: LoopState, priority: Priority, name: str | None, opened_at: str, *,
    base: DeviceResources | None = None,
) -> Stream:  # fmt: skip
    """Create a stream, also while the device is being closed: then for work that was accepted before.

    ``base`` is the device whose coordinator alone enqueues on the stream, for operations over several devices. Then a
    fault that no caller reads from operations of the stream is not reported: the coordinator delivers it. While that
    device closes, the stream may use its memory.
    """
    queue = resources.streams.open(loop_state, priority, name)
    queue.rare.base = None if base is None else base.device_state
    return _new_stream(resources, queue, priority, opened_at)


def launch_converted(
    kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], values: Sequence[Any], shared_bytes: Any,
    stream: Stream,
) -> Operation[None]:  # fmt: skip
    """Do the same as `Stream.launch`, for arguments that `Kernel.bind` has checked and converted to ``values``."""
    newest = stream._newest
    bound = newest.bound
    if (
        stream._hook is not None
        or bound is None
        or kernel is not newest.kernel
        or grid is not newest.grid
        or block is not newest.block
        or shared_bytes is not newest.shared_bytes
    ):
        return stream.launch(kernel, grid, block, *args, shared_bytes=shared_bytes)
    operation = bound.repeat(args, None, values)
    if operation is None:
        return stream._launches.launch_unused(bound, args, values, None)
    newest.launches += 1
    return operation


def submit_call(
    stream: Stream, call: Callable[..., T], name: str, on_result: Callable[[T], object] | None, args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Operation[T]:  # fmt: skip
    """Do the same as `Stream.submit` for an integration, whose ``call`` calls the function with this name.

    On a GPU, ``on_result`` is called with the result when the device has finished, before any waiter gets it; not with
    None.
    """
    operation: Operation[T]
    if stream._hook is None:
        operation = stream._submissions.enqueue(call, args, kwargs, name, on_result)
    else:
        enqueue = functools.partial(stream._submissions.enqueue, name=name, on_result=on_result)
        operation = stream._hook.call("submit", enqueue, call, args, kwargs)
    return operation
