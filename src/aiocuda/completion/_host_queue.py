"""HostQueue: the operations of one stream that are still on the host."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .._base._log import log
from .._core import POISONED, QUEUED, SHARED, SUBMITTED
from ..errors import BusyError, DeviceFault
from ._pumps import Pumps

if TYPE_CHECKING:
    from .._base._failure import Failure
    from .._core import Ring, StreamOperation
    from ._gates import Gate

__all__ = ["MOST_PER_PUMP", "HostQueue"]

#: Seconds between two events "queue_full" of one stream.
REPORT_SECONDS = 10.0

#: Seconds between two queries of a full stream: an enqueue must stay cheap.
ASK_AGAIN = 50e-6

#: Operations submitted in one pass: 128 launches take 0.6 ms, and no turn of the loop may take 5 ms.
MOST_PER_PUMP = 128


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
        The queues whose oldest entry waits for the submission of an operation of this queue.
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
            return
        operation.call = call
        operation.arguments = arguments
        operation.gate = gate
        operation.status = QUEUED
        entries.append(operation)
        if gate is not None and len(entries) > 1 and entries[0].gate is gate and queue.watch.attended:
            return  # the head waits for the same, and the end of that pumps
        self.pump()
        if entries:
            if not queue.active:
                queue.reactor.activate(queue)
            if len(entries) == 1:
                self._report_full()
            if not queue.watch.attended or len(entries) == 1:
                queue.attend()  # once: a new plan for each enqueue would cost more than the enqueue

    def _takes(self, operation: StreamOperation[Any], gate: Gate | None) -> bool:
        """Return whether a poisoned or shared queue takes an operation; raise `BusyError` if it would have to wait."""
        queue = self._queue()
        poison = queue.poison
        if poison is not None:
            if not poison.delivered:
                queue.rare.skip(operation, poison.failure())
                return False
            queue.poison = None
        if queue.shared and (gate is not None or len(queue.pending) >= queue.device_hot.limit):
            queue.poll()
            if queue.reactor_hot.faulted:  # the poll has found a fault, and has failed everything but this operation
                queue.enqueued -= 1
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
        """Submit the operations for which the stream has room."""
        if self._pumping:
            return  # `Ring.poll`, called below, pumps too
        queue = self._queue()  # first: a call may raise KeyboardInterrupt
        entries, pending, functions = self.entries, queue.pending, queue.rare.submissions
        most = queue.device_hot.limit
        moved = False
        self._pumping = True
        try:
            asked = False
            for _ in range(MOST_PER_PUMP):  # no conditional jump leads back: see `Ring._resolve`
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
                if gate is functions:  # it has no failure, and is closed at the end of most pumps
                    is_open = functions.ready(operation)
                elif gate is not None:
                    is_open = self._is_open(operation, gate)
                if not is_open:
                    moved = moved or is_open is None
                    break
                try:
                    entries.popleft()
                    moved = True
                    if operation.status < SUBMITTED:  # an abandoned one keeps its state
                        operation.status = SUBMITTED
                    queue.submit(operation, operation.call, operation.arguments, ahead=True)
                except BaseException:
                    queue.rare.interruption.put_back(operation)
                    raise
                operation.forget_call()
            else:
                self._pump_soon()
        finally:
            self._pumping = False
        if moved and self.followers:
            self._pump_followers()

    def _gets_room(self) -> bool:
        """Query the full stream, unless it was queried just now. Return whether it has room for an entry."""
        queue = self._queue()
        return (
            queue.driver.now() - queue.last_busy >= ASK_AGAIN and queue.poll(MOST_PER_PUMP) > 0 and bool(self.entries)
        )

    def _pump_followers(self) -> None:
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
            failure = failure.unseen()
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
        if self.entries:  # they hold the queue
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
