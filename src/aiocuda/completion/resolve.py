"""Resolve: what a lane does with the device's answers.

Operations are resolved strictly from the oldest to the newest, and nothing is believed but a query: a wake, a poll or a
tick only says when to ask. These functions are methods of `Lane`; they stand here because they are the hot half of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..errors import DeviceFault
from .failure import Failure
from .operation import ABANDONED, DONE, FAILED, LANDING, SUBMITTED, Operation

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["MOST_PER_TURN", "STEP", "fail_all", "landed", "linger", "passed", "poll", "reclaim"]

#: Operations resolved in one go: 1 000 take 1.7 ms, and no turn of the loop may last 5 (measured).
MOST_PER_TURN = 256

#: The kind of what is only a part of an operation: one chunk of a staged copy.
STEP = "step"


def poll(lane: Lane, budget: int = MOST_PER_TURN) -> int:
    """Ask the driver, and resolve what is done, in order. How many were resolved."""
    pending = lane.pending
    if not pending:
        return 0
    reactor = lane.reactor
    reactor.polls += 1
    query = lane._driver.event_query
    resolved = 0
    first = head = last = pending[0]
    # What letting go of one operation makes others enqueue, chunks of a staged copy say, is none of these.
    most = min(budget, len(pending))
    try:
        # The newest first: if it is done, so is everything before it, and one query serves a whole batch.
        newest = pending[-1]
        if newest._lease is None:
            newest = _newest_recorded(lane)
        everything = newest._lease is None or query(newest._lease.handle)
        if not everything and newest is head:
            lane.last_busy = lane._driver.now()
            return 0
        while resolved < most:
            head = pending[0]
            lease = head._lease
            if not everything and lease is not None and not query(lease.handle):
                break
            if head._land is not None and not _landed(lane, head):
                break
            if resolved == 0:
                now = lane._driver.now()
            pending.popleft()
            resolved += 1
            last = head
            _finish(lane, head, now)
    except DeviceFault as fault:
        lane._driver.blame(repr(head))
        reactor.fault(fault)
        return resolved
    if resolved:
        _learn(lane, first, last, resolved, now)
        lane.last_resolved = now
        if lane.queue.entries:
            lane.queue.pump()
        if lane.attended and not pending and not lane.queue.entries:
            reactor.leave(lane)
        if reactor.on_progress is not None:
            reactor.on_progress()
    elif not everything:
        lane.last_busy = lane._driver.now()
    return resolved


def linger(lane: Lane, operation: Operation[Any]) -> None:
    """Ask; and if the operation is likely to end within microseconds, go on asking that long."""
    if lane.poll() and operation._state >= DONE:
        return
    linger = lane.hub.policy.linger
    estimate = operation._estimate
    seconds = None if estimate is None else estimate.seconds
    if seconds is None or seconds > linger or not lane.pending or lane.pending[0] is not operation:
        return
    now = lane._driver.now
    until = now() + linger
    while operation._state < DONE and now() < until:
        lane.poll()


def _newest_recorded(lane: Lane) -> Operation[Any]:
    """The newest operation with an event; the oldest of all if there is none.

    An operation without event and without failure was interrupted between its two driver calls (Ctrl-C): an
    event recorded now is late but true.
    """
    for index in range(len(lane.pending) - 1, -1, -1):
        operation: Operation[Any] = lane.pending[index]
        if operation._lease is not None:
            return operation
        if operation._failure is None and operation._state == SUBMITTED:
            lease = lane.hub.leases.take()
            lane._driver.event_record(lease.handle, lane.handle)
            operation._lease = lease
            return operation
    oldest: Operation[Any] = lane.pending[0]
    return oldest


def _landed(lane: Lane, operation: Operation[Any]) -> bool:
    """The device is done with it; is the host?"""
    if operation._failure is not None or operation._state == ABANDONED:
        return True
    if operation._state == SUBMITTED:
        operation._state = LANDING
        assert operation._land is not None
        try:
            if operation._land(operation):
                operation._land = None
                return True
        except Exception as error:  # noqa: BLE001 - the copy's failure is the operation's
            operation._failure = Failure(error, lane.loop, repr(operation))
            operation._value = error
            operation._land = None
            return True
        return False
    return False


def landed(lane: Lane, operation: Operation[Any], error: BaseException | None = None) -> None:
    """The host's part, begun by ``land``, has ended."""
    operation._land = None
    if error is not None and operation._failure is None:
        operation._failure = Failure(error, lane.loop, repr(operation))
        operation._value = error
    lane.poll()
    lane.reactor.plan(lane)


def _finish(lane: Lane, operation: Operation[Any], now: float) -> None:
    """The operation's turn has come: its event goes back, what it held is let go, everybody is told."""
    lease = operation._lease
    if operation._start is not None or lane.hub.instrument is not None:
        _report(lane, operation)
    if lease is not None:
        operation._lease = None
        if not lease.lent:
            lane.hub.leases.give(lease)
    operation._keep = None
    release = operation._release
    if release is not None:
        operation._release = None
        release()
    lane.latencies.append(now - operation._submitted)
    if operation._state == ABANDONED:
        operation._abandoned = False
    elif operation._failure is None:
        if operation.kind is not STEP:
            lane.reactor.resolved += 1
        operation._finish(DONE, operation._value)
    else:
        if operation.kind is not STEP:
            lane.reactor.failed += 1
        operation._finish(FAILED, operation._value)


def _report(lane: Lane, operation: Operation[Any]) -> None:
    start, end = operation._start, operation._lease
    operation._start = None
    instrument = lane.hub.instrument
    if instrument is not None:
        timed = start is not None and end is not None and end.timing
        instrument.on_resolve(operation, start.handle if timed else 0, end.handle if timed else 0)  # type: ignore[union-attr]
    if start is not None:
        lane.hub.leases.give(start)


def _learn(lane: Lane, first: Operation[Any], last: Operation[Any], count: int, now: float) -> None:
    """Take a sample of a duration; see `predict`."""
    estimate = first._estimate
    if estimate is None or estimate is not last._estimate:
        return
    start = max(first._submitted, lane.last_resolved)
    seconds = (now - start) / count
    blind = now - max(lane.last_busy, start)  # it ended somewhere in here
    if blind <= 100e-6 or blind <= 0.1 * (now - start):
        estimate.caught(seconds)
    elif estimate.seconds is None or seconds < estimate.seconds:
        estimate.overslept(seconds)
    elif (lane.last_busy - start) / count > estimate.seconds:
        estimate.overdue(seconds)


def fail_all(lane: Lane, fault: DeviceFault) -> None:
    """The device has faulted: every operation in here fails with it, awaited or not."""
    failure = Failure(fault, lane.loop, f"the operations of {lane.name}")
    lane.queue.fail_all(fault, failure)
    pending, lane.pending = list(lane.pending), deque()
    for operation in pending:
        # Its event and its memory stay where they are: nobody knows what the device still does.
        operation._lease = None
        operation._start = None
        if operation._state == ABANDONED:
            operation._abandoned = False
            continue
        lane.reactor.failed += operation.kind is not STEP
        operation._failure = failure
        operation._finish(FAILED, fault)


def passed(lane: Lane) -> bool:
    """Has the device done all that it has accepted? Asks the driver, tells nobody."""
    if lane._driver.fault is not None:
        return True
    return all(
        operation._lease is None or lane._driver.event_query(operation._lease.handle)
        for operation in reversed(lane.pending)
    )


def reclaim(lane: Lane) -> bool:
    """Let go of what an orphan held, once the device has passed."""
    if not lane.passed():
        return False
    while lane.pending:
        operation = lane.pending.popleft()
        operation._abandoned = False
        operation._keep = None
        lease, operation._lease = operation._lease, None
        if lease is not None and not lease.lent and lane._driver.fault is None:
            lane.hub.leases.give(lease)
    if not lane.imported and lane._driver.fault is None:
        lane.hub.stream_opened(-1)
        lane._driver.stream_destroy(lane.handle)
    return True
