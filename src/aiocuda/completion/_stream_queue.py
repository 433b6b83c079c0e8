"""StreamQueue: the unfinished operations of one stream, in order.

`StreamOperation` is one operation, `HostQueue` the part of the queue that is still on the host, and `Gate` a condition
that an operation there waits for. They use each other, so they are one module.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import weakref
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from .._base._checks import check_callback
from .._base._failure import Failure, Poison, raisable
from .._base._label import LABEL
from .._base._log import log
from .._base._wakeups import MOST_PER_TURN, Callback, Waiters, wake_future
from ..driver.protocol import Driver, RecordedCall, RecordRefused
from ..errors import AiocudaError, BusyError, ClosedError, DeviceFault, DriverError, SkippedError
from ._listeners import Hooks, Listeners, call_hooks, call_resolve_hooks
from ._methods import KINDS
from ._operation import INTERNAL, Operation
from ._prediction import INSTANT
from ._pumps import Pumps
from ._state import ABANDONED, DONE, FAILED, LANDING, QUEUED, STAGING, SUBMITTED, State
from ._submission import SUBMIT_AHEAD, SubmissionLimit

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._notifiers import ArmedNotifier
    from ._prediction import Estimate
    from ._reactor import Reactor

__all__ = [
    "MOST_PER_PUMP",
    "Countdown",
    "Enqueue",
    "Every",
    "Gate",
    "HostQueue",
    "StreamOperation",
    "StreamQueue",
    "Submitted",
    "is_captured",
    "new_operation",
    "stream_operation",
    "stream_queue",
]

#: The driver's answer for a default stream while a stream that waits for it is captured.
STREAM_CAPTURE_IMPLICIT = 906

#: Seconds between two events "queue_full" of one stream.
REPORT_SECONDS = 10.0

#: Seconds between two queries of a full stream: an enqueue must stay cheap.
ASK_AGAIN = 50e-6

#: Awaits of a stream that make no query of its newest operation after one that was in vain.
MOST_BLIND_AWAITS = 15

#: Operations submitted in one pass: 128 launches take 0.6 ms, and no turn of the loop may take 5 ms.
MOST_PER_PUMP = 128

T_co = TypeVar("T_co", covariant=True)

_NAMES = {state: state.name.lower() for state in State}

#: The kinds that have a size in bytes.
_SIZED = frozenset(kind.name for kind in KINDS.values() if kind.size is not None)

_next_id = itertools.count(1).__next__

#: The host's work after the device has finished. It returns False if it continues and will call
#: `StreamQueue.copied_out`.
CopyOut: TypeAlias = "Callable[[StreamOperation[Any]], bool]"

#: A future of the loop, a countdown that many operations share, or a callback with its context.
Waiter: TypeAlias = "asyncio.Future[None] | Countdown | Callback"


class Enqueue(Protocol):
    """The function that `StreamQueue.prepare` returns."""

    def __call__(self, values: Sequence[Any], keep: object, label: str | None = None, /) -> StreamOperation[Any]: ...


class Countdown:
    """One waiter for many operations. It is woken when all are done, or when the first one fails."""

    __slots__ = ("fail_fast", "future", "left")

    def __init__(self, future: asyncio.Future[None], left: int, fail_fast: bool) -> None:
        self.future = future
        self.left = left
        self.fail_fast = fail_fast


class Extra:
    """The state that only some operations have.

    Each attribute that a plain operation, such as a launch, does not have makes it 60 ns faster to create and resolve.

    Attributes
    ----------
    copy_out : callable or None
        The host's work after the device has finished.
    failure : Failure or None
        The failure that the operation takes in its turn, or has taken.
    detached : bool
        True while the operation is abandoned and the device may still use its memory.
    on_await : tuple of callable
        Called once with the operation, in its context, when a task awaits it after it has finished.
    on_settled : callable or None
        Called without arguments when the device has finished with the operation, whether it succeeded or not.
    """

    __slots__ = ("copy_out", "detached", "failure", "on_await", "on_settled")

    def __init__(self) -> None:
        self.copy_out: CopyOut | None = None
        self.failure: Failure | None = None
        self.detached = False
        self.on_await: tuple[Callable[[StreamOperation[Any]], object], ...] = ()
        self.on_settled: Callable[[], object] | None = None


class Gate(Protocol):
    """A condition on the host that an operation waits for."""

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether the operation may be submitted now. Each `HostQueue.pump` asks. May raise its failure."""

    def failure(self) -> Failure | None:
        """Return a failure elsewhere that skips the operation. Asked once, when ready."""


class StreamOperation(Operation[T_co]):
    """An operation as the library sees it: its place in a stream queue, its event, memory, failure and waiters.

    The hot functions of `StreamQueue` write the attributes directly.
    """

    __slots__ = ("__weakref__", "arguments", "call", "context", "estimate", "extra", "gate", "keep", "lease",
                 "own_label", "queue", "status", "submitted_at", "value", "waiters")  # fmt: skip

    queue: StreamQueue
    context: Context  # of the task that submitted it, for hooks and log events
    status: int  # a value of `State`
    value: Any  # the result; of a failed operation the error
    estimate: Estimate | None  # of its duration
    keep: object  # objects that the device may use; held until the device has finished
    lease: Lease | None  # its event, from the submission until the operation leaves the queue
    submitted_at: float  # the driver's time of the submission; 0.0 before
    waiters: Waiter | Waiters[Waiter] | None  # a single waiter is stored without a `Waiters`
    extra: Extra | None

    # Set only by ``label=`` of a launch: to set the context variable takes 250 ns longer.
    own_label: str

    # Set only while the operation is in the host queue.
    call: Callable[..., object] | None
    arguments: tuple[Any, ...]
    gate: Gate | None

    @property
    def state(self) -> str:
        return _NAMES[State(self.status)]

    @property
    def stream(self) -> Any:
        return self.queue.stream

    @property
    def stream_name(self) -> str:
        return self.queue.name

    @property
    def kernel(self) -> str | None:
        return None if self.estimate is None else self.estimate.kernel

    @property
    def label(self) -> str | None:
        return getattr(self, "own_label", None) or self.context.get(LABEL)

    @property
    def nbytes(self) -> int:
        keep: Any = self.keep if self.kind in _SIZED else None  # a buffer, or a tuple that begins with a buffer
        return 0 if keep is None else int((keep[0] if type(keep) is tuple else keep).nbytes)

    @property
    def is_awaited(self) -> bool:
        queue = self.queue
        return self.waiters is not None or queue.lingers_for is self or self in queue.gathers

    @property
    def waits_for(self) -> StreamOperation[Any] | None:
        keep: Any = self.keep if self.kind == "wait" else None
        return keep if isinstance(keep, StreamOperation) else None

    @property
    def part_of(self) -> StreamOperation[Any] | None:
        entries = self.queue.on_host
        return entries[0] if self.kind is INTERNAL and self.copy_out is not None and entries else None

    def done(self) -> bool:
        return self.status >= DONE

    def result(self) -> T_co:
        state = self.status
        if state == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        error = self.exception()
        assert error is not None
        raise error

    def exception(self) -> BaseException | None:
        state = self.status
        if state == DONE:
            return None
        if state == FAILED:
            assert self.failure is not None
            self.failure.poison.delivered = True
            return raisable(self.value)
        if state == ABANDONED:
            return ClosedError(f"{self!r} was abandoned: its result was dropped")
        raise BusyError(f"{self!r} has not finished: await it")

    def add_done_callback(
        self, fn: Callable[[StreamOperation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        check_callback(fn, context)
        if context is None:
            context = contextvars.copy_context()
        queue = self.queue
        queue.check_loop()
        if self.status >= DONE:
            self.report_await()
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context))  # the earlier waiters are being woken
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context))
        queue.attend()

    def remove_done_callback(self, fn: Callable[[StreamOperation[Any]], object]) -> int:
        check_callback(fn)
        waiters = self.waiters
        if type(waiters) is Waiters:
            removed = waiters.remove(fn)
            if removed and not waiters:
                self.waiters = None
            return removed
        if type(waiters) is Callback and waiters.function == fn:
            self.waiters = None
            return 1
        return 0

    def abandon(self) -> bool:
        self.queue.check_loop()
        if self.status >= DONE:
            return False
        self.drop_result()
        return True

    async def settle(self) -> None:
        self.queue.check_loop()
        if not self.is_settled:
            await self.queue.settle()
        if not self.is_settled:
            raise ClosedError(
                f"{self!r} was still with the device when that was closed: what it may touch stays in use"
            )

    def __await__(self) -> Generator[Any, None, T_co]:
        if self.status < DONE:
            queue = self.queue
            if _get_running_loop() is not queue.loop:
                queue.check_loop()
            turn = queue.reactor.turn
            if not queue.polling:  # otherwise the reactor queries in this turn
                if turn.immediate:
                    queue.look_ahead(self)
                if self.status < DONE:
                    queue.linger(self)
            if self.status < DONE:
                waiter: asyncio.Future[None] = queue.loop.create_future()
                self.add_waiter(waiter)
                queue.attend()
                try:
                    yield from waiter
                finally:
                    if self.status < DONE:
                        self.remove_waiter(waiter)
            elif turn.is_over():
                yield
        else:
            if self.extra is not None:
                self.report_await()
            if self.queue.reactor.turn.is_over_for_task():
                yield
        if self.status == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        return self.result()

    def __dir__(self) -> list[str]:
        """Return the names of the public class."""
        return [name for name in super().__dir__() if hasattr(Operation, name)]

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation. An abandoned operation is done before that."""
        return self.status >= DONE and (self.extra is None or not self.extra.detached)

    @property
    def is_unwanted(self) -> bool:
        """True if the operation was abandoned or has failed, so that its result is not needed."""
        return self.status == ABANDONED or self.failure is not None

    # The attributes of `Extra`.

    @property
    def failure(self) -> Failure | None:
        return None if self.extra is None else self.extra.failure

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self._extras().failure = failure

    @property
    def copy_out(self) -> CopyOut | None:
        return None if self.extra is None else self.extra.copy_out

    @copy_out.setter
    def copy_out(self, copy_out: CopyOut | None) -> None:
        self._extras().copy_out = copy_out

    @property
    def detached(self) -> bool:
        return self.extra is not None and self.extra.detached

    @detached.setter
    def detached(self, detached: bool) -> None:
        self._extras().detached = detached

    @property
    def on_settled(self) -> Callable[[], object] | None:
        return None if self.extra is None else self.extra.on_settled

    @on_settled.setter
    def on_settled(self, on_settled: Callable[[], object] | None) -> None:
        self._extras().on_settled = on_settled

    def report_when_awaited(self, report: Callable[[StreamOperation[Any]], object]) -> None:
        """Call a function of a listener, once, if the operation is awaited after it has finished."""
        extra = self._extras()
        extra.on_await = (*extra.on_await, report)

    def report_await(self) -> None:
        """Call `Extra.on_await`: the operation has finished, and a task awaits it now."""
        extra = self.extra
        if extra is not None and extra.on_await:
            reports, extra.on_await = extra.on_await, ()
            for report in reports:
                self.queue.reactor.guard(self.context.copy().run, report, self)

    def _extras(self) -> Extra:
        extra = self.extra
        if extra is None:
            extra = self.extra = Extra()
        return extra

    def call_on_settled(self) -> None:
        """Call `on_settled` once: the device has finished with the operation."""
        extra = self.extra
        if extra is not None and extra.on_settled is not None:
            on_settled, extra.on_settled = extra.on_settled, None
            on_settled()

    def forget_call(self) -> None:
        """Release the call and its arguments: the operation has left the host queue."""
        self.gate = self.call = None
        self.arguments = ()

    def fail_in_turn(self, failure: Failure, error: BaseException) -> None:
        """Set the failure that the operation takes when its turn comes."""
        self.failure = failure
        self.value = error

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Fail now, if unfinished, and wake the waiters. The device has faulted.

        A second call continues a call that Ctrl-C has interrupted.
        """
        if self.status == ABANDONED:
            self.detached = False
        elif self.status < DONE:
            self.fail_in_turn(failure, error)
            self.status = FAILED
            self.queue.reactor.failed += self.kind is not INTERNAL
        self.wake_waiters_paced()

    def drop_result(self) -> None:
        """Finish as abandoned and wake the waiters.

        The operation keeps its place in the queue, its event and its memory until its turn comes.
        """
        extra = self._extras()
        # These lines make no call: Ctrl-C leaves the operation abandoned or unchanged. If Ctrl-C prevents the wake-up,
        # the waiters are woken in the operation's turn.
        extra.detached = True
        self.status = ABANDONED
        self.value = None
        self.queue.reactor.abandoned += self.kind is not INTERNAL
        self.wake_waiters_paced()

    # -- waiters --------------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> bool:
        """Wake the waiter when the operation finishes. Return False if it is already registered: it is woken once."""
        waiters = self.waiters
        if waiters is None:
            self.waiters = waiter
        elif waiters is waiter:
            return False
        elif type(waiters) is not Waiters:
            self.waiters = Waiters(waiters, waiter)  # type: ignore[arg-type]  # mypy does not narrow by type()
        elif waiter in waiters:
            return False
        else:
            waiters.add(waiter)
        return True

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a waiter that no longer waits. Does nothing if it is not registered."""
        waiters = self.waiters
        if waiters is waiter:
            self.waiters = None
        elif type(waiters) is Waiters and waiters.discard(waiter) and not waiters:
            self.waiters = None

    def wake_waiters(self) -> None:
        """Wake the waiters of an operation that finishes in its turn: one at once, several through `Wakes`.

        One pass resolves at most 256 operations, so it wakes at most 256 waiters at once.
        """
        waiters = self.waiters
        if type(waiters) is Waiters:
            self.queue.reactor.wakes.wake(self._wake_next)
        elif waiters is not None:
            self.waiters = None
            self._wake(waiters)  # type: ignore[arg-type]  # mypy does not narrow by type()

    def wake_waiters_paced(self) -> None:
        """Wake the waiters through `Wakes`: any number of operations may finish at the same moment."""
        if self.waiters is not None:
            self.queue.reactor.wakes.wake(self._wake_next)

    def _wake_next(self) -> bool:
        """Wake one waiter. Return True if more are left."""
        waiters = self.waiters
        if type(waiters) is not Waiters:
            self.waiters = None
            if waiters is not None:
                self._wake(waiters)  # type: ignore[arg-type]
            return False
        if waiters:
            self._wake(waiters.pop())
        if waiters:
            return True
        self.waiters = None
        return False

    def _wake(self, waiter: Waiter) -> None:
        if type(waiter) is Callback:
            self.queue.loop.call_soon(waiter.function, self, context=waiter.context)
            return
        if type(waiter) is Countdown:
            waiter.left -= 1
            if waiter.left and (self.status == DONE or not waiter.fail_fast):
                return
            waiter = waiter.future
        if not waiter.done():  # type: ignore[union-attr]  # mypy does not narrow by type()
            waiter.set_result(None)  # type: ignore[union-attr]


def new_operation(
    queue: StreamQueue,
    kind: str,
    estimate: Estimate | None,
    keep: object,
    made: type[StreamOperation[Any]] = StreamOperation,
) -> Any:
    """Return a new operation that is about to be submitted.

    An ``__init__`` would take 60 ns longer; a launch takes 1.3 µs beside the driver call.
    """
    operation = made()
    operation.id = _next_id()
    operation.kind = kind
    operation.queue = queue
    operation.estimate = estimate
    operation.keep = keep
    operation.status = SUBMITTED
    operation.lease = operation.waiters = operation.value = operation.extra = None
    operation.submitted_at = 0.0
    operation.context = copy_context()
    return operation


class Submitted:
    """A gate that opens when an operation of another stream was submitted, so that it has an event to wait for."""

    __slots__ = ("_follower", "_known", "_operation")

    def __init__(self, operation: StreamOperation[Any], follower: StreamQueue) -> None:
        self._operation = operation
        self._follower = follower
        failure = operation.failure
        # A wait for an operation with a known failure is intended. A failure that is delivered later still
        # skips the operations that depend on it.
        self._known = failure is not None and failure.delivered

    def ready(self, operation: StreamOperation[Any]) -> bool:
        queue = self._operation.queue
        state = self._operation.status
        if state in (SUBMITTED, LANDING, DONE, FAILED):
            return True
        # A queued operation is in the host queue. An abandoned operation may be.
        if state in (QUEUED, STAGING) or any(entry is self._operation for entry in queue.host_queue.entries):
            queue.host_queue.followers[self._follower] = None
            return False
        return True

    def failure(self) -> Failure | None:
        return None if self._known else self._operation.failure


class Every:
    """A gate that opens when all of several gates are open."""

    __slots__ = ("_gates",)

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates

    def ready(self, operation: StreamOperation[Any]) -> bool:
        return all(gate.ready(operation) for gate in self._gates)

    def failure(self) -> Failure | None:
        return next(filter(None, (gate.failure() for gate in self._gates)), None)


class HostQueue:
    """The operations of one stream that are still on the host, first in, first out.

    It is usually empty, and then costs nothing. Operations wait in it for three reasons. The hardware queue of a stream
    holds a limited number of entries, and then blocks the caller. A pageable copy is many chunks that no operation may
    overtake. An operation may have to wait for something on the host, its `Gate`: an operation of another stream that
    is itself on the host, or a kernel that is being compiled.

    Attributes
    ----------
    entries : deque of Operation
        The operations, the oldest first.
    followers : dict of StreamQueue
        The queues whose oldest entry waits for the submission of an operation of this queue.
    """

    __slots__ = ("_pumping", "_queue", "_reported_at", "_scheduled", "entries", "followers")

    def __init__(self, queue: StreamQueue) -> None:
        self._queue = queue
        self._reported_at = -math.inf  # the time of the last event "queue_full"
        self._pumping = False
        self._scheduled = False
        self.entries: deque[StreamOperation[Any]] = deque()
        self.followers: dict[StreamQueue, None] = {}

    def put(
        self,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        gate: Gate | None = None,
    ) -> None:
        """Add an operation, and submit it if all earlier ones were submitted and the stream has room."""
        queue = self._queue
        poison = queue.poison
        if poison is not None:
            if not poison.delivered:
                queue.skip(operation, poison.failure())
                return
            queue.poison = None
        if queue.shared and (gate is not None or len(queue.pending) >= queue.device_state.limit):
            queue.poll()
            if queue.reactor.faulted:  # the poll has found a fault, and has failed everything but this operation
                queue.enqueued -= 1
                queue.check()
            if len(queue.pending) >= queue.device_state.limit or (gate is not None and not gate.ready(operation)):
                queue.enqueued -= 1
                raise BusyError(
                    f"others enqueue on {queue.name} too, so nothing of ours may wait in front of it; now it cannot "
                    f"take {operation.kind!r} at once: await what it depends on, then try again"
                )
        operation.call = call
        operation.arguments = arguments
        operation.gate = gate
        operation.status = QUEUED
        self.entries.append(operation)
        self.pump()
        if self.entries:
            if not queue.active:
                queue.reactor.activate(queue)
            if len(self.entries) == 1:
                self._report_full()
            if not queue.attended or len(self.entries) == 1:
                queue.attend()  # once: a new plan for each enqueue would cost more than the enqueue

    def _report_full(self) -> None:
        """Log that the stream takes no more operations for now; at most once in `REPORT_SECONDS`."""
        queue, limit = self._queue, self._queue.device_state.limit
        now = queue.driver.now()
        if len(queue.pending) >= limit and now - self._reported_at > REPORT_SECONDS:
            self._reported_at = now
            device = queue.device_state.properties.name
            log("info", "queue_full", queue="stream", device=device, stream=queue.name, limit=limit)

    def pump(self) -> None:
        """Submit the operations for which the stream has room."""
        if self._pumping:
            return  # `StreamQueue.poll`, called below, pumps too
        self._pumping = True
        queue = self._queue
        entries = self.entries
        moved = False
        try:
            asked = False
            least = len(entries) - MOST_PER_PUMP
            while entries:
                if len(queue.pending) >= queue.device_state.limit:
                    # Ask for room once at most: the rest belongs to a later turn of the loop.
                    early = asked or queue.driver.now() - queue.last_busy < ASK_AGAIN
                    if early or not queue.poll(MOST_PER_PUMP) or not entries:
                        break
                    asked = True
                if len(entries) <= least:
                    self._pump_soon()
                    break
                operation = entries[0]
                if operation.gate is not None:
                    is_open = self._is_open(operation, operation.gate)
                    if not is_open:
                        moved = moved or is_open is None
                        break
                if not entries or entries[0] is not operation:
                    continue  # a fault has emptied the host queue
                entries.popleft()
                moved = True
                if operation.status < DONE:
                    operation.status = SUBMITTED
                try:
                    queue.submit(operation, operation.call, operation.arguments, ahead=True)
                except BaseException:
                    self._put_back(operation)
                    raise
                operation.forget_call()
        finally:
            self._pumping = False
        if moved and self.followers:
            self._pump_followers()

    def _put_back(self, operation: StreamOperation[Any]) -> None:
        """Put the oldest entry back if Ctrl-C came before it was in its place in the stream."""
        if not operation.submitted_at and operation not in self._queue.pending:  # it may have finished in its own hook
            self.entries.appendleft(operation)

    def _pump_followers(self) -> None:
        followers, self.followers = self.followers, {}
        reactor = self._queue.reactor
        if reactor.pumps is None:
            reactor.pumps = Pumps(reactor.loop)
        reactor.pumps.pump(followers)

    def _is_open(self, operation: StreamOperation[Any], gate: Gate) -> bool | None:
        """Return whether the gate of the oldest entry is open; None if the operation has failed or was skipped."""
        queue, entries = self._queue, self.entries
        try:
            if not gate.ready(operation):
                return False
            failure = gate.failure()
            if failure is None:
                return True
            failure = failure.unseen()
            entries.popleft().forget_call()
            queue.skip(operation, failure)
            self.skip_all(failure)
        except Exception as error:  # noqa: BLE001 - the operation fails with the failure of its gate
            if entries and entries[0] is operation:
                if not isinstance(error, DeviceFault):
                    entries.popleft().forget_call()
                elif not queue.active:
                    queue.reactor.activate(queue)  # the fault fails all operations of active queues, this one too
                queue.fail(operation, error)
        return None

    def _pump_soon(self) -> None:
        """Submit more in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._queue.loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._scheduled = False
        self.pump()

    def skip_all(self, failure: Failure) -> None:
        """Skip all operations, because an earlier one has failed."""
        while self.entries:
            operation = self.entries.popleft()
            operation.forget_call()
            self._queue.skip(operation, failure)

    def fail_all(self, fault: DeviceFault, failure: Failure) -> Iterator[tuple[StreamOperation[Any], bool]]:
        """Fail all operations, because the device has faulted. Yield each one, and whether it was awaited."""
        while self.entries:
            operation = self.entries[0]  # removed last: see `StreamQueue.fail_all`
            awaited = operation.is_awaited
            operation.forget_call()
            operation.fail(failure, fault)
            yield operation, awaited
            if self.entries and self.entries[0] is operation:
                self.entries.popleft()

    def withdraw(self) -> list[StreamOperation[Any]]:
        """Remove and return all operations."""
        operations = list(self.entries)
        self.entries.clear()
        for operation in operations:
            operation.forget_call()
        return operations

    def __len__(self) -> int:
        return len(self.entries)


class _Obstacle:
    """An attribute of `StreamQueue` that is true or false, as one bit of `StreamQueue.obstacles`."""

    __slots__ = ("_bit",)

    def __init__(self, bit: int) -> None:
        self._bit = bit

    def __get__(self, queue: StreamQueue, owner: type[StreamQueue]) -> bool:
        return queue.obstacles & self._bit != 0

    def __set__(self, queue: StreamQueue, value: bool) -> None:
        queue.obstacles = queue.obstacles | self._bit if value else queue.obstacles & ~self._bit


#: Bits of `StreamQueue.obstacles`.
CLOSED, SHARED, RECORDED, POISONED, INACTIVE, FAULTED = (1 << number for number in range(6))

#: The bits with which a queue may refuse a new operation.
REFUSING = CLOSED | SHARED | RECORDED

#: The bits with which a device-side wait of the queue, or for it, is more than a wait for one event.
COMPLICATED = SHARED | RECORDED | POISONED


class StreamQueue:
    """The unfinished operations of one stream, in order.

    `pending` holds the operations that the stream has accepted, each with an event recorded after it. `host_queue`
    holds the operations that are still on the host. Operations are resolved strictly from the oldest to the newest, and
    only after a query of the driver: a notification, a poll or a timer only says when to query.

    The hot functions (`enqueue`, `submit`, `poll`, `linger`, `resolve_to`, and the functions that they call) read and
    write the attributes of operations directly. Everything else uses the methods of `Operation`.

    Attributes
    ----------
    reactor : Reactor
    device_state : DeviceState
    loop : asyncio.AbstractEventLoop
        The only loop that may use the stream.
    handle : int
        The stream, as the driver names it.
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
    enqueued : int
        The number of operations so far, without chunks and markers.
    after_wait : bool
        True if the next operation directly follows a wait for another stream.
    unmarked_wait_at : int
        The value of `enqueued` at the last device-side wait that no operation represents; else -1.
    submissions : SubmissionLimit
        Limits the submitted functions whose work is unfinished: see `Stream.submit`.
    foreign : dict
        Other libraries' objects for the stream, by the `ForeignStreams` that made them.
    latencies : deque of float
        Seconds from the submission to the end of recent operations.
    live_bytes, peak_bytes : int
        Of the memory that was allocated through the stream.
    lingers_for : StreamOperation or None
        While the caller of `linger` or `resolve_to` resolves operations: the one that it waits for, without a waiter.
    gathers : frozenset of StreamOperation
        While `gather` resolves operations for a listener: all that it waits for, without a waiter.
    last_busy, last_resolved : float
        The driver's time when the stream was last seen unfinished, and when a timed operation was last resolved.
    active, attended, polling, poll_from, poll_until, watched_since, armed
        The reactor's plan for this queue: see `Reactor.plan`.
    on_host : deque of StreamOperation
        The entries of the host queue: the operations that the stream has not accepted yet, the oldest first.
    obstacles : int
        0 if a new operation can take the short way of `prepare`. Its bits are the reasons for the long way of
        `submit`: the queue is closed, shared, recorded, poisoned or not active, or the device has faulted.
    """

    closed = _Obstacle(CLOSED)
    shared = _Obstacle(SHARED)
    recorded = _Obstacle(RECORDED)

    __slots__ = (
        "__weakref__",
        "_blind_awaits",
        "_idle_leases",
        "_most_blind_awaits",
        "_now",
        "_poison",
        "_record",
        "_reported",
        "_resolving",
        "_stream",
        "_target",
        "after_wait",
        "armed",
        "attended",
        "device_state",
        "draining",
        "driver",
        "ended",
        "enqueued",
        "foreign",
        "gathers",
        "handle",
        "host_queue",
        "imported",
        "last_busy",
        "last_resolved",
        "latencies",
        "lent",
        "lingers_for",
        "live_bytes",
        "loop",
        "name",
        "obstacles",
        "on_host",
        "opened_at",
        "peak_bytes",
        "pending",
        "poll_from",
        "poll_until",
        "polling",
        "reactor",
        "submissions",
        "unmarked_wait_at",
        "watched_since",
    )  # fmt: skip

    def __init__(self, reactor: Reactor, handle: int, name: str, imported: bool = False) -> None:
        self.reactor = reactor
        self.device_state = reactor.device_state
        self.obstacles = INACTIVE
        self.loop: asyncio.AbstractEventLoop = reactor.loop
        self.driver = reactor.device_state.driver
        # Each submission needs these, so they are looked up once.
        self._now = self.driver.now
        self._record = self.driver.recorder(handle)
        self._idle_leases = reactor.device_state.leases.plain
        self.handle = handle
        self.name = name
        self.opened_at: str | None = None
        self.enqueued = 0
        self.after_wait = False
        self.unmarked_wait_at = -1
        self.live_bytes = self.peak_bytes = 0
        self.imported = self.shared = imported
        self.lent = 0
        self.pending: deque[StreamOperation[Any]] = deque()
        self.host_queue = HostQueue(self)
        self.on_host = self.host_queue.entries
        self.submissions = SubmissionLimit(self, SUBMIT_AHEAD)
        self.foreign: dict[object, Any] = {}
        self._poison: Poison | None = None
        self.draining = self.ended = False
        self._stream: weakref.ref[Any] | None = None
        self.latencies: deque[float] = deque(maxlen=512)
        self._resolving = False
        self._blind_awaits = self._most_blind_awaits = 0  # calls of `look_ahead` that make no query: left, and of all
        self._reported = 0  # the id of the last operation whose end the listeners have been notified of
        self._target: StreamOperation[Any] | None = None  # that `awaited` has returned; None if that may have changed
        self.attended = self.polling = False
        self.poll_from = self.poll_until = self.watched_since = 0.0
        self.armed: ArmedNotifier | None = None
        self.last_busy = self.last_resolved = 0.0
        self.lingers_for: StreamOperation[Any] | None = None
        self.gathers: frozenset[StreamOperation[Any]] = frozenset()
        reactor.opened[self] = None

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Any:
        """The public `aiocuda.Stream`, or None if the program holds it no longer."""
        return None if self._stream is None else self._stream()

    @property
    def active(self) -> bool:
        """True while the reactor watches the queue: it has unfinished operations."""
        return not self.obstacles & INACTIVE

    @active.setter
    def active(self, active: bool) -> None:
        self.obstacles = self.obstacles & ~INACTIVE if active else self.obstacles | INACTIVE

    @property
    def poison(self) -> Poison | None:
        """The reason why the stream is unusable, or None."""
        return self._poison

    @poison.setter
    def poison(self, poison: Poison | None) -> None:
        self._poison = poison
        self.obstacles = self.obstacles & ~POISONED if poison is None else self.obstacles | POISONED

    def set_stream(self, stream: object) -> None:
        """Set the public stream, which is made after its queue."""
        self._stream = weakref.ref(stream)

    def check_loop(self) -> None:
        """Raise unless the stream's own loop is running."""
        if _get_running_loop() is not self.loop:
            raise self.device_state.wrong_loop(self.loop, self.name, "make a stream in each loop, share the device")

    def check(self) -> None:
        """Raise if the stream accepts no operation now."""
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

    # -- streams that others use, too ----------------------------------------------------------------------------

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

    # -- enqueue -------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        kind: str,
        estimate: Estimate | None,
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        keep: object = None,
    ) -> StreamOperation[Any]:
        """Enqueue ``call(*arguments)`` after all earlier operations of the stream.

        ``keep`` is held until the operation has finished.
        """
        operation: StreamOperation[Any] = new_operation(self, kind, estimate, keep)
        self.submit(operation, call, arguments)
        return operation

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
        self._check_new("submit")
        operation: StreamOperation[Any] = new_operation(self, "submit", estimate, keep)
        if (
            gate is self.submissions  # as the only gate
            and not (self.obstacles & COMPLICATED or self.host_queue.entries)
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
        self.check()
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
        if self.host_queue.entries:
            operation.context = self.host_queue.entries[0].context.copy()  # any task may submit the chunk
        self.submit(operation, call, arguments, ahead=True)
        return operation

    def submit(
        self,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        ahead: bool = False,
    ) -> None:
        """Make the driver call of an operation, and record an event after it (0.24 µs, free on the GPU).

        A new operation goes to the host queue if earlier operations are there, or if the stream is full. ``ahead`` is
        for operations that go directly to the stream: the head of the host queue, its chunks, and markers.
        """
        if not ahead:
            if self.obstacles & REFUSING or _get_running_loop() is not self.loop or self.reactor.faulted:
                self._check_new(operation.kind)
            if self.after_wait and operation.estimate is not INSTANT:
                self.after_wait = False
                operation.estimate = None if operation.estimate is None else operation.estimate.after_wait
            if self.host_queue.entries or self._poison is not None or len(self.pending) >= self.device_state.limit:
                self.enqueued += 1
                self.host_queue.put(operation, call, arguments)
                return
        elif self.obstacles & SHARED and self._skips_captured(operation, call):
            return
        if self.obstacles & INACTIVE:
            self.reactor.activate(self)
        try:
            # The operation is in its place before the first driver call: an interrupt between them loses nothing.
            self.enqueued += not ahead
            self.pending.append(operation)
            listeners = self.device_state.listeners  # read once: another thread may remove the last one
            if listeners is not None:
                self._submit_observed(listeners, operation, call, arguments)
                return
            now = self._now()
            if call is not None:
                call(*arguments)
            operation.submitted_at = now  # not earlier: 0.0 means that the driver refused the call (`_record_late`)
            lease = operation.lease or (
                self._idle_leases.pop() if self._idle_leases else self.device_state.leases.take()
            )
            try:
                self._record(lease.handle)
            except BaseException:
                self._return_lease(operation, lease)
                raise
            operation.lease = lease
        except Exception as error:  # noqa: BLE001 - the operation fails with any error
            self.fail(operation, error)
        except BaseException:
            self._interrupted_submit(operation)
            raise

    def prepare(
        self, kind: str, estimate: Estimate, call: RecordedCall, unrecorded: Callable[[Sequence[Any]], object]
    ) -> Enqueue:
        """Return a function that enqueues ``call(values, event)``, which also records the operation's event.

        It is `submit` for the usual case, with everything bound that does not change: 0.4 µs instead of 0.7. Everything
        unusual goes to `submit`, with ``unrecorded(values)`` as the driver call. The second argument is held until the
        operation has finished. The third one is its label.
        """
        entries, loop, after_wait = self.host_queue.entries, self.loop, estimate.after_wait
        device_state, idle_leases, now = self.device_state, self._idle_leases, self._now

        def enqueue(values: Sequence[Any], keep: object, label: str | None = None) -> StreamOperation[Any]:
            listeners = device_state.listeners
            if (
                self.obstacles
                or entries
                or _get_running_loop() is not loop
                or len(self.pending) >= device_state.limit
                or (listeners is not None and listeners.timing)
            ):
                return self._enqueue_unusual(kind, estimate, keep, unrecorded, values, label)
            operation: StreamOperation[Any] = StreamOperation()  # the same as `new_operation`, without its call
            operation.id = _next_id()
            operation.kind = kind
            operation.queue = self
            operation.estimate = estimate
            if self.after_wait:
                self.after_wait = False
                operation.estimate = after_wait
            operation.keep = keep
            operation.status = SUBMITTED
            operation.lease = operation.waiters = operation.value = operation.extra = lease = None
            operation.submitted_at = 0.0
            operation.context = copy_context()
            if label is not None:
                operation.own_label = label
            try:
                # The operation is in its place before the driver call: an interrupt loses nothing.
                self.enqueued += 1
                self.pending.append(operation)
                lease = idle_leases.pop() if idle_leases else device_state.leases.take()
                at = now()
                call(values, lease.handle)
                operation.submitted_at = at
                operation.lease = lease  # not earlier: a stream of another thread may wait for the event
                if listeners is not None and listeners.submit:
                    self._report_submitted(listeners.submit, operation)
            except BaseException as error:  # noqa: BLE001 - the operation fails with it, or it is raised
                self._recorded_call_failed(operation, error, lease)
            return operation

        return enqueue

    def _enqueue_unusual(
        self, kind: str, estimate: Estimate, keep: object, call: Callable[..., object], values: Sequence[Any],
        label: str | None,
    ) -> StreamOperation[Any]:  # fmt: skip
        """Enqueue an operation of `prepare` by `submit`, which records its event."""
        operation: StreamOperation[Any] = new_operation(self, kind, estimate, keep)
        if label is not None:
            operation.own_label = label
        self.submit(operation, call, (values,))
        return operation

    def _recorded_call_failed(self, operation: StreamOperation[Any], error: BaseException, lease: Lease | None) -> None:
        """Handle an error of `prepare` as `submit` does: a refused call, a refused record, or Ctrl-C."""
        if isinstance(error, RecordRefused):
            operation.submitted_at = self._now()
            error = error.error
        if lease is not None and operation.lease is None:
            self._return_lease(operation, lease)
        if isinstance(error, Exception):
            self.fail(operation, error)
            return
        self._interrupted_submit(operation)
        raise error

    def _skips_captured(self, operation: StreamOperation[Any], call: Callable[..., object] | None) -> bool:
        """Append a marker without an event if the stream is captured; raise `BusyError` for a driver call."""
        if self.recorded or not self.is_captured():
            return False
        if call is not None:
            self.refuse_captured()
        if not self.active:
            self.reactor.activate(self)
        self.pending.append(operation)
        return True

    def _submit_observed(
        self,
        listeners: Listeners,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
    ) -> None:
        """Do the driver calls of `submit`, with a timing event before and after the call if a listener wants it."""
        leases = self.device_state.leases
        now = self._now()
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
            self._idle_leases.pop() if self._idle_leases and not timing else leases.take(timing=timing)
        )
        try:
            self._record(lease.handle)
        except BaseException:
            self._return_lease(operation, lease)
            raise
        operation.lease = lease
        if listeners.submit:
            self._report_submitted(listeners.submit, operation)

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

    def mark(self) -> StreamOperation[Any] | None:
        """Submit a marker; return None if the queue has ended and holds no work of the device."""
        return None if self.ended and not self.pending else self.submit_marker()

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

    # -- waits for other streams ---------------------------------------------------------------------------------

    def wait(self, operation: StreamOperation[Any]) -> StreamOperation[Any]:
        """Enqueue a device-side wait for an operation of another stream of this loop."""
        waiting = self.enqueue_gated("wait", Submitted(operation, self), self._issue_wait, (operation,), operation)
        self.after_wait = True
        return waiting

    def follow(self, operation: StreamOperation[Any]) -> None:
        """Make later operations wait for one of another stream, without a "wait" operation where that is possible."""
        if self.obstacles & (SHARED | RECORDED) == SHARED:
            self.refuse_captured()
        if operation.queue is self:
            return
        lease = operation.lease  # read once: if the operation is of another loop, its loop may reset it
        if lease is not None and not self.host_queue.entries and self._poison is None:
            self.after_wait = True  # the same as `note_wait`, without its call
            self.unmarked_wait_at = self.enqueued
            self.driver.stream_wait(self.handle, lease.handle)
            if self.device_state.listeners is not None:
                self.report_follow(operation)
        elif not operation.is_settled:
            self.wait(operation)

    def note_wait(self) -> None:
        """Note a device-side wait for another stream that no operation represents. Call it before the driver call."""
        self.after_wait = True
        self.unmarked_wait_at = self.enqueued

    def _issue_wait(self, operation: StreamOperation[Any]) -> None:
        lease = operation.lease
        if lease is None and not operation.is_settled and operation.queue is not self:
            # It was skipped or withdrawn, so it has no event. Earlier operations of its stream may still run.
            lease = operation.queue.submit_marker().lease
        if lease is not None:
            self.driver.stream_wait(self.handle, lease.handle)

    # -- the reactor's view --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if the queue has no unfinished operation."""
        return not self.pending and not self.host_queue.entries

    def pump(self) -> None:
        """Submit operations of the host queue for which the stream has room."""
        if self.host_queue.entries:
            self.host_queue.pump()

    def attend(self) -> None:
        """Have the reactor watch the queue: an operation of it has a waiter."""
        if self.polling:
            self._target = None  # this operation may be older
        elif self.pending or self.attended:  # otherwise it is on the host, and no query can find its end
            self.reactor.plan(self)

    def ends_with(self, operation: object) -> bool:
        """Return whether an operation represents all work so far, as that of `end` does. No call of the driver."""
        pending = self.pending
        return (
            bool(pending)
            and pending[-1] is operation
            and not self.obstacles
            and self.unmarked_wait_at != self.enqueued
            and not self.on_host
        )

    def is_stuck(self) -> bool:
        """Return whether its oldest operation is known to be unfinished, by one query.

        `poll` makes two queries or more, because it begins with the newest operation. False if the answer is unknown.
        """
        lease = self.pending[0].lease if self.pending else None
        if lease is None or self._resolving or (self.device_state.guarded and not self.reactor.query_guard.open):
            return False
        try:
            done = self.driver.event_query(lease.handle)
        except AiocudaError:
            return False  # `poll` gets the same error, and handles it
        if done:
            return False  # `poll` counts it
        self.reactor.polls += 1
        self.last_busy = self._now()
        return True

    def awaited(self) -> tuple[StreamOperation[Any] | None, float | None, float]:
        """Return the oldest operation with a waiter, its predicted end, and how far off the prediction may be.

        If the waiter is that of `gather`, return the last of its operations before another waiter: until then nothing
        would wake. While the host queue is not empty, the middle of `pending` counts as awaited: the stream is refilled
        when it is half empty.
        """
        pending = self.pending
        refill = len(pending) // 2 if self.host_queue.entries else -1
        expected: float | None = None
        spread = 0.0
        countdown: Waiter | Waiters[Waiter] | None = None
        found: tuple[StreamOperation[Any] | None, float | None, float] = None, None, 0.0
        for index, operation in enumerate(pending):
            if index == 0:
                expected = max(operation.submitted_at, self.last_resolved)
            estimate = operation.estimate
            seconds = None if estimate is None else estimate.seconds
            if expected is not None:
                expected = None if seconds is None else expected + seconds
                if estimate is not None and estimate.spread > spread:
                    spread = estimate.spread
            waiter = operation.waiters
            copies_out = operation.extra is not None and operation.extra.copy_out is not None
            if waiter is None and not copies_out and index != refill:
                continue
            if countdown is None:
                found = operation, expected, spread
                if type(waiter) is not Countdown or copies_out or index == refill:
                    break
                countdown = waiter
            elif waiter is countdown and not copies_out:
                found = operation, expected, spread
            else:
                break
        self._target = found[0]
        return found

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far, device-side waits too; None if that has finished.

        If the stream has a failure that no caller has received, the operation is skipped: so everything that waits for
        the stream's end is skipped, too.
        """
        unmarked = (
            self.unmarked_wait_at == self.enqueued or self.obstacles & SHARED
        )  # work that no operation represents
        poison = self._poison
        if (unmarked or poison is not None) and not (self.obstacles & CLOSED or self.host_queue.entries):
            if poison is not None and not poison.delivered:
                return self.enqueue("wait", INSTANT, nothing, ())  # its tail may be a marker without a failure
            if unmarked:
                mark = self.submit_marker()
                self.unmarked_wait_at = -1  # after the mark: Ctrl-C between the two loses no wait
                return mark
        return self.tail()

    def tail(self) -> StreamOperation[Any] | None:
        """Return the newest unfinished operation."""
        if self.host_queue.entries:
            return self.host_queue.entries[-1]
        return self.pending[-1] if self.pending else None

    # -- query and resolve (the hot half) ------------------------------------------------------------------------

    def poll(self, budget: int = MOST_PER_TURN, *, awaited: bool = False, newest_only: bool = False) -> int:
        """Query the driver and resolve the finished operations, in order. Return how many were resolved.

        With ``awaited`` the first query is for the operation that `awaited` returns. While that is unfinished, there is
        no other query, and the operations before it stay unresolved: no task waits for them. With ``newest_only`` there
        is one query, and no operation is resolved unless all are done.
        """
        if not self.pending or self._resolving:
            return 0
        try:
            if not self.device_state.guarded or self.reactor.query_guard.open:
                return self._poll(budget, awaited, newest_only)
            with self.reactor.query_guard as query_guard:
                if query_guard.open or self.driver.fault is not None:
                    return self._poll(budget, awaited, newest_only)
                return 0
        except AiocudaError as error:
            self.reactor.report_refusal(error)  # a refused query proves nothing: the reactor queries again
            return 0

    def _poll(self, budget: int, awaited: bool, newest_only: bool) -> int:
        pending, query = self.pending, self.driver.event_query
        self.reactor.polls += 1
        known = 0  # of the oldest operations are known to be done
        operation = newest = pending[-1]
        try:
            if awaited:
                target = self._target
                if target is None or target.status >= DONE:
                    target = self.awaited()[0]
                if target is not None and target.lease is not None:
                    operation = target
                    if not query(target.lease.handle):
                        self.last_busy = self._now()
                        return 0
                    known = self._count_to(target)
            if known < len(pending):
                # The newest first: if it has finished, so have all before it, and one query serves the whole batch.
                operation = newest if newest.lease is not None else self._newest_recorded()
                lease = operation.lease
                if lease is None or query(lease.handle):
                    known = len(pending)
                elif newest_only or operation is pending[0]:
                    self.last_busy = self._now()
                    return 0
        except DeviceFault as fault:
            return self._fault(operation, fault)
        resolved = self._resolve(known, budget)
        if not resolved and not known:
            self.last_busy = self._now()
        return resolved

    def look_ahead(self, operation: StreamOperation[Any]) -> None:
        """Resolve all operations of the stream by one query, if the newest one is done. Called before `linger`.

        Other awaits of this turn have found their operations done, so the next awaits probably will, too:
        `asyncio.gather` awaits each operation by a task of its own, and all of them begin in one turn. After a query
        that was in vain, the next 1, 3, 7 … calls make none.
        """
        pending = self.pending
        if len(pending) < 2 or pending[-1] is operation:
            return
        if self._blind_awaits:
            self._blind_awaits -= 1
            return
        turn = self.reactor.turn
        resolved = self.poll(MOST_PER_TURN - turn.inlined, newest_only=True) if turn.inlined < MOST_PER_TURN else 0
        if resolved:
            turn.has_inlined(resolved)
            self._most_blind_awaits = 0
        else:
            self._most_blind_awaits = min(2 * self._most_blind_awaits + 1, MOST_BLIND_AWAITS)
            self._blind_awaits = self._most_blind_awaits

    def resolve_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation and all before it without a query: later work on the device is known to be done."""
        if self.pending and self.pending[0] is operation and not self._resolving:
            self._resolve_oldest(operation)  # as for an await that does not suspend, the caller limits their number
            return
        turn = self.reactor.turn
        left = MOST_PER_TURN - turn.inlined
        known = self._count_to(operation)
        if known and left > 0 and not self._resolving:
            self.lingers_for = operation
            try:
                turn.has_inlined(self._resolve(known, min(known, left)))
            finally:
                self.lingers_for = None

    def _count_to(self, operation: StreamOperation[Any]) -> int:
        """Return the number of unfinished operations up to this one; 0 if the stream has not accepted it."""
        pending = self.pending
        if pending and pending[-1] is operation:
            return len(pending)
        for count, other in enumerate(pending, 1):  # `index` compares by `==`, which takes twice as long
            if other is operation:
                return count
        return 0

    def linger(self, operation: StreamOperation[Any], gathered: Sequence[StreamOperation[Any]] = ()) -> None:
        """Query the event of an operation; if its end is predicted within microseconds, repeat the query until then.

        The other operations need no query: those before it are done when it is, and later ones are not awaited here.
        ``gathered``: all operations that `gather` awaits; the last one of this stream is ``operation``.
        """
        if gathered and self.device_state.listeners is not None:
            self._linger_for_listeners(operation, gathered)
            return
        lease = operation.lease
        if lease is None or self._resolving:
            self.lingers_for = operation
            try:
                self.reactor.inline(self)
            finally:
                self.lingers_for = None
            return
        device_state = self.device_state
        driver = self.driver
        query = driver.event_query
        handle = lease.handle
        self.reactor.polls += 1
        guarded = device_state.guarded and not self.reactor.query_guard.open
        try:
            if guarded:
                guarded = False
                driver.begin_queries()
                guarded = True  # `end_queries` follows only a successful `begin_queries`
            if not query(handle):
                now = self.last_busy = driver.now()
                longest = device_state.policy.linger
                estimate = operation.estimate
                seconds = None if estimate is None else estimate.seconds
                if seconds is None or seconds > 2 * longest:  # a duration measured through the loop is that much longer
                    return
                until = now + longest
                while not query(handle):
                    now = self.last_busy = driver.now()
                    if now > until:
                        return
        except DeviceFault as fault:
            self._fault(operation, fault)
            return
        except AiocudaError as error:
            self.reactor.report_refusal(error)
            return
        finally:
            if guarded:
                driver.end_queries()
        if self.pending[0] is operation:
            self._resolve_oldest(operation)
        else:
            self.resolve_to(operation)

    def _linger_for_listeners(self, last: StreamOperation[Any], gathered: Sequence[StreamOperation[Any]]) -> None:
        """Do the same as `linger`. The hooks see that all gathered operations are awaited."""
        self.gathers = frozenset(gathered)
        try:
            self.linger(last)
        finally:
            self.gathers = frozenset()

    def _resolve_oldest(self, operation: StreamOperation[Any]) -> None:
        """Resolve the oldest operation of the stream, which is done.

        It is `_resolve` for an operation that needs no special handling: the waiter resumes 0.3 µs sooner.
        """
        device_state = self.device_state
        if (
            operation.status != SUBMITTED
            or operation.extra is not None
            or device_state.listeners is not None
            or device_state.starts
        ):
            self.lingers_for = operation
            try:
                self._resolve(1, 1)
            finally:
                self.lingers_for = None
            return
        now = self._now()
        lease = operation.lease
        try:
            self.pending.popleft()
            operation.lease = None
            if lease is not None and not lease.lent:  # as `EventLeases.give`, without its call
                lease.generation += 1
                lease.home.append(lease)
            operation.keep = None
            self.latencies.append(now - operation.submitted_at)
            operation.status = DONE
            self.reactor.resolved += 1
            if operation.waiters is not None:
                operation.wake_waiters()
        except BaseException:
            self.reactor.resolved += self._finish_interrupted(operation)
            raise
        estimate = operation.estimate
        if estimate is INSTANT:
            self._after_resolving(None, 0.0, 0, now)
        else:
            self._after_resolving(estimate, operation.submitted_at, 1, now)

    def _resolve(self, known: int, most: int) -> int:
        """Resolve at most ``most`` operations, from the oldest on. The first ``known`` need no query: they are done."""
        pending = self.pending
        listened = self.device_state.listeners is not None or bool(self.device_state.starts)
        keep_latency = self.latencies.append
        first = head = pending[0]
        sampled: Estimate | None = None  # of the timed operations, if all of them share it
        resolved = done = timed = 0
        most = min(most, len(pending))  # not the operations that `on_settled` enqueues, such as chunks
        now = 0.0
        # `on_settled` of a chunk refills the stream, which asks for room. A pass inside this one would resolve
        # operations that this one has counted, and this one would resolve operations that it has not queried.
        self._resolving = True
        try:
            while resolved < most and pending:  # a hook or `on_settled` may find a fault, which fails all of them
                head = pending[0]
                extra, estimate = head.extra, head.estimate
                if (resolved >= known and not self._has_passed(head)) or (
                    extra is not None and extra.copy_out is not None and not self._copy_out(head)
                ):
                    break
                now = now or self._now()
                # The head's turn: return its event, release its memory, wake its waiters.
                pending.popleft()
                resolved += 1
                if estimate is not INSTANT:
                    sampled = estimate if timed == 0 or estimate is sampled else None
                    timed += 1
                if self._report_resolved(head) if listened else extra is not None:
                    if not self._finish_special(head):
                        continue
                else:
                    lease, head.lease = head.lease, None
                    if lease is not None and not lease.lent:  # as `EventLeases.give`, without 60 ns for the call
                        lease.generation += 1
                        lease.home.append(lease)
                    head.keep = None  # after the event: the finaliser of a user's `Event` may return it
                head.status = DONE
                if head.kind is not INTERNAL:
                    done += 1
                    keep_latency(now - head.submitted_at)
                waiter = head.waiters
                if type(waiter) is Countdown and waiter.left > 1:
                    waiter.left -= 1
                    head.waiters = None
                elif waiter is not None:
                    head.wake_waiters()
        except BaseException as error:  # noqa: BLE001 - raised there, unless it is a fault of the device
            return self._interrupt_resolve(head, error)
        finally:
            self._resolving = False
            self.reactor.resolved += done
        if resolved:
            self._after_resolving(sampled, first.submitted_at, timed, now)
        return resolved

    def _has_passed(self, operation: StreamOperation[Any]) -> bool:
        """Query the driver for one operation. True also if the stream has not accepted it."""
        lease = operation.lease or self._record_late(operation)
        return lease is None or self.driver.event_query(lease.handle)

    def _finish_special(self, operation: StreamOperation[Any]) -> bool:
        """Give back what an operation with an `Extra` holds; call its `on_settled`.

        Finish an operation that was abandoned or has failed, and return False; leave a successful one to `_resolve`.
        """
        lease, extra = operation.lease, operation.extra
        if lease is not None:
            operation.lease = None
            if not lease.lent:
                lease.generation += 1
                lease.home.append(lease)
        operation.keep = None
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
            operation.status = FAILED
            self.reactor.failed += operation.kind is not INTERNAL
            operation.wake_waiters()
            return False
        return True

    def _after_resolving(self, sampled: Estimate | None, start: float, timed: int, now: float) -> None:
        """Learn from the resolved operations, and fill the room that they have left.

        Parameters
        ----------
        sampled
            The estimate of the operations that take time; None if they have different ones.
        start
            The submission of the first one.
        timed
            The number of operations that take time.
        """
        if sampled is not None:
            if self.last_resolved > start:  # `max` takes 60 ns
                start = self.last_resolved
            busy = self.last_busy
            blind = now - (busy if busy > start else start)  # the operations ended at some time in this interval
            if blind <= 100e-6 or blind <= 0.1 * (now - start):
                sampled.caught((now - start) / timed)
            elif sampled.seconds is None or now - start < sampled.seconds * timed:
                sampled.overslept((now - start) / timed)
            elif busy - start > sampled.seconds * timed:
                sampled.overdue((now - start) / timed)
        if timed:  # zero-duration operations carry no timing information
            self.last_resolved = now
        self._target = None
        if self.host_queue.entries:
            self.host_queue.pump()
        reactor = self.reactor
        if self.attended and not self.pending and not self.host_queue.entries:
            reactor.stop_attending(self)
        if reactor.on_progress is not None:
            reactor.on_progress()

    # -- query and resolve: rare cases ---------------------------------------------------------------------------

    def _interrupt_resolve(self, operation: StreamOperation[Any], error: BaseException) -> int:
        """End a pass of `_resolve` that was interrupted in the turn of an operation: by a fault, or by Ctrl-C."""
        if isinstance(error, DeviceFault):
            return self._fault(operation, error)
        self.reactor.resolved += self._finish_interrupted(operation)
        raise error

    def _finish_interrupted(self, operation: StreamOperation[Any]) -> bool:
        """Finish an operation after Ctrl-C in its turn. Return whether it counts as resolved.

        If the operation has left the queue, no later pass would finish it.
        """
        if self.pending and self.pending[0] is operation:
            return False
        try:
            self._report_resolved(operation)
        finally:  # also after a second Ctrl-C
            counts = self._finish_reported(operation)
        return counts

    def _finish_reported(self, operation: StreamOperation[Any]) -> bool:
        """Do the rest of `_finish_interrupted`."""
        counts = False
        extra = operation.extra
        if operation.lease is not None:
            self._return_lease(operation, operation.lease)
        operation.keep = None
        operation.call_on_settled()
        if extra is not None and operation.status == ABANDONED:
            extra.detached = False
        elif operation.status < DONE:
            if extra is not None and extra.failure is not None:
                self.reactor.failed += operation.kind is not INTERNAL
                operation.status = FAILED
            else:
                operation.status = DONE
                counts = operation.kind is not INTERNAL
        operation.wake_waiters()
        return counts

    def _fault(self, operation: StreamOperation[Any], fault: DeviceFault) -> int:
        self.driver.blame(self.name_of(operation))
        self.reactor.fault(fault, self.pending[0] if self.pending else operation)
        return 1  # any number above 0: everything has failed

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
        if not operation.submitted_at:
            return None  # the stream has not accepted it
        lease = self.device_state.leases.take()
        try:
            self._record(lease.handle)
        except BaseException:
            self._return_lease(operation, lease)
            raise
        operation.lease = lease
        return lease

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
            operation.fail_in_turn(Poison(error, self.loop, str(operation)).failure(), error)
        operation.copy_out = None
        return True

    def copied_out(self, operation: StreamOperation[Any], error: BaseException | None = None) -> None:
        """Continue with an operation: the host's work that its ``copy_out`` has started is done, or has failed."""
        operation.copy_out = None
        if self.reactor.closed:
            return  # the waiters have been woken
        if error is not None and not operation.is_unwanted:
            operation.fail_in_turn(Poison(error, self.loop, str(operation)).failure(), error)
        self.poll()
        self.reactor.plan(self)

    # -- listeners -----------------------------------------------------------------------------------------------

    def report_follow(self, operation: StreamOperation[Any]) -> None:
        """Notify the listeners that the next operation waits for one of another stream, and no "wait" shows it."""
        listeners = self.device_state.listeners
        if listeners is not None and listeners.follow:
            self._remove_failed(call_hooks(listeners.follow, self, operation))

    def _report_submitted(self, hooks: Hooks, operation: StreamOperation[Any]) -> None:
        """Notify the listeners that the stream has accepted the operation."""
        try:
            failed = operation.context.run(call_hooks, hooks, operation)
        except RuntimeError:  # a hook of this operation, which runs in this context, has led here
            failed = operation.context.copy().run(call_hooks, hooks, operation)
        if failed:
            self._remove_failed(failed)

    def _report_resolved(self, operation: StreamOperation[Any]) -> bool:
        """Notify the listeners, once, that the operation is about to finish. Its events are still valid.

        Return whether the operation now has an `Extra`: a hook may abandon it.
        """
        device_state = self.device_state
        listeners = device_state.listeners if operation.id != self._reported else None
        if device_state.starts:
            start, end = device_state.starts.pop(operation.id, None), operation.lease
            if start is not None:
                try:
                    if listeners is not None and end is not None and end.timing:
                        self._call_resolve(listeners.resolve, operation, start.handle, end.handle)
                        listeners = None
                finally:
                    device_state.leases.give(start)
        if listeners is not None and listeners.resolve:
            self._call_resolve(listeners.resolve, operation, 0, 0)
        return operation.extra is not None

    def _report_faulted(self, operation: StreamOperation[Any], awaited: bool) -> None:
        """Notify the listeners of an operation that a fault has ended. Its events stay in use.

        ``awaited``: it had waiters, which have been woken.
        """
        self.device_state.starts.pop(operation.id, None)
        self._report_gone(operation, awaited)

    def _report_gone(self, operation: StreamOperation[Any], awaited: bool) -> None:
        """Notify the listeners of an operation that nothing watches any more."""
        listeners = self.device_state.listeners
        if listeners is not None and listeners.resolve:
            lingers_for, self.lingers_for = self.lingers_for, operation if awaited else None
            try:
                self._call_resolve(listeners.resolve, operation, 0, 0)
            finally:
                self.lingers_for = lingers_for

    def _call_resolve(self, hooks: Hooks, operation: StreamOperation[Any], start: int, end: int) -> None:
        left = iter(hooks)
        self._reported = operation.id
        # Nothing between these lines makes a call: Ctrl-C comes before the operation counts as reported, or below.
        try:
            failed = operation.context.run(call_resolve_hooks, left, operation, start, end)
        except RuntimeError:  # as in `_report_submitted`
            failed = operation.context.copy().run(call_resolve_hooks, left, operation, start, end)
        except BaseException:  # Ctrl-C between two hooks
            operation.context.copy().run(call_resolve_hooks, left, operation, start, end)
            raise
        if failed:
            self._remove_failed(failed)

    def _remove_failed(self, failed: Sequence[tuple[object, BaseException]]) -> None:
        """Remove listeners with a hook that has raised, and report their errors. No operation fails."""
        interrupt: BaseException | None = None
        for listener, error in failed:
            self.device_state.remove_listener(listener)
            try:
                self.reactor.report(
                    f"a hook of the listener {type(listener).__qualname__} failed, and the listener was removed", error
                )
            except BaseException as left:  # noqa: BLE001 - Ctrl-C: all listeners are reported first
                interrupt = left
        if interrupt is not None:
            raise interrupt

    # -- failures ------------------------------------------------------------------------------------------------

    def fail(self, operation: StreamOperation[Any], error: BaseException) -> None:
        """Fail an operation that the driver or a function of the program refused, and skip all later operations."""
        if isinstance(error, DeviceFault):
            self._fault(operation, error)
            return
        if isinstance(error, AiocudaError):
            error.__traceback__ = None  # its frames hold the operation and the memory of its arguments
        entries = self.host_queue.entries
        chunk = operation.kind is INTERNAL and operation.copy_out is not None
        copy = entries.popleft() if entries and chunk else None
        failure = Poison(error, self.loop, repr(copy) if copy is not None else self.name_of(operation)).failure()
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
        if not pending or pending[-1] is not operation:
            pending.append(operation)
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
            if listened and operation.id != self._reported:
                self._report_faulted(operation, awaited)
        while self.pending:
            operation = self.pending[0]  # removed last: the watchdog continues after Ctrl-C
            # Its event and its memory stay in use: what the device still does is unknown.
            operation.lease = None
            awaited = operation.is_awaited
            operation.fail(failure, fault)
            if listened and operation.id != self._reported:
                self._report_faulted(operation, awaited)
            if self.pending and self.pending[0] is operation:  # a hook may have led here, too
                self.pending.popleft()
        poison.delivered = self.reactor.failed == before  # no operation has failed, so there is nothing to deliver

    def name_awaited(self) -> str:
        """Return the name of the oldest operation with a waiter, for errors."""
        operation = self.awaited()[0]
        return f"the work of {self.name}" if operation is None else self.name_of(operation)

    def name_of(self, operation: StreamOperation[Any]) -> str:
        """Return the name of an operation for errors: of its copy for a chunk, of an earlier operation for a marker."""
        if operation.kind is not INTERNAL:
            return str(operation)
        pending = list(self.pending)
        at = pending.index(operation) if operation in pending else len(pending)
        if operation.copy_out is None:
            others = reversed(pending[:at])
        else:
            others = iter([*pending[at:], *self.host_queue.entries])
        found = next((other for other in others if other.kind is not INTERNAL), None)
        return f"the work of {self.name}" if found is None else str(found)

    def _return_lease(self, operation: StreamOperation[Any], lease: Lease) -> None:
        """Take an event from an operation. An event that could not be recorded, too: `_record_late` uses another."""
        operation.lease = None
        if not lease.lent:
            self.device_state.leases.give(lease)

    def _interrupted_submit(self, operation: StreamOperation[Any]) -> None:
        """Handle Ctrl-C during `submit`.

        If the driver call has returned, the stream has accepted the operation, which only lacks its event. If not, the
        result of the call is unknown: the operation fails, and its memory is held until an event recorded from now on.
        """
        if not operation.submitted_at and self.pending and self.pending[-1] is operation:
            operation.submitted_at = self._now()
            error = DriverError(
                f"{operation} was interrupted on its way to the device, which may do it or not", code=0, call="Ctrl-C"
            )
            self.fail(operation, error)

    # -- the end -------------------------------------------------------------------------------------------------

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

    async def flush(self) -> None:
        """Wait until no operation is on the host."""
        if self.host_queue.entries:
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
            self.pending.append(operation)
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
            self._report_gone(operation, awaited=False)

    def has_device_finished(self) -> bool:
        """Return whether the device has finished all accepted operations. Queries the driver, wakes no waiter."""
        if self.driver.fault is not None:
            return True
        return all(
            operation.lease is None or self.driver.event_query(operation.lease.handle)
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
            self.driver.stream_destroy(self.handle)  # an imported stream is only forgotten
            if not self.imported:
                self.device_state.stream_opened(-1)


class _HasQueue(Protocol):
    @property
    def _queue(self) -> StreamQueue: ...


def stream_queue(stream: _HasQueue) -> StreamQueue:
    """Return the queue of a public stream. Measured hot functions read ``stream._queue`` directly."""
    return stream._queue


def stream_operation(operation: Operation[T_co]) -> StreamOperation[T_co]:
    """Return an operation as the library sees it. Every operation is a `StreamOperation`."""
    assert isinstance(operation, StreamOperation)
    return operation


def is_captured(driver: Driver, stream: int) -> bool:
    """Return whether a stream is being captured, given the driver's name of it. From any thread."""
    try:
        return driver.stream_capturing(stream)
    except BusyError as error:
        if getattr(error, "code", 0) == STREAM_CAPTURE_IMPLICIT:
            return True
        raise


def nothing() -> None:
    """Do nothing: the call of an operation that only marks a place in the order."""


def _copied_out_at_once(operation: StreamOperation[Any]) -> bool:
    """Return True: a chunk has no host work of its own."""
    return True


def _use_lease(operation: StreamOperation[Any], lease: Lease) -> None:
    """Make `submit` record the event of this lease."""
    operation.lease = lease
