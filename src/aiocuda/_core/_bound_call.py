"""Work that a stream repeats, with everything bound that does not change: calls, launches, copies, barriers, chains."""

from __future__ import annotations

import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..driver.protocol import native_call
from ..errors import AiocudaError
from ._calls import COMPILED, copy_context, new_object, next_id
from ._native import Native
from ._state import BARRED, DONE, IN_CALL, SUBMITTED
from ._stream_operation import StreamOperation

if TYPE_CHECKING:
    from ..driver.protocol import Launcher, RecordedCall
    from ._blocks import BlockFields
    from ._enqueuing_stream import EnqueuingStream
    from ._estimate import Estimate
    from ._hot import Lease
    from ._ring import Ring

__all__ = ["BoundCall", "BoundCopy", "BoundJoin", "BoundLaunch", "Chain"]


class BoundCall:
    """Work that a stream repeats. `enqueue` does the same as `Ring.submit` for the usual case, with fewer calls.

    Parameters
    ----------
    kind
        The kind of its operations.
    estimate
        Of their duration.
    call
        The work and the record of an event, as one call of the driver.
    unrecorded
        ``unrecorded(values)`` is the work alone, for everything unusual, which goes to `Ring.submit`.
    """

    __slots__ = ("_after_wait", "_call", "_native", "_unrecorded", "estimate", "kind", "queue")

    def __init__(
        self, queue: Ring, kind: str, estimate: Estimate, call: RecordedCall,
        unrecorded: Callable[[Sequence[Any]], object],
    ) -> None:  # fmt: skip
        self.queue = queue
        self.kind = kind
        self.estimate = estimate
        self._after_wait = estimate.after_wait
        self._call = call
        native = native_call(call) if COMPILED else None
        self._native = None if native is None else Native(native)
        self._unrecorded = unrecorded

    def enqueue(self, values: Sequence[Any], keep: object, label: str | None = None) -> StreamOperation[Any]:
        """Enqueue the work with these arguments. ``keep`` is held until the operation has finished."""
        queue = self.queue
        hot = queue.device_hot
        listeners = hot.listeners
        pending = queue.pending
        if (
            queue.obstacles
            or queue.on_host
            or _get_running_loop() is not queue.loop
            or len(pending) >= hot.limit
            or (listeners is not None and listeners.timing)
        ):
            return queue.enqueue_unusual(self.kind, self.estimate, keep, self._unrecorded, values, label)
        # The same as `new_operation`, without its call.
        operation: StreamOperation[Any] = new_object(StreamOperation) if COMPILED else StreamOperation()
        operation.id = number = next_id()
        operation.kind = self.kind
        operation.queue = queue
        if queue.after_wait:
            queue.after_wait = False
            operation.estimate = self._after_wait
        else:
            operation.estimate = self.estimate
        operation.keep = keep
        operation.status = SUBMITTED
        operation.lease = operation.waiters = operation.value = operation.extra = lease = None
        operation.submitted_at = IN_CALL
        operation.context = copy_context()
        if label is not None:
            operation.own_label = label
        try:
            # The operation is in its place before the driver call: an interrupt loses nothing.
            queue.enqueued += 1
            queue.newest_id = number  # first: a signal handler may enqueue between the two lines
            pending.append(operation)
            idle = hot.idle_leases
            lease = idle.pop() if idle else queue.device_state.leases.take()
            at = queue.now()
            if self._native is None or not self._native.enqueue(values, lease):
                self._call(values, lease.handle)
            operation.submitted_at = at
            operation.lease = lease  # not earlier: a stream of another thread may wait for the event
            lease = None  # it is the operation's now, which may be resolved in a hook
            if queue.newest_id != number:
                queue.rare.move_to_end(operation)
            if listeners is not None and listeners.submit:
                queue.rare.submitted(listeners.submit, operation)
        except BaseException as error:
            if not queue.rare.end_call(operation, error, lease):
                raise
        return operation


class BoundLaunch(BoundCall):
    """A kernel launch with everything bound that does not change.

    Attributes
    ----------
    launcher
        The driver's launch, without the record of an event.
    pointers
        The indices of the arguments that are memory.
    converters
        Of the arguments.
    kernel
    """

    __slots__ = ("converters", "kernel", "launcher", "pointers")

    def __init__(
        self, queue: Ring, call: RecordedCall, launcher: Launcher, estimate: Estimate,
        pointers: tuple[int, ...], converters: tuple[Callable[[Any], Any], ...], kernel: Any,
    ) -> None:  # fmt: skip
        super().__init__(queue, "launch", estimate, call, launcher)
        self.launcher = launcher
        self.pointers = pointers
        self.converters = converters
        self.kernel = kernel

    def repeat(
        self, args: tuple[Any, ...], label: str | None = None, values: Sequence[Any] | None = None
    ) -> StreamOperation[None] | None:
        """Enqueue the launch again. Return None if memory is new to the stream: then it needs all checks.

        ``values`` are the arguments if they have been converted already. A measured hot path: it reads `_block` instead
        of calling `block_of`.
        """
        queue = self.queue
        if values is None:
            if len(args) != len(self.converters):
                raise self.kernel.signature.count_error(args)
            values = []
            for convert, argument in zip(self.converters, args):  # noqa: B905 - just counted
                values.append(convert(argument))
        for index in self.pointers:
            memory: BlockFields = args[index]._block
            used = memory.uses.get(queue)
            # If that operation failed or was skipped, so were the waits before it.
            if used is None or (used.extra is not None and used.failure is not None) or not memory.ready:
                return None
        operation = self.enqueue(values, args, label)
        for index in self.pointers:
            args[index]._block.uses[queue] = operation
        return operation


class BoundCopy(BoundCall):
    """A copy between a device buffer and a pinned array, with everything bound that does not change.

    It refers to both weakly: the memory is freed as if it did not exist.

    Parameters
    ----------
    kind
        ``"upload"`` or ``"download"``.
    host_writes
        The record of the host memory that downloads write.
    """

    __slots__ = ("_address", "_device", "_dtype", "_host", "_host_writes", "_nbytes", "_shape", "_uploads")

    def __init__(self, kind: str, queue: Ring, device: Any, host: Any, estimate: Estimate, host_writes: Any) -> None:
        stream, nbytes = queue.handle, device.nbytes
        driver = queue.driver
        if kind == "upload":
            ends = (stream, device.address, host.address, nbytes)
            super().__init__(queue, kind, estimate, driver.recorded_upload(*ends), lambda _: driver.upload(*ends))
        else:
            ends = (stream, host.address, device.address, nbytes)
            super().__init__(queue, kind, estimate, driver.recorded_download(*ends), lambda _: driver.download(*ends))
        self._uploads = kind == "upload"
        self._device: Any = weakref.ref(device)
        self._host: Any = weakref.ref(host)
        self._address, self._nbytes = host.address, nbytes
        self._shape, self._dtype = host.shape, host.dtype
        self._host_writes = host_writes

    def binds(self, device: object, host: object) -> bool:
        """True if it was made for these two objects."""
        return self._device() is device and self._host() is host

    def repeat(self, device: Any, host: Any) -> StreamOperation[None] | None:
        """Enqueue the copy again. Return None if anything is unusual: then it needs all checks.

        A measured hot path: it reads the blocks' attributes directly. The array may have been changed in place.
        """
        if self._device() is not device or self._host() is not host:
            return None
        memory: BlockFields = device._block
        pinned: BlockFields = host._block
        queue, flags = self.queue, host.flags
        used = memory.uses.get(queue)
        if (
            used is None
            or not (memory.ready and pinned.ready)
            or queue not in pinned.uses
            or (used.extra is not None and used.failure is not None)
            or memory.owner.closed
            or pinned.owner.closed
            or host.dtype is not self._dtype
            or host.shape != self._shape
        ):
            return None
        if self._uploads:
            if not flags.c_contiguous:
                return None
            memory.uses[queue] = pinned.uses[queue] = operation = self.enqueue((), (device, host))
            return operation
        if not flags.carray or self._host_writes.writer(self._address, self._nbytes) is not None:
            return None
        memory.uses[queue] = pinned.uses[queue] = operation = self.enqueue((), (device, host))
        self._host_writes.add(self._address, self._nbytes, operation)
        return operation


class BoundJoin:
    """A barrier that several streams of one device and one loop repeat, with everything bound that does not change.

    The first stream waits for the others and records an event; then the others wait for that event.

    Parameters
    ----------
    queues
        Of the streams.
    waiting
        The waits of the first stream and the record of its event, as one call of the driver. It takes the events.
    recorded
        The record alone: for a first stream whose waits are made in C.
    wait
        ``wait(event)`` makes all other streams wait.
    unusual
        Makes the barrier for streams in any state.
    follow
        ``follow(queue, operation)`` makes one stream wait for an operation in any state.
    """

    __slots__ = ("_first", "_follow", "_others", "_recorded", "_unusual", "_wait", "_waiting")

    def __init__(
        self, queues: Sequence[Ring], waiting: BoundCall, recorded: BoundCall, wait: Callable[[int], None],
        unusual: Callable[[], StreamOperation[None]], follow: Callable[[Ring, StreamOperation[None]], None],
    ) -> None:  # fmt: skip
        self._first = queues[0]
        self._others = tuple(queues[1:])
        self._waiting = waiting
        self._recorded = recorded
        self._wait = wait
        self._unusual = unusual
        self._follow = follow

    def join(self) -> StreamOperation[None]:
        """Let later work of each stream wait for all earlier work of all of them."""
        first, others = self._first, self._others
        hot = first.device_hot
        if (
            _get_running_loop() is not first.loop
            or first.obstacles & BARRED
            or first.on_host
            or len(first.pending) >= hot.limit  # the events may be recorded again before there is room
            or hot.listeners is not None  # they see the operation, but not the waits before it
        ):
            return self._unusual()
        leases: list[Lease] = []
        for queue in others:
            if queue.obstacles & BARRED or queue.on_host or queue.unmarked_wait_at == queue.enqueued:
                return self._unusual()
            pending = queue.pending
            if pending:
                tail = pending[-1]
                lease = tail.lease
                if lease is None or tail.extra is not None:
                    return self._unusual()
                leases.append(lease)
        if leases:
            first.note_wait()  # also because the duration of the operation then includes the waits
        joined: StreamOperation[None]
        if COMPILED and self._waits_in_c(leases):
            joined = self._recorded.enqueue((), None)
        else:
            joined = self._waiting.enqueue([lease.handle for lease in leases], None)
        event = joined.lease
        if event is None:
            for queue in others:
                self._follow(queue, joined)
            return joined
        for queue in others:
            queue.after_wait = True  # the same as `note_wait`, without its call
            queue.unmarked_wait_at = queue.enqueued
        if not COMPILED or not self._others_wait_in_c(event):
            self._wait(event.handle)
        return joined

    def _waits_in_c(self, leases: list[Lease]) -> bool:
        """Make the first stream wait for these events. Return False if the driver has to do it, and report errors."""
        native = self._first._native
        if native is None:
            return False
        try:
            for lease in leases:
                if not native.wait(lease):
                    return False
        except AiocudaError:
            return False
        return True

    def _others_wait_in_c(self, event: Lease) -> bool:
        """Make the other streams wait for an event. Return False if the driver has to do it."""
        for queue in self._others:
            if queue._native is None or not queue._native.wait(event):
                return False
        return True


class Chain:
    """Functions that enqueue, in a fixed order, each on its stream behind the work of the one before.

    It is the hot half of a pipeline's item: each function is that of a stage. The slot is what they take.

    Attributes
    ----------
    position : int
        Of the function that was called last, or was about to be: if it has raised, the failure is its own.

    Parameters
    ----------
    names, functions, streams, queues
        Of each stage; the queues are those of the streams.
    """

    __slots__ = ("_functions", "_names", "_queues", "_streams", "position")

    def __init__(
        self, names: Sequence[str], functions: Sequence[Callable[[Any], Any]], streams: Sequence[EnqueuingStream],
        queues: Sequence[Ring],
    ) -> None:  # fmt: skip
        self._names = tuple(names)
        self._functions = tuple(functions)
        self._streams = tuple(streams)
        self._queues: tuple[Ring, ...] = tuple(queues)
        self.position = 0

    def enqueue(self, start: int, slot: Any, ends: list[StreamOperation[Any] | None], returned: dict[str, Any]) -> int:
        """Call the functions from a position on, until one is unusual.

        Parameters
        ----------
        ends
            By position, the operation that ends the work of each function.
        returned
            By name, what each function has returned.

        Returns
        -------
        The position of the first function without an end: it was not called because of the work before it, or was, and
        has not returned its only operation. The number of functions if there is none.
        """
        names, queues = self._names, self._queues
        for position in range(start, len(names)):
            self.position = position
            queue = queues[position]
            if position:
                end = ends[position - 1]
                if end is None or end.status > DONE or not end.submitted_at or queue.obstacles:
                    return position
                if end.status != DONE and end.queue is not queue:
                    queue.follow(end)
            slot._stream = self._streams[position]
            result = self._functions[position](slot)
            returned[names[position]] = result
            pending = queue.pending  # the same as `Ring.ends_with`, without its call
            if (
                not pending
                or pending[-1] is not result
                or queue.obstacles
                or queue.unmarked_wait_at == queue.enqueued
                or queue.on_host
            ):
                return position
            ends[position] = result
        return len(names)

    @staticmethod
    def resolve(ends: list[StreamOperation[Any] | None]) -> None:
        """Resolve the ends of all functions: the last one is done, and each has waited for the one before it."""
        for position in range(len(ends)):
            end = ends[position]
            if end is not None:
                ends[position] = None
                if end.status < DONE:
                    end.queue.resolve_to(end)
