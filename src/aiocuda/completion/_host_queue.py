"""The submission queue: a stream's operations that are still on the host.

It is empty in the common case and costs nothing. Three things fill it: the hardware queue behind the stream holds a
bounded number of entries and then blocks its caller; a pageable copy is many steps that nothing may overtake; and an
operation may have to wait for something on the host, its `Gate`: another stream's operation that is itself still
here, a kernel that is being compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BusyError, DeviceFault
from ._failure import Failure
from ._operation import DONE, FAILED, LANDING, QUEUED, STAGING, SUBMITTED, Operation

if TYPE_CHECKING:
    from ._stream_queue import StreamQueue

__all__ = ["Every", "Gate", "HostQueue", "Submitted", "forget_call"]

#: A full stream is asked at most this often for room, in seconds: an enqueue must stay cheap.
ASK_AGAIN = 50e-6

#: Operations submitted in one go: 128 launches take 0.6 ms, and no turn of the loop may last 5.
MOST_PER_PUMP = 128


class Gate(Protocol):
    """What an operation waits for on the host."""

    def ready(self, operation: Operation[Any]) -> bool:
        """May it go to the stream now? Asked again by each `HostQueue.pump`. May raise its failure."""

    def failure(self) -> Failure | None:
        """Asked once when ready: a failure elsewhere that skips the operation."""


class Submitted:
    """Opens once another stream's operation has been given to its stream: then there is an event to wait for."""

    __slots__ = ("_follower", "_known", "_operation")

    def __init__(self, operation: Operation[Any], follower: StreamQueue) -> None:
        self._operation = operation
        self._follower = follower
        failure = operation._failure
        # Who waits for what he could know to have failed means it. Told later, it still skips what depends on it.
        self._known = failure is not None and failure.delivered

    def ready(self, operation: Operation[Any]) -> bool:
        queue = self._operation._queue
        state = self._operation._state
        if state in (SUBMITTED, LANDING, DONE, FAILED):
            return True
        # One that is queued is in there. One that was abandoned may be.
        if state in (QUEUED, STAGING) or any(entry is self._operation for entry in queue.host_queue.entries):
            queue.host_queue.followers[self._follower] = None
            return False
        return True

    def failure(self) -> Failure | None:
        return None if self._known else self._operation._failure


class Every:
    """Opens once all of several gates are open."""

    __slots__ = ("_gates",)

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates

    def ready(self, operation: Operation[Any]) -> bool:
        return all(gate.ready(operation) for gate in self._gates)

    def failure(self) -> Failure | None:
        return next(filter(None, (gate.failure() for gate in self._gates)), None)


class HostQueue:
    """First in, first out, in front of one stream."""

    __slots__ = ("_pumping", "_queue", "_scheduled", "entries", "followers")

    def __init__(self, queue: StreamQueue) -> None:
        self._queue = queue
        self._pumping = False
        self._scheduled = False
        self.entries: deque[Operation[Any]] = deque()
        #: Queues whose head waits for something in here to be submitted.
        self.followers: dict[StreamQueue, None] = {}

    def put(
        self,
        operation: Operation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        gate: Gate | None = None,
    ) -> None:
        """Submit the operation if all before it has been and there is room; else keep it."""
        queue = self._queue
        spoiled = queue.spoiled
        if spoiled is not None:
            if not spoiled.delivered:
                queue.skip(operation, spoiled.failure())
                return
            queue.spoiled = None
        if queue.shared and (gate is not None or len(queue.pending) >= queue.device_state.limit):
            queue.poll()
            if queue.reactor.faulted:  # which that has found: all that was here has failed, and this was not
                queue.enqueued -= 1
                queue.check()
            if len(queue.pending) >= queue.device_state.limit or (gate is not None and not gate.ready(operation)):
                queue.enqueued -= 1
                raise BusyError(
                    f"others enqueue on {queue.name} too, so nothing of ours may wait in front of it; now it cannot "
                    f"take {operation.kind!r} at once: await what it depends on, then try again"
                )
        operation._call = call
        operation._arguments = arguments
        operation._gate = gate
        operation._state = QUEUED
        self.entries.append(operation)
        self.pump()
        if self.entries:
            if not queue.active:
                queue.reactor.activate(queue)
            if not queue.attended or len(self.entries) == 1:
                queue.attend()  # once: to plan anew at each enqueue would cost more than the enqueue

    def pump(self) -> None:
        """Give the stream what fits."""
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
                    # One look for room at most: what follows belongs to a later turn of the loop.
                    if asked or queue._driver.now() - queue.last_busy < ASK_AGAIN:
                        break
                    if not queue.poll(MOST_PER_PUMP) or not entries:
                        break
                    asked = True
                if len(entries) <= least:
                    self._pump_soon()
                    break
                operation = entries[0]
                try:
                    gate = operation._gate
                    if gate is not None:
                        if not gate.ready(operation):
                            break
                        failure = gate.failure()
                        if failure is not None:
                            failure = failure.untold()
                            forget_call(entries.popleft())
                            queue.skip(operation, failure)
                            self.skip_all(failure)
                            moved = True
                            break
                except Exception as error:  # noqa: BLE001 - a gate's failure is the operation's
                    if entries and entries[0] is operation:
                        if not isinstance(error, DeviceFault):
                            forget_call(entries.popleft())
                        elif not queue.active:
                            queue.reactor.activate(queue)  # a fault fails it with all others, if it is known to be here
                        queue.fail(operation, error)
                    moved = True
                    break
                if not entries or entries[0] is not operation:
                    continue  # a fault has emptied the queue meanwhile
                entries.popleft()
                moved = True
                if operation._state < DONE:
                    operation._state = SUBMITTED
                try:
                    queue.submit(operation, operation._call, operation._arguments, ahead=True)
                except BaseException:
                    if operation not in queue.pending:
                        entries.appendleft(operation)  # interrupted (Ctrl-C) before it was in its place
                    raise
                forget_call(operation)
        finally:
            self._pumping = False
        if moved and self.followers:
            followers, self.followers = self.followers, {}
            for follower in followers:
                follower.host_queue.pump()
                follower.attend()

    def _pump_soon(self) -> None:
        """There is room for more, in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._queue.loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._scheduled = False
        self.pump()

    def skip_all(self, failure: Failure) -> None:
        """Something before them failed: none of these runs."""
        while self.entries:
            operation = self.entries.popleft()
            forget_call(operation)
            self._queue.skip(operation, failure)

    def fail_all(self, fault: DeviceFault, failure: Failure) -> None:
        """The device has faulted."""
        while self.entries:
            operation = self.entries[0]  # and out of it when it is over: see `StreamQueue.fail_all`
            forget_call(operation)
            self._queue.lose(operation, fault, failure)
            self.entries.popleft()

    def withdraw(self) -> list[Operation[Any]]:
        """Take everything out again."""
        operations = list(self.entries)
        self.entries.clear()
        for operation in operations:
            forget_call(operation)
        return operations

    def __len__(self) -> int:
        return len(self.entries)


def forget_call(operation: Operation[Any]) -> None:
    """It is in the queue no more. Whoever keeps the operation keeps nothing of what it was to be called with."""
    operation._gate = operation._call = None
    operation._arguments = ()
