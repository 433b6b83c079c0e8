"""The invariants, looked at after every step of the loop."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...completion._host_queue import MOST_PER_PUMP
from ...completion._operation import INTERNAL, TRANSITIONS, Operation, State
from ...driver.simulated import SimulatedDriver
from ...errors import DeviceFault
from ...memory._buffer import DeviceBuffer
from .heard import Heard

if TYPE_CHECKING:
    from ..._device import Device
    from ...completion._notifiers import NotifierPool
    from ...completion._stream_queue import StreamQueue

__all__ = ["Checker", "ViolationError"]

#: A turn of the loop that does more than this takes longer than 5 ms (256 resolves take 1.7; measured).
MOST_RESOLVED = 600
MOST_CALLS = 3_000

#: Virtual seconds after which everybody has been told of a fault.
MOST_UNTOLD = 0.1


class ViolationError(AssertionError):
    """An invariant that does not hold: ``V6 …``."""


class _Watched(deque[Operation[Any]]):
    """A queue's pending operations, under somebody's eyes."""

    def __init__(self, operations: Iterable[Operation[Any]], checker: Checker, queue: StreamQueue) -> None:
        super().__init__(operations)
        self._checker = checker
        self._queue = queue
        self._newest = 0

    def append(self, operation: Operation[Any]) -> None:
        if operation.kind != INTERNAL:
            if operation.id < self._newest:
                self._checker.found(f"V3 {operation!r} was given to the device after a later one of its stream")
            self._newest = operation.id
        super().append(operation)

    def popleft(self) -> Operation[Any]:
        operation = super().popleft()
        self._checker.resolving(operation)
        return operation


class _Rings:
    """The notifiers of one loop that were rung, until their tags have come."""

    def __init__(self, notifier_pool: NotifierPool) -> None:
        self._rack = weakref.ref(notifier_pool)  # ports outlive everything, and this one's `drain` is now ours
        self._out: dict[int, int] = {}  # tag → which notifier
        self._drain = notifier_pool.port.drain
        notifier_pool.port.drain = self._drained  # type: ignore[method-assign]

    def _drained(self) -> list[int]:
        tags = self._drain()
        for tag in tags:
            self._out.pop(tag, None)
        return tags

    def too_free(self) -> bool:
        """Is a notifier free to be rung again that nobody has heard yet?"""
        notifier_pool, out = self._rack(), self._out
        if notifier_pool is None or not (notifier_pool.armed or out):
            return False
        for tag, armed in notifier_pool.armed.items():
            out[tag] = armed.index
        return not set(out.values()).isdisjoint(notifier_pool._free)


class Checker:
    """Looks at devices of one simulated driver.

    Operations that a program has made are followed from `follow` on; what is written down of queues, leases and memory
    is looked at where it is.
    """

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver
        self.devices: list[Device] = []
        self.heard = Heard(driver.upsets)
        self.violations: list[str] = []
        self.transitions: set[tuple[State, State]] = set()
        self.told: Counter[int] = Counter()  # callbacks by operation
        self._states: dict[Operation[Any], int] = {}
        self._all: list[Operation[Any]] = []
        #: Something that is not followed was abandoned.
        self.dropped = False
        self._borrowed: list[tuple[Operation[Any], Any]] = []
        self._resolved = 0
        self._enqueued = 0
        self._calls = 0
        self._seen_of_driver = 0
        self._refused = 0
        self._faulted = False  # the loop knew of it before this step
        self._faulted_at: float | None = None
        self._told_of_fault = False  # by an operation
        self._ends: dict[Operation[Any], int] = {}
        self._before: dict[Operation[Any], Operation[Any]] = {}
        self._behind: dict[Operation[Any], list[Operation[Any]]] = {}
        #: Asked when everything has been closed: what is wrong. Not where the loop went first.
        self.at_end: list[Callable[[], Iterable[str]]] = []
        self._rings: dict[NotifierPool, _Rings] = {}
        self._sizes: list[list[int]] = []  # by device, of what is gone through where one of them has changed

    def found(self, violation: str) -> None:
        """An invariant does not hold."""
        self.violations.append(violation)

    def unforeseen(self, error: Exception) -> None:
        """An error that nobody has foreseen: perhaps of something that had ended, and went on."""
        for operation, ended in self._ends.items():
            if operation.status != ended:
                self.found(f"V1 {operation!r} had ended as {State(ended).name}")
        self.found(f"P27 {type(error).__name__}: {error}")

    # -- what is looked at ---------------------------------------------------------------------------------------

    def watch(self, device: Device) -> None:
        """Look at this device from now on."""
        self.devices.append(device)
        self._sizes.append([])

    def follow(self, operation: Operation[Any]) -> None:
        """Look at this one from now on."""
        self._states[operation] = operation.status
        self._all.append(operation)
        operation.add_done_callback(self._tell)

    def borrow(self, operation: Operation[Any], array: Any) -> None:
        """The operation holds this array, of which only a weak reference is given, until it has passed."""
        self._borrowed.append((operation, array))

    def order(self, waiting: Operation[Any], before: Operation[Any]) -> None:
        """One operation waits, in its stream, for another one."""
        self._before[waiting] = before

    def behind(self, operation: Operation[Any], before: Iterable[Operation[Any]]) -> None:
        """An operation comes, on the device, behind these and all that stands in front of them."""
        self._behind.setdefault(operation, []).extend(before)

    def _tell(self, operation: Operation[Any]) -> None:
        self.told[operation.id] += 1

    def resolving(self, operation: Operation[Any]) -> None:
        """An operation leaves its queue: V2 and V9."""
        # What an orphan lets go of tells nobody; and what a fault fails it fails at once.
        self._resolved += not operation.queue.loop.is_closed() and operation.status != State.FAILED
        lease = operation.lease
        if lease is None or operation.failure is not None or self.driver.fault is not None:
            return
        if not self.is_done(operation):
            self.found(f"V2 {operation!r} was resolved before the device had done it")
        if self._behind:
            for other in self._behind.pop(operation, ()):
                self._look_behind(operation, other)
        before = self._before.pop(operation, None)
        if before is None:
            return
        self._look_behind(operation, before)
        if before.failure is not None and not before.failure.delivered and operation.status < State.DONE:
            self.found(f"V9 {operation!r} was done although {before!r} had failed, and nobody knew")

    def _look_behind(self, operation: Operation[Any], before: Operation[Any]) -> None:
        # One that failed may have an event that was recorded late, behind more than itself.
        others = [other for other in before.queue.pending if other.id <= before.id and other.failure is None]
        if not all(map(self.is_done, others)):
            self.found(f"V9 {operation!r} was done before what it waits for, {before!r} and all in front of it")

    def is_done(self, operation: Operation[Any]) -> bool:
        """Is the device done with it, as far as its event tells?"""
        lease = operation.lease
        event = None if lease is None else self.driver._machine.events.get(lease.handle)
        return event is None or event.is_done

    def step(self) -> None:
        """After each handle that the loop has run."""
        driver = self.driver
        if len(driver.violations) > self._seen_of_driver:
            for text in driver.violations[self._seen_of_driver :]:
                self.found(text)
            self._seen_of_driver = len(driver.violations)
        if len(driver.refused) > self._refused:
            if self._faulted:
                self.found(f"V7 {driver.refused[-1]} was called when the loop knew of the fault")
            self._refused = len(driver.refused)
        self._look_at_states()
        enqueued = 0
        for index, device in enumerate(self.devices):
            queues: list[StreamQueue] = []
            for loop_state in device._loop_states._loop_states.values():
                queues += loop_state.queues
                self._faulted = self._faulted or loop_state.reactor.faulted
                self._look_at_bells(loop_state.reactor.notifier_pool)
            for queue in queues:
                enqueued += queue.enqueued
            if not device.closed:
                self._look_at_lanes(index, queues)
        self._faulted = self._faulted or self._told_of_fault
        resolved, self._resolved = self._resolved, 0
        # Who enqueues makes room as he goes, with each call by so much at most, for what others have left there, too.
        if resolved > MOST_RESOLVED + MOST_PER_PUMP * max(0, enqueued - self._enqueued):
            self.found(f"V14 {resolved} operations were resolved in one step")
        self._enqueued = enqueued
        calls, self._calls = self._calls, driver._calls
        if driver._calls - calls > MOST_CALLS:
            self.found(f"V14 {driver._calls - calls} calls of the driver in one step")
        if driver.fault is not None:
            self._look_at_fault()
        if self.heard.unplanned:
            self._look_at_heard()
        if self.violations:
            raise ViolationError(self.violations[0])

    def _look_at_states(self) -> None:
        changed = [operation for operation, before in self._states.items() if operation.status != before]
        if changed:
            self._look_at_changed(changed)
        if self._borrowed:
            self._look_at_borrowed()

    def _look_at_changed(self, changed: list[Operation[Any]]) -> None:
        ended = []
        for operation in changed:
            now = operation.status
            self._check_way(operation, State(self._states[operation]), State(now))
            self._states[operation] = now
            if now >= State.DONE:
                ended.append(operation)
        for operation in ended:
            del self._states[operation]
            self._ends[operation] = operation.status
            if operation.status == State.FAILED:
                self.heard.error(operation.value)
                self._told_of_fault = self._told_of_fault or isinstance(operation.value, DeviceFault)
        if ended:
            self._check_order(ended)

    def _look_at_borrowed(self) -> None:
        for operation, array in self._borrowed:
            if array() is None and not operation.is_settled and self.driver.fault is None:
                if operation.status != State.ABANDONED or operation.submitted_at:  # else it was withdrawn
                    self.found(f"V4 {operation!r} still uses an array that was let go")
        self._borrowed = [(op, array) for op, array in self._borrowed if not op.is_settled]

    def _look_at_heard(self) -> None:
        for text in self.heard.unplanned:
            self.found(f"P27 the loop was told: {text}")
        self.heard.unplanned.clear()

    def _look_at_fault(self) -> None:
        """P3: everybody is told of it in time. V4: what uses memory that has gone makes one."""
        now = self.driver.now()
        if self._faulted_at is None:
            self._faulted_at = now
            if not self.driver.upsets.happened:
                self.found(f"V4 nothing was to go wrong: {self.driver.fault}")
        if now - self._faulted_at > MOST_UNTOLD:
            for operation in self._states:
                if not operation.queue.loop.is_closed():
                    self.found(f"P3 {operation!r} has not heard of the fault {now - self._faulted_at:.3f} s ago")
                    return

    def _check_order(self, ended: list[Operation[Any]]) -> None:
        """V3: none is done while an earlier one of its stream is not."""
        oldest: dict[StreamQueue, int] = {}
        for operation in self._states:
            oldest.setdefault(operation.queue, operation.id)
        for operation in ended:
            if operation.status == State.DONE and operation.id > oldest.get(operation.queue, operation.id):
                self.found(f"V3 {operation!r} is done, and an earlier one of its stream is not")

    def _check_way(self, operation: Operation[Any], before: State, now: State) -> None:
        """V1: is there a way from one state to the other?"""
        if now in TRANSITIONS[before]:
            self.transitions.add((before, now))
            return
        reached, ways = {before}, [before]
        while ways:
            for following in TRANSITIONS[ways.pop()]:
                if following not in reached:
                    reached.add(following)
                    ways.append(following)
        if now not in reached:
            self.found(f"V1 {operation!r} went from {before.name} to {now.name}")

    def _look_at_bells(self, notifier_pool: NotifierPool) -> None:
        rings = self._rings.get(notifier_pool)
        if rings is None:
            rings = self._rings[notifier_pool] = _Rings(notifier_pool)
        if rings.too_free():
            self.found("V5 a notifier is free to be rung again, and its own tag has not come")

    def _look_at_lanes(self, index: int, queues: list[StreamQueue]) -> None:
        device = self.devices[index]
        plain = device._device_state.leases.plain
        sizes = [len(queue.pending) for queue in queues]
        sizes += len(plain), len(self._states)
        if sizes == self._sizes[index]:
            return  # a look at the device: nothing has come or gone
        self._sizes[index] = sizes
        held: set[int] = set()
        for queue in queues:
            if type(queue.pending) is not _Watched:
                queue.pending = _Watched(queue.pending, self, queue)
            given = sum(operation.submitted_at > 0 for operation in queue.pending)  # what was withdrawn stands here too
            if given > 2 * device._device_state.max_in_flight + 64:
                self.found(f"V12 {given} operations of {queue.name} are with the device")
            for operation in queue.pending:
                lease = operation.lease
                if lease is not None:
                    held.add(lease.handle)
                if operation.kind is INTERNAL and operation.keep is not None:
                    self._look_at_chunk(queue, operation)
        idle = [lease.handle for lease in plain]
        if len(set(idle)) != len(idle):
            self.found("V5 an event is in its pool twice")
        if held & set(idle):
            self.found("V5 an event in use is in its pool")

    def _look_at_chunk(self, queue: StreamQueue, chunk: Operation[Any]) -> None:
        """V4: the device copies it just now, so its buffer is not free."""
        keep: Any = chunk.keep
        for part in keep:
            if isinstance(part, DeviceBuffer):
                use = part._block.uses.get(queue)
                if use is None or use.is_settled:
                    self.found(f"V4 {part!r} counts as unused, and {queue.name} has a chunk of it with the device")

    # -- at the end ----------------------------------------------------------------------------------------------

    def end(self, loop_closed: bool = False) -> None:
        """Everything has been closed: V1 and V6. Where the loop went first, nobody was told."""
        for operation in () if loop_closed else self._all:
            if not operation.done():
                self.found(f"V1 {operation!r} never ended")
            elif not operation.is_settled:
                self.found(f"V1 {operation!r} ended, and its device is still said to be at work on it")
            elif self.told[operation.id] != 1:
                self.found(f"V1 {operation!r} told its callback {self.told[operation.id]} times")
            elif self._ends.get(operation, operation.status) != operation.status:
                self.found(f"V1 {operation!r} had ended as {State(self._ends[operation]).name}")
        # And with it what it failed with.
        dropped = self.dropped or any(operation.status == State.ABANDONED for operation in self._all)
        for collection in (self._all, self._states, self._ends, self._before, self._behind, self._borrowed):
            collection.clear()  # what nobody has read is told now
        gc.collect()
        asked = None
        for asked in () if loop_closed else self.at_end:
            self.violations.extend(asked())
        # What they look at holds errors, and the traceback of one that a job has raised holds the driver call during
        # which this driver has run the job.
        del asked
        self.at_end.clear()
        gc.collect()
        self._look_at_heard()
        if not (loop_closed or dropped) and self.driver.fault is None:
            unheard = self.heard.unheard()
            if unheard is not None:
                self.found(f"P27 {unheard}")
        if not self.devices or self.driver.fault is not None:
            return
        for device in self.devices:
            counts = device.statistics()
            if counts.in_flight:
                self.found(f"V6 {counts.in_flight} operations of {device.name} are in flight after the end")
            used = self.driver._memory._pools[device.index].used
            if used and not device.memory.exports.held:  # else somebody else holds some, which stays allocated
                self.found(f"V6 {used} bytes of {device.name}'s memory are left after the end")
            tokens = len(device._device_state.budget.tokens)
            if tokens != self.driver.notifier_limit(device.index):
                self.found(f"V6 {tokens} notifiers of {device.name} may be armed after the end")
        counted = self.driver.statistics()
        for what in ("streams", "events"):
            if counted[what]:
                self.found(f"V6 {counted[what]} {what} are left after the end")
        pages = len(self.driver._pages._ranges)
        if pages:
            self.found(f"V6 {pages} ranges of pinned memory are left after the end")
