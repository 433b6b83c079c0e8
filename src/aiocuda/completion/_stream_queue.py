"""StreamQueue: all that is unusual about the queue of a stream. `new_queue` makes the queue.

A *marker* is an operation without a driver call; its event stands for all earlier work of the stream. A *chunk* is one
piece of a staged copy. Both have the kind `INTERNAL`, and only a chunk has a ``copy_out``. A *lease* is a CUDA event on
loan to an operation. A *poison* is a failure that makes a stream skip new operations until a caller has received it.
`Ring.attend` tells the reactor that an operation has a waiter. An operation fails *in its turn*: after all before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._base._arrays import MOST_BYTES
from .._base._failure import Failure, Poison
from .._base._shared import COUNTING
from .._base._wakeups import wake_future
from .._core import (
    ABANDONED,
    CLOSED,
    COMPLICATED,
    DONE,
    ENDED,
    FAILED,
    FAULTED,
    IN_CALL,
    INSTANT,
    INTERNAL,
    LANDING,
    RECORDED,
    REFUSING,
    SHARED,
    SUBMITTED,
    CopyOut,
    Estimate,
    Ring,
    StreamOperation,
    new_operation,
)
from ..errors import AiocudaError, BusyError, ClosedError, DeviceFault, InvalidArgumentError, SkippedError
from ._device_state import DeviceState, UnseenFailure
from ._foreign_work import is_captured
from ._host_queue import Gate, HostQueue, Submitted
from ._interruption import Interruption
from ._listeners import Hooks, Listeners, Reports
from ._methods import KINDS
from ._submission import SUBMIT_AHEAD, SubmissionLimit

if TYPE_CHECKING:
    from .._core import Lease
    from ._reactor import Reactor

__all__ = ["HasQueue", "StreamQueue", "new_queue", "stream_queue"]

#: The kinds that have a size in bytes.
_SIZED = frozenset(kind.name for kind in KINDS.values() if kind.size is not None)


class StreamQueue:
    """All that is unusual about the queue of a stream, its `Ring`: `Ring.rare`.

    Checks, gates, shared and captured streams, waits for other streams, failures, and the end. The ring calls
    `refuse_unusable`, `follow_unusual`, `put`, `pump`, `skips_captured`, `submit_observed`, `submitted`, `end_call`,
    `move_to_end`, `record_late`, `copy_out`, `resolved`, `finish_special`, `linger`, `end_resolve` and
    `report_fault`.

    Attributes
    ----------
    host_queue : HostQueue
        The operations that are still on the host.
    reports : Reports
        Notifies the listeners.
    opened_at : str or None
        The line of the program that has opened the stream.
    imported : bool
        True for a stream that another library has made.
    lent : int
        How many loans of the stream to other libraries are open.
    draining : bool
        The queue is closed, and takes the operations that a coordinator accepted earlier: see `let_in`.
    submissions : SubmissionLimit
        Limits the submitted functions whose work is unfinished: see `Stream.submit`.
    foreign : dict
        Other libraries' objects for the stream, by the `ForeignStreams` that made them.
    base : DeviceState or None
        The device whose coordinator alone enqueues here, for operations over several devices: these deliver the
        failures, so the loop gets none that was not read. That device waits for them when it closes.
    unseen : UnseenFailure
        A failure of an operation of this stream, until code of the program has seen it.
    recorded_bytes : int
        The part of ``live_bytes`` that other libraries hold: see `Stream.record_memory`.
    """

    __slots__ = ("_name", "_reference", "_stream", "base", "draining", "foreign", "host_queue", "imported", "lent",
                 "opened_at", "recorded_bytes", "reports", "submissions", "unseen")  # fmt: skip

    def __init__(self, ring: Ring, imported: bool) -> None:
        self._reference = weakref.ref(ring)  # weak, because the ring owns this object
        self._name = ring.name
        self.reports = Reports(ring)
        self.opened_at: str | None = None
        self.imported = ring.shared = imported
        self.lent = 0
        self.host_queue = HostQueue(ring)
        self.submissions = SubmissionLimit(ring, SUBMIT_AHEAD)
        self.foreign: dict[object, Any] = {}
        self.recorded_bytes = 0
        self.unseen = UnseenFailure(ring.device_state.unseen)
        self.base: DeviceState | None = None
        self.draining = False
        self._stream: weakref.ref[Any] | None = None

    def _ring(self) -> Ring:
        """Return the ring. Raise `ClosedError` in a finaliser that the collector calls while it deletes the ring."""
        ring = self._reference()
        if ring is None:
            raise self._closed_error()
        return ring

    @property
    def interruption(self) -> Interruption:
        """Ends what was refused, or interrupted by Ctrl-C."""
        return Interruption(self._ring())

    def _closed_error(self) -> ClosedError:
        return ClosedError(
            f"stream {self._name!r} has been closed, by itself or with its device: make another by device.stream()"
        )

    # -- checks --------------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Any:
        """The public `aiocuda.Stream`, or None if the program holds it no longer."""
        return None if self._stream is None else self._stream()

    def record_memory(self, nbytes: int) -> None:
        """Count memory that another library has allocated on the stream; if negative, memory that it has released."""
        ring = self._ring()
        ring.check()
        if not 0 <= self.recorded_bytes + nbytes <= MOST_BYTES:
            raise InvalidArgumentError(
                f"nbytes={nbytes:,} does not fit: other libraries hold {self.recorded_bytes:,} bytes on {ring.name} by "
                "record_memory, and a negative number releases at most these",
                size=nbytes,
            )
        self.recorded_bytes += nbytes
        with COUNTING:
            ring.live_bytes += nbytes
            ring.peak_bytes = max(ring.peak_bytes, ring.live_bytes)

    def set_stream(self, stream: object) -> None:
        """Set the public stream, which is made after its queue."""
        self._stream = weakref.ref(stream)

    def refuse_unusable(self, kind: str | None = None) -> None:
        """Raise the reason why the stream accepts no operation now, if there is one.

        Parameters
        ----------
        kind
            Of a new operation. It is refused also while `Stream.capture` records the stream, because it would run
            instead of being recorded. None for a caller that enqueues nothing.
        """
        ring = self._ring()
        if kind is not None and ring.obstacles & RECORDED:
            raise BusyError(
                f"{ring.name} is being captured, and this {kind} would run instead of being recorded: call the "
                "stream's verbs by the stream, `stream.launch(…)`, or end the capture first"
            )
        if _get_running_loop() is not ring.loop:
            raise ring.device_state.wrong_loop(ring.loop, ring.name, "make a stream in each loop, share the device")
        if ring.obstacles & CLOSED:
            raise self._closed_error()
        fault = ring.driver.fault
        if fault is not None:
            raise fault.again()
        if ring.obstacles & (SHARED | RECORDED) == SHARED:  # `Stream.capture` makes its graph without the driver
            self.refuse_captured()

    # -- streams that others use, too ----------------------------------------------------------------------------------

    def begin_loan(self) -> None:
        """Mark the stream as shared: another library uses it."""
        self.lent += 1
        self._ring().shared = True

    def end_loan(self) -> None:
        """End one loan. The stream is shared until the last one has ended."""
        self.lent -= 1
        self._ring().shared = self.imported or self.lent > 0

    def is_captured(self) -> bool:
        """Return whether another library captures the stream. ``cuStreamIsCapturing``."""
        ring = self._ring()
        return is_captured(ring.driver, ring.handle)

    def refuse_captured(self) -> None:
        """Raise `BusyError` while another library captures the stream."""
        if self.is_captured():
            name = self._ring().name
            raise BusyError(
                f"{name} is being captured into a graph by another library, and new work would become part of "
                "that graph, or make the capture fail: end that capture first, or use a stream of your own"
            )

    def takes_frees(self) -> bool:
        """Return whether memory may now be freed in the order of this stream: a capture would record the free."""
        obstacles = self._ring().obstacles
        return not obstacles & ENDED and not (obstacles & SHARED and self.is_captured())

    def skips_captured(self, operation: StreamOperation[Any], call: Callable[..., object] | None) -> bool:
        """Return False unless another library captures the stream. Then raise `BusyError` if there is a driver call.

        A marker is appended without an event, whose record would become part of the graph: return True.
        """
        ring = self._ring()
        if ring.obstacles & RECORDED or not self.is_captured():
            return False
        if call is not None:
            self.refuse_captured()
        if not ring.active:
            ring.reactor.activate(ring)
        ring.append(operation)
        return True

    # -- enqueue -------------------------------------------------------------------------------------------------------

    def enqueue_gated(
        self,
        kind: str,
        gate: Gate,
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        keep: object = None,
        *,
        estimate: Estimate | None = None,
        copy_out: CopyOut | None = None,
        value: object = None,
    ) -> StreamOperation[Any]:
        """Enqueue an operation that the host holds until ``gate`` is open, and then submits. Later ones wait behind it.

        A gate waits for what only the host sees: a page lock, a host function, an operation of another driver. If
        ``call`` is None, the gate itself submits the work, as chunks. ``copy_out`` is the host's work after that of the
        device, and ``value`` the result.
        """
        ring = self._ring()
        if ring.obstacles & RECORDED:  # a graph cannot hold work on the host: the error names the method
            self.refuse_unusable(kind)
        ring.check()
        operation: StreamOperation[Any] = new_operation(ring, kind, INSTANT if kind == "wait" else estimate, keep)
        operation.copy_out = copy_out
        operation.value = value
        ring.enqueued += 1
        self.host_queue.put(operation, call, arguments, gate)
        return operation

    def enqueue_submission(
        self, call: Callable[[StreamOperation[Any]], object], gate: Gate, keep: object, estimate: Estimate
    ) -> StreamOperation[Any]:
        """Enqueue ``call(operation)``, which sets the operation's result, when ``gate`` is open."""
        ring = self._ring()
        # As `Ring.check`, without its call. For a stream that is only shared, `refuse_unusable` may return.
        if ring.obstacles & REFUSING or _get_running_loop() is not ring.loop or ring.driver.fault is not None:
            self.refuse_unusable("submit")
        operation: StreamOperation[Any] = new_operation(ring, "submit", estimate, keep)
        if (
            gate is self.submissions  # as the only gate
            and not (ring.obstacles & COMPLICATED or ring.on_host)
            and len(ring.pending) < ring.device_hot.limit
            and gate.ready(operation)
        ):
            ring.submit(operation, call, (operation,))  # 3 µs faster than through the host queue
        else:
            ring.enqueued += 1  # `Ring.submit` counts, `HostQueue.put` does not
            self.host_queue.put(operation, call, (operation,), gate)
        return operation

    def enqueue_record(self, lease: Lease, keep: object) -> StreamOperation[None]:
        """Record the event of a lease that a user's `Event` holds, after all earlier operations."""
        ring = self._ring()
        operation: StreamOperation[None] = new_operation(ring, "record", INSTANT, keep)
        ring.submit(operation, _use_lease, (operation, lease))  # `_use_lease` sets its event, `submit` records it
        return operation

    def submit_chunk(
        self,
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        estimate: Estimate | None,
        release: Callable[[], object],
        keep: object,
    ) -> StreamOperation[Any]:
        """Submit one chunk of the staged copy at the head of the host queue.

        ``release`` is called when the device has finished with the chunk, whether it succeeded or not. ``keep`` is held
        until then, because the copy may be withdrawn before.
        """
        ring = self._ring()
        operation: StreamOperation[Any] = new_operation(ring, INTERNAL, estimate, keep)
        operation.on_settled = release
        operation.copy_out = _copied_out_at_once  # with a `copy_out`, it counts as awaited: the reactor watches it
        if ring.on_host:
            operation.context = ring.on_host[0].context.copy()  # of the copy: any task may run this method
        ring.submit(operation, call, arguments, ahead=True)
        return operation

    def submit_observed(
        self,
        listeners: Listeners,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
    ) -> None:
        """Do the driver calls of `Ring.submit`, whose comments apply here, too. Then call the hooks.

        If a listener wants timing, an event with timing comes before the call (in `DeviceHot.starts`, from where
        `Reports.resolved` gives it back), and the event after it has timing, too.
        """
        ring = self._ring()
        leases = ring.device_state.leases
        now = ring.now()
        timing = listeners.timing
        if timing:
            start = leases.take(timing=True)
            try:
                ring._record(start.handle)
            except BaseException:
                leases.give(start)
                raise
            ring.device_hot.starts[operation.id] = start
        if call is not None:
            call(*arguments)
        operation.submitted_at = now
        idle = ring.device_hot.idle_leases
        lease = operation.lease or (idle.pop() if idle and not timing else leases.take(timing=timing))
        try:
            ring._record(lease.handle)
        except BaseException:
            operation.return_lease(lease)
            raise
        operation.lease = lease
        if ring.newest_id != operation.id:  # its driver call has enqueued others
            self.move_to_end(operation)
        if listeners.submit:
            self.reports.submitted(listeners.submit, operation)

    def put(
        self, operation: StreamOperation[Any], call: Callable[..., object] | None, arguments: tuple[Any, ...]
    ) -> None:
        """Put an operation that the stream does not take now into the host queue."""
        self.host_queue.put(operation, call, arguments)

    def move_to_end(self, operation: StreamOperation[Any]) -> None:
        """Put an operation behind those that its driver call has enqueued, by a finaliser for example.

        Its event was recorded after their events, so theirs prove nothing about it.
        """
        ring = self._ring()
        if operation in ring.pending:  # else a fault has removed it
            ring.outlook.forget()
            ring.append(operation)  # before the next line: Ctrl-C between the two loses nothing
            ring.pending.remove(operation)  # removes the first of its two entries

    def end_call(self, operation: StreamOperation[Any], error: BaseException, lease: Lease | None) -> bool:
        """Handle an error of the driver calls of an operation: see `Interruption.end_call`."""
        return self.interruption.end_call(operation, error, lease)

    # -- markers -------------------------------------------------------------------------------------------------------

    def mark_end(self) -> None:
        """Submit a marker after work of another library; if the newest operation is one, record its event again."""
        ring = self._ring()
        newest = ring.pending[-1] if ring.pending else None
        if (
            newest is None
            or newest.kind is not INTERNAL
            or newest.copy_out is not None  # a chunk
            or not self.record_again(newest)
        ):
            ring.submit_marker()

    def record_again(self, operation: StreamOperation[Any]) -> bool:
        """Record the event of the newest operation once more: it then comes after everything on the stream so far.

        Return False if that is not possible: it has no event or has failed, or a user or a listener has its event.
        """
        ring, lease = self._ring(), operation.lease
        if (
            lease is None
            or lease.lent
            or lease.timing
            or operation.failure is not None
            or operation is not ring.pending[-1]
        ):
            return False
        try:
            ring._record(lease.handle)
        except Exception as error:  # noqa: BLE001 - the operation fails with any error
            self.fail(operation, error)  # no other marker: whatever waits for the stream's end is skipped now
        return True

    # -- waits for other streams ---------------------------------------------------------------------------------------

    def wait(self, operation: StreamOperation[Any]) -> StreamOperation[Any]:
        """Enqueue a device-side wait for an operation of another stream of this loop."""
        ring = self._ring()
        waiting = self.enqueue_gated("wait", Submitted(operation, ring), self._issue_wait, (operation,), operation)
        ring.after_wait = True  # the next operation has another estimate, because its duration includes the wait
        return waiting

    def follow_unusual(self, operation: StreamOperation[Any]) -> None:
        """Make later operations wait for one of another stream, in any state of both streams: see `Ring.follow`."""
        ring = self._ring()
        if ring.obstacles & (SHARED | RECORDED) == SHARED:
            self.refuse_captured()
        if operation.queue is ring:
            return
        lease = operation.lease  # read once, as in `Ring.follow`
        if lease is not None and not ring.on_host and ring._poison is None:
            ring.note_wait()
            ring.driver.stream_wait(ring.handle, lease.handle)
            if ring.device_hot.listeners is not None:
                self.reports.followed(operation)  # no operation of kind "wait" shows them the order
        elif not operation.is_settled:
            self.wait(operation)  # which is submitted when the other operation has its event

    def _issue_wait(self, operation: StreamOperation[Any]) -> None:
        """Make the driver call of a "wait" for this operation of another stream: it was submitted, or never will be."""
        ring = self._ring()
        lease = operation.lease
        if lease is None and not operation.is_settled and operation.queue is not ring:
            # It was skipped or withdrawn, so it has no event. Earlier operations of its stream may still run.
            lease = operation.queue.submit_marker().lease
        if lease is not None:
            ring.driver.stream_wait(ring.handle, lease.handle)

    # -- the reactor's view --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit operations of the host queue for which the stream has room."""
        if self.host_queue.entries:
            self.host_queue.pump()

    def is_stuck(self) -> bool:
        """Return whether one query has found the oldest operation unfinished. False if the answer is unknown.

        The watchdog asks this first, because `Ring.poll` makes two queries or more: it begins with the newest one.
        """
        ring = self._ring()
        lease = ring.pending[0].lease if ring.pending else None
        if lease is None or ring._resolving or (ring.device_hot.guarded and not ring.reactor.query_guard.open):
            return False
        try:
            if ring.driver.event_query(lease.handle):
                return False  # `poll` repeats the query, and counts it
        except AiocudaError:
            return False  # `poll` gets the same error, and handles it
        ring.reactor_hot.polls += 1
        ring.last_busy = ring.now()
        return True

    # -- resolve: rare cases -------------------------------------------------------------------------------------------

    def submitted(self, hooks: Hooks, operation: StreamOperation[Any]) -> None:
        """Notify the listeners that the stream has accepted the operation."""
        self.reports.submitted(hooks, operation)

    def resolved(self, operation: StreamOperation[Any]) -> bool:
        """Notify the listeners that the operation is about to finish. Return whether it now has an `Extra`."""
        return self.reports.resolved(operation)

    def linger(self, operation: StreamOperation[Any], gathered: Sequence[StreamOperation[Any]]) -> None:
        """Do what `Ring.linger` does, with listeners, which see that all gathered operations are awaited."""
        self.reports.linger(operation, gathered)

    def end_resolve(self, operation: StreamOperation[Any], error: BaseException) -> bool:
        """Handle an error in the turn of an operation: see `Interruption.end_resolve`."""
        return self.interruption.end_resolve(operation, error)

    def finish_special(self, operation: StreamOperation[Any]) -> bool:
        """Call the `on_settled` of an operation with an `Extra`, which the device has finished.

        If it was abandoned or has failed, finish it and return False. If it has succeeded, return True: `Ring._resolve`
        finishes it.
        """
        extra = operation.extra
        assert extra is not None
        on_settled = extra.on_settled
        if on_settled is not None:
            extra.on_settled = None
            try:
                on_settled()
            except BaseException as error:  # noqa: BLE001 - the operation is done, so the loop's handler gets the error
                self._ring().reactor.report(f"after {operation!r} something could not be given back", error)
        if operation.status == ABANDONED:
            extra.detached = False
            operation.wake_waiters_paced()  # waiters that have not been woken yet
            return False
        if extra.failure is not None:
            operation.note_waiters(extra.failure.poison)  # a waiter in the program sees the failure
            self.unseen.forget_seen()
            operation.status = FAILED
            self._ring().reactor.failed += operation.kind is not INTERNAL
            operation.wake_waiters()
            return False
        return True

    def record_late(self, operation: StreamOperation[Any]) -> Lease | None:
        """Record an event for an operation that the stream has accepted without one.

        Ctrl-C came between the driver call and the record, or the driver refused the record. An event that is recorded
        now is late, but proves the same.
        """
        if operation.submitted_at <= 0.0:
            return None  # the stream has not accepted it
        ring = self._ring()
        lease: Lease = ring.device_state.leases.take()
        try:
            ring._record(lease.handle)
        except BaseException:
            operation.return_lease(lease)
            raise
        operation.lease = lease
        return lease

    def copy_out(self, operation: StreamOperation[Any]) -> bool:
        """Start the host's work of an operation that the device has finished. Return True if that work is done.

        An operation that has failed or was abandoned copies nothing more, but waits for the threads that are copying:
        each later query asks its ``copy_out`` again.
        """
        copy_out = operation.copy_out
        assert copy_out is not None
        if operation.status == LANDING and operation.failure is None:
            return False  # the work that was started will call `copied_out`
        try:
            if not copy_out(operation):
                if operation.status == SUBMITTED:
                    operation.status = LANDING  # not before the call: after Ctrl-C, it is repeated
                return False
        except Exception as error:  # noqa: BLE001 - the error of the copy is the operation's
            operation.fail_copy_out(error)
        operation.copy_out = None
        return True

    def copied_out(self, operation: StreamOperation[Any], error: BaseException | None = None) -> None:
        """Resolve an operation whose host's work, which its ``copy_out`` has started, is done or has failed."""
        ring = self._ring()
        operation.copy_out = None
        if ring.reactor.closed:
            return  # the waiters have been woken
        if error is not None and not operation.is_unwanted:
            operation.fail_copy_out(error)
        ring.poll()
        ring.reactor.plan(ring)

    # -- failures ------------------------------------------------------------------------------------------------------

    def report_fault(self, operation: StreamOperation[Any], fault: DeviceFault) -> int:
        """Fail everything on the device, because a call for this operation has found a fault. Return as `Ring.poll`."""
        ring = self._ring()
        ring.driver.blame(operation.shown_name)
        ring.reactor.fault(fault, ring.pending[0] if ring.pending else operation)
        return 1  # any number above 0: everything has failed

    def fail(self, operation: StreamOperation[Any], error: BaseException) -> None:
        """Fail an operation that the driver or a function of the program refused, and skip all later operations.

        A chunk fails the copy that it is a piece of: the head of the host queue.
        """
        if isinstance(error, DeviceFault):
            self.report_fault(operation, error)
            return
        if isinstance(error, AiocudaError):
            error.__traceback__ = None  # its frames hold the operation and the memory of its arguments
        entries = self.host_queue.entries
        chunk = operation.kind is INTERNAL and operation.copy_out is not None
        copy = entries.popleft() if entries and chunk else None
        failure = Poison(error, self._ring().loop, repr(copy) if copy is not None else operation.shown_name).failure()
        (operation if copy is None else copy).note_unseen(failure.poison)
        self.place_failed(operation, error, failure)
        if copy is not None:
            copy.forget_call()
            self.place_failed(copy, error, failure)
        self.host_queue.skip_all(failure)

    def skip(self, operation: StreamOperation[Any], failure: Failure) -> None:
        """Append an operation that will not run. It fails with a `SkippedError` when its turn comes."""
        poison = failure.poison
        error = SkippedError(f"{operation} was not run: {poison.where} failed before it: {poison.error}")
        error.__cause__ = poison.error
        self.place_failed(operation, error, failure)

    def place_failed(self, operation: StreamOperation[Any], error: BaseException, failure: Failure) -> None:
        """Append an operation that the stream has not accepted, to fail with ``error`` in its turn. Poison the stream.

        Its call has raised, or it is skipped, because an operation before it has failed.
        """
        ring = self._ring()
        pending = ring.pending
        if not ring.active:
            ring.reactor.activate(ring)
        if operation.submitted_at == IN_CALL:
            operation.submitted_at = 0.0  # its call is over
        if not pending or pending[-1] is not operation:  # `Ring.submit` appends an operation before its call
            ring.append(operation)
        if operation.status < DONE:
            operation.status = SUBMITTED
        operation.fail_in_turn(failure, error)
        ring.poison = failure.poison
        ring.unmarked_wait_at = ring.enqueued  # no event stands for it: `Ring.end` has to record one
        ring.attend()

    def fail_all(self, fault: DeviceFault) -> None:
        """Fail every operation at once: the device has faulted. After Ctrl-C, a second call continues."""
        ring = self._ring()
        poison = Poison(fault, ring.loop, f"the operations of {ring.name}")
        failure = poison.failure()
        ring.obstacles |= FAULTED
        ring.outlook.forget()
        before = ring.reactor.failed
        listened = ring.device_hot.listeners is not None or bool(ring.device_hot.starts)
        for operation, awaited in self.host_queue.fail_all(fault, failure):
            if listened and not self.reports.was_reported(operation):
                self.reports.faulted(operation, awaited)
        while ring.pending:
            operation = ring.pending[0]  # removed last: the watchdog continues after Ctrl-C
            # Its event is not returned, and its memory is kept: what the device still does is unknown.
            operation.lease = None
            awaited = operation.is_awaited
            operation.fail(failure, fault)
            if listened and not self.reports.was_reported(operation):
                self.reports.faulted(operation, awaited)
            if ring.pending and ring.pending[0] is operation:  # else a hook has called this method, too
                ring.pending.popleft()
        # Nothing is to be delivered if no operation has failed, or if operations over several devices do it: `base`.
        poison.delivered = ring.reactor.failed == before or self.base is not None
        self.unseen.note(poison)

    # -- the end -------------------------------------------------------------------------------------------------------

    def refuse(self, draining: bool = False) -> None:
        """Refuse new operations from now on. Accepted operations continue.

        Parameters
        ----------
        draining
            The stream's coordinator or device closes the stream, and waits for the operations that a coordinator has
            registered and not submitted yet. `let_in` accepts these.
        """
        ring = self._ring()
        if not ring.obstacles & CLOSED:
            self.draining = draining
            ring.obstacles |= CLOSED

    def let_in(self) -> None:
        """Accept one operation that a coordinator registered before the queue closed. The caller closes it again."""
        ring = self._ring()
        if not self.draining:
            ring.check()
        ring.closed = False

    def finish(self) -> None:
        """Refuse everything: nothing waits for the operations any more, or none is left."""
        self.draining = False
        self._ring().obstacles |= CLOSED | ENDED
        self.unseen.pass_on()  # from now on, the device's block raises an unseen failure of this stream

    async def flush(self) -> None:
        """Wait until the stream has accepted all operations that are on the host now."""
        if self.host_queue.entries:
            await self._wait_for_marker(on_submit=True)

    async def settle(self) -> None:
        """Wait until the device has finished with all operations so far. Their failures stay unread."""
        ring = self._ring()  # held during the wait, because the program may drop the stream
        while not ring.idle and not ring.reactor.closed:
            if not await self._wait_for_marker(on_submit=False):
                return  # otherwise the marker was abandoned too early, with all of the host queue: wait for another one

    async def settle_operation(self, operation: StreamOperation[Any]) -> None:
        """Wait until the device has finished with an operation. Raise `ClosedError` if its end is unknown."""
        operation.queue.check_loop()
        if not operation.is_settled:
            await self.settle()
        if not operation.is_settled:
            raise ClosedError(
                f"{operation!r} was still with the device when that was closed: what it may touch stays in use"
            )

    @staticmethod
    def size_of(operation: StreamOperation[Any]) -> int:
        """Return the bytes that an unfinished transfer moves, or a fill sets; else 0."""
        keep: Any = operation.keep if operation.kind in _SIZED else None  # a buffer, or a tuple that begins with one
        return 0 if keep is None else int((keep[0] if type(keep) is tuple else keep).nbytes)

    async def _wait_for_marker(self, on_submit: bool) -> bool:
        """Wait until a new marker is done; with ``on_submit``, only until the stream has accepted it.

        Return True if the marker was abandoned with the rest of the host queue.
        """
        ring = self._ring()
        reached: asyncio.Future[None] = ring.loop.create_future()
        marker = ring.marker()
        if ring.shared:  # nothing waits in its host queue
            ring.submit(marker, None, (), ahead=True)
        else:  # with `on_submit`, the "driver call" of the marker wakes this task
            self.host_queue.put(marker, wake_future if on_submit else None, (reached,) if on_submit else ())
        if marker.status < DONE and not reached.done():
            marker.add_waiter(reached)
            ring.attend()
            await reached
        return marker.status == ABANDONED

    def withdraw_all(self) -> None:
        """Abandon all operations that are still on the host. The stream never gets them."""
        for operation in self.host_queue.withdraw():
            operation.copy_out = None  # nothing is copied to the caller's array
            if operation.status < DONE:
                operation.drop_result()
            self._release_withdrawn(operation)

    def _release_withdrawn(self, operation: StreamOperation[Any]) -> None:
        """Release the memory of a withdrawn operation: at once, or, if earlier work runs, when that has finished.

        The earlier work may include chunks of the withdrawn operation itself.
        """
        ring = self._ring()
        operation.detached = bool(ring.pending)
        if ring.pending:
            ring.append(operation)  # without an event: its turn comes after the earlier work
            return
        operation.keep = None
        operation.call_on_settled()

    def orphan(self) -> None:
        """Abandon all operations and stop watching them. Waiters are woken if their loop is open.

        Call it on the queue's own loop, unless that is closed.
        """
        ring = self._ring()
        self.finish()
        ring.outlook.forget()
        ring.reactor.retire(ring)
        withdrawn = self.host_queue.withdraw()
        gone = ring.loop.is_closed()  # then no waiter can be woken
        for operation in [*withdrawn, *ring.pending]:
            operation.copy_out = None
            if operation.kind is INTERNAL:
                operation.on_settled = None  # that of a chunk would submit the next chunk
            if gone:
                operation.waiters = None
            if operation.status < DONE:
                operation.drop_result()
            operation.detached = True
        accepted = tuple(ring.pending)
        for operation in withdrawn:
            self._release_withdrawn(operation)
        for operation in accepted:
            self.reports.gone(operation, awaited=False)

    def has_device_finished(self) -> bool:
        """Return whether the device has finished all accepted operations. Queries the driver, wakes no waiter.

        Any thread may call it, outside of the `QueryGuard`.
        """
        ring = self._ring()
        driver = ring.driver
        if driver.fault is not None:
            return True
        with contextlib.ExitStack() as queries:
            if ring.device_hot.guarded and ring.pending:
                driver.begin_queries()
                queries.callback(driver.end_queries)
            return all(
                operation.lease is None or driver.event_query(operation.lease.handle)
                for operation in reversed(ring.pending)  # the newest first: it is the last to be done
            )

    def reclaim(self) -> None:
        """Release all that an orphaned queue holds: the device has finished."""
        ring = self._ring()
        while ring.pending:
            operation = ring.pending.popleft()
            operation.detached = False
            lease, operation.lease = operation.lease, None
            ours = lease is not None and not lease.lent  # else the user's `Event` gives it back, maybe on the next line
            operation.keep = None
            if ring.driver.fault is None:
                if lease is not None and ours:
                    ring.device_state.leases.give(lease)
                start = ring.device_hot.starts.pop(operation.id, None)
                if start is not None:
                    ring.device_state.leases.give(start)
            operation.call_on_settled()
        if ring.driver.fault is None:
            ring.device_state.destroy_stream(ring.handle)
            if not self.imported:
                ring.device_state.stream_opened(-1)


def new_queue(reactor: Reactor, handle: int, name: str, imported: bool = False) -> Ring:
    """Return the queue of a stream, empty and open."""
    ring = Ring(reactor, handle, name)
    ring.rare = StreamQueue(ring, imported)
    reactor.add(ring)
    return ring


class HasQueue(Protocol):
    """An `aiocuda.Stream`, whose package lies above this one."""

    @property
    def _queue(self) -> Ring: ...


def stream_queue(stream: HasQueue) -> Ring:
    """Return the queue of a public stream. Measured hot functions read ``stream._queue`` directly."""
    return stream._queue


def _copied_out_at_once(operation: StreamOperation[Any]) -> bool:
    """The ``copy_out`` of a chunk. Return True: the host has nothing left to do for it."""
    return True


def _use_lease(operation: StreamOperation[Any], lease: Lease) -> None:
    """The "driver call" of a "record": make `Ring.submit` record the event of this lease."""
    operation.lease = lease
