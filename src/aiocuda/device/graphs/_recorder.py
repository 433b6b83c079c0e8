"""Recorder: one capture, over all of its streams.

Each captured stream has a head: the nodes that its next node waits for. A method adds a node after the head, and the
node becomes the head; a wait adds another stream's head to it. So a wait makes no node: it is only edges of the graph.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

from ..._base._types import SourceLine
from ..._base._wakeups import Waiters
from ..._core import Operation, Ring, StreamOperation, new_operation
from ...completion._methods import METHODS, Refusal
from ...completion._stream_queue import stream_queue
from ...errors import BusyError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ...memory._buffer import DeviceBuffer
from .._resources import DeviceResources
from ..streams._checker import Checker, Conflict
from ..streams._hook import RecordedOperation, StreamHook
from ..streams._stream import Stream
from ._nodes import NODES, GraphNode, copy_node

__all__ = ["CapturedOperation", "Recorder", "RecordingHook", "check_branches", "check_host_writes"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: The state of a captured operation, before all states of an enqueued one.
_CAPTURED = -1


class CapturedOperation(RecordedOperation[T_co]):
    """A place in a graph. During the capture other streams can wait for it; later `Graph.update` can change it.

    It does not run by itself: every method that would wait for it raises `BusyError`.
    """

    __slots__ = ("after", "index", "recorder")

    recorder: Recorder
    after: tuple[int, ...]  # the nodes that a wait for it waits for
    index: int | None  # of its own node; None for a wait, which has none

    @classmethod
    def of(
        cls, recorder: Recorder, queue: Ring, kind: str, after: tuple[int, ...], index: int | None
    ) -> CapturedOperation[Any]:
        """Return what a method has recorded."""
        captured: CapturedOperation[Any] = new_operation(queue, kind, None, None, cls)
        return captured._recorded(recorder, after, index)

    def _recorded(self, recorder: Recorder, after: tuple[int, ...], index: int | None) -> Self:
        self.recorder = recorder
        self.after = after
        self.index = index
        self.status = _CAPTURED
        self.waiters = Waiters()  # so that new waiters come to `add_waiter`
        return self

    def returning(self, value: Any) -> Self:
        """Return the operation with its result: a pipeline that replays the graph returns it."""
        self.value = value
        return self

    def joined_by(self, stream: Stream) -> Operation[None]:
        """Record that later work of this stream waits for it. A stream that is not captured is captured from now on."""
        return self.recorder.wait(stream, self)

    @property
    def seen_state(self) -> str:
        return "captured"

    def _refuse(self) -> NoReturn:
        raise BusyError(
            f"{self!r} was recorded into a graph and does not run by itself: leave the `async with stream.capture()` "
            "block, then `await graph.launch(stream)`"
        )

    def add_waiter(self, waiter: Any) -> NoReturn:
        self._refuse()

    def __await__(self) -> Generator[Any, None, T_co]:
        self._refuse()

    async def wait(self) -> T_co:
        self._refuse()

    async def settle(self) -> None:
        self._refuse()

    def result(self) -> T_co:
        self._refuse()

    def exception(self) -> BaseException | None:
        self._refuse()

    def add_done_callback(self, fn: Any, *, context: Any = None) -> None:
        self._refuse()

    def remove_done_callback(self, fn: Any) -> int:
        return 0  # it has no callbacks

    def abandon(self) -> bool:
        self._refuse()


class RecordingHook:
    """The hook of a captured stream: each method records a node, or raises an error with the reason and the cure."""

    #: Methods that do more than to add their node, by the method that records them.
    _RECORDED: ClassVar = {"download": "_download", "wait": "_wait", "synchronize": "_synchronize"}

    def __init__(self, recorder: Recorder, stream: Stream) -> None:
        self._recorder = recorder
        self._stream = stream
        self._resources = recorder.resources

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Record the method's work."""
        recorded = METHODS[method].graph
        if recorded is None:
            raise BusyError(
                f"{self._stream.name} is being captured: leave the `async with stream.capture()` block first"
            )
        if isinstance(recorded, Refusal):
            self._refuse(*recorded)
        if method == "end":
            return cast("T", self._recorder.head(self._stream, "wait"))
        self._recorder.check(self._stream)
        name = self._RECORDED.get(method)
        if name is not None:
            return cast("T", getattr(self, name)(*args))
        return cast("T", self._recorder.add(self._stream, NODES[method](self._resources, *args)))

    def _refuse(self, work: str, cure: str) -> NoReturn:
        raise UnsupportedError(f"{self._stream.name} is being captured, and {work} cannot be part of a graph: {cure}")

    def _download(self, buffer: Any, out: Any) -> Operation[Any]:
        if not isinstance(buffer, DeviceBuffer):
            raise InvalidTypeError(f"download takes a device buffer, not {type(buffer).__name__}")
        if out is None:
            self._refuse(
                "a new array for each download",
                f"give it one, `stream.download(buffer, out=device.pinned({buffer.shape}, {str(buffer.dtype)!r}))`",
            )
        return self._recorder.add(self._stream, copy_node(self._resources, out, buffer)).returning(out)

    def _wait(self, other: Any) -> Operation[Any]:
        operation = other._last_work() if isinstance(other, Stream) else getattr(other, "operation", other)
        if isinstance(operation, CapturedOperation):
            return self._recorder.wait(self._stream, operation)
        if operation is not None and not isinstance(operation, StreamOperation):
            raise InvalidTypeError(f"a stream waits for an operation, an event or a stream, not {type(other).__name__}")
        self._refuse(
            f"a wait for {other!r}, which is not captured,", "let the stream wait for it, then launch the graph on it"
        )

    def _synchronize(self) -> Operation[Any]:
        return self._recorder.head(self._stream, "synchronize")


class Recorder:
    """Records the nodes of one graph. Captured operations hold it, so that it drops all else when the capture ends."""

    def __init__(self, resources: DeviceResources, origin: Stream) -> None:
        self.resources = resources
        self.origin = origin  #: the stream that is captured first
        #: Identifies the capture. A graph keeps it to know its operations, and so does not hold the recorder's streams.
        self.token = object()
        self.nodes: list[GraphNode] = []
        self.open = self.used = False  #: True inside the ``with`` block; True from the beginning of the block on
        self._heads: dict[Stream, tuple[int, ...]] = {}
        self._hooks: dict[Stream, StreamHook | None] = {}  # those of the streams when they are not captured
        self._queues: list[Ring] = []  # those that it has set to record
        self._task: asyncio.Task[Any] | None = None
        self._task_name = ""

    def begin(self) -> None:
        """Capture the first stream. Only the task that runs now may record."""
        stream_queue(self.origin).check_loop()
        self._task, self._task_name = asyncio.current_task(), _task_name()
        self.open = self.used = True
        self._capture(self.origin, ())

    def _capture(self, stream: Stream, head: tuple[int, ...]) -> None:
        if isinstance(stream._hook, RecordingHook):
            raise BusyError(f"{stream.name} is being captured already: end that capture first, or use another stream")
        self._hooks[stream] = stream._put_hook(RecordingHook(self, stream))
        self._heads[stream] = head
        queue = stream_queue(stream)
        if not queue.recorded:  # else the capture contains another `Stream` object of the same queue
            queue.recorded = True
            self._queues.append(queue)

    def end(self) -> None:
        """Let all streams enqueue again."""
        self.open = False
        self._task = None
        for stream, hook in self._hooks.items():
            if isinstance(stream._hook, RecordingHook):  # not for a lease that has ended in the block
                stream._put_hook(hook)
        for queue in self._queues:
            queue.recorded = False
        self._hooks = {}
        self._queues = []
        self._heads = {}

    def take_nodes(self) -> tuple[GraphNode, ...]:
        """Return the nodes, to which the recorder refers no longer."""
        nodes, self.nodes = self.nodes, []
        return tuple(nodes)

    def check(self, stream: Stream) -> None:
        """Raise unless the running task may record work of this stream."""
        stream_queue(stream).check()
        if asyncio.current_task() is not self._task:
            raise BusyError(
                f"{stream.name} is being captured into a graph by {self._task_name}, and {_task_name()} would record "
                "into it, too: let that end first, or use a stream of its own"
            )

    def add(self, stream: Stream, node: GraphNode) -> CapturedOperation[Any]:
        """Add a node after the stream's head."""
        check_host_writes(self.nodes, node)
        index = len(self.nodes)
        checker = self.resources.checker
        line = None if checker is None else SourceLine.of_caller()
        self.nodes.append(node.placed(self._heads[stream], stream.name, line))
        if checker is not None:
            check_branches(checker, self.nodes, index)
        self._heads[stream] = (index,)
        return CapturedOperation.of(self, stream_queue(stream), node.kind, (index,), index)

    def head(self, stream: Stream, kind: str) -> CapturedOperation[Any]:
        """Return an operation that represents all recorded work of the stream."""
        return CapturedOperation.of(self, stream_queue(stream), kind, self._heads[stream], None)

    def wait(self, stream: Stream, other: CapturedOperation[Any]) -> CapturedOperation[Any]:
        """Let later nodes of the stream wait for a captured operation. Captures the stream if it is not captured."""
        if not (self.open and other.recorder is self):
            raise BusyError(
                f"{other!r} was recorded into a graph and does not run by itself, so only what is recorded with it can "
                "wait for it: wait for what graph.launch(stream) returns"
            )
        if stream_queue(stream).device_state is not self.resources.device_state:
            raise WrongDeviceError(
                f"{stream.name} is a stream of another device than {self.origin.name}, and a graph is of one: wait for "
                "what graph.launch(stream) returns"
            )
        self.check(stream)
        if stream in self._heads:
            self._heads[stream] = tuple(sorted({*self._heads[stream], *other.after}))
        else:
            self._capture(stream, other.after)
        return self.head(stream, "wait")

    def unjoined(self) -> list[str]:
        """Return the names of streams with nodes that the last node of the first stream does not wait for."""
        reached: set[int] = set()
        left = list(self._heads[self.origin])
        while left:
            index = left.pop()
            if index not in reached:
                reached.add(index)
                left.extend(self.nodes[index].driver_node.after)
        return [stream.name for stream, head in self._heads.items() if not reached.issuperset(head)]


def check_branches(checker: Checker, nodes: Sequence[GraphNode], index: int) -> None:
    """Report the conflicts of a node with those nodes of its graph that no edges put before or after it."""
    node, before = nodes[index], list[int]()  # for each node, the bits of those before it
    for other in nodes:
        before.append(functools.reduce(lambda bits, at: bits | before[at] | 1 << at, other.driver_node.after, 0))
    for at, other in enumerate(nodes):
        if at == index or before[index] >> at & 1 or before[at] >> index & 1:
            continue
        for touch, theirs in itertools.product(node.touches(), other.touches()):
            if touch.conflicts(theirs) and node.line is not None and other.line is not None:
                conflict = Conflict(str(other.line), str(node.line), other.kind, node.kind, other.stream, node.stream,
                                    str(touch.block))  # fmt: skip
                checker.report(conflict, node.line)


def check_host_writes(nodes: Sequence[GraphNode], node: GraphNode, but: int | None = None) -> None:
    """Raise if another node of the graph writes the same host memory: the nodes may run in any order.

    ``but`` is the index of the node that this one replaces.
    """
    if node.writes is None:
        return
    start, nbytes = node.writes
    for index, other in enumerate(nodes):
        if other.writes is not None and index != but:
            begin, size = other.writes
            if begin < start + nbytes and start < begin + size:
                raise InvalidArgumentError(
                    f"step {index} of this graph writes this array already, or part of it: give another one"
                )


def _task_name() -> str:
    """Return the running task's name, for messages."""
    task = asyncio.current_task()
    return "no task" if task is None else task.get_name()
