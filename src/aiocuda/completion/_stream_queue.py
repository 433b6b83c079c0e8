"""StreamQueue: the unfinished operations of one stream, in order."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .._base._arrays import MOST_BYTES
from .._base._failure import Failure, Poison
from .._base._wakeups import wake_future
from .._core import (
    ABANDONED,
    CLOSED,
    COMPLICATED,
    DONE,
    FAILED,
    FAULTED,
    IN_CALL,
    INSTANT,
    INTERNAL,
    LANDING,
    RECORDED,
    SHARED,
    SUBMITTED,
    Estimate,
    Obstacle,
    Ring,
    new_operation,
)
from ..errors import AiocudaError, BusyError, ClosedError, DeviceFault, InvalidArgumentError, SkippedError
from ._captures import is_captured
from ._extra import CopyOut
from ._gates import Gate, Submitted
from ._host_queue import HostQueue
from ._interruption import Interruption
from ._listeners import Listeners
from ._reports import Reports
from ._stream_operation import StreamOperation
from ._submission import SUBMIT_AHEAD, SubmissionLimit
from ._unseen_failure import UnseenFailure

if TYPE_CHECKING:
    from .._core import Lease
    from ._device_state import DeviceState
    from ._reactor import Reactor

__all__ = ["HasQueue", "StreamQueue", "stream_queue"]


class StreamQueue(Ring):
    """The unfinished operations of one stream, in order: on the host, and on the device.

    `Ring` has the operations that the stream has accepted, and the hot functions; this class the rest: checks, gates,
    shared and captured streams, waits for other streams, failures, and the end.

    Attributes
    ----------
    host_queue : HostQueue
        The operations that are still on the host.
    name : str
    opened_at : str or None
        The line of the program that has opened the stream.
    imported : bool
        True for a stream that another library has made.
    lent : int
        How many loans of the stream to other libraries are open.
    shared : bool
        True while others may enqueue on the stream: it is imported or lent. Then no operation waits in the host queue,
        and each submission first asks the driver whether the stream is being captured: a call on a captured stream
        becomes part of that graph, or makes the capture fail.
    recorded : bool
        True while `Stream.capture` records the stream's calls into a graph. The queue then refuses new operations.
    closed : bool
        New operations are refused. Accepted operations continue.
    draining : bool
        The queue is closed, and takes the operations that a coordinator accepted earlier: see `let_in`.
    ended : bool
        The queue is closed, and nothing waits for its operations any more.
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

    closed = Obstacle(CLOSED)
    shared = Obstacle(SHARED)
    recorded = Obstacle(RECORDED)

    __slots__ = ("_stream", "base", "draining", "ended", "foreign", "host_queue", "imported", "lent", "name",
                 "opened_at", "recorded_bytes", "submissions", "unseen")  # fmt: skip

    def __init__(self, reactor: Reactor, handle: int, name: str, imported: bool = False) -> None:
        super().__init__(reactor, handle, StreamOperation)
        self.reports = Reports(self)
        self.interruption = Interruption(self)
        self.name = name
        self.opened_at: str | None = None
        self.imported = self.shared = imported
        self.lent = 0
        self.host_queue = HostQueue(self)
        self.submissions = SubmissionLimit(self, SUBMIT_AHEAD)
        self.foreign: dict[object, Any] = {}
        self.recorded_bytes = 0
        self.unseen = UnseenFailure(self.device_state.unseen)
        self.base: DeviceState | None = None
        self.draining = self.ended = False
        self._stream: weakref.ref[Any] | None = None
        reactor.add(self)

    # -- checks --------------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Any:
        """The public `aiocuda.Stream`, or None if the program holds it no longer."""
        return None if self._stream is None else self._stream()

    def record_memory(self, nbytes: int) -> None:
        """Count memory that another library holds; a negative number: that it has released."""
        self.check()
        if not 0 <= self.recorded_bytes + nbytes <= MOST_BYTES:
            raise InvalidArgumentError(
                f"nbytes={nbytes:,} does not fit: other libraries hold {self.recorded_bytes:,} bytes on {self.name} by "
                "record_memory, and a negative number releases at most these",
                size=nbytes,
            )
        self.recorded_bytes += nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def set_stream(self, stream: object) -> None:
        """Set the public stream, which is made after its queue."""
        self._stream = weakref.ref(stream)

    def refuse_loop(self) -> NoReturn:
        """Raise the error for another loop than the stream's own, or for none."""
        raise self.device_state.wrong_loop(self.loop, self.name, "make a stream in each loop, share the device")

    def refuse_unusable(self) -> None:
        """Raise the reason why the stream accepts no operation now, if there is one."""
        self.check_loop()
        if self.obstacles & CLOSED:
            raise ClosedError(
                f"stream {self.name!r} has been closed, by itself or with its device: make another by device.stream()"
            )
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if self.obstacles & (SHARED | RECORDED) == SHARED:
            self.refuse_captured()

    def _check_new(self, kind: str) -> None:
        if self.recorded:
            raise BusyError(
                f"{self.name} is being captured, and this {kind} would run instead of being recorded: call the "
                "stream's verbs by the stream, `stream.launch(…)`, or end the capture first"
            )
        self.check()

    # -- streams that others use, too ----------------------------------------------------------------------------------

    def begin_loan(self) -> None:
        """Mark the stream as shared: another library uses it."""
        self.lent += 1
        self.shared = True

    def end_loan(self) -> None:
        """End one loan. The stream is shared until the last one has ended."""
        self.lent -= 1
        self.shared = self.imported or self.lent > 0

    def is_captured(self) -> bool:
        """Return whether another library captures the stream. ``cuStreamIsCapturing``."""
        return is_captured(self.driver, self.handle)

    def refuse_captured(self) -> None:
        """Raise `BusyError` while another library captures the stream."""
        if self.is_captured():
            raise BusyError(
                f"{self.name} is being captured into a graph by another library, and new work would become part of "
                "that graph, or make the capture fail: end that capture first, or use a stream of your own"
            )

    def takes_frees(self) -> bool:
        """Return whether memory may now be freed in the order of this stream."""
        return not self.ended and not (self.shared and self.is_captured())

    def _skips_captured(self, operation: StreamOperation[Any], call: Callable[..., object] | None) -> bool:
        """Append a marker without an event if the stream is captured; raise `BusyError` for a driver call."""
        if self.recorded or not self.is_captured():
            return False
        if call is not None:
            self.refuse_captured()
        if not self.active:
            self.reactor.activate(self)
        self.append(operation)
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
        """Enqueue an operation that is submitted when ``gate`` is open. Later operations wait for it."""
        self._check_new(kind)
        operation: StreamOperation[Any] = new_operation(self, kind, INSTANT if kind == "wait" else estimate, keep)
        operation.copy_out = copy_out
        operation.value = value
        self.enqueued += 1
        self.host_queue.put(operation, call, arguments, gate)
        return operation

    def enqueue_submission(
        self, call: Callable[[StreamOperation[Any]], object], gate: Gate, keep: object, estimate: Estimate
    ) -> StreamOperation[Any]:
        """Enqueue ``call(operation)``, which sets the operation's result, when ``gate`` is open."""
        if self.obstacles & RECORDED:
            self._check_new("submit")  # raises
        self.check()
        operation: StreamOperation[Any] = new_operation(self, "submit", estimate, keep)
        if (
            gate is self.submissions  # as the only gate
            and not (self.obstacles & COMPLICATED or self.on_host)
            and len(self.pending) < self.device_state.limit
            and gate.ready(operation)
        ):
            self.submit(operation, call, (operation,))  # 3 µs faster than through the host queue
        else:
            self.enqueued += 1
            self.host_queue.put(operation, call, (operation,), gate)
        return operation

    def enqueue_record(self, lease: Lease, keep: object) -> StreamOperation[None]:
        """Record the event of a lease that a user's `Event` holds, after all earlier operations."""
        operation: StreamOperation[None] = new_operation(self, "record", INSTANT, keep)
        self.submit(operation, _use_lease, (operation, lease))
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
        operation: StreamOperation[Any] = new_operation(self, INTERNAL, estimate, keep)
        operation.on_settled = release
        operation.copy_out = _copied_out_at_once  # so the reactor watches it: the rest of the copy waits for it
        if self.on_host:
            operation.context = self.on_host[0].context.copy()  # any task may submit the chunk
        self.submit(operation, call, arguments, ahead=True)
        return operation

    def move_to_end(self, operation: StreamOperation[Any]) -> None:
        """Put an operation behind those that its driver call has enqueued, by a finaliser for example.

        Its event was recorded last, so theirs prove nothing about it.
        """
        if operation in self.pending:  # not after a fault
            self._target = None
            self.append(operation)  # first: Ctrl-C loses nothing
            self.pending.remove(operation)  # the first of both

    def enqueue_unusual(
        self, kind: str, estimate: Estimate, keep: object, call: Callable[..., object], values: Sequence[Any],
        label: str | None,
    ) -> StreamOperation[Any]:  # fmt: skip
        """Enqueue an operation of a `BoundCall` by `submit`, because the stream has an obstacle or is full.

        ``call(values)`` is the driver call without the record of the event: `submit` records it.
        """
        operation: StreamOperation[Any] = new_operation(self, kind, estimate, keep)
        if label is not None:
            operation.own_label = label
        self.submit(operation, call, (values,))
        return operation

    def _submit_observed(
        self,
        listeners: Listeners,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
    ) -> None:
        """Do the driver calls of `submit`, with a timing event before and after the call if a listener wants it."""
        leases = self.device_state.leases
        now = self.now()
        timing = listeners.timing
        if timing:
            start = leases.take(timing=True)
            try:
                self._record(start.handle)
            except BaseException:
                leases.give(start)
                raise
            self.device_state.starts[operation.id] = start
        if call is not None:
            call(*arguments)
        operation.submitted_at = now
        lease = operation.lease or (
            self.idle_leases.pop() if self.idle_leases and not timing else leases.take(timing=timing)
        )
        try:
            self._record(lease.handle)
        except BaseException:
            self.return_lease(operation, lease)
            raise
        operation.lease = lease
        if self.newest_id != operation.id:
            self.move_to_end(operation)
        if listeners.submit:
            self.reports.submitted(listeners.submit, operation)

    # -- markers -------------------------------------------------------------------------------------------------------

    def marker(self) -> StreamOperation[Any]:
        """Return a new marker: an operation without a driver call, which is not counted."""
        operation: StreamOperation[Any] = new_operation(self, INTERNAL, INSTANT, None)
        operation.on_settled = nothing  # so that it is not counted
        return operation

    def submit_marker(self) -> StreamOperation[Any]:
        """Submit a marker. Its event comes after all work that the stream has accepted so far."""
        marker = self.marker()
        self.submit(marker, None, (), ahead=True)
        return marker

    def mark(self, *, after_end: bool = False) -> StreamOperation[Any] | None:
        """Submit a marker; return None if the queue has ended. With ``after_end``, only if it has no work left."""
        return None if self.ended and not (after_end and self.pending) else self.submit_marker()

    def mark_end(self) -> None:
        """Submit a marker, unless the newest operation is one: then record its event again."""
        newest = self.pending[-1] if self.pending else None
        if (
            newest is None
            or newest.kind is not INTERNAL
            or newest.copy_out is not None
            or not self.record_again(newest)
        ):
            self.submit_marker()

    def record_again(self, operation: StreamOperation[Any]) -> bool:
        """Record the event of the newest operation once more: it then comes after everything on the stream so far.

        Return False if that is not possible, because the operation has failed, or because others hold its event.
        """
        lease = operation.lease
        if (
            lease is None
            or lease.lent
            or lease.timing
            or operation.failure is not None
            or operation is not self.pending[-1]
        ):
            return False
        try:
            self._record(lease.handle)
        except Exception as error:  # noqa: BLE001 - the operation fails with any error
            self.fail(operation, error)
        return True

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far, device-side waits too; None if that has finished.

        If the stream has a failure that no caller has received, the operation is skipped: so everything that waits for
        the stream's end is skipped, too.
        """
        unmarked = (
            self.unmarked_wait_at == self.enqueued or self.obstacles & SHARED
        )  # work that no operation represents
        poison = self._poison
        if (unmarked or poison is not None) and not (self.obstacles & CLOSED or self.on_host):
            if poison is not None and not poison.delivered:
                return self.enqueue("wait", INSTANT, nothing, ())  # its tail may be a marker without a failure
            if unmarked:
                mark = self.submit_marker()
                self.unmarked_wait_at = -1  # after the mark: Ctrl-C between the two loses no wait
                return mark
        return self.tail()

    # -- waits for other streams ---------------------------------------------------------------------------------------

    def wait(self, operation: StreamOperation[Any]) -> StreamOperation[Any]:
        """Enqueue a device-side wait for an operation of another stream of this loop."""
        waiting = self.enqueue_gated("wait", Submitted(operation, self), self._issue_wait, (operation,), operation)
        self.after_wait = True
        return waiting

    def follow_unusual(self, operation: StreamOperation[Any]) -> None:
        """Do what `follow` does for any operation, in any state of the stream."""
        if self.obstacles & (SHARED | RECORDED) == SHARED:
            self.refuse_captured()
        if operation.queue is self:
            return
        lease = operation.lease  # read once, as in `follow`
        if lease is not None and not self.on_host and self._poison is None:
            self.note_wait()
            self.driver.stream_wait(self.handle, lease.handle)
            if self.device_state.listeners is not None:
                self.reports.followed(operation)
        elif not operation.is_settled:
            self.wait(operation)

    def _issue_wait(self, operation: StreamOperation[Any]) -> None:
        lease = operation.lease
        if lease is None and not operation.is_settled and operation.queue is not self:
            # It was skipped or withdrawn, so it has no event. Earlier operations of its stream may still run.
            lease = operation.queue.submit_marker().lease
        if lease is not None:
            self.driver.stream_wait(self.handle, lease.handle)

    # -- the reactor's view --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit operations of the host queue for which the stream has room."""
        if self.on_host:
            self.host_queue.pump()

    def is_stuck(self) -> bool:
        """Return whether its oldest operation is known to be unfinished, by one query.

        `poll` makes two queries or more, because it begins with the newest operation. False if the answer is unknown.
        """
        lease = self.pending[0].lease if self.pending else None
        if lease is None or self._resolving or (self.device_state.guarded and not self.reactor.query_guard.open):
            return False
        try:
            if self.driver.event_query(lease.handle):
                return False  # `poll` counts it
        except AiocudaError:
            return False  # `poll` gets the same error, and handles it
        self.reactor.polls += 1
        self.last_busy = self.now()
        return True

    def name_awaited(self) -> str:
        """Return the name of the oldest operation with a waiter, for errors."""
        operation = self.awaited()[0]
        return f"the work of {self.name}" if operation is None else operation.shown_name

    # -- resolve: rare cases -------------------------------------------------------------------------------------------

    def _finish_special(self, operation: StreamOperation[Any]) -> bool:
        """Call the `on_settled` of an operation with an `Extra`.

        Finish an operation that was abandoned or has failed, and return False; leave a successful one to `_resolve`.
        """
        extra = operation.extra
        assert extra is not None
        on_settled = extra.on_settled
        if on_settled is not None:
            extra.on_settled = None
            try:
                on_settled()
            except BaseException as error:  # noqa: BLE001 - the operation is done, so the loop's handler gets the error
                self.reactor.report(f"after {operation!r} something could not be given back", error)
        if operation.status == ABANDONED:
            extra.detached = False
            operation.wake_waiters_paced()  # waiters that have not been woken yet
            return False
        if extra.failure is not None:
            operation.note_waiters(extra.failure.poison)
            self.unseen.forget_seen()
            operation.status = FAILED
            self.reactor.failed += operation.kind is not INTERNAL
            operation.wake_waiters()
            return False
        return True

    def _newest_recorded(self) -> StreamOperation[Any]:
        """Return the newest operation with an event; the oldest of all if none has one."""
        operation: StreamOperation[Any]
        for operation in reversed(list(self.pending)):
            if operation.lease is not None or self._record_late(operation) is not None:
                return operation
        operation = self.pending[0]
        return operation

    def _record_late(self, operation: StreamOperation[Any]) -> Lease | None:
        """Record an event for an operation that the stream has accepted without one.

        Ctrl-C came between its two driver calls, or the driver refused the second. An event that is recorded now is
        late, but proves the same.
        """
        if operation.submitted_at <= 0.0:
            return None  # the stream has not accepted it
        lease = self.device_state.leases.take()
        try:
            self._record(lease.handle)
        except BaseException:
            self.return_lease(operation, lease)
            raise
        operation.lease = lease
        return lease

    def return_lease(self, operation: StreamOperation[Any], lease: Lease) -> None:
        """Take an event from an operation. An event that could not be recorded, too: `_record_late` uses another."""
        operation.lease = None
        if not lease.lent:
            self.device_state.leases.give(lease)

    def _copy_out(self, operation: StreamOperation[Any]) -> bool:
        """Start the host's work of an operation that the device has finished. Return True if it is done.

        An operation that has failed or was abandoned copies nothing more, but waits for the threads that are copying.
        """
        copy_out = operation.copy_out
        assert copy_out is not None
        if operation.status == LANDING and operation.failure is None:
            return False  # it will call `copied_out`
        try:
            if not copy_out(operation):
                if operation.status == SUBMITTED:
                    operation.status = LANDING  # not earlier: after Ctrl-C, `copy_out` is called again
                return False
        except Exception as error:  # noqa: BLE001 - the error of the copy is the operation's
            operation.fail_copy_out(error)
        operation.copy_out = None
        return True

    def copied_out(self, operation: StreamOperation[Any], error: BaseException | None = None) -> None:
        """Continue with an operation: the host's work that its ``copy_out`` has started is done, or has failed."""
        operation.copy_out = None
        if self.reactor.closed:
            return  # the waiters have been woken
        if error is not None and not operation.is_unwanted:
            operation.fail_copy_out(error)
        self.poll()
        self.reactor.plan(self)

    # -- failures ------------------------------------------------------------------------------------------------------

    def report_fault(self, operation: StreamOperation[Any], fault: DeviceFault) -> int:
        self.driver.blame(operation.shown_name)
        self.reactor.fault(fault, self.pending[0] if self.pending else operation)
        return 1  # any number above 0: everything has failed

    def fail(self, operation: StreamOperation[Any], error: BaseException) -> None:
        """Fail an operation that the driver or a function of the program refused, and skip all later operations."""
        if isinstance(error, DeviceFault):
            self.report_fault(operation, error)
            return
        if isinstance(error, AiocudaError):
            error.__traceback__ = None  # its frames hold the operation and the memory of its arguments
        entries = self.on_host
        chunk = operation.kind is INTERNAL and operation.copy_out is not None
        copy = entries.popleft() if entries and chunk else None
        failure = Poison(error, self.loop, repr(copy) if copy is not None else operation.shown_name).failure()
        (operation if copy is None else copy).note_unseen(failure.poison)
        self.place_failed(operation, error, failure)
        if copy is not None:
            copy.forget_call()
            self.place_failed(copy, error, failure)
        self.host_queue.skip_all(failure)

    def skip(self, operation: StreamOperation[Any], failure: Failure) -> None:
        """Put an operation that will not run in its place, where it fails in its turn with a `SkippedError`."""
        poison = failure.poison
        error = SkippedError(f"{operation} was not run: {poison.where} failed before it: {poison.error}")
        error.__cause__ = poison.error
        self.place_failed(operation, error, failure)

    def place_failed(self, operation: StreamOperation[Any], error: BaseException, failure: Failure) -> None:
        """Put an operation in its place with its failure. Later operations do not run."""
        pending = self.pending
        if not self.active:
            self.reactor.activate(self)
        if operation.submitted_at == IN_CALL:
            operation.submitted_at = 0.0
        if not pending or pending[-1] is not operation:
            self.append(operation)
        if operation.status < DONE:
            operation.status = SUBMITTED
        operation.fail_in_turn(failure, error)
        self.poison = failure.poison
        self.unmarked_wait_at = self.enqueued  # after the failure is read, `end` needs a new marker
        self.attend()

    def fail_all(self, fault: DeviceFault) -> None:
        """Fail every operation: the device has faulted."""
        poison = Poison(fault, self.loop, f"the operations of {self.name}")
        failure = poison.failure()
        self.obstacles |= FAULTED
        self._target = None
        before = self.reactor.failed
        listened = self.device_state.listeners is not None or bool(self.device_state.starts)
        for operation, awaited in self.host_queue.fail_all(fault, failure):
            if listened and not self.reports.was_reported(operation):
                self.reports.faulted(operation, awaited)
        while self.pending:
            operation = self.pending[0]  # removed last: the watchdog continues after Ctrl-C
            # Its event and its memory stay in use: what the device still does is unknown.
            operation.lease = None
            awaited = operation.is_awaited
            operation.fail(failure, fault)
            if listened and not self.reports.was_reported(operation):
                self.reports.faulted(operation, awaited)
            if self.pending and self.pending[0] is operation:  # a hook may have led here, too
                self.pending.popleft()
        # If no operation has failed, there is nothing to deliver.
        poison.delivered = self.reactor.failed == before or self.base is not None
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
        if not self.closed:
            self.draining = draining
            self.closed = True

    def let_in(self) -> None:
        """Accept an operation that a coordinator registered before the queue closed. The caller then sets `closed`."""
        if not self.draining:
            self.check()
        self.closed = False

    def finish(self) -> None:
        """Refuse everything: nothing waits for the operations any more, or none is left."""
        self.draining = False
        self.closed = self.ended = True
        self.unseen.pass_on()

    async def flush(self) -> None:
        """Wait until no operation is on the host."""
        if self.on_host:
            await self._wait_for_marker(on_submit=True)

    async def settle(self) -> None:
        """Wait until the device has finished with all operations so far. Their failures stay unread."""
        while not self.idle and not self.reactor.closed:
            if not await self._wait_for_marker(on_submit=False):
                return  # otherwise the host queue was withdrawn with the marker: repeat with a new marker

    async def _wait_for_marker(self, on_submit: bool) -> bool:
        """Wait for a new marker. Return True if it was withdrawn before its turn."""
        reached: asyncio.Future[None] = self.loop.create_future()
        marker = self.marker()
        if self.shared:
            self.submit(marker, None, (), ahead=True)
        else:
            self.host_queue.put(marker, wake_future if on_submit else None, (reached,) if on_submit else ())
        if marker.status < DONE and not reached.done():
            marker.add_waiter(reached)
            self.attend()
            await reached
        return marker.status == ABANDONED

    def withdraw_all(self) -> None:
        """Abandon all operations that are still on the host. The stream never gets them."""
        for operation in self.host_queue.withdraw():
            operation.copy_out = None
            if operation.status < DONE:
                operation.drop_result()
            self._release_withdrawn(operation)

    def _release_withdrawn(self, operation: StreamOperation[Any]) -> None:
        """Release the memory of a withdrawn operation; if earlier work runs, when that has finished.

        The earlier work may include chunks of a copy that is withdrawn.
        """
        operation.detached = bool(self.pending)
        if self.pending:
            self.append(operation)
            return
        operation.keep = None
        operation.call_on_settled()

    def orphan(self) -> None:
        """Abandon all operations and stop watching them. Waiters are woken if their loop is open.

        Call it on the queue's own loop, unless that is closed.
        """
        self.finish()
        self._target = None
        self.reactor.retire(self)
        withdrawn = self.host_queue.withdraw()
        gone = self.loop.is_closed()
        for operation in [*withdrawn, *self.pending]:
            operation.copy_out = None
            if operation.kind is INTERNAL:
                operation.on_settled = None  # it would ask for the next chunk
            if gone:
                operation.waiters = None
            if operation.status < DONE:
                operation.drop_result()
            operation.detached = True
        accepted = tuple(self.pending)
        for operation in withdrawn:
            self._release_withdrawn(operation)
        for operation in accepted:
            self.reports.gone(operation, awaited=False)

    def has_device_finished(self) -> bool:
        """Return whether the device has finished all accepted operations. Queries the driver, wakes no waiter.

        Any thread may call it, outside of the `QueryGuard`.
        """
        driver = self.driver
        if driver.fault is not None:
            return True
        with contextlib.ExitStack() as queries:
            if self.device_state.guarded and self.pending:
                driver.begin_queries()
                queries.callback(driver.end_queries)
            return all(
                operation.lease is None or driver.event_query(operation.lease.handle)
                for operation in reversed(self.pending)
            )

    def reclaim(self) -> None:
        """Release all that an orphaned queue holds: the device has finished."""
        while self.pending:
            operation = self.pending.popleft()
            operation.detached = False
            lease, operation.lease = operation.lease, None
            ours = lease is not None and not lease.lent  # else the user's `Event` returns it, perhaps in the next line
            operation.keep = None
            if self.driver.fault is None:
                if lease is not None and ours:
                    self.device_state.leases.give(lease)
                start = self.device_state.starts.pop(operation.id, None)
                if start is not None:
                    self.device_state.leases.give(start)
            operation.call_on_settled()
        if self.driver.fault is None:
            self.device_state.destroy_stream(self.handle)
            if not self.imported:
                self.device_state.stream_opened(-1)


class HasQueue(Protocol):
    """An `aiocuda.Stream`, whose package lies above this one."""

    @property
    def _queue(self) -> StreamQueue: ...


def stream_queue(stream: HasQueue) -> StreamQueue:
    """Return the queue of a public stream. Measured hot functions read ``stream._queue`` directly."""
    return stream._queue


def nothing() -> None:
    """Do nothing: the call of an operation that only marks a place in the order."""


def _copied_out_at_once(operation: StreamOperation[Any]) -> bool:
    """Return True: a chunk has no host work of its own."""
    return True


def _use_lease(operation: StreamOperation[Any], lease: Lease) -> None:
    """Make `submit` record the event of this lease."""
    operation.lease = lease
