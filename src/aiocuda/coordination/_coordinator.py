"""AsyncCoordinator: graphs of operations, ordered on the device, awaited where somebody wants to know."""

from __future__ import annotations

from asyncio import CancelledError, _get_running_loop
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, cast

import numpy.typing as npt

from .._checks import is_coroutine_function, is_function, several
from .._device import Device
from .._event import Event
from .._types import ProcessLocal
from .._user_code import LEAVES_LOOP
from ..completion._operation import Operation
from ..errors import DeviceOutOfMemory, InvalidArgumentError, InvalidTypeError
from ..interchange._host_arrays import as_source, as_target
from ..kernels import Kernel
from ..memory._buffer import DeviceBuffer
from ..stream import Checker, Stream
from . import _outside
from ._arguments import as_buffer, check_count, check_launch, resolved
from ._bracket import Bracket
from ._checking import said
from ._dependencies import Access, accesses_of, check_acyclic, inferred, of_launch
from ._ending import combined
from ._node import KINDS, PRIORITIES, Cause, Kind, Node, NodePriority
from ._scheduler import SAMPLED, Scheduler
from ._statistics import CoordinatorStatistics, statistics_of

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AsyncCoordinator"]

_KINDS = frozenset(KINDS)
_RANKS = {name: rank for rank, name in enumerate(PRIORITIES)}

#: What ``after`` takes.
After = Node[Any] | Operation[Any] | Event | Iterable[Any]


class AsyncCoordinator(ProcessLocal):
    """Puts operations in order on the device, over as many streams as that takes.

    Each verb registers an operation and returns it at once, to be awaited or not. It comes behind what ``after``
    names, and behind all that conflicts with what it reads and writes; both become waits on the device. At most
    ``max_in_flight`` are given to streams; the others wait on the host, by priority, and who is overtaken 64 times
    rises one class. What a failed operation was to bring is not used: all that needs it is skipped, with
    `SkippedError`; everything else goes on. The bytes that a failed or skipped operation should have written are
    *poisoned*: whatever reads them is skipped, too, until an operation has replaced them.

    Leaving ``async with`` waits for all of it, and raises what nobody was told of: one failure as it is, several as an
    `ExceptionGroup`. Left by an exception, it withdraws what no stream has and waits for nothing.

    ::

        async with AsyncCoordinator(device) as coordinator:
            x = coordinator.upload(array)
            left = coordinator.compute(square, grid, block, x, a, n)
            right = coordinator.compute(cube, grid, block, x, b, n)
            coordinator.compute(add, grid, block, a, b, total, n)   # behind both: it reads what they write
            result = await coordinator.download(total)

    Parameters
    ----------
    device
        Where the streams are.
    max_in_flight
        Operations that are given to streams at once, 1 to 4096.
    streams
        Streams for kernels, for each of three priorities, made as they are needed; 1 to 64. Uploads and downloads have
        one of each priority.
    check
        Look for unordered accesses from now on, as ``open_device(check=True)`` does from the start.
    """

    def __init__(self, device: Device, max_in_flight: int = 64, *, streams: int = 4, check: bool = False) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a coordinator orders the work of an aiocuda.Device, not {type(device).__name__}")
        check_count("max_in_flight", max_in_flight, 4096)
        check_count("streams", streams, 64)
        if check and device.checker is None:
            device.checker = Checker()
        self.device = device
        self.max_in_flight = max_in_flight
        self._scheduler = Scheduler(device, max_in_flight, streams)
        self._extents: set[Any] = set()

    # -- verbs ---------------------------------------------------------------------------------------------------

    def upload(
        self, source: Any, target: DeviceBuffer | None = None, *, after: After = (), reads: Iterable[Any] | None = None,
        writes: Iterable[Any] | None = None, stream: Stream | None = None, priority: NodePriority = "normal",
        description: str = "",
    ) -> Node[DeviceBuffer]:  # fmt: skip
        """Copy an array to the device. ``cuMemcpyHtoDAsync``.

        The result is the buffer; ``node.buffer`` is the same one at once, and the node itself can be given to `compute`
        and `download` in its place. The array is borrowed until the operation is done.

        Parameters
        ----------
        source
            As `Stream.upload` takes it.
        target
            The buffer to fill; a new one if left out. No room for that is the operation's failure.
        after
            What it comes behind and needs: a node, an operation or event of a stream, or several of them.
        reads, writes
            Buffers and arrays, instead of what is inferred: it reads ``source`` and replaces ``target``.
        stream
            One of your own.
        priority
            ``"critical"``, ``"high"``, ``"normal"``, ``"low"`` or ``"cleanup"``.
        description
            How errors and reports name it.
        """
        began, node = self._begin("transfer", "upload", stream, priority, description)
        array = as_source(source, self.device._pinned)
        try:
            buffer = self._made(array, stream) if target is None else as_buffer(target)
        except DeviceOutOfMemory as error:
            self._link(node, after, [], began, error)
            return node
        node._value = buffer
        accesses = accesses_of((array,) if reads is None else reads, (buffer,) if writes is None else writes)
        node._work = lambda stream: stream.copy(buffer, array)
        self._link(node, after, accesses, began)
        return node

    def compute(
        self, kernel: Kernel, grid: Any, block: Any, *args: Any, shared_bytes: int = 0, after: After = (),
        reads: Iterable[Any] | None = None, writes: Iterable[Any] | None = None, stream: Stream | None = None,
        priority: NodePriority = "normal", description: str = "", kind: Kind = "kernel",
    ) -> Node[None]:  # fmt: skip
        """Run a kernel. ``cuLaunchKernelEx``.

        Arguments are those of `Stream.launch`, and nodes of `upload` for their buffers. A buffer counts as read and
        written unless its parameter is ``const``, which counts as read. Of a buffer that ``reads`` or ``writes`` names,
        only that holds. A buffer that ``writes`` names and ``reads`` does not is replaced: the operation does not need
        its content, and runs also if that is poisoned.
        """
        began, node = self._begin(kind, "compute", stream, priority, description)
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"compute takes an aiocuda.Kernel, not {type(kernel).__name__}")
        uploads: list[Node[Any]] = []
        error: BaseException | None = None
        for argument in args:
            if isinstance(argument, Node):
                uploads = [self._mine(argument) for argument in args if isinstance(argument, Node)]
                error, args = resolved(args)
                break
        if error is None:
            kernel.bind(args)
            check_launch(self._extents, self.device, grid, block, shared_bytes)
            if shared_bytes:
                node._work = lambda stream: stream.launch(kernel, grid, block, *args, shared_bytes=shared_bytes)
            else:
                node._work = lambda stream: stream.launch(kernel, grid, block, *args)
        elif len(args) != len(kernel.signature.parameters):
            raise kernel.miscounted(args)
        if reads is None and writes is None:
            accesses = of_launch(kernel, args)
        else:
            accesses = inferred(kernel, args, reads, writes)
        self._link(node, after, accesses, began, uploads=uploads)
        return node

    def download(
        self, buffer: DeviceBuffer | Node[DeviceBuffer], out: npt.NDArray[Any] | None = None, *, after: After = (),
        reads: Iterable[Any] | None = None, writes: Iterable[Any] | None = None, stream: Stream | None = None,
        priority: NodePriority = "normal", description: str = "",
    ) -> Node[npt.NDArray[Any]]:  # fmt: skip
        """Copy a buffer to the host; the result is ``out``, or a new array. ``cuMemcpyDtoHAsync``."""
        began, node = self._begin("transfer", "download", stream, priority, description)
        if isinstance(buffer, Node):
            self._mine(buffer)
        error, (found,) = resolved((buffer,))
        target = None if out is None else as_target(out, self.device._pinned)
        read: Iterable[Any] = ()
        if error is None:
            source = as_buffer(found)
            read = (source,)
            node._lands = True
            node._work = lambda stream: stream.download(source, target)
        written: Iterable[Any] = () if target is None else (target,)
        accesses = accesses_of(read if reads is None else reads, written if writes is None else writes)
        self._link(node, after, accesses, began, uploads=(buffer,) if isinstance(buffer, Node) else ())
        return node

    def operation(
        self, kind: Kind, *, after: After = (), reads: Iterable[Any] = (), writes: Iterable[Any] = (),
        stream: Stream | None = None, priority: NodePriority = "normal", description: str = "",
    ) -> Bracket:  # fmt: skip
        """What is enqueued on ``bracket.stream`` inside ``async with`` counts as one operation.

        For work that another library enqueues, or several verbs of a stream. If the block raises, the operation has
        failed, and what depends on it is skipped. Only ``reads`` and ``writes`` say which bytes it touches; verbs
        inside the block are not looked at.
        """
        _, node = self._begin(kind, "bracket", stream, priority, description, bracket=(after, reads, writes))
        return cast("Bracket", node)

    def host(
        self, function: Callable[..., Any], *args: Any, after: After = (), reads: Iterable[Any] = (),
        writes: Iterable[Any] = (), priority: NodePriority = "normal", description: str = "",
    ) -> Node[Any]:  # fmt: skip
        """Run a function on the host once all that it comes behind is done, and put what depends on it behind that.

        A coroutine function runs on the loop, a plain one on a worker thread of the device. It takes no place. Only
        ``reads`` and ``writes`` say which bytes it touches.

        Any exception of the function fails the operation: each waiter gets the same object. `KeyboardInterrupt` and
        `SystemExit` also leave the event loop, as from a task. If a plain function raises `CancelledError` or
        `StopIteration`, the operation fails with a `RuntimeError` whose ``__cause__`` it is.
        """
        if not is_function(function):
            raise InvalidTypeError(f"host takes a function, not {type(function).__name__}")
        began, node = self._begin("host", "host", None, priority, description)
        _outside.call(self._scheduler, node, function, args, is_coroutine_function(function))
        self._link(node, after, accesses_of(reads, writes), began)
        return node

    def add_dependency(self, dependent: Node[Any], prerequisite: Node[Any]) -> None:
        """Put an operation that still waits behind another one.

        Raises
        ------
        CycleError
            The other one comes behind it already.
        ClosedError
            It has been given to a stream.
        """
        self._scheduler.check()
        self._mine(dependent)
        self._mine(prerequisite)
        check_acyclic(dependent, prerequisite)
        _outside.add(self._scheduler, dependent, prerequisite)

    # -- registration --------------------------------------------------------------------------------------------

    def _begin(
        self, kind: Kind, role: str, stream: Stream | None, priority: NodePriority, description: str,
        bracket: tuple[After, Iterable[Any], Iterable[Any]] | None = None,
    ) -> tuple[float, Node[Any]]:  # fmt: skip
        scheduler = self._scheduler
        if _get_running_loop() is not scheduler.running or scheduler.closing or scheduler.driver.fault is not None:
            scheduler.check()
        rank = _RANKS.get(priority) if isinstance(priority, str) else None
        if rank is None:
            raise InvalidArgumentError(f"priority is one of {', '.join(PRIORITIES)}, not {priority!r}")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidArgumentError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
        if stream is not None and not isinstance(stream, Stream):
            raise InvalidTypeError(f"stream is an aiocuda.Stream, not {type(stream).__name__}")
        began = scheduler.driver.now()
        number = scheduler.number = scheduler.number + 1
        if bracket is None:
            return began, Node(scheduler, number, kind, role, rank, description, stream, began)
        after, reads, writes = bracket
        accesses = accesses_of(reads, writes)
        return began, Bracket(scheduler, number, kind, rank, description, stream, began, accesses, self._named(after))

    def _link(
        self, node: Node[Any], after: After, accesses: list[Access], began: float, error: BaseException | None = None,
        uploads: Iterable[Node[Any]] = (),
    ) -> None:  # fmt: skip
        """Its edges, and on its way. ``uploads`` were given in the place of their buffers."""
        scheduler = self._scheduler
        for upload in uploads:
            node._come_behind(upload, upload._value is None)  # where there is a buffer, its bytes are what is needed
        if after != ():
            for other in self._named(after):
                node._come_behind(other, True)
        if accesses:
            scheduler.graph.note(node, accesses)
        if scheduler.device.checker is not None:
            node._said = said(scheduler.device.checker, accesses)
        if error is not None:
            node._cause = Cause(error, node.name)
            node._error = error
            scheduler.note_unread(node._cause)
        if node._role == "host":
            _outside.until_landed(node)
        scheduler.register(node)
        if not scheduler.number & SAMPLED:
            scheduler.overhead += scheduler.driver.now() - began

    def _named(self, after: After) -> list[Node[Any]]:
        """What ``after`` names, as nodes."""
        things = (after,) if isinstance(after, Node | Operation | Event) else after
        found: list[Node[Any]] = []
        for thing in several(things, "after names operations: a node, an operation, an event or several"):
            if isinstance(thing, Node):
                found.append(self._mine(thing))
            elif isinstance(thing, Operation | Event):
                found.append(_outside.node(self._scheduler, thing))
            else:
                raise InvalidTypeError(f"after names nodes, operations and events, not {type(thing).__name__}")
        return found

    def _mine(self, node: Node[Any]) -> Node[Any]:
        if not isinstance(node, Node):
            raise InvalidTypeError(f"an operation of a coordinator is meant, not {type(node).__name__}")
        if node._scheduler is not self._scheduler:
            raise InvalidArgumentError(f"{node!r} belongs to another coordinator: await it, or give its `operation`")
        return node

    def _made(self, array: npt.NDArray[Any], stream: Stream | None) -> DeviceBuffer:
        return (stream or self.upload_stream).empty(array.shape, array.dtype)

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def upload_stream(self) -> Stream:
        """The stream of uploads of normal priority."""
        return self._scheduler.streams.first("upload")

    @property
    def compute_stream(self) -> Stream:
        """The first of the streams of kernels of normal priority."""
        return self._scheduler.streams.first("compute")

    @property
    def download_stream(self) -> Stream:
        """The stream of downloads of normal priority."""
        return self._scheduler.streams.first("download")

    # -- waiting -------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Ask the device how far it is, and give what fits; how many operations have ended by that."""
        scheduler = self._scheduler
        scheduler.check_loop()
        before = sum(scheduler.ended)
        scheduler.ask()
        return sum(scheduler.ended) - before

    async def wait(self, node: Node[Any]) -> Any:
        """Its result: the same as awaiting it."""
        return await self._mine(node)

    async def drain(self) -> None:
        """Wait until all that was registered has finished, done or failed; what failed is left for others to read."""
        await self._scheduler.drain()

    async def room(self) -> None:
        """Wait until no more than ``max_in_flight`` operations wait on the host: for who produces without end."""
        await self._scheduler.room()

    def statistics(self) -> CoordinatorStatistics:
        """A snapshot."""
        return statistics_of(self._scheduler)

    # -- the end -------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        self._scheduler.refuse()

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for all that was registered, then close the streams.

        The verbs of its streams refuse new work, too. What was registered runs, also on the host's side; an operation
        whose block has been entered goes on until the block is left. Raises what no task was told of. A cancellation
        meanwhile leaves the coordinator, as an exception leaves ``async with``.
        """
        scheduler = self._scheduler
        if not scheduler.closed:
            scheduler.check_loop()
            scheduler.refuse()
            try:
                await scheduler.drain()
                await scheduler.close()
            except BaseException:
                scheduler.leave()
                raise
        failures = scheduler.read_all()
        if failures:
            raise combined(failures)

    async def __aenter__(self) -> Self:
        self._scheduler.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
            return
        if not (
            self._scheduler.closed or self.device._closing
        ):  # a device that is being closed waits for its operations
            self._scheduler.leave()
        failures = [failure for failure in self._scheduler.read_all() if failure is not error]
        if not failures:
            return
        if not isinstance(error, (CancelledError, GeneratorExit, *LEAVES_LOOP)):
            raise combined([error, *failures]) from error.__cause__
        for failure in failures:  # a cancellation stays one, and so does Ctrl-C
            self._scheduler.loop.call_exception_handler(
                {"message": "aiocuda: an operation of a coordinator that was left had failed", "exception": failure}
            )

    def __repr__(self) -> str:
        scheduler = self._scheduler
        state = "closed" if scheduler.closed else f"{scheduler.in_flight} of {scheduler.max_in_flight} in flight"
        return f"<AsyncCoordinator on {self.device.name}: {state}, {len(scheduler.waiting)} waiting>"
