"""Ring: the operations that a stream has accepted, in order, each with its event: submit, query, resolve.

It answers the common case. For everything unusual it asks one object, `Ring.rare`.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._base._wakeups import MOST_PER_TURN
from ..driver.protocol import native_call
from ..errors import AiocudaError, DeviceFault
from ._calls import COMPILED, copy_context, new_object, next_id
from ._estimate import CALLBACK_SECONDS, INSTANT, Outlook
from ._hot import Countdown, Watch
from ._native import Native
from ._operation import INTERNAL
from ._state import (
    CLOSED,
    COMPLICATED,
    DONE,
    ENDED,
    IN_CALL,
    INACTIVE,
    POISONED,
    RECORDED,
    REFUSING,
    SHARED,
    SUBMITTED,
    UNASKED,
)
from ._stream_operation import StreamOperation

if TYPE_CHECKING:
    import asyncio

    from .._base._failure import Poison
    from ..driver.protocol import Driver
    from ._estimate import Estimate
    from ._hot import DeviceHot, Lease, ReactorHot

__all__ = ["Obstacle", "Ring", "new_id", "new_operation", "nothing"]

#: A query that is not for an await of its own is made at most once in this time per stream: see `glance`.
GLANCE_SECONDS = 20e-6

#: Seconds from which a query that is repeated must let signals and other threads in.
LONG = 0.001


class Obstacle:
    """An attribute of a queue that is true or false, as one bit of `Ring.obstacles`."""

    __slots__ = ("_bit",)

    def __init__(self, bit: int) -> None:
        self._bit = bit

    def __get__(self, queue: Ring, owner: type[Ring]) -> bool:
        return queue.obstacles & self._bit != 0

    def __set__(self, queue: Ring, value: bool) -> None:
        queue.obstacles = queue.obstacles | self._bit if value else queue.obstacles & ~self._bit


class Ring:
    """The queue of a stream: the operations that the stream has accepted and that have not been resolved. Final.

    Operations are resolved strictly from the oldest to the newest, and only after a query of the driver: a
    notification, a poll or a timer only says when to query. The functions read and write the attributes of operations
    directly.

    Attributes
    ----------
    reactor : Reactor
    device_state : DeviceState
    reactor_hot, device_hot
        What these two hold for the core.
    driver : Driver
    loop : asyncio.AbstractEventLoop
        The only loop that may use the stream.
    handle : int
        The stream, as the driver names it.
    name : str
    rare : StreamQueue
        It does all that is unusual: these methods are the only ones of `completion` that a ring calls for its
        operations. It refers to the ring weakly, so that both are freed without the garbage collector.
    watch : Watch
        The reactor's plan for this queue. Only the reactor writes it.
    outlook : Outlook
        Finds the operation that is awaited, and predicts its end.
    pending : deque of StreamOperation
        The accepted operations, each with an event recorded after it.
    on_host : deque of StreamOperation
        The operations that the stream has not accepted yet, the oldest first: the entries of the host queue.
    obstacles : int
        0 if a new operation can take the short way of `BoundCall`. Its bits are the reasons for the long way of
        `submit`: the queue is closed, shared, recorded, poisoned or not active, or the device has faulted.
    closed : bool
        New operations are refused. Accepted operations continue.
    ended : bool
        The queue is closed, and nothing waits for its operations any more.
    shared : bool
        True while others may enqueue on the stream: it is imported or lent. Then no operation waits in the host queue,
        and each submission first asks the driver whether the stream is being captured: a call on a captured stream
        becomes part of that graph, or makes the capture fail.
    recorded : bool
        True while `Stream.capture` records the stream's calls into a graph. The queue then refuses new operations.
    newest_id : int
        The id of the operation that was put into ``pending`` last. A driver call may run code of the program, such as a
        finaliser, that enqueues another one.
    enqueued : int
        The number of operations so far, without chunks and markers.
    after_wait : bool
        True if the next operation directly follows a wait for another stream.
    unmarked_wait_at : int
        The value of `enqueued` at the last device-side wait that no operation represents; else -1.
    latencies : deque of float
        Seconds from the submission to the end of recent operations.
    last_busy, last_resolved : float
        The driver's time when the stream was last seen unfinished, and when a timed operation was last resolved.
    live_bytes, peak_bytes : int
        Of the memory that was allocated through the stream.
    awaiting : StreamOperation or None
        The operation up to which an await that begins resolves, before it has a waiter: for the listeners.
    """

    closed = Obstacle(CLOSED)
    ended = Obstacle(ENDED)
    shared = Obstacle(SHARED)
    recorded = Obstacle(RECORDED)

    __slots__ = ("__weakref__", "_asked_at", "_native", "_poison", "_record", "_resolving", "after_wait",
                 "awaiting", "device_hot", "device_state", "driver", "enqueued", "handle", "last_busy",
                 "last_resolved", "latencies", "live_bytes", "loop", "name", "newest_id", "now", "obstacles",
                 "on_host", "outlook", "peak_bytes", "pending", "rare", "reactor", "reactor_hot", "unmarked_wait_at",
                 "watch")  # fmt: skip

    rare: Any  # set by `new_queue`

    def __init__(self, reactor: Any, handle: int, name: str) -> None:
        self.reactor = reactor
        self.name = name
        self.watch = Watch()
        self.outlook = Outlook()
        self.device_state = reactor.device_state
        self.reactor_hot: ReactorHot = reactor.hot
        self.device_hot: DeviceHot = reactor.device_state.hot
        self.obstacles = INACTIVE
        self.loop: asyncio.AbstractEventLoop = reactor.loop
        self.driver: Driver = reactor.device_state.driver
        # Each submission needs these, so they are looked up once.
        self.now: Callable[[], float] = self.driver.now
        self._record = self.driver.recorder(handle)
        native = native_call(self._record) if COMPILED else None
        self._native = None if native is None else Native(native)
        self.handle = handle
        self.enqueued = self.newest_id = 0
        self.live_bytes = self.peak_bytes = 0
        self.after_wait = False
        self.unmarked_wait_at = -1
        self.pending: deque[StreamOperation[Any]] = deque()
        self.on_host: deque[StreamOperation[Any]] = deque()
        self._poison: Poison | None = None
        self.latencies: deque[float] = deque(maxlen=512)
        self.awaiting: StreamOperation[Any] | None = None
        self._resolving = False
        self.last_busy = self.last_resolved = 0.0
        self._asked_at = -1.0  # the time of the last query of `glance` that has found nothing done

    @property
    def active(self) -> bool:
        """True while the reactor watches the queue: it has unfinished operations."""
        return not self.obstacles & INACTIVE

    def set_active(self, active: bool) -> None:
        """Note whether the reactor watches the queue. Only the reactor calls it."""
        self.obstacles = self.obstacles & ~INACTIVE if active else self.obstacles | INACTIVE

    @property
    def poison(self) -> Poison | None:
        """The reason why the stream is unusable, or None."""
        return self._poison

    @poison.setter
    def poison(self, poison: Poison | None) -> None:
        self._poison = poison
        self.obstacles = self.obstacles & ~POISONED if poison is None else self.obstacles | POISONED

    @property
    def idle(self) -> bool:
        """True if the queue has no unfinished operation."""
        return not self.pending and not self.on_host

    def tail(self) -> StreamOperation[Any] | None:
        """Return the newest unfinished operation."""
        if self.on_host:
            return self.on_host[-1]
        return self.pending[-1] if self.pending else None

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

    def append(self, operation: StreamOperation[Any]) -> None:
        """Put an operation behind all others."""
        self.newest_id = operation.id
        self.pending.append(operation)

    def check_loop(self) -> None:
        """Raise unless the stream's own loop is running."""
        if _get_running_loop() is not self.loop:
            self.rare.refuse_unusable()

    def check(self) -> None:
        """Raise if the stream accepts no operation now."""
        if self.obstacles & REFUSING or _get_running_loop() is not self.loop or self.driver.fault is not None:
            self.rare.refuse_unusable()

    def last_work(self) -> tuple[int, StreamOperation[Any] | None] | None:
        """Return what the next user of memory that is freed now has to wait for, if no event need be recorded for it.

        (stream, operation): the last operation of the stream; its event comes after all work of the stream.
        (stream, None): the stream is idle.
        None: an event has to be recorded, because other libraries may enqueue on the stream; or the operation has a
        result, which would live as long as the freed memory; or it has no event.
        """
        pending = self.pending
        if self.obstacles & SHARED:
            return None
        if not pending:
            return (self.handle, None)
        last = pending[-1]
        return None if last.value is not None or last.lease is None else (self.handle, last)

    def attend(self, operation: StreamOperation[Any] | None = None) -> None:
        """Have the reactor watch the queue: an operation of it has a waiter, ``operation`` if the caller knows it."""
        if self.watch.polling:
            self.outlook.note_waiter(operation)
        elif self.pending or self.watch.attended:  # otherwise it is on the host, and no query can find its end
            self.reactor.plan(self)

    def follow(self, operation: StreamOperation[Any]) -> None:
        """Make later operations wait for one of another stream, without a "wait" operation where that is possible."""
        lease = operation.lease  # read once: if the operation is of another loop, its loop may reset it
        if (
            lease is None
            or self.obstacles & COMPLICATED
            or self.on_host
            or operation.queue is self
            or self.device_hot.listeners is not None
        ):
            self.rare.follow_unusual(operation)
            return
        self.after_wait = True  # the same as `note_wait`, without its call
        self.unmarked_wait_at = self.enqueued
        if self._native is None or not self._native.wait(lease):
            self.driver.stream_wait(self.handle, lease.handle)

    def note_wait(self) -> None:
        """Note a device-side wait for another stream that no operation represents. Call it before the driver call."""
        self.after_wait = True
        self.unmarked_wait_at = self.enqueued

    # -- submit --------------------------------------------------------------------------------------------------------

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

    def submit(  # noqa: C901 - each part that moved to a method would cost a call
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
            if self.obstacles & REFUSING or _get_running_loop() is not self.loop or self.reactor_hot.faulted:
                self.rare.refuse_unusable(operation.kind)
            if self.after_wait and operation.estimate is not INSTANT:
                self.after_wait = False
                operation.estimate = None if operation.estimate is None else operation.estimate.after_wait
            if self.on_host or self._poison is not None or len(self.pending) >= self.device_hot.limit:
                self.enqueued += 1
                self.rare.put(operation, call, arguments)
                return
        elif self.obstacles & SHARED and self.rare.skips_captured(operation, call):
            return
        if self.obstacles & INACTIVE:
            self.reactor.activate(self)
        try:
            # The operation is in its place before the first driver call: an interrupt between them loses nothing.
            self.enqueued += not ahead
            operation.submitted_at = IN_CALL
            self.newest_id = operation.id  # first: a signal handler may enqueue between the two lines
            self.pending.append(operation)
            listeners = self.device_hot.listeners  # read once: another thread may remove the last one
            if listeners is not None:
                self.rare.submit_observed(listeners, operation, call, arguments)
                return
            now = self.now()
            if call is not None:
                call(*arguments)
            operation.submitted_at = now  # not earlier: see `StreamQueue.record_late`
            idle = self.device_hot.idle_leases
            lease = operation.lease or (idle.pop() if idle else self.device_state.leases.take())
            try:
                if self._native is None or not self._native.enqueue((), lease):
                    self._record(lease.handle)
            except BaseException:
                operation.return_lease(lease)
                raise
            operation.lease = lease
            if self.newest_id != operation.id:
                self.rare.move_to_end(operation)
        except BaseException as error:
            if not self.rare.end_call(operation, error, None):
                raise

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
        return None if self.obstacles & ENDED and not (after_end and self.pending) else self.submit_marker()

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far, device-side waits too; None if that has finished.

        If the stream has a failure that no caller has received, the operation is skipped: so everything that waits for
        the stream's end is skipped, too.
        """
        # Work that no operation represents.
        unmarked = self.unmarked_wait_at == self.enqueued or self.obstacles & SHARED
        poison = self._poison
        if (unmarked or poison is not None) and not (self.obstacles & CLOSED or self.on_host):
            if poison is not None and not poison.delivered:
                return self.enqueue("wait", INSTANT, nothing, ())  # its tail may be a marker without a failure
            if unmarked:
                mark = self.submit_marker()
                self.unmarked_wait_at = -1  # after the mark: Ctrl-C between the two loses no wait
                return mark
        return self.tail()

    # -- query ---------------------------------------------------------------------------------------------------------

    def poll(self, budget: int = MOST_PER_TURN, *, awaited: bool = False, newest_only: bool = False) -> int:
        """Query the driver and resolve the finished operations, in order. Return how many were resolved.

        With ``awaited`` the first query is for the operation that `Outlook.find` returns. While that is unfinished,
        there is no other query, and the operations before it stay unresolved: no task waits for them. With
        ``newest_only`` there is one query, and no operation is resolved unless all are done.
        """
        if not self.pending or self._resolving:
            return 0
        try:
            if not self.device_hot.guarded or self.reactor.query_guard.open:
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
        self.reactor_hot.polls += 1
        operation = newest = pending[-1]
        proven: StreamOperation[Any] | None = None  # it is known to be done, with all before it
        try:
            if awaited:
                target = self.outlook.awaited
                if target is None or target.status >= DONE:
                    target = self.outlook.find(self)[0]
                if target is not None and target.lease is not None:
                    operation = target
                    if not (self._is_done(target.lease) if COMPILED else query(target.lease.handle)):
                        self.last_busy = self.now()
                        return 0
                    proven = target
            if proven is not newest and pending:
                # The newest first: if it has finished, so have all before it, and one query serves the whole batch.
                operation = newest if newest.lease is not None else self._newest_recorded()
                lease = operation.lease
                if lease is None or (self._is_done(lease) if COMPILED else query(lease.handle)):
                    proven = newest
                elif newest_only or not pending or operation is pending[0]:
                    self.last_busy = self.now()
                    return 0
        except DeviceFault as fault:
            resolved: int = self.rare.report_fault(operation, fault)
            return resolved
        # Counted last: a query may run code of the program, which enqueues, or asks and so resolves.
        known = 0 if proven is None else self._count_to(proven)
        resolved = self._resolve(known, budget) if pending else 0
        if not resolved and proven is None:
            self.last_busy = self.now()
        return resolved

    def look_ahead(self, operation: StreamOperation[Any]) -> None:
        """Resolve all operations of the stream by one query, if the newest one is done. Called before `linger`.

        Other awaits of this turn have found their operations done, so the next awaits probably will, too:
        `asyncio.gather` awaits each operation by a task of its own, and all of them begin in one turn.
        """
        pending = self.pending
        turn = self.reactor_hot.turn
        if len(pending) < 2 or pending[-1] is operation or turn.inlined >= MOST_PER_TURN:
            return
        if self.now() - self.last_busy < GLANCE_SECONDS:
            return  # a query has found the stream unfinished just now
        resolved = self.poll(MOST_PER_TURN - turn.inlined, newest_only=True)
        if resolved:
            turn.has_inlined(resolved)

    def glance(self) -> None:
        """Query the driver for a program that asks without an await, and resolve what is done.

        It does nothing on another thread or loop, and while the stream is captured, closed or faulted.
        """
        if self.pending and not self.obstacles & UNASKED and _get_running_loop() is self.loop:
            # A clock that stands since then is virtual: only a query lets its time pass. Not `last_busy`: while the
            # reactor polls for a later operation, that is always new.
            if not 0.0 < self.now() - self._asked_at < GLANCE_SECONDS and not self.poll():
                self._asked_at = self.now()

    def resolve_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation and all before it without a query: it is known to be done.

        If it is the oldest of the stream, the caller limits the number of operations in a turn of the loop. `_resolve`
        does the same for all operations, but if this one needs no special handling, its waiter resumes 0.3 µs sooner.
        """
        hot = self.device_hot
        now = self.now()  # first: it may run code of the program, such as a signal handler
        if (
            not self.pending
            or self.pending[0] is not operation
            or operation.status != SUBMITTED
            or operation.extra is not None
            or hot.listeners is not None
            or hot.starts
            or self._resolving
        ):
            self._resolve_up_to(operation)
            return
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
            self.reactor_hot.resolved += 1
            if operation.waiters is not None:
                operation.wake_waiters()
        except BaseException as error:
            if not self.rare.end_resolve(operation, error):
                raise
            return
        estimate = operation.estimate
        if estimate is INSTANT:
            self._after_resolving(None, operation, operation, 0, now)
        else:
            self._after_resolving(estimate, operation, operation, 1, now)

    def _resolve_up_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation and all before it, which may need special handling."""
        turn = self.reactor_hot.turn
        known = self._count_to(operation)
        most = 1 if known == 1 else min(known, MOST_PER_TURN - turn.inlined)
        if most <= 0 or self._resolving:
            return
        self.awaiting = operation
        try:
            resolved = self._resolve(known, most)
        finally:
            self.awaiting = None
        if known > 1:
            turn.has_inlined(resolved)

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
        if gathered and self.device_hot.listeners is not None:
            self.rare.linger(operation, gathered)
            return
        lease = operation.lease
        if lease is None or self._resolving:
            self.awaiting = operation
            try:
                self.reactor.inline(self)
            finally:
                self.awaiting = None
            return
        hot = self.device_hot
        driver = self.driver
        query = driver.event_query
        handle = lease.handle
        self.reactor_hot.polls += 1
        guarded = hot.guarded and not self.reactor.query_guard.open
        try:
            if guarded:
                guarded = False
                driver.begin_queries()
                guarded = True  # `end_queries` follows only a successful `begin_queries`
            if not (self._is_done(lease) if COMPILED else query(handle)):
                now = self.last_busy = driver.now()
                until = self.outlook.patience(self, operation, now)
                if not until:
                    return
                # Calls in C let no signal and no other thread in. No conditional jump leads back: see `_resolve`.
                while True:
                    if self._is_done(lease) if COMPILED and hot.linger < LONG else query(handle):
                        break
                    if now > until:
                        return
                    now = self.last_busy = driver.now()
        except DeviceFault as fault:
            self.rare.report_fault(operation, fault)
            return
        except AiocudaError as error:
            self.reactor.report_refusal(error)
            return
        finally:
            if guarded:
                self.reactor.query_guard.end()
        self.resolve_to(operation)

    # -- resolve -------------------------------------------------------------------------------------------------------

    def _resolve(self, known: int, most: int) -> int:  # noqa: C901 - each part that moved would cost a call
        """Resolve at most ``most`` operations, from the oldest on. The first ``known`` need no query: they are done."""
        pending = self.pending
        listened = self.device_hot.listeners is not None or bool(self.device_hot.starts)
        keep_latency = self.latencies.append
        first = head = pending[0]
        sampled: Estimate | None = None  # of the timed operations, if all of them share it
        resolved = done = timed = 0
        now = 0.0
        # `on_settled` of a chunk refills the stream, which asks for room. A pass inside this one would resolve
        # operations that this one has counted, and this one would resolve operations that it has not queried.
        self._resolving = True
        try:
            for _ in range(min(most, len(pending))):  # not the operations that `on_settled` enqueues, such as chunks
                if not pending:  # a hook or `on_settled` may find a fault, which fails all of them
                    break
                head = pending[0]
                extra, estimate = head.extra, head.estimate
                if (
                    (head.lease is None and head.submitted_at == IN_CALL)
                    or (resolved >= known and not self._has_passed(head))
                    or (extra is not None and extra.copy_out is not None and not self.rare.copy_out(head))
                ):
                    break
                now = now or self.now()
                # The head's turn: return its event, release its memory, wake its waiters.
                pending.popleft()
                resolved += 1
                if estimate is not INSTANT:
                    sampled = estimate if timed == 0 or estimate is sampled else None
                    timed += 1
                is_special = self.rare.resolved(head) if listened else extra is not None
                lease, head.lease = head.lease, None
                if lease is not None and not lease.lent:  # as `EventLeases.give`, without 60 ns for the call
                    lease.generation += 1
                    lease.home.append(lease)
                head.keep = None  # after the event: the finaliser of a user's `Event` may return it
                if is_special and not self.rare.finish_special(head):
                    continue
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
                waiter = None  # always: in 3.13 and 3.14, an interrupt at a conditional jump back skips the handlers
        except BaseException as error:
            if not self.rare.end_resolve(head, error):
                raise
            return 1  # any number above 0: a fault has ended everything
        finally:
            self._resolving = False
            self.reactor_hot.resolved += done
        if resolved:
            self._after_resolving(sampled, first, head, timed, now)
        return resolved

    def _has_passed(self, operation: StreamOperation[Any]) -> bool:
        """Query the driver for one operation. True also if the stream has not accepted it."""
        lease = operation.lease or self.rare.record_late(operation)
        return lease is None or self._is_done(lease)

    def _newest_recorded(self) -> StreamOperation[Any]:
        """Return the newest operation with an event; the oldest of all if none has one."""
        operation: StreamOperation[Any]
        for operation in reversed(list(self.pending)):
            if operation.lease is not None or self.rare.record_late(operation) is not None:
                return operation
        operation = self.pending[0]
        return operation

    def _is_done(self, lease: Lease) -> bool:
        """Query the driver for an event. The Python form saves this call where it queries most."""
        if self._native is not None:
            answer = self._native.query(lease)
            if answer >= 0:
                return answer == 1
        return self.driver.event_query(lease.handle)

    def _after_resolving(
        self, sampled: Estimate | None, first: StreamOperation[Any], last: StreamOperation[Any], timed: int, now: float
    ) -> None:
        """Learn from the resolved operations, and fill the room that they have left.

        Parameters
        ----------
        sampled
            The estimate of the operations that take time; None if they have different ones.
        first, last
            The oldest and the newest of the operations.
        timed
            The number of operations that take time.
        """
        if sampled is not None:
            start = first.submitted_at
            if self.last_resolved > start:  # `max` takes 60 ns
                start = self.last_resolved
            busy, watch = self.last_busy, self.watch
            if watch.attended and busy < now - CALLBACK_SECONDS:
                busy = now - CALLBACK_SECONDS
            foreseen = watch.predicted - start if watch.target == last.id and watch.predicted > start else 0.0
            sampled.add(busy - start if busy > start else 0.0, now - start, timed, foreseen)
        elif timed > 1 and self.watch.attended and now < self.watch.predicted and not self.pending:
            self.outlook.shorten(self, first, last, now)
        if timed:  # zero-duration operations carry no timing information
            self.last_resolved = now
        self.outlook.awaited = None  # as `Outlook.forget`, without its call
        if self.on_host:
            self.rare.pump()
        if self.watch.attended and not self.pending and not self.on_host:
            self.reactor.stop_attending(self)
        if self.reactor_hot.on_progress is not None:
            self.reactor_hot.on_progress()


def new_operation(
    queue: Ring,
    kind: str,
    estimate: Estimate | None,
    keep: object,
    made: type[StreamOperation[Any]] | None = None,
) -> Any:
    """Return a new operation that is about to be submitted.

    An ``__init__`` would take 60 ns longer; a launch takes 1.3 µs beside the driver call.
    """
    operation = (new_object(StreamOperation) if COMPILED else StreamOperation()) if made is None else made()
    operation.id = next_id()
    operation.kind = kind
    operation.queue = queue
    operation.estimate = estimate
    operation.keep = keep
    operation.status = SUBMITTED
    operation.lease = operation.waiters = operation.value = operation.extra = None
    operation.submitted_at = 0.0
    operation.context = copy_context()
    return operation


def nothing() -> None:
    """Do nothing: the call of an operation that only marks a place in the order."""


def new_id() -> int:
    """Return the id of a new operation that no stream has."""
    return next_id()
