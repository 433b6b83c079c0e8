"""Ring: the operations that a stream has accepted, in order, each with its event: submit, query, resolve.

It answers the common case. For everything unusual it asks one object, `Ring.rare`.

- A *waiter* is woken when its operation finishes: the future of an await, a callback, or the `Countdown` of `gather`.
- A *lease* is a CUDA event, as an object. Each accepted operation has one, recorded after it, until it is resolved. An
  operation in `Ring.pending` without a lease has failed or was skipped, or its driver calls are not complete.
- A *marker* is an operation of the library with an event and no other work: it ends when all work before it has.
- The *poison* is the failure because of which a stream skips new operations, until a caller has received it.
- A queue is *attended* while an operation of it has a waiter: the reactor then has a plan for its next query, the
  `Ring.watch`.
- "As `f`, without its call" says that a hot function repeats the lines of `f`: each call takes about 60 ns.
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

#: After a query has found nothing done, `glance` and `look_ahead` make no other one for this time.
GLANCE_SECONDS = 20e-6

#: An await may repeat its query for less than this time by calls in C, which let in no signal and no other thread.
LONG = 0.001


class Obstacle:
    """A descriptor: an attribute of a queue that is true or false, and is stored as one bit of `Ring.obstacles`."""

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
    notification, a poll or a timer only says when to query. The methods read and write attributes of operations.

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
        Does everything unusual: failures, Ctrl-C, listeners, shared streams, the host queue. It refers to the ring
        weakly, so that both are freed without the garbage collector.
    watch : Watch
        The reactor's plan for this queue. Only the reactor writes it.
    outlook : Outlook
        Finds the operation that is awaited, and predicts its end.
    pending : deque of StreamOperation
        The accepted operations, the oldest first, each with an event recorded after it.
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
        The id of the operation that was put into ``pending`` last. If it has changed after a driver call, that call has
        run code of the program, such as a finaliser, which has enqueued another operation.
    enqueued : int
        The number of operations so far, without chunks and markers.
    after_wait : bool
        True if the next operation directly follows a wait for another stream: its duration then includes the wait.
    unmarked_wait_at : int
        The value of `enqueued` at the last device-side wait that no operation represents; else -1. While both are
        equal, that wait is the newest work of the stream, and only a new event comes after it.
    latencies : deque of float
        Seconds from the submission to the end of the last 512 operations, for `Stream.statistics`.
    last_busy, last_resolved : float
        The driver's time when the stream was last seen unfinished, and when a timed operation was last resolved.
    live_bytes, peak_bytes : int
        Of the memory that was allocated through the stream.
    awaiting : StreamOperation or None
        The operation of an await that resolves operations before it adds a waiter. Listeners see it as awaited, too.
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
        self._record = self.driver.recorder(handle)  # ``_record(event)`` records an event on the stream
        native = native_call(self._record) if COMPILED else None  # the same in C, if the driver has it
        self._native = None if native is None else Native(native)
        self.handle = handle
        self.enqueued = self.newest_id = 0
        self.live_bytes = self.peak_bytes = 0
        self.after_wait = False
        self.unmarked_wait_at = -1
        self.pending: deque[StreamOperation[Any]] = deque()
        self.on_host: deque[StreamOperation[Any]] = deque()
        self._poison: Poison | None = None
        self.latencies: deque[float] = deque(maxlen=512)  # enough for a 99th percentile
        self.awaiting: StreamOperation[Any] | None = None
        self._resolving = False  # True during a pass of `_resolve`
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
        """Return the newest unfinished operation, or None."""
        if self.on_host:  # these come after all of `pending`
            return self.on_host[-1]
        return self.pending[-1] if self.pending else None

    def ends_with(self, operation: object) -> bool:
        """Return whether this operation is known to end last, so that `end` would return it. Calls no driver."""
        pending = self.pending
        return (
            bool(pending)
            and pending[-1] is operation
            and not self.obstacles
            and self.unmarked_wait_at != self.enqueued
            and not self.on_host
        )

    def append(self, operation: StreamOperation[Any]) -> None:
        """Make an operation the newest of `pending`."""
        self.newest_id = operation.id
        self.pending.append(operation)

    def check_loop(self) -> None:
        """Raise unless the stream's own loop is running."""
        if _get_running_loop() is not self.loop:
            self.rare.refuse_unusable()

    def check(self) -> None:
        """Raise if the stream accepts no operation now."""
        if self.obstacles & REFUSING or _get_running_loop() is not self.loop or self.driver.fault is not None:
            self.rare.refuse_unusable()  # returns if the stream is only shared, and not captured

    def last_work(self) -> tuple[int, StreamOperation[Any] | None] | None:
        """Return what other streams have to wait for before they use memory that is freed in this stream now.

        It is this stream and its last operation, or None if none is unfinished. The caller discards it if the free has
        made this stream wait for others. The result is None if only a new event can tell: other libraries may have
        enqueued, or the operation has no event, or a result, which would live as long as the freed memory.
        """
        pending = self.pending
        if self.obstacles & SHARED:
            return None
        if not pending:
            return (self.handle, None)
        last = pending[-1]
        return None if last.value is not None or last.lease is None else (self.handle, last)

    def attend(self, operation: StreamOperation[Any] | None = None) -> None:
        """Have the reactor wait for an operation with a new waiter: ``operation``, if the caller names it."""
        if self.watch.polling:  # the reactor queries in each turn of the loop: it only has to know for which operation
            self.outlook.note_waiter(operation)
        elif self.pending or self.watch.attended:  # otherwise it is on the host, and no query can find its end
            self.reactor.plan(self)

    def follow(self, operation: StreamOperation[Any]) -> None:
        """Make later work wait, on the device, for another stream's operation; usually without a "wait" operation."""
        lease = operation.lease  # read once: if the operation is of another loop, its loop may reset it
        if (
            lease is None
            or self.obstacles & COMPLICATED
            or self.on_host
            or operation.queue is self
            or self.device_hot.listeners is not None  # they are notified of the wait
        ):
            self.rare.follow_unusual(operation)
            return
        self.after_wait = True  # as `note_wait`, without its call
        self.unmarked_wait_at = self.enqueued
        if self._native is None or not self._native.wait(lease):
            self.driver.stream_wait(self.handle, lease.handle)

    def note_wait(self) -> None:
        """Note a device-side wait without an operation. Call it before the driver call: so Ctrl-C loses no wait."""
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

        A new operation goes to the host queue if earlier operations are there, if the stream is full, or, to be
        skipped, if the stream is poisoned. ``ahead`` is for those that go directly to the stream: the head of the host
        queue, its chunks, and markers.
        """
        if not ahead:
            if self.obstacles & REFUSING or _get_running_loop() is not self.loop or self.reactor_hot.faulted:
                self.rare.refuse_unusable(operation.kind)  # returns if the stream is only shared, and not captured
            if self.after_wait and operation.estimate is not INSTANT:  # the first timed one: its duration has the wait
                self.after_wait = False
                operation.estimate = None if operation.estimate is None else operation.estimate.after_wait
            if self.on_host or self._poison is not None or len(self.pending) >= self.device_hot.limit:
                self.enqueued += 1
                self.rare.put(operation, call, arguments)
                return
        elif self.obstacles & SHARED and self.rare.skips_captured(operation, call):
            return  # a marker, which is now in `pending` without an event
        if self.obstacles & INACTIVE:
            self.reactor.activate(self)
        try:
            # The operation is in its place before the first driver call: an interrupt between them loses nothing.
            self.enqueued += not ahead  # the head of the host queue is counted already, chunks and markers never
            operation.submitted_at = IN_CALL
            self.newest_id = operation.id  # first: a signal handler may enqueue between the two lines
            self.pending.append(operation)
            listeners = self.device_hot.listeners  # read once: another thread may remove the last one
            if listeners is not None:
                self.rare.submit_observed(listeners, operation, call, arguments)
                return
            now = self.now()
            if call is not None:
                call(*arguments)  # if this is a "record", it sets the lease to that of the user's `Event`
            operation.submitted_at = now  # not earlier: it says that the stream has accepted the operation
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
                raise  # Ctrl-C; other errors are now the operation's

    def enqueue_unusual(
        self, kind: str, estimate: Estimate, keep: object, call: Callable[..., object], values: Sequence[Any],
        label: str | None,
    ) -> StreamOperation[Any]:  # fmt: skip
        """Enqueue an operation of a `BoundCall` by `submit`: there is an obstacle or no room, or timing is wanted.

        ``call(values)`` is the driver call without the record of the event: `submit` records it.
        """
        operation: StreamOperation[Any] = new_operation(self, kind, estimate, keep)
        if label is not None:
            operation.own_label = label
        self.submit(operation, call, (values,))
        return operation

    # -- markers -------------------------------------------------------------------------------------------------------

    def marker(self) -> StreamOperation[Any]:
        """Return a new marker, which is not submitted yet. It never counts as an operation of the program."""
        operation: StreamOperation[Any] = new_operation(self, INTERNAL, INSTANT, None)
        operation.on_settled = nothing  # gives it an `Extra`: so `resolve_to`, which would count it, leaves it alone
        return operation

    def submit_marker(self) -> StreamOperation[Any]:
        """Submit a marker. Its event comes after all work that the stream has accepted so far."""
        marker = self.marker()
        self.submit(marker, None, (), ahead=True)
        return marker

    def mark(self, *, after_end: bool = False) -> StreamOperation[Any] | None:
        """Return a marker, submitted; None if the queue has ended. With ``after_end``, only if it is empty, too."""
        return None if self.obstacles & ENDED and not (after_end and self.pending) else self.submit_marker()

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far, device-side waits too; None if that has finished.

        If the stream has a failure that no caller has received, the operation is skipped: so everything that waits for
        the stream's end is skipped, too.
        """
        # True if the newest work may have no operation. While operations are on the host, one of them is the newest.
        unmarked = self.unmarked_wait_at == self.enqueued or self.obstacles & SHARED
        poison = self._poison
        if (unmarked or poison is not None) and not (self.obstacles & CLOSED or self.on_host):
            if poison is not None and not poison.delivered:
                return self.enqueue("wait", INSTANT, nothing, ())  # is skipped; the tail may be a marker, which is not
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
            with self.reactor.query_guard as query_guard:  # a query could break the capture of another library
                if query_guard.open or self.driver.fault is not None:
                    return self._poll(budget, awaited, newest_only)
                return 0  # the driver has refused to open the guard
        except AiocudaError as error:
            self.reactor.report_refusal(error)  # a refused query proves nothing: the reactor queries again
            return 0

    def _poll(self, budget: int, awaited: bool, newest_only: bool) -> int:
        """Do what `poll` does, inside of the guard."""
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
                lease = operation.lease  # None: no operation has an event, so the device has none of them
                if lease is None or (self._is_done(lease) if COMPILED else query(lease.handle)):
                    proven = newest
                elif newest_only or not pending or operation is pending[0]:
                    self.last_busy = self.now()
                    return 0  # there is no older operation, or it is not to be queried
        except DeviceFault as fault:
            resolved: int = self.rare.report_fault(operation, fault)
            return resolved
        # Counted last: a query may run code of the program, which enqueues, or asks and so resolves.
        known = 0 if proven is None else self._count_to(proven)
        resolved = self._resolve(known, budget) if pending else 0
        if not resolved and proven is None:  # `_resolve` has found the oldest operation unfinished
            self.last_busy = self.now()
        return resolved

    def look_ahead(self, operation: StreamOperation[Any]) -> None:
        """Resolve the operations of the stream by one query, if the newest one is done. Called before `linger`.

        The caller has seen `Turn.immediate`: other awaits of this turn have found their operations done. So the next
        ones probably will, too: the tasks of `asyncio.gather` begin in one turn, one for each operation.
        """
        pending = self.pending
        turn = self.reactor_hot.turn
        if len(pending) < 2 or pending[-1] is operation or turn.inlined >= MOST_PER_TURN:
            return  # `linger` makes this query
        if self.now() - self.last_busy < GLANCE_SECONDS:
            return  # a query has found the stream unfinished just now
        resolved = self.poll(MOST_PER_TURN - turn.inlined, newest_only=True)
        if resolved:
            turn.has_inlined(resolved)

    def glance(self) -> None:
        """Query the driver for a program that calls `done` instead of awaiting, and resolve what is done.

        After a query that has found nothing done, there is none for GLANCE_SECONDS. It does nothing on another thread
        or loop, and while the stream is recorded, closed or faulted.
        """
        if self.pending and not self.obstacles & UNASKED and _get_running_loop() is self.loop:
            # `0.0 <`: a clock that has not moved since the last query is simulated, and only a query moves it.
            # The time is kept apart from `last_busy`, which the polls of the reactor keep renewing.
            if not 0.0 < self.now() - self._asked_at < GLANCE_SECONDS and not self.poll():
                self._asked_at = self.now()

    def resolve_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation and all before it without a query: it is known to be done.

        The usual operation is the oldest, and needs no special handling: it is resolved here, 0.3 µs faster than by
        `_resolve`. `Turn.inlined` does not count it: `Turn.is_over` limits the awaits that resolve one operation each.
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
            return  # a fault, which has failed all operations
        estimate = operation.estimate
        if estimate is INSTANT:
            self._after_resolving(None, operation, operation, 0, now)
        else:
            self._after_resolving(estimate, operation, operation, 1, now)

    def _resolve_up_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation that is done, and all before it, as many as this turn of the loop still allows."""
        turn = self.reactor_hot.turn
        known = self._count_to(operation)
        most = 1 if known == 1 else min(known, MOST_PER_TURN - turn.inlined)  # awaits of single ones have another limit
        if most <= 0 or self._resolving:
            return  # the reactor resolves them later; or a pass that calls this does
        self.awaiting = operation
        try:
            resolved = self._resolve(known, most)
        finally:
            self.awaiting = None
        if known > 1:
            turn.has_inlined(resolved)

    def _count_to(self, operation: StreamOperation[Any]) -> int:
        """Return the number of operations in `pending` up to this one, with it; 0 if it is not there."""
        pending = self.pending
        if pending and pending[-1] is operation:
            return len(pending)
        for count, other in enumerate(pending, 1):  # `index` compares by `==`, which takes twice as long
            if other is operation:
                return count
        return 0

    def linger(self, operation: StreamOperation[Any], gathered: Sequence[StreamOperation[Any]] = ()) -> None:
        """Query an operation whose await begins, repeatedly if its end is near; if it is done, resolve it.

        So the await need not suspend. The operations before it need no query: they are done when it is.
        ``gathered``: all operations that `gather` awaits; the last one of this stream is ``operation``.
        """
        if gathered and self.device_hot.listeners is not None:
            self.rare.linger(operation, gathered)  # calls this method without ``gathered``
            return
        lease = operation.lease
        if lease is None or self._resolving:  # no event to query: make a usual pass (within a pass, it does nothing)
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
        guarded = hot.guarded and not self.reactor.query_guard.open  # a query could break another library's capture
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
                # Calls in C let in no signal and no other thread: they are repeated only for less than LONG.
                # No conditional jump leads back: in Python 3.13 and 3.14, an interrupt there skips the `finally`.
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
        """Resolve at most ``most`` operations, the oldest first; return their number. The first ``known`` are done."""
        pending = self.pending
        listened = self.device_hot.listeners is not None or bool(self.device_hot.starts)  # events of a removed one
        keep_latency = self.latencies.append
        first = head = pending[0]
        sampled: Estimate | None = None  # of the timed operations, if all of them share it
        resolved = done = timed = 0
        now = 0.0
        # Code that this pass calls may poll: `on_settled` of a chunk looks for room in the stream. A pass inside this
        # one would take operations that are in `known`, and this one would then resolve others without a query.
        self._resolving = True
        try:
            for _ in range(min(most, len(pending))):  # not the operations that `on_settled` enqueues, such as chunks
                if not pending:  # a hook or `on_settled` may find a fault, which fails all of them
                    break
                head = pending[0]
                extra, estimate = head.extra, head.estimate
                if (
                    (head.lease is None and head.submitted_at == IN_CALL)  # this runs within its driver call
                    or (resolved >= known and not self._has_passed(head))
                    or (extra is not None and extra.copy_out is not None and not self.rare.copy_out(head))
                ):
                    break
                now = now or self.now()  # once
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
                    continue  # it has failed, or was abandoned
                head.status = DONE
                if head.kind is not INTERNAL:
                    done += 1
                    keep_latency(now - head.submitted_at)
                waiter = head.waiters
                if type(waiter) is Countdown and waiter.left > 1:  # as `wake_waiters`, without its call
                    waiter.left -= 1
                    head.waiters = None
                elif waiter is not None:
                    head.wake_waiters()
                waiter = None  # no conditional jump leads back: in 3.13 and 3.14, an interrupt there skips the handlers
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
        """Query the driver for one operation. True without a query if it has no event: the stream never accepted it."""
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
        """Return whether an event is done, by a query in C if possible. Hot loops of the Python form do not call it."""
        if self._native is not None:
            answer = self._native.query(lease)  # -1 if the driver has to find out
            if answer >= 0:
                return answer == 1
        return self.driver.event_query(lease.handle)

    def _after_resolving(
        self, sampled: Estimate | None, first: StreamOperation[Any], last: StreamOperation[Any], timed: int, now: float
    ) -> None:
        """Learn durations from operations that were just resolved, and submit others in their place.

        ``first`` and ``last`` are the oldest and the newest of them. ``timed`` of them take time: all except INSTANT
        ones. ``sampled`` is the estimate of these, or None if they have different ones.
        """
        if sampled is not None:
            start = first.submitted_at
            if self.last_resolved > start:  # `max` takes 60 ns
                start = self.last_resolved
            busy, watch = self.last_busy, self.watch
            if watch.attended and busy < now - CALLBACK_SECONDS:  # a callback is at most so late: they ended after that
                busy = now - CALLBACK_SECONDS
            # The prediction of the reactor, if it has waited for the last of these operations.
            foreseen = watch.predicted - start if watch.target == last.id and watch.predicted > start else 0.0
            sampled.add(busy - start if busy > start else 0.0, now - start, timed, foreseen)
        elif timed > 1 and self.watch.attended and now < self.watch.predicted and not self.pending:
            # Operations of several kinds, and the last one has ended before its predicted end.
            self.outlook.shorten(self, first, last, now)
        if timed:  # zero-duration operations carry no timing information
            self.last_resolved = now
        self.outlook.awaited = None  # as `Outlook.forget`, without its call
        if self.on_host:
            self.rare.pump()
        if self.watch.attended and not self.pending and not self.on_host:
            self.reactor.stop_attending(self)
        if self.reactor_hot.on_progress is not None:
            self.reactor_hot.on_progress()  # tasks may wait for staging buffers


def new_operation(
    queue: Ring,
    kind: str,
    estimate: Estimate | None,
    keep: object,
    cls: type[StreamOperation[Any]] | None = None,
) -> Any:
    """Return a new operation for a queue. It is not submitted yet. Its context is a copy of the caller's.

    ``keep`` is held until the device has finished with the operation. ``cls`` is a subclass without ``__init__``, for a
    captured operation. An ``__init__`` would take 60 ns longer; a launch takes 1.3 µs beside the driver call.
    """
    operation = (new_object(StreamOperation) if COMPILED else StreamOperation()) if cls is None else cls()
    operation.id = next_id()
    operation.kind = kind
    operation.queue = queue
    operation.estimate = estimate
    operation.keep = keep
    operation.status = SUBMITTED  # in advance: `Ring.submit` does not write it, the host queue changes it
    operation.lease = operation.waiters = operation.value = operation.extra = None
    operation.submitted_at = 0.0  # the stream has not accepted it
    operation.context = copy_context()
    return operation


def nothing() -> None:
    """Do nothing: the call of an operation that only marks a place in the order."""


def new_id() -> int:
    """Return the next id of operations: for one that is in no queue, such as a `Wait`."""
    return next_id()
