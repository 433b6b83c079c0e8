"""Work that a stream repeats, with everything bound that does not change: calls, launches, copies, barriers, chains.

They do in fewer calls what the methods of streams do in the usual case. In all other cases ``repeat`` returns None, and
``enqueue`` calls `Ring.submit`. `_ring` says what a lease is.
"""

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
    """Work that a stream repeats. `enqueue` does in fewer calls what `Ring.submit` does in the usual case.

    Parameters
    ----------
    kind
        The kind of its operations.
    estimate
        The estimate of their duration.
    call
        ``call(values, event)`` makes the driver call and records the event after it.
    unrecorded
        ``unrecorded(values)`` makes the driver call alone: for unusual cases, in which `Ring.submit` records the event.
    """

    __slots__ = ("_after_wait", "_call", "_native", "_unrecorded", "estimate", "kind", "queue")

    def __init__(
        self, queue: Ring, kind: str, estimate: Estimate, call: RecordedCall,
        unrecorded: Callable[[Sequence[Any]], object],
    ) -> None:  # fmt: skip
        self.queue = queue
        self.kind = kind
        self.estimate = estimate
        self._after_wait = estimate.after_wait  # of an operation that directly follows a wait
        self._call = call
        native = native_call(call) if COMPILED else None  # the same in C, if the driver has it
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
            or (listeners is not None and listeners.timing)  # then an event also comes before the call
        ):
            return queue.enqueue_unusual(self.kind, self.estimate, keep, self._unrecorded, values, label)
        # As `new_operation`, without its call.
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
            operation.submitted_at = at  # not earlier: it says that the stream has accepted the operation
            operation.lease = lease  # not earlier: a stream of another thread may wait for the event
            lease = None  # the operation has it now: if a hook resolves it and raises, `end_call` must not give it back
            if queue.newest_id != number:  # the driver call has run code of the program that has enqueued, too
                queue.rare.move_to_end(operation)
            if listeners is not None and listeners.submit:
                queue.rare.submitted(listeners.submit, operation)
        except BaseException as error:
            if not queue.rare.end_call(operation, error, lease):
                raise  # Ctrl-C; other errors are now the operation's
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
        One function for each argument: it returns the value that the driver takes.
    kernel
        The kernel, for error messages.
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
        """Enqueue the launch again. Return None, and enqueue nothing, if memory is new to the stream or not ready.

        ``values``: the arguments as the driver takes them, if the caller has converted them. Their buffers are held
        until the launch has finished. A measured hot path: it reads `_block` instead of calling `block_of`.
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
            # The stream has used it, so it has made the waits for earlier users, unless that use failed or was skipped.
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
    device, host
        The `DeviceBuffer`, and the page-locked array.
    host_writes
        The record of the host memory that unfinished downloads write.
    """

    __slots__ = ("_address", "_device", "_dtype", "_host", "_host_writes", "_nbytes", "_shape", "_uploads")

    def __init__(self, kind: str, queue: Ring, device: Any, host: Any, estimate: Estimate, host_writes: Any) -> None:
        stream, nbytes = queue.handle, device.nbytes
        driver = queue.driver
        if kind == "upload":
            ends = (stream, device.address, host.address, nbytes)
            # A copy takes no values.
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
        """Enqueue the copy again. Return None, and enqueue nothing, if anything is unusual: then it needs all checks.

        A measured hot path: it reads the blocks' attributes directly. The array may have got another dtype, shape or
        flag since the copy was bound, so these are compared.
        """
        if self._device() is not device or self._host() is not host:
            return None
        memory: BlockFields = device._block
        pinned: BlockFields = host._block
        queue, flags = self.queue, host.flags
        used = memory.uses.get(queue)  # as in `BoundLaunch.repeat`
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
        # `carray`: contiguous, aligned and writable. Another download may be writing the same memory.
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
        The queues of the streams.
    waiting
        The waits of the first stream and the record of its event, as one call of the driver. Its values are the events.
    recorded
        The record alone: for a first stream whose waits are made in C.
    wait
        ``wait(event)`` makes all other streams wait, by the driver.
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
        """Let later work of each stream wait for all earlier work of all of them. Return the barrier of the first."""
        first, others = self._first, self._others
        hot = first.device_hot
        if (
            _get_running_loop() is not first.loop
            or first.obstacles & BARRED
            or first.on_host
            or len(first.pending) >= hot.limit  # on the host, it could find its events recorded again
            or hot.listeners is not None  # they see the operation, but not the waits before it
        ):
            return self._unusual()
        leases: list[Lease] = []  # each comes after all work of its stream
        for queue in others:
            if queue.obstacles & BARRED or queue.on_host or queue.unmarked_wait_at == queue.enqueued:
                return self._unusual()
            pending = queue.pending
            if pending:
                tail = pending[-1]
                lease = tail.lease
                if lease is None or tail.extra is not None:  # it may have failed
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
        if event is None:  # the driver has refused the waits, so the barrier fails; or it is done already
            for queue in others:
                self._follow(queue, joined)
            return joined
        for queue in others:
            queue.after_wait = True  # as `note_wait`, without its call
            queue.unmarked_wait_at = queue.enqueued
        if not COMPILED or not self._others_wait_in_c(event):
            self._wait(event.handle)
        return joined

    def _waits_in_c(self, leases: list[Lease]) -> bool:
        """Make the first stream wait for these events by calls in C. Return False if the driver has to make all waits.

        Some waits may have been made then. A second wait for the same event changes nothing. An error is dropped: the
        driver gets it, too, and fails the barrier with it.
        """
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
        """Make the other streams wait for an event by calls in C. Return False if the driver has to make all waits.

        Errors are raised: the barrier is enqueued, so it cannot fail with them.
        """
        for queue in self._others:
            if queue._native is None or not queue._native.wait(event):
                return False
        return True


class Chain:
    """The stages of a pipeline in which each waits for the one before. `enqueue` enqueues the work of one item.

    A stage is a function ``function(slot)`` that enqueues on the stage's stream. The slot is the memory of the item.

    Attributes
    ----------
    position : int
        The position of the stage that is being called. If `enqueue` raises an error, it is the error of this stage.

    Parameters
    ----------
    names, functions, streams, queues
        The name, the function, the stream and its queue of each stage, in order.
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
        """Enqueue the work of an item, from stage ``start`` on, until one is unusual. Set `ends` and `returned`.

        Parameters
        ----------
        ends
            By position, the last operation of each stage.
        returned
            By name, what the function of each stage has returned.

        Returns
        -------
        The position of the stage at which it has stopped; the number of stages if all have their ends. The stage was
        not called, because the stage before has no usual end; or it was, so that `returned` has its name, and has not
        returned the last operation of its stream.
        """
        names, queues = self._names, self._queues
        for position in range(start, len(names)):
            self.position = position
            queue = queues[position]
            if position:
                end = ends[position - 1]
                # It has failed, or the stream has not accepted it yet, or this stage's queue has an obstacle.
                if end is None or end.status > DONE or not end.submitted_at or queue.obstacles:
                    return position
                if end.status != DONE and end.queue is not queue:
                    queue.follow(end)
            slot._stream = self._streams[position]
            result = self._functions[position](slot)
            returned[names[position]] = result
            pending = queue.pending  # as `Ring.ends_with`, without its call
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
        """Resolve the ends of all stages without a query: the last is done, and each has waited for the one before."""
        for position in range(len(ends)):
            end = ends[position]
            if end is not None:
                ends[position] = None
                if end.status < DONE:
                    end.queue.resolve_to(end)
