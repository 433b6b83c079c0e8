"""Resolve: what a queue does with the device's answers.

Operations are resolved strictly from the oldest to the newest, and nothing is believed but a query: a wake, a poll or a
tick only says when to ask. These functions are methods of `StreamQueue`; they stand here because they are the hot half
of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import AiocudaError, DeviceFault
from . import _observed
from ._failure import Spoiled
from ._operation import ABANDONED, DONE, FAILED, LANDING, STEP, SUBMITTED, Operation
from ._prediction import INSTANT, Estimate
from ._waiters import Countdown

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._stream_queue import StreamQueue

__all__ = ["MOST_PER_TURN", "fail_all", "landed", "linger", "poll", "resolve_to"]

#: Operations resolved in one go: 1 000 take 1.7 ms, and no turn of the loop may last 5 (measured).
MOST_PER_TURN = 256


def poll(queue: StreamQueue, budget: int = MOST_PER_TURN) -> int:
    """Ask the driver, and resolve what is done, in order. How many were resolved."""
    if not queue.pending or queue.resolving:
        return 0
    try:
        if not queue.device_state.guarded or queue.reactor.query_guard.now:
            return _poll(queue, budget)
        with queue.reactor.query_guard as query_guard:
            return _poll(queue, budget) if query_guard.now or queue._driver.fault is not None else 0
    except AiocudaError as error:
        queue.reactor.complain(error)  # a refused query proves nothing: ask again
        return 0


def _poll(queue: StreamQueue, budget: int) -> int:
    pending = queue.pending
    queue.reactor.polls += 1
    newest = pending[-1]
    try:
        # The newest first: if it is done, so is everything before it, and one query serves a whole batch.
        if newest._lease is None:
            newest = _newest_recorded(queue)
        lease = newest._lease
        everything = lease is None or queue._driver.event_query(lease.handle)
    except DeviceFault as fault:
        return _fault(queue, newest, fault)
    if not everything and newest is pending[0]:
        queue.last_busy = queue._driver.now()
        return 0
    return _resolve(queue, everything, budget)


def resolve_to(queue: StreamQueue, operation: Operation[Any]) -> None:
    """Resolve it, and all in front of it, without asking: what the device does behind it elsewhere is done."""
    turn, pending = queue.reactor.turn, queue.pending
    if queue.resolving or turn.inlined >= MOST_PER_TURN:
        return
    if pending and pending[0] is operation and _is_plain(queue, operation):
        _resolve_alone(queue, operation)
        turn.has_inlined(1)
        return
    for count, other in enumerate(pending, 1):
        if other is operation:
            if count <= MOST_PER_TURN - turn.inlined:
                turn.has_inlined(_resolve(queue, True, count))
            return


def linger(queue: StreamQueue, operation: Operation[Any]) -> None:
    """Ask; and if the operation is likely to end within microseconds, go on asking that long."""
    lease = operation._lease
    pending = queue.pending
    if lease is None or pending[0] is not operation or pending[-1] is not operation:
        queue.reactor.inline(queue)
        return
    device_state = queue.device_state
    driver = queue._driver
    query = driver.event_query
    handle = lease.handle
    queue.reactor.polls += 1
    guarded = device_state.guarded and not queue.reactor.query_guard.now
    try:
        if guarded:
            guarded = False
            driver.begin_queries()
            guarded = True  # only what has begun is ended
        if not query(handle):
            now = queue.last_busy = driver.now()
            longest = device_state.policy.linger
            estimate = operation._estimate
            seconds = None if estimate is None else estimate.seconds
            if seconds is None or seconds > 2 * longest:  # what was seen through the loop looks that much longer
                return
            until = now + longest
            while not query(handle):
                now = queue.last_busy = driver.now()
                if now > until:
                    return
    except DeviceFault as fault:
        _fault(queue, operation, fault)
        return
    except AiocudaError as error:
        queue.reactor.complain(error)
        return
    finally:
        if guarded:
            driver.end_queries()
    if _is_plain(queue, operation):
        _resolve_alone(queue, operation)
    else:
        _resolve(queue, True, 1)


def _is_plain(queue: StreamQueue, operation: Operation[Any]) -> bool:
    """Is there nothing about it that most operations have not?"""
    device_state = queue.device_state
    return (
        operation._state == SUBMITTED
        and operation._extra is None
        and device_state.instrument is None
        and not device_state.starts
    )


def _resolve_alone(queue: StreamQueue, operation: Operation[Any]) -> None:
    """What `_resolve` does, for a plain operation, the oldest of its stream: who waits for it resumes 0.3 µs sooner."""
    now = queue._now()
    lease = operation._lease
    try:
        queue.pending.popleft()
        operation._lease = None
        if lease is not None and not lease.lent:
            queue.device_state.leases.give(lease)
        operation._keep = None
        queue.latencies.append(now - operation._submitted)
        operation._state = DONE
        queue.reactor.resolved += 1
        if operation._waiters is not None:
            operation._tell()
    except BaseException:
        queue.reactor.resolved += _interrupted(queue, operation)
        raise
    estimate = operation._estimate
    if estimate is not None:
        _learn(queue, estimate, operation._submitted, 1, now)
    if estimate is not INSTANT:
        queue.last_resolved = now
    _after(queue)


def _resolve(queue: StreamQueue, everything: bool, budget: int) -> int:
    """Resolve from the oldest on: all if it is known that everything is done, else as far as queries say so."""
    driver = queue._driver
    query = driver.event_query
    pending = queue.pending
    listened = queue.device_state.instrument is not None or queue.device_state.starts
    keep_latency = queue.latencies.append
    first = head = pending[0]
    sampled: Estimate | None = None  # of what took time, if all of that was of one kind
    resolved = done = timed = 0
    # What letting go of one operation makes others enqueue, chunks of a staged copy say, is none of these.
    most = min(budget, len(pending))
    now = 0.0
    # Letting go of a chunk refills the queue, which asks for room: a second pass inside this one would resolve what
    # this one has counted, and this one then what it has not asked about.
    queue.resolving = True
    try:
        while resolved < most:
            head = pending[0]
            lease = head._lease
            if not everything:
                if lease is None:
                    lease = _recorded_late(queue, head)
                if lease is not None and not query(lease.handle):
                    break
            extra = head._extra
            if extra is not None and extra.land is not None and not _landed(queue, head):
                break
            if resolved == 0:
                now = driver.now()
            # Its turn has come: its event goes back, what it held is let go, everybody is told.
            pending.popleft()
            resolved += 1
            estimate = head._estimate
            if estimate is not INSTANT:
                sampled = estimate if timed == 0 or estimate is sampled else None
                timed += 1
            if listened:
                _observed.report(queue, head)
                extra = head._extra  # whoever listens may have abandoned it
            if lease is not None:
                head._lease = None
                if not lease.lent:  # what `EventLeases.give` does, 60 ns sooner
                    lease.generation += 1
                    lease.home.append(lease)
            head._keep = None
            step = False
            if extra is not None:
                release = extra.release
                if release is not None:
                    step = head.kind is STEP
                    extra.release = None
                    try:
                        release()
                    except BaseException as error:  # noqa: BLE001 - no operation's failure, and this one is done
                        queue.reactor.tell(f"after {head!r} something could not be given back", error)
                    if queue.reactor.faulted:
                        most = resolved  # all that came behind it has failed meanwhile
                if head._state == ABANDONED:
                    extra.abandoned = False
                    head._tell_out_of_turn()  # those that have not been woken yet
                    continue
                if extra.failure is not None:
                    head._state = FAILED
                    queue.reactor.failed += head.kind is not STEP
                    head._tell()
                    continue
            head._state = DONE
            if not step:
                done += 1
                keep_latency(now - head._submitted)
            waiter = head._waiters
            if type(waiter) is Countdown and waiter.left > 1:
                waiter.left -= 1
                head._waiters = None
            elif waiter is not None:
                head._tell()
    except DeviceFault as fault:
        queue.reactor.resolved += done
        return _fault(queue, head, fault)
    except BaseException:
        queue.reactor.resolved += done + _interrupted(queue, head)
        raise
    finally:
        queue.resolving = False
    if resolved:
        queue.reactor.resolved += done
        if sampled is not None:
            _learn(queue, sampled, first._submitted, timed, now)
        if timed:  # when what takes no time was found done says nothing of when the next one began
            queue.last_resolved = now
        _after(queue)
    elif not everything:
        queue.last_busy = driver.now()
    return resolved


def _interrupted(queue: StreamQueue, operation: Operation[Any]) -> bool:
    """Ctrl-C in the middle of its turn: if it has left the queue, nobody would come back to it. Is it to be counted?"""
    if queue.pending and queue.pending[0] is operation:
        return False
    counts = False
    lease, extra = operation._lease, operation._extra
    if lease is not None:
        operation._lease = None
        if not lease.lent:
            queue.device_state.leases.give(lease)
    operation._keep = None
    release = None if extra is None else extra.release
    if extra is not None and release is not None:
        extra.release = None
        release()
    if extra is not None and operation._state == ABANDONED:
        extra.abandoned = False
    elif operation._state < DONE:
        if extra is not None and extra.failure is not None:
            queue.reactor.failed += operation.kind is not STEP
            operation._state = FAILED
        else:
            operation._state = DONE
            counts = operation.kind is not STEP
    operation._tell()
    return counts


def _after(queue: StreamQueue) -> None:
    """Something has been resolved: there is room, and others may have waited for it."""
    if queue.host_queue.entries:
        queue.host_queue.pump()
    reactor = queue.reactor
    if queue.attended and not queue.pending and not queue.host_queue.entries:
        reactor.leave(queue)
    if reactor.on_progress is not None:
        reactor.on_progress()


def _fault(queue: StreamQueue, operation: Operation[Any], fault: DeviceFault) -> int:
    queue._driver.blame(queue.named(operation))
    queue.reactor.fault(fault)
    return 1  # more than that: everything has failed


def _newest_recorded(queue: StreamQueue) -> Operation[Any]:
    """The newest operation with an event; the oldest of all if there is none."""
    for index in range(len(queue.pending) - 1, -1, -1):
        operation: Operation[Any] = queue.pending[index]
        if operation._lease is not None or _recorded_late(queue, operation) is not None:
            return operation
    oldest: Operation[Any] = queue.pending[0]
    return oldest


def _recorded_late(queue: StreamQueue, operation: Operation[Any]) -> Lease | None:
    """An event for an operation that the device has and that has none.

    It was interrupted between its two driver calls (Ctrl-C), or the second was refused. An event recorded now is late
    but true.
    """
    if not operation._submitted:
        return None  # it never reached the device
    lease = queue.device_state.leases.take()
    try:
        queue._record(lease.handle)
    except BaseException:
        queue.unrecorded(operation, lease)
        raise
    operation._lease = lease
    return lease


def _landed(queue: StreamQueue, operation: Operation[Any]) -> bool:
    """The device is done with it; is the host?

    What failed or was abandoned meanwhile copies nothing more, but waits for what a thread is copying just now.
    """
    land = operation._land
    assert land is not None
    if operation._state == LANDING and operation._failure is None:
        return False  # it reports by itself
    try:
        if not land(operation):
            if operation._state == SUBMITTED:
                operation._state = LANDING  # and not before: what Ctrl-C has interrupted is asked again
            return False
    except Exception as error:  # noqa: BLE001 - the copy's failure is the operation's
        operation._failure = Spoiled(error, queue.loop, repr(operation)).failure()
        operation._value = error
    operation._land = None
    return True


def landed(queue: StreamQueue, operation: Operation[Any], error: BaseException | None = None) -> None:
    """The host's part, begun by ``land``, has ended."""
    operation._land = None
    if queue.reactor.closed:
        return  # everybody has been told
    if error is not None and not operation._dropped:
        operation._failure = Spoiled(error, queue.loop, repr(operation)).failure()
        operation._value = error
    queue.poll()
    queue.reactor.plan(queue)


def _learn(queue: StreamQueue, estimate: Estimate, start: float, count: int, now: float) -> None:
    """Take a sample of a duration; see `predict`."""
    if queue.last_resolved > start:  # `max` takes 60 ns
        start = queue.last_resolved
    busy = queue.last_busy
    seconds = (now - start) / count
    blind = now - (busy if busy > start else start)  # it ended somewhere in here
    if blind <= 100e-6 or blind <= 0.1 * (now - start):
        estimate.caught(seconds)
    elif estimate.seconds is None or seconds < estimate.seconds:
        estimate.overslept(seconds)
    elif (busy - start) / count > estimate.seconds:
        estimate.overdue(seconds)


def fail_all(queue: StreamQueue, fault: DeviceFault) -> None:
    """The device has faulted: every operation in here fails with it, awaited or not."""
    spoiled = Spoiled(fault, queue.loop, f"the operations of {queue.name}")
    failure = spoiled.failure()
    before = queue.reactor.failed
    queue.host_queue.fail_all(fault, failure)
    while queue.pending:
        operation = queue.pending[
            0
        ]  # and out of it when it is over: what Ctrl-C leaves in there, the watchdog comes to
        # Its event and its memory stay where they are: nobody knows what the device still does.
        operation._lease = None
        queue.lose(operation, fault, failure)
        queue.pending.popleft()
    spoiled.delivered = queue.reactor.failed == before  # there was nobody's operation: nobody is to be told
