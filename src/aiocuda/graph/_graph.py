"""Graph: recorded work, launched as a whole."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from .._types import ProcessLocal
from ..completion._failure import Failure
from ..completion._host_queue import Every, Gate, Submitted
from ..completion._operation import QUEUED, Operation, new_operation
from ..completion._stream_queue import StreamQueue
from ..driver.protocol import KernelNode, check_update
from ..errors import (
    BusyError,
    ClosedError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    WrongDeviceError,
    WrongLoopError,
)
from ..memory._block import Block
from ..stream import Stream
from ..stream._use import meet_all
from ._captured import Captured
from ._executable import Executable
from ._recorder import Recorder, check_writes
from ._recording import Recording
from ._steps import Step, copy_step, fill_step, launch_step

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["Graph"]


class Held(NamedTuple):
    """What a launch holds until its turn has come."""

    executable: Executable
    steps: tuple[Step, ...]
    writer: Writer  # who claims the arrays that it writes; and not the graph, which would hold itself


class Room:
    """Opens when the launches of graphs in one stream have few enough steps in flight for one more.

    A step may take an entry of the stream's hardware queue, as an operation does, and a full one blocks its caller.
    """

    __slots__ = ("_queue", "_steps")

    def __init__(self, queue: StreamQueue, steps: int) -> None:
        self._queue = queue
        self._steps = steps

    def ready(self, operation: Operation[Any]) -> bool:
        """Is there room? A graph that is larger than all of it has its turn when no other is there."""
        queue = self._queue
        taken = sum(len(held.steps) for each in queue.pending if isinstance(held := each._keep, Held))
        return taken == 0 or taken + self._steps <= queue.device_state.limit

    def failure(self) -> Failure | None:
        """None."""
        return None


class Behind(Submitted):
    """Opens once the launch before, in another stream, has been given to the driver, which keeps the order.

    That one's failure is not this one's.
    """

    __slots__ = ()

    def failure(self) -> Failure | None:
        """None."""
        return None


class Writer:
    """Stands for a graph among those that write host memory: one claim for all of its launches, which never meet."""

    __slots__ = ("__weakref__", "_launches", "id", "ranges")

    def __init__(self) -> None:
        self.id = 0
        self.ranges: set[tuple[int, int]] = set()
        self._launches: dict[StreamQueue, Operation[Any]] = {}  # the newest of each stream

    def launched(self, queue: StreamQueue, operation: Operation[Any]) -> None:
        self._launches[queue] = operation
        self.id = operation.id

    @property
    def _passed(self) -> bool:
        for queue, operation in list(self._launches.items()):
            if operation._passed:
                del self._launches[queue]
        return not self._launches

    def __repr__(self) -> str:
        return repr(next(reversed(self._launches.values()), None))


class Graph(ProcessLocal):
    """Work that was recorded by `aiocuda.Stream.capture`, to be launched any number of times.

    ``with stream.capture() as graph:`` records launches, copies between the device and pinned memory, fills, and waits
    of streams for one another. Nothing runs meanwhile, and nothing is asked of CUDA: no stream is put into a mode, and
    nobody else's capture is disturbed. A stream that waits for something captured is captured, too; what it is given
    has to be waited for before the block ends. What cannot be in a graph raises `UnsupportedError` and names the cure:
    allocations, arrays that are not pinned, prefetches, events, callbacks, copies between devices. An exception in the
    block discards what was recorded.

    A graph belongs to the event loop that it was recorded in, and to one device. It goes back to the driver when nobody
    holds it any more, by `close`, or with its device.

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

    __slots__ = ("__weakref__", "_blocks", "_claimed", "_closed", "_device", "_held", "_home", "_last", "_steps",
                 "_token", "_writer", "_writes")  # fmt: skip

    def __init__(self, device: Device, queue: StreamQueue) -> None:
        self._device = device
        self._home = queue
        self._token: object = None  # by which it knows what was captured into it
        self._held: Held | None = None  # what each launch holds; None while it is recorded
        self._claimed: tuple[tuple[int, int], ...] = ()  # what of host memory is claimed for its launches
        self._steps: tuple[Step, ...] = ()
        self._blocks: tuple[Block, ...] = ()
        self._writes: tuple[tuple[int, int], ...] = ()
        self._last: Operation[None] | None = None  # the newest launch
        self._writer = Writer()
        self._closed = False

    def _recorded(self, recorder: Recorder) -> None:
        """The recording has ended: build what came of it."""
        graphs, reactor = self._device._graphs, self._home.reactor
        self._token = recorder.token
        self._set(tuple(recorder.steps))
        recorder.steps = []
        graphs.watch(reactor)
        executable = Executable(self._device, reactor, graphs, self._steps)
        self._held = Held(executable, self._steps, self._writer)
        executable.start()

    def _set(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps
        if self._held is not None:
            self._held = Held(self._held.executable, steps, self._writer)
        self._blocks = tuple(dict.fromkeys(block for step in steps for block in step.blocks))
        self._writes = tuple(step.writes for step in steps if step.writes is not None)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device that it runs on."""
        return self._device

    @property
    def closed(self) -> bool:
        """Has it been closed, or was its recording discarded?"""
        return self._closed

    def __len__(self) -> int:
        """How many operations it runs."""
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, Self]:
        """Itself, once it is ready to be launched: its kernels compiled and loaded, and all of it on the device.

        Nothing needs it but a launch on a stream that others use too: launches wait in their place.
        """
        yield from self._check(self._home).executable.wait().__await__()
        return self

    # -- launched ------------------------------------------------------------------------------------------------

    def launch(self, stream: Stream) -> Operation[None]:
        """Run all of it, in the order of a stream. ``cuGraphLaunch``.

        Any number of launches may be in flight: each comes behind the one before, in whatever stream. It works on what
        the graph was told by then; a later `update` does not reach back.

        Raises
        ------
        StaleHandleError
            Memory that it works on has been freed.
        BusyError
            The capture has not ended; or another copy is writing the same array.
        ClosedError
            It has been closed, or its recording was discarded.
        WrongDeviceError, WrongLoopError
            The stream is another device's, or another event loop's.
        """
        if type(stream) is not Stream:
            self._check_stream(stream)
        queue, held, blocks, writes = stream._queue, self._held, self._blocks, self._writes
        if held is None or queue.device_state is not self._home.device_state or queue.loop is not self._home.loop:
            held = self._check(queue)
        executable, steps, last = held.executable, held.steps, self._last
        gates: list[Gate] = []
        for memory in blocks:
            used = memory.uses.get(queue)
            # One that failed or was skipped has taken the waits in front of it along.
            if used is None or (used._extra is not None and used._failure is not None) or not memory.ready:
                try:
                    gate = meet_all(queue, blocks, self._device)
                except StaleHandleError as error:
                    error.add_note(f"{self!r} works on it: let it work on other memory by `graph.update`")
                    raise
                if gate is not None:
                    gates.append(gate)
                break
        # As long as one launch is in flight, what it writes is claimed for the next one, too.
        claimed = not writes or (self._claimed is writes and last is not None and not last._passed)
        if not claimed:
            self._check_writers(writes)
        if last is not None and last._state == QUEUED and last._queue is not queue:
            gates.append(Behind(last, queue))
        if not executable.built:
            executable.ready(None)  # raises, if it could not be built
            gates.append(executable.wanted_by(queue))
        if (len(queue.pending) + 1) * len(steps) > queue.device_state.limit:
            gates.append(Room(queue, len(steps)))
        arguments = (queue.handle, steps)
        operation: Operation[None]
        if gates:
            operation = queue.enqueue_behind("graph", Every(gates), executable.launch, arguments, held)
        else:
            operation = new_operation(queue, "graph", executable.estimate, held)
            queue.submit(operation, executable.launch, arguments)
        self._last = operation
        for memory in blocks:
            memory.uses[queue] = operation
        if writes:
            self._writer.launched(queue, operation)
            if not claimed:
                self._claim(writes)
        return operation

    def _check_stream(self, stream: object) -> None:
        """It is no plain stream: may it take a launch?"""
        if not isinstance(stream, Stream):
            raise InvalidTypeError(f"a graph is launched on an aiocuda.Stream, not on {type(stream).__name__}")
        if isinstance(stream, Recording):
            self._check(stream._queue)
            stream._refuse("another graph", "launch it before or behind that one")

    def _check(self, queue: StreamQueue) -> Held:
        """May it be used where this queue is? Then what a launch there holds."""
        held = self._held
        if self._closed:
            raise ClosedError(f"{self!r}: capture it again")
        if held is None:
            raise BusyError(f"{self!r}: leave the `with stream.capture()` block first")
        if queue.device_state is not self._home.device_state:
            raise WrongDeviceError(f"{self!r} is not of the device of {queue.name}: capture it on a stream of that one")
        if queue.loop is not self._home.loop:
            raise WrongLoopError(f"{self!r} belongs to another event loop than {queue.name}: capture it in that one")
        return held

    def _check_writers(self, writes: tuple[tuple[int, int], ...]) -> None:
        """Does anybody else write the arrays that it downloads to?"""
        for place in writes:
            writer: object = self._device._targets.writer(*place)
            if writer is None:
                self._writer.ranges.discard(place)
            elif writer is not self._writer or place not in self._writer.ranges:
                raise BusyError(
                    f"{writer!r} is writing an array that {self!r} downloads to, or part of it: await it first, or "
                    "give the download another one"
                )

    def _claim(self, writes: tuple[tuple[int, int], ...]) -> None:
        """While any launch is in flight, nobody else writes what this one does."""
        for place in writes:
            if place not in self._writer.ranges:
                self._writer.ranges.add(place)
                self._device._targets.add(*place, cast("Operation[Any]", self._writer))
        self._claimed = writes

    # -- changed -------------------------------------------------------------------------------------------------

    def update(
        self, operation: Operation[Any], *args: Any, grid: Any = None, block: Any = None, shared_bytes: Any = None
    ) -> None:
        """From the next launch on, one of its operations works on something else.

        ``cuGraphExecKernelNodeSetParams`` and its kin, at that launch. Those that were enqueued before keep what they
        were given.

        Parameters
        ----------
        operation
            What the verb returned when it was captured.
        *args
            Of a launch, all of the kernel's arguments; of a copy or a download, its target and its source; of a fill,
            the buffer and the value. The kernel, the direction of a copy and the size of a fill's item stay.
        grid, block, shared_bytes
            Of a launch; what is left out stays.
        """
        self._home.check_loop()
        self._check(self._home)
        if not isinstance(operation, Captured) or operation._recorder.token is not self._token:
            raise InvalidArgumentError(
                f"{operation!r} was not captured into {self!r}: update takes what a verb returned in its `with` block"
            )
        index = operation._index
        if index is None:
            raise InvalidArgumentError(f"{operation!r} only orders others: there is nothing to update")
        old = self._steps[index]
        node = old.node
        if isinstance(node, KernelNode):
            new = launch_step(
                self._device,
                old.kernel,
                node.grid if grid is None else grid,
                node.block if block is None else block,
                args,
                node.shared_bytes if shared_bytes is None else shared_bytes,
            )
        else:
            if len(args) != 2 or not (grid is block is shared_bytes is None):
                takes = "a buffer and a value" if old.kind == "fill" else "a target and a source"
                raise InvalidTypeError(f"update of a {old.kind} takes {takes}, {len(args)} given")
            new = (fill_step if old.kind == "fill" else copy_step)(self._device, *args)
            if new.kind != old.kind:
                raise InvalidArgumentError(f"{operation!r} stays a {old.kind}, and this would be a {new.kind}")
        check_update([node], 0, new.node)
        check_writes(self._steps, new, but=index)
        self._set((*self._steps[:index], new.behind(node.after), *self._steps[index + 1 :]))

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give it back to the driver, behind the launches in flight; it cannot be launched any more."""
        self._closed = True
        self._held = self._last = None
        self._set(())

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._held is None:
            state = "being captured"
        else:
            state = f"{len(self._steps)} operations"
        return f"<Graph of {self._home.name}: {state}>"
