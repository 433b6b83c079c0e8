"""HostQueue: the operations of one stream that are still on the host, and the gates that they wait for.

To *pump* a host queue is to submit its operations, the oldest first, while the stream has room and their gates are
open. `Pumps` does this for streams that wait for each other. A queue is *attended* while an operation of it has a
waiter, and the reactor has a plan for it: when to query next, or which notifier is armed. An operation is *skipped* if
an earlier one has failed: it goes to ``pending`` and fails there in its turn.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from .._base._log import log
from .._core import DONE, FAILED, LANDING, POISONED, QUEUED, SHARED, STAGING, SUBMITTED
from ..errors import BusyError, DeviceFault

if TYPE_CHECKING:
    from .._base._failure import Failure
    from .._core import Ring, StreamOperation

__all__ = ["MOST_PER_PUMP", "Every", "Gate", "HostQueue", "Pumps", "Submitted"]

#: Seconds between two events "queue_full" of one stream.
REPORT_SECONDS = 10.0

#: Seconds between two queries of a full stream: an enqueue must stay cheap.
ASK_AGAIN = 50e-6

#: Operations submitted in one pass: 128 launches take 0.6 ms, and no turn of the loop may take 5 ms.
MOST_PER_PUMP = 128

#: Streams that are pumped in one iteration of the loop: each of them may submit up to `MOST_PER_PUMP` operations.
MOST_AT_ONCE: Final = 128


class Gate(Protocol):
    """A condition on the host that an operation waits for."""

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether the operation may be submitted now. Each `HostQueue.pump` asks. May raise its failure."""

    def failure(self) -> Failure | None:
        """Return the failure of something else because of which the operation is skipped. Called once, when ready."""


class Submitted:
    """A gate that opens when an operation of another stream was submitted, so that it has an event to wait for."""

    __slots__ = ("_follower", "_known", "_operation")

    def __init__(self, operation: StreamOperation[Any], follower: Ring) -> None:
        self._operation = operation
        self._follower = follower
        failure = operation.failure
        # If the program knew of the failure before this wait, it wants the wait all the same. A failure that it
        # receives later still skips the operations that depend on it.
        self._known = failure is not None and failure.delivered

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether the other operation has left its host queue. If not, that queue pumps this one then."""
        queue = self._operation.queue
        state = self._operation.status
        if state in (SUBMITTED, LANDING, DONE, FAILED):
            return True
        # An unfinished operation is in the host queue, an abandoned one may be.
        if state in (QUEUED, STAGING) or any(entry is self._operation for entry in queue.on_host):
            queue.rare.host_queue.followers[self._follower] = None
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
    followers : dict of Ring
        The queues whose oldest entry waits for the submission of an operation of this queue; a set in their order.
    """

    __slots__ = ("_pumping", "_queue", "_reported_at", "_scheduled", "entries", "followers")

    def __init__(self, queue: Ring) -> None:
        self._queue: Callable[[], Ring] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it
        self._reported_at = -math.inf  # the time of the last event "queue_full"
        self._pumping = False
        self._scheduled = False
        self.entries: deque[StreamOperation[Any]] = queue.on_host
        self.followers: dict[Ring, None] = {}

    def put(
        self,
        operation: StreamOperation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        gate: Gate | None = None,
    ) -> None:
        """Add an operation, and submit it if all earlier ones were submitted and the stream has room."""
        queue, entries = self._queue(), self.entries
        if queue.obstacles & (POISONED | SHARED) and not self._takes(operation, gate):
            return  # it was skipped
        operation.call = call
        operation.arguments = arguments
        operation.gate = gate
        operation.status = QUEUED
        entries.append(operation)
        if gate is not None and len(entries) > 1 and entries[0].gate is gate and queue.watch.attended:
            return  # the head waits for the same gate, and whatever opens that pumps this queue
        self.pump()
        if entries:
            if not queue.active:
                queue.reactor.activate(queue)
            if len(entries) == 1:
                self._report_full()
            # Not for each entry: a new plan for every enqueue would cost more than the enqueue.
            if not queue.watch.attended or len(entries) == 1:
                queue.attend()

    def _takes(self, operation: StreamOperation[Any], gate: Gate | None) -> bool:
        """Return whether a queue that is poisoned or shared takes an operation.

        If it is poisoned, skip the operation and return False, unless a caller has received the failure. If it is
        shared, raise `BusyError` for an operation that would have to wait on the host.
        """
        queue = self._queue()
        poison = queue.poison
        if poison is not None:
            if not poison.delivered:
                queue.rare.skip(operation, poison.failure())
                return False
            queue.poison = None  # a caller has received the failure: the stream is usable again
        if queue.shared and (gate is not None or len(queue.pending) >= queue.device_hot.limit):
            queue.poll()
            if queue.reactor_hot.faulted:  # the poll has found a fault, and has failed everything but this operation
                queue.enqueued -= 1  # the caller has counted it
                queue.check()
            if len(queue.pending) >= queue.device_hot.limit or (gate is not None and not gate.ready(operation)):
                queue.enqueued -= 1
                raise BusyError(
                    f"others enqueue on {queue.name} too, so nothing of ours may wait in front of it; now it cannot "
                    f"take {operation.kind!r} at once: await what it depends on, then try again"
                )
        return True

    def _report_full(self) -> None:
        """Log that the stream takes no more operations for now; at most once in `REPORT_SECONDS`."""
        queue, limit = self._queue(), self._queue().device_hot.limit
        now = queue.driver.now()
        if len(queue.pending) >= limit and now - self._reported_at > REPORT_SECONDS:
            self._reported_at = now
            device = queue.device_state.properties.name
            log("info", "queue_full", queue="stream", device=device, stream=queue.name, limit=limit)

    def pump(self) -> None:
        """Submit entries while the stream has room and their gates are open; at most `MOST_PER_PUMP` of them."""
        if self._pumping:
            return  # `Ring.poll`, called below, pumps too
        queue = self._queue()  # before `_pumping` is set: a call may raise KeyboardInterrupt
        entries, pending, submissions = self.entries, queue.pending, queue.rare.submissions
        most = queue.device_hot.limit
        moved = False
        self._pumping = True
        try:
            asked = False
            for _ in range(MOST_PER_PUMP):  # not `while`: in 3.13 and 3.14, Ctrl-C at its jump back skips the handlers
                if not entries:
                    break
                if len(pending) >= most:
                    # Ask for room once at most: the rest belongs to a later turn of the loop.
                    if asked or not self._gets_room():
                        break
                    asked = True
                operation = entries[0]
                gate = operation.gate
                is_open: bool | None = True
                if (
                    gate is submissions
                ):  # as `_is_open`, without its call: it has no failure, and is closed in most pumps
                    is_open = submissions.ready(operation)
                elif gate is not None:
                    is_open = self._is_open(operation, gate)
                if not is_open:
                    moved = moved or is_open is None  # it has failed or was skipped, and all entries with it
                    break
                try:
                    entries.popleft()
                    moved = True
                    if operation.status < SUBMITTED:  # an abandoned one keeps its state
                        operation.status = SUBMITTED
                    queue.submit(operation, operation.call, operation.arguments, ahead=True)
                except BaseException:  # such as Ctrl-C: most errors fail the operation, and are not raised
                    queue.rare.interruption.put_back(operation)
                    raise
                operation.forget_call()
            else:  # no `break`: there may be more
                self._pump_soon()
        finally:
            self._pumping = False
        if moved and self.followers:
            self._pump_followers()

    def _gets_room(self) -> bool:
        """Query the full stream, unless it was queried just now. Return whether it has room, and an entry is left."""
        queue = self._queue()
        return (
            queue.driver.now() - queue.last_busy >= ASK_AGAIN and queue.poll(MOST_PER_PUMP) > 0 and bool(self.entries)
        )

    def _pump_followers(self) -> None:
        """Pump the queues that wait for an operation of this one: it may have been submitted."""
        reactor = self._queue().reactor
        followers, self.followers = self.followers, {}
        if reactor.pumps is None:
            reactor.pumps = Pumps(reactor.loop)
        reactor.pumps.pump(followers)

    def _is_open(self, operation: StreamOperation[Any], gate: Gate) -> bool | None:
        """Return whether the gate of the oldest entry is open; None if the operation has failed or was skipped."""
        queue, entries = self._queue(), self.entries
        try:
            if not gate.ready(operation):
                return False
            failure = gate.failure()
            if failure is None:
                return bool(entries) and entries[0] is operation  # unless a fault has emptied the host queue
            failure = failure.unseen()  # it may be delivered already; whoever awaits this operation gets it again
            entries.popleft().forget_call()
            queue.rare.skip(operation, failure)
            self.skip_all(failure)
        except Exception as error:  # noqa: BLE001 - the operation fails with the failure of its gate
            if entries and entries[0] is operation:
                if not isinstance(error, DeviceFault):
                    entries.popleft().forget_call()
                elif not queue.active:
                    queue.reactor.activate(queue)  # the fault fails all operations of active queues, this one too
                queue.rare.fail(operation, error)
        return None

    def _pump_soon(self) -> None:
        """Submit more in the next turn of the loop."""
        if not self._scheduled:
            loop = self._queue().loop
            self._scheduled = True
            loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._scheduled = False
        if self.entries:  # they hold the ring: without one, `_queue()` might return None
            self.pump()

    def skip_all(self, failure: Failure) -> None:
        """Skip all operations, because an earlier one has failed."""
        while self.entries:
            operation = self.entries.popleft()
            operation.forget_call()
            self._queue().rare.skip(operation, failure)

    def fail_all(self, fault: DeviceFault, failure: Failure) -> Iterator[tuple[StreamOperation[Any], bool]]:
        """Fail all operations, because the device has faulted. Yield each one, and whether it was awaited."""
        while self.entries:
            operation = self.entries[0]  # removed last: after Ctrl-C in a hook, the next call goes on with it
            awaited = operation.is_awaited  # before `fail`, which drops the waiters
            operation.forget_call()
            operation.fail(failure, fault)
            yield operation, awaited
            if self.entries and self.entries[0] is operation:  # else a hook of the caller has emptied the queue
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


class Pumps:
    """The streams of one event loop whose oldest operation on the host waited for one that is submitted now.

    Two streams may wait for each other in turn, thousands of times. So a stream does not pump another one directly,
    which would be as many nested calls: it adds that stream to a list, and the outermost call works through the list.
    """

    __slots__ = ("_is_pumping", "_is_scheduled", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Ring] = []  # the next one is the last
        self._is_pumping = False
        self._is_scheduled = False

    def pump(self, queues: Iterable[Ring]) -> None:
        """Pump these streams. A call inside another one only adds them to the list, before those already there."""
        self._waiting.extend(reversed(tuple(queues)))
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            for _ in range(MOST_AT_ONCE):
                if not self._waiting:
                    break
                queue = self._waiting.pop()
                queue.rare.pump()
                queue.attend()
        finally:
            self._is_pumping = False
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._is_scheduled = False
        self.pump(())
