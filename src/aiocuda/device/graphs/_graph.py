"""Graph: recorded work that is launched as a whole. Capture: the block in which streams record it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from ..._base._failure import Failure
from ..._base._mistakes import keywords, lacks, or_none, refuses
from ..._base._types import ProcessLocal, SourceLine
from ..._core import QUEUED, Operation, Ring, StreamOperation, new_operation
from ...completion._host_queue import Every, Gate, Submitted
from ...completion._stream_queue import stream_queue
from ...driver.protocol import KernelNode, check_update
from ...errors import (
    BusyError,
    ClosedError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    WrongDeviceError,
    WrongLoopError,
)
from ...memory._block import Block
from ...memory._pinned import PinnedBuffer
from .._resources import DeviceResources
from ..streams._checker import Touch
from ..streams._stream import Stream
from ._executable import ExecutableGraph
from ._nodes import NODES, GraphNode, arguments_of, copy_node, launch_node
from ._recorder import CapturedOperation, Recorder, check_branches, check_host_writes

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["Capture", "Graph"]


class GraphVersion(NamedTuple):
    """A graph between two updates. Each launch of it holds it until the launch has been submitted."""

    executable: ExecutableGraph
    nodes: tuple[GraphNode, ...]
    writer: GraphWriter  # and not the graph, which would hold itself through its newest launch


class CapacityGate:
    """Opens when the unfinished graph launches of a stream leave room for this one.

    A node may take an entry of the stream's hardware queue, as an operation does, and a full queue blocks its caller.
    """

    __slots__ = ("_nodes", "_queue")

    def __init__(self, queue: Ring, nodes: int) -> None:
        self._queue = queue
        self._nodes = nodes

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """True if there is room. A graph that is larger than the limit waits until no other is unfinished."""
        queue = self._queue
        taken = sum(len(kept.nodes) for each in queue.pending if isinstance(kept := each.keep, GraphVersion))
        return taken == 0 or taken + self._nodes <= queue.device_hot.limit

    def failure(self) -> Failure | None:
        return None  # it waits for no operation of another stream


class PreviousLaunchGate(Submitted):
    """Opens once the graph's previous launch, in another stream, has been submitted: the driver keeps their order.

    A failure of the previous launch does not skip this one.
    """

    __slots__ = ()

    def failure(self) -> Failure | None:
        return None


class GraphWriter:
    """Represents a graph in `HostWrites`: its launches run one after the other, so they share one entry per range.

    ``id`` is that of the newest launch; ``ranges`` has the address and bytes of the host memory that is entered for it.
    """

    __slots__ = ("__weakref__", "_launches", "id", "ranges")

    def __init__(self) -> None:
        self.id = 0
        self.ranges: set[tuple[int, int]] = set()
        self._launches: dict[Ring, StreamOperation[Any]] = {}  # the newest of each stream

    def launched(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Note the newest launch of a stream."""
        self._launches[queue] = operation
        self.id = operation.id

    @property
    def is_settled(self) -> bool:
        """True when all launches have passed. `HostWrites` reads it, as of an operation."""
        for queue, operation in list(self._launches.items()):
            if operation.is_settled:
                del self._launches[queue]
        return not self._launches

    def __repr__(self) -> str:
        return repr(next(reversed(self._launches.values()), None))


@lacks
@refuses(__call__="is not called: graph.launch(stream) runs it")
class Graph(ProcessLocal):
    """Work that was recorded by `aiocuda.Stream.capture`, to be launched any number of times.

    ``with stream.capture() as graph:`` records launches, copies between the device and pinned memory, fills, and waits
    of streams for one another. Nothing runs and CUDA is not called in the block: no CUDA stream is in capture mode,
    and captures of other libraries are not disturbed. A stream that waits for a captured operation is captured, too;
    the first stream has to wait for its work before the block ends. Work that cannot be part of a graph raises
    `UnsupportedError` with the cure: allocations, arrays that are not pinned, prefetches, events, callbacks, copies
    between devices. An exception in the block discards the recorded work.

    A graph belongs to the event loop that it was recorded in, and to one device. It is destroyed when the program does
    not hold it any more, by `close`, or with its device.

    Examples
    --------
    >>> with stream.capture() as graph:
    ...     stream.copy(x, source)
    ...     scaled = stream.launch(scale, 1, 32, x, 2.0)
    ...     stream.download(x, out=target)
    >>> await graph.launch(stream)
    >>> graph.update(scaled, x, 3.0)
    >>> await graph.launch(stream)
    """

    __slots__ = ("__weakref__", "_blocks", "_closed", "_home", "_last", "_nodes", "_resources", "_token", "_version",
                 "_writer", "_writes", "_writes_entered")  # fmt: skip

    @or_none
    def __init__(self, resources: DeviceResources, queue: Ring) -> None:
        if not isinstance(resources, DeviceResources):
            raise InvalidTypeError("a graph is recorded: `async with stream.capture() as graph`")
        self._resources = resources
        self._home = queue
        self._token: object = None  # identifies the operations that were captured into it
        self._version: GraphVersion | None = None  # None while it is recorded
        self._writes_entered: tuple[tuple[int, int], ...] = ()  # host memory that is entered for its launches
        self._nodes: tuple[GraphNode, ...] = ()
        self._blocks: tuple[Block, ...] = ()
        self._writes: tuple[tuple[int, int], ...] = ()
        self._last: StreamOperation[None] | None = None  # the newest launch
        self._writer = GraphWriter()
        self._closed = False

    def _build(self, recorder: Recorder) -> None:
        """Build the recorded work."""
        graphs, reactor = self._resources.graphs, self._home.reactor
        self._token = recorder.token
        self._set_nodes(recorder.take_nodes())
        graphs.watch(reactor)
        executable = ExecutableGraph(self._resources, reactor, self._nodes)
        self._version = GraphVersion(executable, self._nodes, self._writer)
        executable.start()

    def _set_nodes(self, nodes: tuple[GraphNode, ...]) -> None:
        self._nodes = nodes
        if self._version is not None:
            self._version = GraphVersion(self._version.executable, nodes, self._writer)
        blocks = tuple(dict.fromkeys(block for node in nodes for block in node.blocks))
        if blocks != self._blocks:
            for block in self._blocks:
                block.leave_graph(self)
            for block in blocks:
                block.enter_graph(self)
            self._blocks = blocks
        self._writes = tuple(node.writes for node in nodes if node.writes is not None)

    @property
    def device(self) -> Device:
        """The device that it runs on."""
        device: Device = self._resources.device
        return device

    @property
    def closed(self) -> bool:
        """True if it has been closed, or its recording was discarded."""
        return self._closed

    def __len__(self) -> int:
        """Return the number of its operations."""
        return len(self._nodes)

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until the graph can be launched: its kernels are compiled and loaded, and the graph is on the device.

        Only a launch on a stream that other libraries use, too, needs this: other launches wait in their place.
        """
        yield from self._check(self._home).executable.wait().__await__()
        return self

    async def wait(self) -> Self:
        """Wait until the graph can be launched, like ``await``, but as a coroutine."""
        return await self

    @or_none
    def launch(self, stream: Stream) -> Operation[None]:
        """Run all of it, in the order of a stream. ``cuGraphLaunch``.

        Any number of launches may be in flight. Each runs after the previous one, also in another stream. It runs the
        graph as it is now; a later `update` does not change it.

        Raises
        ------
        StaleHandleError
            Memory that it uses has been freed.
        BusyError
            The capture has not ended; or another copy is writing an array that it writes.
        ClosedError
            It has been closed, or its recording was discarded.
        WrongDeviceError, WrongLoopError
            The stream is another device's, or another event loop's.
        """
        if type(stream) is not Stream or stream._hook is not None:
            return self._launch_by_hook(stream)
        return self._launch(stream)

    def _launch(self, stream: Stream, _: Sequence[Touch] = ()) -> StreamOperation[None]:
        """Launch it as `launch` does, without the stream's hook."""
        queue, version, blocks, writes = stream._queue, self._version, self._blocks, self._writes
        if version is None or queue.device_state is not self._home.device_state or queue.loop is not self._home.loop:
            version = self._check(queue)
        executable, nodes, last = version.executable, version.nodes, self._last
        gates: list[Gate] = []
        for memory in blocks:
            used = memory.uses.get(queue)
            # If that operation failed or was skipped, so were the waits before it.
            if used is None or (used.extra is not None and used.failure is not None) or not memory.ready:
                gates = self._prepare_memory(stream)
                break
        # While one launch is in flight, its entries in `HostWrites` serve the next one, too.
        entered = not writes or (self._writes_entered is writes and last is not None and not last.is_settled)
        if not entered:
            self._check_host_writes(writes)
        if (
            not executable.built
            or (last is not None and last.status == QUEUED and last.queue is not queue)
            or (len(queue.pending) + 1) * len(nodes) > queue.device_hot.limit
        ):
            gates += self._launch_gates(queue, version)
        arguments = (queue.handle, nodes)
        operation: StreamOperation[None]
        if gates:
            operation = queue.rare.enqueue_gated("graph", Every(gates), executable.launch, arguments, version)
        else:
            operation = new_operation(queue, "graph", executable.estimate, version)
            queue.submit(operation, executable.launch, arguments)
        self._last = operation
        for memory in blocks:
            memory.uses[queue] = operation
        if writes:
            self._writer.launched(queue, operation)
            if not entered:
                self._enter_host_writes(writes)
        return operation

    def _launch_by_hook(self, stream: object) -> StreamOperation[None]:
        """Launch it by the hook of the stream, if it has one. Raise unless it is a stream."""
        if not isinstance(stream, Stream):
            kind = type(stream).__name__
            raise InvalidTypeError(f"a graph is launched on an aiocuda.Stream, not on {kind}: graph.launch(stream)")
        if stream._hook is None:
            return self._launch(stream)
        queue, checker = stream_queue(stream), self._resources.checker
        self._check(queue)
        if checker is None:
            return stream._hook.call("launch_graph", self._launch, stream, ())
        if self._last is not None:
            checker.wait(queue, self._last)  # the driver keeps the order of its launches
        # A pipeline launches the graph of a stage: the lines of the stage are those of the program.
        line = SourceLine.of_direct_caller("device", "coordination")
        operation: StreamOperation[None]
        operation = stream._hook.call("launch_graph", self._launch, stream, self._touches(line))
        for node in self._nodes:
            for written in node.keep:
                if node.kind in ("launch", "download") and isinstance(written, PinnedBuffer):
                    checker.sources.written(written, operation)
        for node in self._nodes:
            if node.kind == "upload":
                checker.watch_source(queue, node.keep[1], operation, line or node.line)
        return operation

    def _touches(self, line: SourceLine | None) -> list[Touch]:
        """Return what a launch does with device memory: one access to each range of bytes.

        The accesses are those of this line; with None, of the lines that were captured.
        """
        merged: dict[tuple[Block, int, int], Touch] = {}
        for node in self._nodes:
            for touch in node.touches():
                key = touch[:3]
                known = merged.get(key)
                if known is None or (touch.writes and not known.writes):
                    merged[key] = touch._replace(line=line or node.line)
        return list(merged.values())

    def _prepare_memory(self, stream: Stream) -> list[Gate]:
        """Let the stream use the graph's memory for the first time."""
        try:
            gate = stream._access.prepare_all(self._blocks)
        except StaleHandleError as error:
            error.add_note(f"{self!r} works on it: let it work on other memory by `graph.update`")
            raise
        return [] if gate is None else [gate]

    def _launch_gates(self, queue: Ring, version: GraphVersion) -> list[Gate]:
        """Return the gates of a launch, besides that of its memory."""
        executable, last, count = version.executable, self._last, len(version.nodes)
        gates: list[Gate] = []
        if last is not None and last.status == QUEUED and last.queue is not queue:
            gates.append(PreviousLaunchGate(last, queue))
        if not executable.built:
            executable.ready(None)  # raises if it could not be built
            gates.append(executable.wanted_by(queue))
        if (len(queue.pending) + 1) * count > queue.device_hot.limit:
            gates.append(CapacityGate(queue, count))
        return gates

    def _check(self, queue: Ring) -> GraphVersion:
        """Return the present version. Raises if the graph cannot be launched on this queue."""
        version = self._version
        if self._closed:
            raise ClosedError(f"{self!r}: capture it again")
        if version is None:
            raise BusyError(f"{self!r}: leave the `async with stream.capture()` block first")
        if queue.device_state is not self._home.device_state:
            raise WrongDeviceError(f"{self!r} is not of the device of {queue.name}: capture it on a stream of that one")
        if queue.loop is not self._home.loop:
            raise WrongLoopError(f"{self!r} belongs to another event loop than {queue.name}: capture it in that one")
        return version

    def _check_host_writes(self, writes: tuple[tuple[int, int], ...]) -> None:
        """Raise if another operation writes the arrays that it downloads to."""
        for memory in writes:
            writer: object = self._resources.host_writes.writer(*memory)
            if writer is None:
                self._writer.ranges.discard(memory)
            elif writer is not self._writer or memory not in self._writer.ranges:
                raise BusyError(
                    f"{writer!r} is writing an array that {self!r} downloads to, or part of it: await it first, or "
                    "give the download another one"
                )

    def _enter_host_writes(self, writes: tuple[tuple[int, int], ...]) -> None:
        """Let no other operation write these arrays while a launch is in flight."""
        for memory in writes:
            if memory not in self._writer.ranges:
                self._writer.ranges.add(memory)
                self._resources.host_writes.add(*memory, cast("StreamOperation[Any]", self._writer))
        self._writes_entered = writes

    @keywords("the kernel's arguments have no keywords: graph.update(operation, *arguments), with all of them")
    def update(
        self, operation: Operation[Any], *args: Any, grid: Any = None, block: Any = None, shared_bytes: Any = None
    ) -> None:
        """Change the arguments of one of its operations, from the next launch on.

        The next launch calls ``cuGraphExecKernelNodeSetParams``, or the same for copies and fills. Launches that are
        enqueued already do not change.

        Parameters
        ----------
        operation
            What the stream's method returned in the capture.
        *args
            For a launch, all of the kernel's arguments; for a copy or a download, its target and its source; for a
            fill, the buffer and the value. The kernel, the direction of a copy and the size of a fill's item stay.
        grid, block, shared_bytes
            For a launch; what is omitted stays.
        """
        self._home.check_loop()
        self._check(self._home)
        if not isinstance(operation, CapturedOperation) or operation.recorder.token is not self._token:
            raise InvalidArgumentError(
                f"{operation!r} was not captured into {self!r}: update takes what a stream's method returned in its "
                "`with` block"
            )
        index = operation.index
        if index is None:
            raise InvalidArgumentError(f"{operation!r} only orders others: there is nothing to update")
        old = self._nodes[index]
        present = old.driver_node
        if isinstance(present, KernelNode):
            new = launch_node(
                self._resources,
                old.kernel,
                present.grid if grid is None else grid,
                present.block if block is None else block,
                args,
                present.shared_bytes if shared_bytes is None else shared_bytes,
            )
        else:
            make: Callable[..., GraphNode] = NODES.get(old.kind, copy_node)  # an upload and a download are copies
            names = arguments_of(make)
            if len(args) != len(names) or not (grid is block is shared_bytes is None):
                takes = " and ".join(f"a {name}" for name in names)
                raise InvalidTypeError(f"update of a {old.kind} takes {takes}, {len(args)} given")
            new = make(self._resources, *args)
            if new.kind != old.kind:
                raise InvalidArgumentError(f"{operation!r} stays a {old.kind}, and this would be a {new.kind}")
        check_update([present], 0, new.driver_node)
        check_host_writes(self._nodes, new, but=index)
        checker = self._resources.checker
        new = new.placed(present.after, old.stream, None if checker is None else SourceLine.of_caller())
        nodes = (*self._nodes[:index], new, *self._nodes[index + 1 :])
        if checker is not None:
            check_branches(checker, nodes, index)
        self._set_nodes(nodes)

    def close(self) -> None:
        """Destroy it after the launches in flight. It cannot be launched any more."""
        self._closed = True
        self._version = self._last = None
        self._set_nodes(())

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._version is None:
            state = "being captured"
        else:
            state = f"{len(self._nodes)} operations"
        return f"<Graph of {self._home.name}: {state}>"


@lacks
@refuses(__await__="is a block, which records a graph: `async with stream.capture() as graph`")
class Capture:
    """What `aiocuda.Stream.capture` returns: a context manager, for ``with`` or ``async with``, over the `Graph`.

    After ``with``, a worker thread builds the graph, and its first launch waits in its stream until it is built. After
    ``async with``, it is built. A block that has recorded nothing warns.
    """

    __slots__ = ("_graph", "_recorder")

    def __init__(self, resources: DeviceResources, stream: Stream) -> None:
        self._graph = Graph(resources, stream_queue(stream))
        self._recorder = Recorder(resources, stream)

    def __enter__(self) -> Graph:
        recorder = self._recorder
        if recorder.used:
            raise BusyError("a capture is made once: call stream.capture() again")
        stream_queue(recorder.origin).check()
        recorder.begin()
        return self._graph

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        recorder, graph = self._recorder, self._graph
        unjoined = recorder.unjoined()
        recorder.end()
        if kind is not None:
            graph.close()
        elif unjoined:
            graph.close()
            names = ", ".join(unjoined)
            raise InvalidArgumentError(
                f"the capture of {recorder.origin.name} ends, and does not wait for {names}, captured with it: "
                f"{recorder.origin.name}.wait({unjoined[0]}) at the end of the block"
            )
        else:
            line = None if recorder.nodes else SourceLine.of_direct_caller("device")  # a pipeline refuses an empty one
            if line is not None:
                line.warn(
                    f"this capture of {recorder.origin.name} has recorded nothing, so the graph is empty: the work of "
                    "another stream joins it if that stream waits, `other.wait(stream)`, at the beginning of the block",
                    RuntimeWarning,
                )
            graph._build(recorder)

    async def __aenter__(self) -> Graph:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.__exit__(kind, *exc)
        if kind is None:
            await self._graph

    def __repr__(self) -> str:
        return "stream.capture()"
