"""The driver protocol: the operations of CUDA that this library uses.

All other packages reach a GPU, or the host that simulates one, through `Driver`. Handles are plain integers, so that
a hot path costs one call and creates no object. Clocks, threads and file descriptors are reached through the driver,
too: see `Driver.now`, `Driver.offload` and `Driver.open_port`.

Every driver obeys these rules:

    * A method marked **may block** waits for the device, a disk or a compiler. It is only called through
      `Driver.offload`. Every other method returns immediately.
    * Methods may be called from any thread. They do not change the thread's current CUDA context.
    * Every failure is raised as an `aiocuda.errors.AiocudaError`. CUDA's codes are translated in the driver and
      nowhere else. A fault sets `Driver.fault` before it is raised; after that no method uses the device.
    * An unknown, destroyed or stale handle raises `StaleHandleError`. No handle is 0, with one exception: stream 0 is
      the default stream of the device of the current context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from .._base._types import DeviceProperties, Dim3, Span
from ..errors import DeviceFault, InvalidArgumentError

__all__ = [
    "Advice",
    "Allocation",
    "Code",
    "CompiledKernel",
    "CopyNode",
    "CudaSource",
    "Devices",
    "Driver",
    "EmptyNode",
    "FillNode",
    "Graphs",
    "KernelNode",
    "Launcher",
    "LoadedKernel",
    "ManagedAttributes",
    "Memory",
    "NativeCall",
    "Node",
    "Notifier",
    "Notify",
    "Port",
    "Program",
    "Span",
    "Streams",
    "WorkerThreads",
    "check_nodes",
    "check_update",
    "native_call",
]


class Devices(Protocol):
    """Methods about devices, and about the driver as a whole."""

    @property
    def name(self) -> str:
        """The driver's name: ``"cuda"``, ``"host"`` or ``"simulated"``."""

    @property
    def fault(self) -> DeviceFault | None:
        """The first fault of any device of this driver, or None. Once set, it never changes back.

        A fault on one device makes every device of the process unusable (measured on two H200s), so a driver keeps
        one fault and not one per device.
        """

    @property
    def registry(self) -> dict[Any, Any]:
        """A dictionary, empty at first, in which higher layers keep objects that live as long as the driver.

        The objects refer to the driver. A table outside the driver would therefore keep the driver alive.
        """

    def blame(self, operation: str) -> None:
        """Add to the fault the name of the operation that detected it. Only the first call has an effect."""

    def device_count(self) -> int:
        """Return the number of devices. ``cuDeviceGetCount``."""

    def device_open(self, device: int) -> DeviceProperties:
        """Make a device ready for use; idempotent. **May block.** ``cuDevicePrimaryCtxRetain``.

        A driver never releases the primary context of an open device: other libraries may use streams of it.
        """

    def versions(self) -> dict[str, str]:
        """Return the versions of the NVIDIA driver and of the packages that this driver uses, by name."""

    def statistics(self) -> dict[str, int]:
        """Return counts by name.

        ====================  ====================================================================================
        ``streams``           streams that were created and not destroyed, without the kept ones
        ``streams_created``   streams created so far; a kept stream that is used again does not count
        ``streams_kept``      streams without an owner that are not destroyed, because other libraries may use them
        ``events``            events that were created and not destroyed
        ``graphs``            graphs that were built and not destroyed
        ``threads``           running threads of this driver
        ``calls``             method calls that reached the device
        ====================  ====================================================================================
        """

    def close(self) -> None:
        """End the threads; every method then raises `ClosedError`. Idempotent. The CUDA driver does nothing."""


class Streams(Protocol):
    """Methods about streams and events, which order the device's work."""

    def priority_range(self, device: int) -> tuple[int, int]:
        """Return (least, greatest) priority. A smaller number has precedence. ``cuCtxGetStreamPriorityRange``."""

    def stream_reserve(self, device: int, count: int) -> None:
        """Make what ``count`` streams need that live at one time, before they are created. **May block.**

        CUDA's notifiers have streams, too. The greatest count of a device holds; what was made is not made again.
        """

    def stream_create(self, device: int, priority: int) -> int:
        """Return the handle of a non-blocking stream. ``cuStreamCreateWithPriority``.

        With CUDA this waits for all running kernels if more streams live than `stream_reserve` has made resources for.

        The stream is new, or one that `stream_destroy` kept: of the same device and priority, idle, and not being
        captured. The handle is new in both cases.
        """

    def stream_default(self, device: int) -> int:
        """Return a new handle of the device's default stream, ``CU_STREAM_LEGACY``. No stream is created.

        Other libraries may use this stream, so calls that name it always release the GIL. `stream_destroy` forgets
        the handle.
        """

    def stream_import(self, device: int, handle: int) -> int:
        """Allow the use of a stream that another library created. Return its handle, which is its ``CUstream``.

        CUDA's handles of default streams, 0, 1 and 2, are the same on every device: with CUDA each import of one has a
        new handle. Calls that name the stream always release the GIL. A stream may be imported several times;
        `stream_destroy` must then be called as often. `StaleHandleError` where the driver can detect that the stream
        does not exist. `BusyError` for the first import of a stream that is being captured, if the driver cannot ask
        for its device then.
        """

    def stream_handle(self, stream: int) -> int:
        """Return the ``CUstream`` of a stream, for use by other libraries.

        It may differ from the driver's own handle, which is never used twice. From this call on, another library may
        use the stream until the process ends, so `stream_destroy` keeps it.
        """

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        """True if ``handle`` is the ``CUstream`` of the stream. Unlike `stream_handle`, this has no other effect."""

    def stream_destroy(self, stream: int) -> None:
        """Release a stream. Work that it has accepted still runs. ``cuStreamDestroy``.

        An imported stream is only forgotten. A stream whose ``CUstream`` was read by `stream_handle` is kept: its
        handle becomes stale, `stream_create` may return the stream under a new handle, and `stream_import` accepts
        its ``CUstream``.
        """

    def stream_priority(self, stream: int) -> int:
        """Return the stream's priority, after clamping. ``cuStreamGetPriority``."""

    def stream_query(self, stream: int) -> bool:
        """True if all work that the stream has accepted is done. ``cuStreamQuery``."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait until all work that the stream has accepted is done. **May block.** ``cuStreamSynchronize``."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Make later work of the stream wait, on the device, for the event's last record. ``cuStreamWaitEvent``.

        The event may be recorded again as soon as this returns. An event that was never recorded counts as done.
        """

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        """Return `stream_wait` bound to several streams: a call makes all of them wait for one event.

        If the call fails, some of the streams may wait.
        """

    def recorded_wait(self, stream: int) -> RecordedCall:
        """Bind waits of a stream for several events with the record of an event after them: ``call(events, event)``.

        If a wait fails, the event is not recorded, and the stream may wait for some of the events.
        """

    def stream_capturing(self, stream: int) -> bool:
        """True if the stream is being captured into a graph. ``cuStreamIsCapturing``."""

    def event_create(self, device: int, timing: bool) -> int:
        """Return the handle of a new event, which counts as done. ``cuEventCreate``. Timing makes an event slower."""

    def event_destroy(self, event: int) -> None:
        """Destroy an event. Waits for it that are already enqueued stay in force. ``cuEventDestroy``."""

    def event_record(self, event: int, stream: int) -> None:
        """Record the event: it is done when all earlier work of the stream is done. ``cuEventRecord``.

        `WrongDeviceError` unless event and stream belong to the same device.
        """

    def recorder(self, stream: int) -> Callable[[int], None]:
        """Return `event_record` bound to one stream: a faster call for code that records often."""

    def event_query(self, event: int) -> bool:
        """True if all work before the event's last record is done. Never blocks. ``cuEventQuery``."""

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Return the device time between two timing events that are done, in milliseconds. ``cuEventElapsedTime``."""

    def begin_queries(self) -> None:
        """Let this thread query streams and events without ending another library's capture, until `end_queries`.

        ``cuThreadExchangeStreamCaptureMode`` with ``RELAXED``.
        """

    def end_queries(self) -> None:
        """Restore the capture mode that `begin_queries` changed."""


#: The values of ``cuMemAdvise``.
Advice: TypeAlias = Literal[
    "set_read_mostly",
    "unset_read_mostly",
    "set_preferred_location",
    "unset_preferred_location",
    "set_accessed_by",
    "unset_accessed_by",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedAttributes:
    """The attributes of a range of managed memory. A location is a device's index, or -1 for the host."""

    read_mostly: bool = False
    preferred_location: int | None = None  #: None if not set, or not the same in the whole range
    accessed_by: frozenset[int] = frozenset()
    last_prefetch: int | None = None  #: target of the last prefetch, finished or not; None as above


class Allocation(NamedTuple):
    """A whole allocation of device or managed memory, made by any library."""

    device: int  #: the device that owns the memory; -1 for managed memory, which belongs to every device
    address: int
    nbytes: int
    managed: bool


class Memory(Protocol):
    """Methods about memory: device, pinned and managed memory; copies, fills and prefetches.

    All are in stream order, except those that **may block**. Addresses are integers; host addresses are real ones on
    every driver. Copies take host memory that is pinned (`pinned_allocate`, `pin`) or managed. A driver does not
    stage pageable memory.
    """

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return (free, total) bytes of a device. ``cuMemGetInfo``."""

    def locate(self, address: int) -> Allocation | None:
        """Return the allocation of device or managed memory that contains an address. ``cuPointerGetAttributes``.

        The allocation may be another library's. None for any other address: host memory, pinned or not, and addresses
        that are not allocated.
        """

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        """Allocate device memory for work enqueued on ``stream`` from now on; return its address. ``nbytes`` > 0.

        ``cuMemAllocFromPoolAsync``, from this driver's own pool, which keeps freed memory. `DeviceOutOfMemory`, with
        ``requested`` and ``free`` filled in, if there is not enough.
        """

    def deallocate(self, address: int, stream: int) -> None:
        """Free device memory once the work already enqueued on ``stream`` is done. ``cuMemFreeAsync``."""

    def pool_reserved(self, device: int) -> int:
        """Return the bytes that the pool holds, used and unused. ``CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT``."""

    def pool_trim(self, device: int, keep: int) -> None:
        """Return unused bytes of the pool beyond ``keep`` to the device. **May block.** ``cuMemPoolTrimTo``."""

    def pinned_allocate(self, nbytes: int) -> int:
        """Allocate page-locked host memory, usable by every device. **May block.** ``cuMemHostAlloc``."""

    def pinned_deallocate(self, address: int) -> None:
        """Free page-locked memory. **May block** until all devices are idle. ``cuMemFreeHost``."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing host memory. **May block.** ``cuMemHostRegister``."""

    def unpin(self, address: int) -> None:
        """End the page-lock of `pin`. **May block.** ``cuMemHostUnregister``."""

    def managed_allocate(self, device: int, nbytes: int) -> int:
        """Allocate managed memory: one address for the host and all devices. ``cuMemAllocManaged``.

        Takes 0.1 ms, also while a kernel is held on the device (measured).
        """

    def managed_deallocate(self, address: int) -> None:
        """Free managed memory. **May block** until all devices are idle. ``cuMemFree``."""

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy from the host to the device. ``cuMemcpyHtoDAsync``."""

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy from the device to the host. ``cuMemcpyDtoHAsync``."""

    def recorded_upload(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind an `upload` with the record of an event after it: ``call((), event)``. Made once, called often."""

    def recorded_download(self, stream: int, target: int, source: int, nbytes: int) -> RecordedCall:
        """Bind a `download` with the record of an event after it: ``call((), event)``."""

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy within one device. ``cuMemcpyDtoDAsync``."""

    def copy_peer(
        self, stream: int, target: int, target_device: int, source: int, source_device: int, nbytes: int
    ) -> None:
        """Copy from one device to another. Enables peer access where it can be enabled. ``cuMemcpyPeerAsync``.

        `UnsupportedError` if the devices cannot access each other's memory.
        """

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times. ``cuMemsetD8Async`` and its variants."""

    def prefetch(self, stream: int, address: int, nbytes: int, device: int) -> None:
        """Move managed memory to a device, or to the host (-1). ``cuMemPrefetchAsync``."""

    def advise(self, address: int, nbytes: int, advice: Advice, device: int) -> None:
        """Declare how managed memory will be used; rounded out to whole pages. **May block.** ``cuMemAdvise``.

        Not in stream order. ``device`` is -1 for the host, and is ignored by advice that names no location.
        `InvalidArgumentError` if the range is not managed memory.
        """

    def managed_attributes(self, address: int, nbytes: int) -> ManagedAttributes:
        """Return the advice and the last prefetch of a range. **May block.** ``cuMemRangeGetAttribute``."""


#: Launches a kernel with the given arguments, in stream order. It is created once and called often.
Launcher: TypeAlias = Callable[[Sequence[Any]], None]

#: Enqueues work with these arguments, and records an event after it. `RecordRefused` if only the record failed. It may
#: have an attribute ``native``, a function that returns a `NativeCall`: see `native_call`.
RecordedCall: TypeAlias = Callable[[Sequence[Any], int], None]


class NativeCall(NamedTuple):
    """The functions in C of a `RecordedCall`, for callers that are compiled: they save the time of `ctypes`.

    The caller does not release the GIL between these steps:

    1. If a word of ``closed`` is not 0, it makes the `RecordedCall`, which raises the error.
    2. It writes the arguments of a kernel to their places.
    3. It calls ``work(block[0], block[1], block[2], block[3])``, and then ``record(event, stream)``.
    4. It adds the number of calls to ``calls``. It passes the name of a function that has not returned 0, ``name`` or
       ``"cuEventRecord"``, and its code to ``refuse``, which raises what the `RecordedCall` would raise, or does the
       work in another way.

    All arguments of the functions are words of 64 bits. They return a ``CUresult``.

    Attributes
    ----------
    work : int
        The address of the function that enqueues the work; 0 if there is no work, only the record of an event.
    name : str
        The name of this function.
    block : int
        The address of its four arguments.
    parameters : tuple of (str, int)
        For each parameter of a kernel its letter, as in `Program.format`, and the address of its value.
    pack : callable
        ``pack(*values)`` writes the arguments of a kernel to their places: for values that the caller cannot convert.
    record : int
        The address of ``record(event, stream)``.
    wait : int
        The address of ``wait(stream, event, 0)``, which makes the stream wait for an event.
    query : int
        The address of ``query(event)``, which returns ``not_ready`` while the event is not done.
    not_ready : int
    stream : int
        The stream, as the functions take it.
    event : callable
        ``event(handle)`` returns an event as the functions take it.
    closed : tuple of int
        The addresses of two words of 64 bits.
    calls : int
        The address of a word of 64 bits.
    refuse : callable
        ``refuse(name, code)`` raises the error of the driver. If it returns, the work is enqueued all the same.
    owner : object
        Holds the memory of the addresses.
    """

    work: int
    name: str
    block: int
    parameters: tuple[tuple[str, int], ...]
    pack: Callable[..., object]
    record: int
    wait: int
    query: int
    not_ready: int
    stream: int
    event: Callable[[int], int]
    closed: tuple[int, int]
    calls: int
    refuse: Callable[[str, int], object]
    owner: object


def native_call(call: Callable[..., None]) -> NativeCall | None:
    """Return the functions in C of a recorded call, or of a call of `Streams.recorder`; None if it has none."""
    native: Callable[[], NativeCall] | None = getattr(call, "native", None)
    return None if native is None else native()


class RecordRefused(BaseException):
    """The stream has accepted the work of a `RecordedCall`, and the event after it was not recorded.

    Attributes
    ----------
    error : BaseException
        The reason.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def record_alone(record: Callable[[int], None]) -> RecordedCall:
    """Return the record of an event, as `Streams.recorder` returns it, as a call that has no work before it."""

    def alone(_: Sequence[Any], event: int) -> None:
        record(event)

    native = getattr(record, "native", None)
    if native is not None:
        setattr(alone, "native", native)  # noqa: B010 - for mypy, a function has no such attribute
    return alone


def record_after(call: Callable[..., object], record: Callable[[int], object]) -> RecordedCall:
    """Return a call and the record of an event after it as one call."""

    def both(arguments: Sequence[Any], event: int) -> None:
        call(arguments)
        try:
            record(event)
        except BaseException as error:  # noqa: BLE001 - raised again by the queue
            raise RecordRefused(error) from None

    return both


@dataclasses.dataclass(frozen=True, slots=True)
class CudaSource:
    """CUDA C++ source of one kernel. It runs on the device with the rights of this program, so it must be trusted."""

    name: str  #: the kernel's name, as written in the source
    text: str
    include_dirs: tuple[str, ...] = ()
    includes: bool = True  #: False refuses every ``#include``
    options: tuple[str, ...] = ()  #: of the compiler; none of them names a file
    structures: tuple[str, ...] = ()  #: names, as the kernel sees them; their sizes are in the result of `Code.compile`


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that another library has compiled and loaded."""

    handle: int  #: ``CUkernel``, which is valid for every device that its code was compiled for
    owner: object  #: the other library's object; the kernel stays loaded as long as it lives


class CompiledKernel(NamedTuple):
    """The result of `Code.compile`."""

    image: bytes  #: the cubin
    symbol: str  #: the mangled name
    from_cache: bool = False  #: it was found in the cache on disk
    sizes: tuple[int, ...] = ()  #: bytes of each of `CudaSource.structures`


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Everything that a driver needs to load one kernel. Each driver uses the form of the kernel that it can run."""

    name: str
    format: str  #: parameters as `struct` codes with native alignment, pointers as ``P``: ``"fPPi"``
    image: bytes | None = None  #: cubin or PTX
    symbol: str | None = None  #: the kernel's name in ``image``, mangled
    host: Callable[..., object] | None = None  #: the host implementation, in NumPy
    host_takes_grid: bool = False  #: True if ``host`` takes the keyword arguments ``grid`` and ``block``
    host_seconds: float | None = None  #: modelled time of one launch
    read_only: frozenset[int] = frozenset()  #: indices of pointer parameters whose memory the kernel only reads
    loaded: LoadedKernel | None = None  #: takes the place of ``image`` and ``symbol``


class Code(Protocol):
    """Methods about kernels: compile, load, launch."""

    @property
    def wants_image(self) -> bool:
        """True if `load` needs `Program.image` or `Program.loaded`; False if it needs `Program.host`."""

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        """Return a kernel that is compiled for a device's architecture. **May block.** ``nvrtcCompileProgram``.

        Looks in the disk cache first. `CompileError` with the log, or `CompilerNotFoundError`. Only available where
        `wants_image` is True.
        """

    def load(self, device: int, program: Program) -> int:
        """Load a kernel and return a function handle, valid while the caller holds it. **May block.**

        ``cuLibraryLoadData``, ``cuLibraryGetKernel``, ``cuKernelGetFunction``; for `Program.loaded` only the last, and
        the driver then keeps its owner alive. The code is on the device when this returns, so a launch never loads
        code. `InvalidTypeError` if the code and `Program.format` disagree; `UnsupportedError` if the program has no
        form that this driver can run.
        """

    def argument(self, span: Span) -> object:
        """Return the value that a launcher takes for a buffer. Called once per buffer, so that a launch is cheap."""

    def launcher(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> Launcher:
        """Bind everything that does not change from launch to launch. ``cuLaunchKernelEx``.

        The launcher takes one value for each letter of `Program.format`; for a pointer, the value that `argument`
        returned. Only one thread at a time may use a launcher. The caller has checked the values' types and ranges.
        """

    def recorded_launch(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> RecordedCall:
        """Bind a launch with the record of an event after it: ``call(values, event)``. ``cuEventRecord``.

        It is `launcher` and `recorder` in one call, for code that launches often.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class KernelNode:
    """A node of a graph that launches a kernel."""

    function: int
    grid: Dim3
    block: Dim3
    shared_bytes: int
    values: tuple[Any, ...]  #: as a launcher takes them
    after: tuple[int, ...] = ()  #: indices of the nodes that it waits for; each is smaller than its own index


@dataclasses.dataclass(frozen=True, slots=True)
class CopyNode:
    """A node that copies between the device and page-locked memory, or within the device."""

    kind: Literal["upload", "download", "copy"]
    target: int
    source: int
    nbytes: int  #: more than 0
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FillNode:
    """A node that writes a pattern of 1, 2, 4, 8 or 16 bytes repeatedly."""

    target: int
    pattern: bytes
    count: int  #: more than 0
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyNode:
    """A node that does nothing. It joins dependencies."""

    after: tuple[int, ...] = ()


Node: TypeAlias = KernelNode | CopyNode | FillNode | EmptyNode


class Graphs(Protocol):
    """Methods about graphs: work that is described once, with its dependencies, and launched often.

    A graph is built from nodes; nothing here captures a stream. The parameters of a node can be changed between
    launches. The set of nodes and their dependencies cannot. Only one thread at a time may use a graph.
    """

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        """Return a graph for streams of a device. Its code and parameters are on the device. **May block.**

        ``cuGraphCreate``, ``cuGraphAddKernelNode`` and its variants, ``cuGraphInstantiateWithParams``.
        `InvalidArgumentError` if a node waits for a node that does not precede it; `WrongDeviceError` for a function
        of another device.
        """

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        """Change a node's parameters from the next launch on. ``cuGraphExecKernelNodeSetParams`` and its variants.

        The new node has the same class; a copy has the same kind, a fill a pattern of the same size. Its ``after`` is
        ignored. Launches that a stream has already accepted keep their parameters.
        """

    def graph_launch(self, stream: int, graph: int) -> None:
        """Run the whole graph in the order of a stream. ``cuGraphLaunch``.

        A launch also waits for every earlier launch of the same graph, on any stream. Nodes that do not depend on
        each other may run in any order and at the same time.
        """

    def graph_destroy(self, graph: int) -> None:
        """Destroy a graph. Launches that streams have accepted still run. **May block.** ``cuGraphExecDestroy``."""


class Port(Protocol):
    """The wake-up descriptor of one event loop. It is never destroyed: when its loop closes, another may use it."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable whenever there is a tag.

        None where a loop cannot watch descriptors: see `Notify.open_port`.
        """

    def drain(self) -> list[int]:
        """Return the tags that have arrived, in order, and remove them. Never blocks."""

    def close(self) -> None:
        """Discard the tags that arrive from now on. Called when the loop closes; a new loop may then use the port."""


class Notifier(Protocol):
    """Puts a tag into a port when an event is done. It consists of a side stream and a port, and is never destroyed.

    A notifier is armed from `ring` until *its own* tag has been drained. The caller must not call `ring` in between.
    """

    def ring(self, event: int, tag: int) -> None:
        """Put ``tag`` (63 bits) into the port when ``event``'s last record is done.

        ``cuStreamWaitEvent`` and ``cuLaunchHostFunc`` on a side stream. No Python code runs on a thread of the NVIDIA
        driver. After a fault the tag may never arrive.
        """


class Notify(Protocol):
    """Methods about time, threads and notification."""

    @property
    def polls_freely(self) -> bool:
        """True if a query of an event does not slow down the device.

        False where the device consists of threads of this process: a loop that polls takes the GIL from them.
        """

    def now(self) -> float:
        """Return a monotonic time in seconds."""

    def open_port(self, wake: Callable[[], None]) -> Port:
        """Return a port for one event loop. ``wake`` is called, from any thread, only if its ``fileno()`` is None."""

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work``, which may block, on another thread; then put ``tag`` into the port. ``work`` must not raise.

        The threads are daemon threads of the driver, never those of the loop's executor. Calls start in order;
        several run at the same time.
        """

    def worker_threads(self, threads: int, name: str, step: Callable[[], bool], port: Port, tag: int) -> WorkerThreads:
        """Return threads of their own, for work that takes long: that of `offload` would have to wait for it.

        A thread that is woken calls ``step`` until it returns False. ``step`` must not raise. At most so many threads
        run, and their names begin with ``name``. ``tag`` is for `WorkerThreads.notify`.
        """

    def notifier_limit(self, device: int) -> int:
        """Return how many notifiers may be armed at the same time on a device; 0 if there are no notifiers."""

    def notifier(self, device: int, port: Port) -> Notifier:
        """Return a new notifier."""


class WorkerThreads(Protocol):
    """Daemon threads of one user: see `Notify.worker_threads`."""

    def wake(self, threads: int) -> None:
        """Have so many more threads call the function. The caller counts them: there are no more than it has."""

    def notify(self) -> None:
        """Put the tag into the port. The threads call it."""

    def resize(self, threads: int) -> None:
        """Change the number of threads. If there are fewer from now on, threads end when they are idle."""

    def close(self) -> None:
        """Wake no more threads. They end when the function returns False. Idempotent. Does not wait."""


class Driver(Devices, Streams, Memory, Code, Graphs, Notify, Protocol):
    """All methods of a driver."""


# For the drivers: checks of the arguments of `Graphs`.


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise `InvalidArgumentError` unless each node waits for earlier nodes only, and each copy and fill has a size."""
    for index, node in enumerate(nodes):
        _check_size(node)
        for other in node.after:
            if not 0 <= other < index:
                raise InvalidArgumentError(f"node {index} of a graph waits for node {other}, which is not before it")
        if len(set(node.after)) != len(node.after):
            raise InvalidArgumentError(f"node {index} of a graph waits for one node twice: {node.after}")


def _check_size(node: Node) -> None:
    size = node.nbytes if isinstance(node, CopyNode) else node.count if isinstance(node, FillNode) else 1
    if size < 1:
        raise InvalidArgumentError(f"{node!r} has nothing to do: a node of a graph copies or fills at least one item")


def check_update(nodes: Sequence[Node], index: int, new: Node) -> None:
    """Raise `InvalidArgumentError` unless there is a node ``index`` and ``new`` can replace it."""
    if not 0 <= index < len(nodes):
        raise InvalidArgumentError(f"the graph has no node {index}: it has {len(nodes)}, counted from 0")
    old = nodes[index]
    same = type(old) is type(new)
    if isinstance(old, CopyNode) and isinstance(new, CopyNode):
        same = old.kind == new.kind
    if isinstance(old, FillNode) and isinstance(new, FillNode):
        same = len(old.pattern) == len(new.pattern)
    if not same:
        raise InvalidArgumentError(f"{new!r} cannot take the place of {old!r}: build another graph")
    _check_size(new)
