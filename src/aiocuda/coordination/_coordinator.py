"""AsyncCoordinator: graphs of operations, ordered on the device."""

from __future__ import annotations

from asyncio import CancelledError, _get_running_loop
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy.typing as npt

from .._base._arrays import check_alike
from .._base._checks import check_integer, check_timeout, is_coroutine_function, is_function, several
from .._base._label import LABEL, check_label
from .._base._launch import read_launch
from .._base._mistakes import figures, keywords, lacks, refuses
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP
from ..completion import Operation
from ..device import Device, Event
from ..errors import (
    ClosedError,
    DeviceFault,
    DeviceOutOfMemory,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
)  # fmt: skip
from ..kernels import Kernel
from ..lowlevel import Block, StreamOperation, as_source, as_target, block_of, launch_converted, queue_of, resources_of
from ..memory import DeviceBuffer
from ..stream import Checker, Stream
from ._accesses import Access, accesses_of, accesses_of_launch
from ._bracket import Bracket, scheduled
from ._collectives import Broadcast, Collective, Reduction, buffers_of, check_collective
from ._node import KINDS, RANKS, Kind, Node, NodePriority, check_priority
from ._scheduled_node import ABANDONED, DONE, FAILED, SKIPPED, ScheduledNode
from ._scheduler import SAMPLED, Scheduler

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AsyncCoordinator", "CoordinatorStatistics"]

_KINDS = frozenset(KINDS)

_COMPUTE = "compute takes the kernel's own arguments by position; help(AsyncCoordinator.compute) lists its keywords"
_COMPUTE_KEYWORDS = dict.fromkeys(("depends_on", "dependencies"), "use after=")

#: How many combinations of grid, block and shared memory are remembered as valid.
MOST_EXTENTS = 256

#: The values that ``after`` takes.
After = Node[Any] | Operation[Any] | Event | Iterable[Any]


@figures
class CoordinatorStatistics(NamedTuple):
    """Figures of a coordinator since its creation.

    Attributes
    ----------
    registered
        Operations, of all kinds.
    waiting, in_flight
        Not submitted to a stream yet; submitted, and not known to have passed.
    done, failed, skipped, abandoned
        Finished operations, by outcome.
    by_kind
        Registered operations by kind.
    average_overhead
        Host seconds per operation that the coordinator took, without the stream's own enqueue.
    deadlocks
        How many operations and waits have ended with a `DeadlockError`.
    dropped
        Finished operations that `AsyncCoordinator.poll` does not return, because more than 4096 had finished since its
        last call.
    """

    registered: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    skipped: int
    abandoned: int
    by_kind: Mapping[str, int]
    average_overhead: float
    deadlocks: int
    dropped: int


_COLLECTIVE = keywords(
    "it takes operation=, after=, stream=, priority=, description= and label=",
    op="it is called operation: 'sum', 'product', 'minimum' or 'maximum'",
)


@lacks
@refuses(__enter__="is entered by `async with`, not `with`: `async with AsyncCoordinator(device) as coordinator`")
class AsyncCoordinator(Owner):
    """Orders operations on the device, over as many streams as needed.

    Each method registers an operation and returns it immediately as a `Node`, which can be awaited. The operation waits
    on the device for everything that ``after`` names, and for earlier operations with conflicting accesses.
    At most ``max_in_flight`` operations are submitted to streams; the others wait on the host, in the order of their
    priorities. An operation that has been overtaken 64 times moves up one priority.

    If an operation fails, every operation that needs its result is skipped with `SkippedError`; all others run. The
    bytes that a failed or skipped operation should have written are *poisoned*: an operation that reads them is
    skipped, too, until another operation has overwritten them.

    Leaving ``async with`` waits for all operations. It raises the failures that no waiter has received: a single one
    unchanged, several as an `ExceptionGroup`. If an exception leaves the block, operations that have not been submitted
    are withdrawn, and nothing is waited for.

    ::

        async with AsyncCoordinator(device) as coordinator:
            x = coordinator.upload(array)
            left = coordinator.compute(square, grid, block, x, a, n)
            right = coordinator.compute(cube, grid, block, x, b, n)
            coordinator.compute(add, grid, block, a, b, total, n)   # after both: it reads what they write
            result = await coordinator.download(total)

    Parameters
    ----------
    device
        The device of the streams.
    max_in_flight
        How many operations are submitted to streams at the same time, 1 to 4096.
    streams
        How many streams there are for kernels, for each of three stream priorities, 1 to 64. They are created when
        needed. Uploads and downloads have one stream of each priority.
    check
        Look for unordered accesses from now on, as ``open_device(check=True)`` does from the start.
    deadlock_timeout
        Seconds, more than 0, after which what is blocked gets a `DeadlockError`: operations that wait for an event that
        is not recorded or a block that is not entered, and tasks that wait inside a block for something that no task
        brings about. The time counts while nothing in the coordinator moves and no other work of the loop on this
        device is unfinished. None, the default, and infinity: they wait, and the log event ``coordinator_still`` names
        them after 0.5 s. A deadlock that is certain raises the error immediately in either case.
    """

    @keywords(
        "AsyncCoordinator takes a device, max_in_flight=, streams=, check= and deadlock_timeout=",
        "AsyncCoordinator(device, max_in_flight=64)",
        **dict.fromkeys(("max_concurrent", "max_concurrency", "concurrency"), "use max_in_flight="),
    )
    def __init__(
        self, device: Device, max_in_flight: int = 64, *, streams: int = 4, check: bool = False,
        deadlock_timeout: float | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a coordinator orders the work of an aiocuda.Device, not {type(device).__name__}")
        _check_count("max_in_flight", max_in_flight, 4096)
        _check_count("streams", streams, 64)
        timeout = _check_deadlock_timeout(deadlock_timeout)
        if check and device.checker is None:
            resources_of(device).check_with(Checker())
        self.device = device
        self._resources = resources_of(device)
        self.max_in_flight = max_in_flight
        self._scheduler = Scheduler(device, max_in_flight, streams, timeout)
        self._scope = Scope(
            "this coordinator", "make one in each, share the device",
            "make another one by aiocuda.AsyncCoordinator(device)",
            tasks=self._scheduler.host_functions.tasks, wrong_loop=resources_of(device).device_state.wrong_loop,
        )  # fmt: skip
        opened = self._scheduler.streams
        use = "`async with aiocuda.AsyncCoordinator(device) as coordinator`"
        self._scope.must_end(use, SourceLine.of_caller(), lambda: all(stream.closed for stream in opened.all()))
        self._extents: dict[Any, None] = {}  # grids and blocks that were checked before
        #: Grid, block and shared memory of the last launch, if they are immutable: the same objects need no check.
        self._checked_launch: tuple[Any, Any, Any] = (None, None, None)

    # -- operations ---------------------------------------------------------------------------------------------------

    def upload(
        self, source: Any, target: DeviceBuffer | None = None, *, after: After = (), reads: Iterable[Any] | None = None,
        writes: Iterable[Any] | None = None, stream: Stream | None = None, priority: NodePriority = "normal",
        description: str = "", label: str | None = None,
    ) -> Node[DeviceBuffer]:  # fmt: skip
        """Copy an array to the device. ``cuMemcpyHtoDAsync``.

        The result is the buffer. ``node.buffer`` returns it immediately, and `compute` and `download` accept the node
        instead of the buffer. The array is borrowed until the operation is done.

        Parameters
        ----------
        source
            An array, as for `Stream.upload`.
        target
            The buffer to fill; by default a new one. If that cannot be allocated, the operation fails.
        after
            What the operation waits for and needs: a node, an operation or event of a stream, or several of them.
        reads, writes
            Buffers and arrays that replace the inferred accesses: it reads ``source`` and overwrites ``target``.
        stream
            A stream of the program, instead of one of the coordinator's.
        priority
            ``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"cleanup"``.
        description
            The name in errors and reports.
        label
            The label of the node and its operation, see `aiocuda.label`.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            The sizes, shapes or dtypes of ``source`` and ``target`` differ, see `Stream.copy`. No operation is
            registered.
        WrongDeviceError
            The stream cannot use the buffer: it belongs to another device. No operation is registered.
        """
        began, node = self._begin("transfer", "upload", stream, priority, description, label)
        array = as_source(source, self._resources.pinned_pool)
        try:
            if target is None:
                buffer = (stream or self.upload_stream).empty(array.shape, array.dtype)
                block_of(buffer).keep()
            else:
                buffer = _as_buffer(target)
                check_alike(buffer, array)
        except DeviceOutOfMemory as error:
            self._link(node, after, [], began, error)
            return node
        node.value = buffer
        accesses = accesses_of((array,) if reads is None else reads, (buffer,) if writes is None else writes)
        node.work = lambda stream: stream.copy(buffer, array)
        self._link(node, after, accesses, began)
        return node

    def compute(
        self, kernel: Kernel = None, grid: Any = None, block: Any = None, /, *args: Any, shared_bytes: int = 0,  # type: ignore[assignment]
        after: After = (), reads: Iterable[Any] | None = None, writes: Iterable[Any] | None = None,
        stream: Stream | None = None, priority: NodePriority = "normal", description: str = "",
        label: str | None = None, kind: Kind = "kernel", **launch: Any,
    ) -> Node[None]:  # fmt: skip
        """Run a kernel. ``cuLaunchKernelEx``.

        The arguments are those of `Stream.launch`, ``(kernel, grid, block, *args)`` or ``(kernel, *args, n=count,
        block=256)``; a node of `upload` can replace its buffer. A buffer counts as read
        and written; if its parameter is ``const``, as read. For a buffer that ``reads`` or ``writes`` names, only that
        declaration counts. A buffer that only ``writes`` names is overwritten: the operation does not need its content,
        and runs even if the content is poisoned.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError, WrongDeviceError
            As for `Stream.launch`. No operation is registered.
        """
        began, node = self._begin(kind, "compute", stream, priority, description, label)
        if launch:
            kernel, grid, block, args = read_launch(
                "AsyncCoordinator.compute", (kernel, grid, block, *args), launch, _COMPUTE, _COMPUTE_KEYWORDS
            )
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"compute takes an aiocuda.Kernel, not {type(kernel).__name__}")
        uploads: list[ScheduledNode[Any]] = []
        error: BaseException | None = None
        for argument in args:
            if isinstance(argument, Node):
                uploads = [self._own(argument) for argument in args if isinstance(argument, Node)]
                error, args = _resolve(args)
                break
        if error is None:
            values = kernel.bind(args)
            checked = self._checked_launch
            is_empty = "n" in launch and not grid
            if grid is not checked[0] or block is not checked[1] or shared_bytes is not checked[2]:
                self._check_launch(1 if is_empty else grid, block, shared_bytes)
            node.work = partial(launch_converted, kernel, grid, block, args, values, shared_bytes)
            if is_empty:
                node.work = Stream.synchronize
        elif len(args) != len(kernel.signature.parameters):
            raise kernel.signature.count_error(args)
        accesses = accesses_of_launch(kernel, args, reads, writes)
        self._link(node, after, accesses, began, uploads=uploads)
        return node

    def download(
        self, buffer: DeviceBuffer | Node[DeviceBuffer], out: npt.NDArray[Any] | None = None, *, after: After = (),
        reads: Iterable[Any] | None = None, writes: Iterable[Any] | None = None, stream: Stream | None = None,
        priority: NodePriority = "normal", description: str = "", label: str | None = None,
    ) -> Node[npt.NDArray[Any]]:  # fmt: skip
        """Copy a buffer to the host; the result is ``out``, or a new array. ``cuMemcpyDtoHAsync``.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            The sizes, shapes or dtypes of ``buffer`` and ``out`` differ, see `Stream.copy`. No operation is registered.
        WrongDeviceError
            The stream cannot use the buffer: it belongs to another device. No operation is registered.
        """
        began, node = self._begin("transfer", "download", stream, priority, description, label)
        uploads = (self._own(buffer),) if isinstance(buffer, Node) else ()
        error, (found,) = _resolve((buffer,))
        target = None if out is None else as_target(out, self._resources.pinned_pool)
        read: Iterable[Any] = ()
        if error is None:
            source = _as_buffer(found)
            if target is not None:
                check_alike(source, target)
            read = (source,)
            node.copies_out = True
            node.work = lambda stream: stream.download(source, target)
        written: Iterable[Any] = () if target is None else (target,)
        accesses = accesses_of(read if reads is None else reads, written if writes is None else writes)
        self._link(node, after, accesses, began, uploads=uploads)
        return node

    def broadcast(
        self, source: DeviceBuffer | Node[DeviceBuffer], targets: Iterable[DeviceBuffer | Node[DeviceBuffer]], *,
        after: After = (), stream: Stream | None = None, priority: NodePriority = "normal", description: str = "",
        label: str | None = None,
    ) -> Node[None]:  # fmt: skip
        """Copy a buffer to others, on this and other devices. ``cuMemcpyDtoDAsync``, ``cuMemcpyPeerAsync``.

        The devices of the buffers must be open, on one driver. Streams of other devices belong to the coordinator and
        end with it. `InvalidArgumentError` if ``targets`` is empty, if shapes differ or if buffers overlap;
        `InvalidTypeError` if dtypes differ.
        """
        began, node = self._begin("broadcast", "compute", stream, priority, description, label)
        things = [source, *buffers_of(targets, "targets")]

        def prepare(found: list[DeviceBuffer]) -> Collective:
            check_collective(self._resources, [found])
            return Broadcast(node, self._scheduler.streams, found[0], found[1:])

        return self._collect(node, after, things, began, prepare, reads=slice(1), writes=slice(1, None))

    @_COLLECTIVE
    def reduce(
        self, sources: Iterable[DeviceBuffer | Node[DeviceBuffer]], target: DeviceBuffer | Node[DeviceBuffer],
        operation: str = "sum", *, after: After = (), stream: Stream | None = None, priority: NodePriority = "normal",
        description: str = "", label: str | None = None,
    ) -> Node[None]:  # fmt: skip
        """Combine buffers, item by item, into another buffer, or into one of them.

        The sources are combined in the order of the list, so the result has the same bits in every run. float16 and
        bfloat16 are combined in float32 and rounded once; integers wrap.

        Parameters
        ----------
        sources, target
            Buffers of one shape and one dtype: an integer, float16, bfloat16, float32 or float64. They may be on
            several devices, as for `broadcast`.
        operation
            ``"sum"``, ``"product"``, ``"minimum"`` or ``"maximum"``. The last two propagate NaN, as in NumPy.
        after, stream, priority, description, label
            As for `upload`.
        """
        began, node = self._begin("reduction", "compute", stream, priority, description, label)
        things = [*buffers_of(sources, "sources"), target]

        def prepare(found: list[DeviceBuffer]) -> Collective:
            check_collective(self._resources, [found[:-1], found[-1:]])
            return Reduction(node, self._scheduler.streams, found[:-1], found[-1:], operation)

        return self._collect(node, after, things, began, prepare, reads=slice(-1), writes=slice(-1, None))

    @_COLLECTIVE
    def all_reduce(
        self, buffers: Iterable[DeviceBuffer | Node[DeviceBuffer]], operation: str = "sum", *, after: After = (),
        stream: Stream | None = None, priority: NodePriority = "normal", description: str = "",
        label: str | None = None,
    ) -> Node[None]:  # fmt: skip
        """Combine buffers, item by item, and write the result to all of them. See `reduce`.

        All buffers have the same bits then. On one device, up to 8 buffers are read once and written once.
        """
        began, node = self._begin("all-reduce", "compute", stream, priority, description, label)
        things = buffers_of(buffers, "buffers")

        def prepare(found: list[DeviceBuffer]) -> Collective:
            check_collective(self._resources, [found])
            return Reduction(node, self._scheduler.streams, found, found, operation)

        return self._collect(node, after, things, began, prepare, reads=slice(None), writes=slice(None))

    def _collect(
        self, node: ScheduledNode[Any], after: After, things: list[Any], began: float,
        prepare: Callable[[list[DeviceBuffer]], Collective], reads: slice, writes: slice,
    ) -> Node[None]:  # fmt: skip
        """Register a collective of buffers and nodes of uploads. Two slices of them are what it reads and writes."""
        uploads = [self._own(thing) for thing in things if isinstance(thing, Node)]
        error, resolved = _resolve(tuple(things))
        found = [None if thing is None and error is not None else _as_buffer(thing) for thing in resolved]
        stream = node.stream
        if stream is not None and resources_of(stream.device).driver is not self._resources.driver:
            raise WrongDeviceError(
                f"{stream!r} belongs to another driver than this coordinator: name a stream of its own"
            )
        if error is None:
            collective = prepare(cast("list[DeviceBuffer]", found))
            node.work, node.find_busy = collective.submit, collective.find_busy
        read, written = ([buffer for buffer in found[part] if buffer is not None] for part in (reads, writes))
        self._link(node, after, accesses_of(read, written), began, uploads=uploads, is_checked=True)
        return node

    def operation(
        self, kind: Kind, *, after: After = (), reads: Iterable[Any] = (), writes: Iterable[Any] = (),
        stream: Stream | None = None, priority: NodePriority = "normal", description: str = "",
        label: str | None = None,
    ) -> Bracket:  # fmt: skip
        """Return a block that counts everything enqueued on ``bracket.stream`` inside ``async with`` as one operation.

        For work that another library enqueues, or for several methods of a stream. If the block raises an exception,
        the operation fails, and operations that need it are skipped. Only ``reads`` and ``writes`` declare its
        accesses; they are not inferred from the work inside the block.

        The operation is registered by this call: later operations with conflicting accesses wait for it, also before a
        task enters the block. If the block is dropped without being entered, or the coordinator closes before that, the
        operation is withdrawn: operations that need it are skipped.
        """
        began, node = self._begin(kind, "bracket", stream, priority, description, label)
        node.unmet = 1  # until a task enters the block
        self._link(node, after, accesses_of(reads, writes), began)
        return Bracket(node)

    def host(
        self, function: Callable[..., Any], *args: Any, after: After = (), reads: Iterable[Any] = (),
        writes: Iterable[Any] = (), priority: NodePriority = "normal", description: str = "", label: str | None = None,
    ) -> Node[Any]:  # fmt: skip
        """Call a function on the host once all its dependencies are done. Its dependents run after it.

        A coroutine function runs on the loop, a plain function on a worker thread of the device. The operation takes no
        place. Only ``reads`` and ``writes`` declare its accesses.

        An exception of the function fails the operation; each waiter gets the same object. `KeyboardInterrupt` and
        `SystemExit` also leave the event loop, as from a task. If a plain function raises `CancelledError` or
        `StopIteration`, the operation fails with a `RuntimeError` with that exception as its ``__cause__``.
        """
        if not is_function(function):
            raise InvalidTypeError(f"host takes a function, not {type(function).__name__}")
        began, node = self._begin("host", "host", None, priority, description, label)
        self._scheduler.host_functions.assign(node, function, args, is_coroutine_function(function))
        self._link(node, after, accesses_of(reads, writes), began)
        return node

    def add_dependency(self, dependent: Node[Any], prerequisite: Node[Any]) -> None:
        """Let an operation that still waits, or a block that no task has entered, depend on another operation.

        Raises
        ------
        CycleError
            The prerequisite already depends on the dependent.
        ClosedError
            The dependent waits no more: it was submitted to a stream, its function runs, its block has begun, or it has
            ended. The error says which.
        """
        self._scheduler.check()
        self._scheduler.add_dependency(self._own(dependent), self._prerequisite(prerequisite))

    # -- registration --------------------------------------------------------------------------------------------

    def _begin(
        self, kind: Kind, role: str, stream: Stream | None, priority: NodePriority, description: str, label: str | None
    ) -> tuple[float, ScheduledNode[Any]]:  # fmt: skip
        """Return the time and a new node, which is not registered yet."""
        scheduler = self._scheduler
        if _get_running_loop() is not scheduler.loop_in_use or scheduler.closing or scheduler.driver.fault is not None:
            scheduler.check()
        rank = RANKS.get(priority) if isinstance(priority, str) else None
        if rank is None:
            rank = check_priority(priority)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidArgumentError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
        if stream is not None and not isinstance(stream, Stream):
            raise InvalidTypeError(f"stream is an aiocuda.Stream, not {type(stream).__name__}")
        if type(description) is not str and not isinstance(description, str):
            raise InvalidTypeError(f"description is a str, not {type(description).__name__}: errors show it")
        own_label = None if label is None else check_label(label)
        began = scheduler.driver.now()
        number = scheduler.number = scheduler.number + 1
        node: ScheduledNode[Any] = ScheduledNode(scheduler, number, kind, role, rank, description, stream, began)
        if own_label is not None:
            node.set_label(own_label)
        elif (inherited := LABEL.get()) is not None:
            node.label = inherited
        return began, node

    def _link(
        self, node: ScheduledNode[Any], after: After, accesses: list[Access], began: float,
        error: BaseException | None = None, uploads: Iterable[ScheduledNode[Any]] = (), is_checked: bool = False,
    ) -> None:  # fmt: skip
        """Add the edges of a node, and register it.

        Parameters
        ----------
        uploads
            Nodes that were passed instead of their buffers.
        is_checked
            The node uses streams of all devices of its memory.
        """
        scheduler = self._scheduler
        if node.work is not None and not is_checked and node.role != "host":
            # The usual case without a call: memory of this device, in a stream of the coordinator.
            index = self._resources.index
            for access in accesses:
                memory = access[0]
                if isinstance(memory, Block) and (
                    node.stream is not None or memory.device != index or memory.driver is not scheduler.driver
                ):
                    self._check_device(node.stream, memory)
        for upload in uploads:
            # If there is a buffer, the node needs its bytes: see `accesses`.
            node.depend_on(upload, upload.value is None)
        if type(after) is ScheduledNode and after.scheduler is scheduler:
            node.depend_on(after, True)
        elif type(after) is not tuple or after:  # not `after != ()`: an array compares its items
            for other in self._nodes(after):
                node.depend_on(other, True)
        if error is not None:
            scheduler.note_unread(node.fail(error))
        scheduler.register(node, accesses)
        if not scheduler.number & SAMPLED:
            scheduler.overhead += scheduler.driver.now() - began

    def _check_device(self, stream: Stream | None, memory: Block) -> None:
        """Raise `WrongDeviceError` if the stream, or those of the coordinator, cannot use the memory."""
        (self._resources if stream is None else resources_of(stream.device)).check_usable(memory)

    def _nodes(self, after: After) -> list[ScheduledNode[Any]]:
        """Return the things that ``after`` names as nodes."""
        things = (after,) if isinstance(after, Node | Operation | Event) else after
        found: list[ScheduledNode[Any]] = []
        for thing in several(things, "after names operations: a node, an operation, an event or several"):
            if isinstance(thing, Node):
                found.append(self._prerequisite(thing))
            elif isinstance(thing, StreamOperation | Event):
                found.append(self._scheduler.outside.node_of(thing))
            else:
                raise InvalidTypeError(f"after names nodes, operations and events, not {type(thing).__name__}")
        return found

    def _prerequisite(self, node: Node[Any]) -> ScheduledNode[Any]:
        """Return the node. Raise an error if no node here can wait for it."""
        found = _as_scheduled(node)
        if found.scheduler is not self._scheduler:
            self._scheduler.meet(found.scheduler)
        return found

    def _own(self, node: Node[Any]) -> ScheduledNode[Any]:
        """Return the node. Raise an error if it belongs to another coordinator."""
        found = _as_scheduled(node)
        if found.scheduler is not self._scheduler:
            raise InvalidArgumentError(f"{node!r} belongs to another coordinator: await it, or name it in after=")
        return found

    def _check_launch(self, grid: Any, block: Any, shared_bytes: int) -> None:
        """Check the grid and the block of a launch. Combinations that were checked before are known."""
        known = self._extents
        try:
            key = (grid, block, shared_bytes)
            if key in known:
                if type(grid) in (int, tuple) and type(block) in (int, tuple):
                    self._checked_launch = key
                return
        except TypeError:
            key = None  # a list
        self._resources.check_extent(grid, block, shared_bytes)
        if key is not None and type(grid) in (int, tuple) and type(block) in (int, tuple) and len(known) < MOST_EXTENTS:
            known[key] = None

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def upload_stream(self) -> Stream:
        """The stream of uploads of normal priority."""
        return self._scheduler.streams.first("upload")

    @property
    def compute_stream(self) -> Stream:
        """The first stream of kernels of normal priority."""
        return self._scheduler.streams.first("compute")

    @property
    def download_stream(self) -> Stream:
        """The stream of downloads of normal priority."""
        return self._scheduler.streams.first("download")

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> list[Node[Any]]:
        """Query the device and submit what fits; return the operations that have finished since the last call.

        They are done, failed, skipped or abandoned, in the order in which they finished; an abandoned one is returned
        when the device, too, is done with it. The first call returns those that the program still holds. After it, the
        coordinator keeps finished operations for the next call, at most 4096. It drops older ones, and counts them in
        `statistics`. It keeps no results: if the program has dropped a node, `Node.buffer` and the result of the
        returned node raise `StaleHandleError`.
        """
        scheduler = self._scheduler
        scheduler.check_loop()
        scheduler.unpolled.keep()
        scheduler.poll()
        return scheduler.unpolled.take()

    async def wait(self, node: Node[Any]) -> Any:
        """Return the result of a node, as awaiting it does."""
        return await self._own(node)

    async def drain(self) -> None:
        """Wait until all registered operations have finished, except blocks that no task has entered.

        Their failures are not raised here.
        """
        await self._scheduler.drain()

    async def room(self) -> None:
        """Wait until at most ``max_in_flight`` operations wait on the host. For tasks that produce without end."""
        await self._scheduler.room()

    def statistics(self) -> CoordinatorStatistics:
        """Return a snapshot of the figures."""
        scheduler = self._scheduler
        scheduler.collect_finished()
        finished, registered = scheduler.finished, scheduler.registered
        return CoordinatorStatistics(
            registered=registered,
            waiting=registered - sum(finished) - scheduler.in_flight - len(scheduler.substituted),
            in_flight=scheduler.in_flight,
            done=finished[DONE],
            failed=finished[FAILED],
            skipped=finished[SKIPPED],
            abandoned=finished[ABANDONED],
            by_kind=dict(scheduler.kinds),
            average_overhead=max(0.0, scheduler.overhead * (SAMPLED + 1) / registered) if registered else 0.0,
            deadlocks=scheduler.detector.found,
            dropped=scheduler.unpolled.dropped,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        if not self._scope.left:  # otherwise the release withdraws what is registered
            self._scheduler.refuse()

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for all registered operations, then close the streams.

        The methods of the coordinator's streams refuse new work, too. Registered operations run, also on the host; an
        open bracket continues until its block is left. A bracket that was never entered is withdrawn: operations that
        need it are skipped, with a `ClosedError` as their cause. Operations that wait for an event are waited for until
        it is recorded. Raises the failures that no waiter has received. If this call is cancelled, the coordinator is
        left as by an exception from ``async with``.
        """
        try:
            await self._end(None)
        except CancelledError:
            self._report(self._scheduler.read_all())
            raise
        failures = self._scheduler.read_all()
        if self._scope.left:  # by another task; its operations on the host were withdrawn, which is no failure
            failures = [failure for failure in failures if not isinstance(failure, ClosedError)]
        if failures:
            raise _combined(failures)

    async def _end(self, kind: type[BaseException] | None) -> None:
        if not self._scope.closed:
            self._scheduler.check_loop()  # which binds it to the loop at its first use
        await self._scope.exit(self, kind)

    def _unfinished(self) -> int | None:
        scheduler = self._scheduler
        scheduler.poll()
        if not scheduler.idle or any(queue.tail() is not None for queue in scheduler.streams.queues()):
            return None
        return 0

    async def _drain(self) -> None:
        await self._scheduler.drain()
        await self._resources.streams.drain(self._scheduler.streams.queues())

    async def _release(self, outcome: Outcome) -> None:
        if outcome == "done" or not self._resources.closing:  # a device that closes waits for its operations
            self._scheduler.leave()

    async def __aenter__(self) -> Self:
        if self._scope.closing:
            raise self._scope.closed_error()
        self._scheduler.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            self._resources.streams.raise_unseen(queue_of(each) for _, each in self._scheduler.streams.everywhere())
            return
        await self._end(kind)
        failures = [failure for failure in self._scheduler.read_all() if failure is not error]
        if not failures:
            return
        if not isinstance(error, (CancelledError, GeneratorExit, *LEAVES_LOOP)):
            raise _combined([error, *failures]) from error.__cause__
        self._report(failures)  # a cancellation must stay a cancellation, and Ctrl-C a KeyboardInterrupt

    def _report(self, failures: list[BaseException]) -> None:
        for failure in failures:
            self._scheduler.loop.call_exception_handler(
                {"message": "aiocuda: an operation of a coordinator that was left had failed", "exception": failure}
            )

    def __repr__(self) -> str:
        scheduler = self._scheduler
        state = "closed" if scheduler.closed else f"{scheduler.in_flight} of {scheduler.max_in_flight} in flight"
        waiting = len(scheduler.waiting) + len(scheduler.unentered)
        return f"<AsyncCoordinator on {self.device.name}: {state}, {waiting} waiting>"


def _check_count(name: str, value: int, most: int) -> None:
    """Check an option that is a number from 1 to ``most``."""
    check_integer(value, name)
    if not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is from 1 to {most}, and this is {value}")


def _check_deadlock_timeout(value: float | None) -> float | None:
    """Return the option in seconds; None for no limit."""
    seconds = check_timeout(value, "deadlock_timeout")
    if seconds == 0:
        raise InvalidArgumentError(
            "deadlock_timeout is more than 0 seconds, and this is 0; None means that no wait is ended",
            argument="deadlock_timeout",
        )
    return seconds


def _as_buffer(thing: Any) -> DeviceBuffer:
    """Return a device buffer; raise `InvalidTypeError` for anything else."""
    if not isinstance(thing, DeviceBuffer):
        raise InvalidTypeError(f"expected a device buffer or the node of an upload, not {type(thing).__name__}")
    return thing


def _resolve(args: tuple[Any, ...]) -> tuple[BaseException | None, tuple[Any, ...]]:
    """Replace the nodes of uploads by their buffers. An upload without a buffer becomes None; return its error, too."""
    error: BaseException | None = None
    found: list[Any] = []
    for argument in args:
        if isinstance(argument, Node):
            if isinstance(argument, ScheduledNode) and argument.value is None and argument.error is not None:
                error = error or argument.error
                argument = None
            else:
                argument = argument.buffer
        found.append(argument)
    return error, tuple(found)


def _combined(failures: list[BaseException]) -> BaseException:
    """Return one failure, or a group of several. A device fault counts once, although many operations fail with it."""
    found: list[BaseException] = []
    for failure in failures:
        if isinstance(failure, DeviceFault) and any(isinstance(other, DeviceFault) for other in found):
            continue
        found.append(failure)
    if len(found) == 1:
        return found[0]
    return BaseExceptionGroup(f"{len(found)} operations of the coordinator failed", found)


def _as_scheduled(node: Node[Any]) -> ScheduledNode[Any]:
    """Return the scheduler's node of a node of a coordinator. Raise an error if it is something else."""
    found = scheduled(node)
    if not isinstance(found, ScheduledNode):
        raise InvalidTypeError(f"expected an operation of a coordinator, not {type(node).__name__}")
    return found
