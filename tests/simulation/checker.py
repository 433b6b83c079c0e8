"""The invariants that are checked after every step of the event loop."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiocuda._core import Operation
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.errors import DeviceFault
from tests.simulation import internals
from tests.simulation.error_log import ErrorLog
from tests.simulation.internals import MOST_PER_PUMP, TRANSITIONS, State

if TYPE_CHECKING:
    from aiocuda import Device
    from aiocuda._core import Ring
    from aiocuda.completion._notifiers import NotifierPool

__all__ = ["Checker", "ViolationError"]

#: V14: one step of the loop may do this much, which takes about 5 ms (256 resolved operations take 1.7; measured).
MOST_RESOLVED = 600
MOST_CALLS = 3_000

#: P3: virtual seconds after a fault within which all unfinished operations fail.
MOST_SECONDS_AFTER_FAULT = 0.1


class ViolationError(AssertionError):
    """An invariant does not hold: ``V6 …``. Ends the program."""


class Checker:
    """Checks the invariants on the devices of one simulated driver.

    `step` is called after each step of the event loop. It checks the queues, events and notifiers of the devices that
    `watch` has named and the operations that `follow` has named. The program states what it expects by `borrow`,
    `expect_wait` and `expect_after`. `end` checks what is left when everything has been closed.

    Attributes
    ----------
    violations : list of str
        What does not hold; each entry begins with the id of the invariant.
    transitions : set
        The changes of state that operations have made.
    errors : ErrorLog
        The errors that were reported to the program.
    something_abandoned : bool
        Set by the program when it abandons something that is not followed.
    final_checks : list of callable
        Called by `end`; each returns violations. Not called if the loop was closed early.
    """

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver
        self.devices: list[Device] = []
        self.errors = ErrorLog(driver.upsets)
        self.violations: list[str] = []
        self.transitions: set[tuple[State, State]] = set()
        self.something_abandoned = False
        self.final_checks: list[Callable[[], Iterable[str]]] = []
        self._all: list[Operation[Any]] = []
        self._unfinished: dict[Operation[Any], State] = {}
        self._finished: dict[Operation[Any], State] = {}
        self._callback_counts: Counter[int] = Counter()  # by operation id
        self._borrowed: list[tuple[Operation[Any], Callable[[], object]]] = []
        self._waits: dict[Operation[Any], Operation[Any]] = {}
        self._earlier: dict[Operation[Any], list[Operation[Any]]] = {}
        self._rung: dict[NotifierPool, internals.RungNotifiers] = {}
        self._sizes: list[list[int]] = []  # by device: an unchanged size means that a queue needs no check
        # Counts at the end of the last step.
        self._enqueued = 0
        self._calls = 0
        self._driver_violations = 0
        self._refused = 0
        self._resolved = 0  # in this step
        # The fault.
        self._loop_knows_fault = False
        self._operation_had_fault = False
        self._fault_time: float | None = None

    def report(self, violation: str) -> None:
        """Report an invariant that does not hold."""
        self.violations.append(violation)

    def report_error(self, error: Exception) -> None:
        """Report an unexpected error of the program. Report finished operations with a changed state, too."""
        for operation, state in self._finished.items():
            if internals.state_of(operation) != state:
                self.report(f"V1 {operation!r} had already ended as {state.name}")
        self.report(f"P27 {type(error).__name__}: {error}")

    # -- what the program expects --------------------------------------------------------------------------------

    def watch(self, device: Device) -> None:
        """Check this device from now on."""
        self.devices.append(device)
        self._sizes.append([])

    def follow(self, operation: Operation[Any]) -> None:
        """Check the states of this operation from now on."""
        self._unfinished[operation] = internals.state_of(operation)
        self._all.append(operation)
        operation.add_done_callback(self._count_callback)

    def borrow(self, operation: Operation[Any], array: Callable[[], object]) -> None:
        """Expect that an operation keeps an array, given by a weak reference, until the device has finished."""
        self._borrowed.append((operation, array))

    def expect_wait(self, wait: Operation[Any], awaited: Operation[Any]) -> None:
        """Expect that ``wait`` is done after ``awaited``, and fails if that failed and no caller has seen it."""
        self._waits[wait] = awaited

    def expect_after(self, operation: Operation[Any], earlier: Iterable[Operation[Any]]) -> None:
        """Expect that the device runs an operation after these, and after all earlier operations of their streams."""
        self._earlier.setdefault(operation, []).extend(earlier)

    def _count_callback(self, operation: Operation[Any]) -> None:
        self._callback_counts[operation.id] += 1

    # -- when an operation is resolved ---------------------------------------------------------------------------

    def _check_resolved(self, operation: Operation[Any]) -> None:
        """Check V2 and V9 for an operation that leaves its queue."""
        state = internals.state_of(operation)
        # V14 does not count operations that fail with a fault, or belong to a closed loop: they resolve all together.
        self._resolved += not internals.loop_is_closed(operation) and state != State.FAILED
        if (
            internals.event_handle(operation) is None
            or internals.has_failed(operation)
            or self.driver.fault is not None
        ):
            return
        if not self.is_device_done(operation):
            self.report(f"V2 {operation!r} was resolved before the device had done it")
        if self._earlier:
            for other in self._earlier.pop(operation, ()):
                self._check_after(operation, other)
        awaited = self._waits.pop(operation, None)
        if awaited is None:
            return
        self._check_after(operation, awaited)
        if internals.has_failed(awaited) and not internals.failure_was_seen(awaited) and state < State.DONE:
            self.report(f"V9 {operation!r} was done although {awaited!r} had failed and no caller had seen that")

    def _check_after(self, operation: Operation[Any], earlier: Operation[Any]) -> None:
        if not all(map(self.is_device_done, internals.operations_before(earlier))):
            self.report(f"V9 {operation!r} was done before {earlier!r} and the operations before it")

    def is_device_done(self, operation: Operation[Any]) -> bool:
        """True if the device has finished an operation, or the operation has no event."""
        return internals.is_device_done(self.driver, operation)

    # -- after each step -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Check everything after one callback of the event loop.

        Raises
        ------
        ViolationError
            An invariant does not hold.
        """
        driver = self.driver
        self._check_driver()
        self._check_operations()
        enqueued = 0
        for index, device in enumerate(self.devices):
            queues: list[Ring] = []
            for of_loop, knows_fault, notifier_pool in internals.loop_states(device):
                queues += of_loop
                self._loop_knows_fault = self._loop_knows_fault or knows_fault
                self._check_notifiers(notifier_pool)
            enqueued += internals.retired_operations(device)
            for queue in queues:
                enqueued += queue.enqueued
            if not device.closed:
                self._check_queues(index, queues)
        self._loop_knows_fault = self._loop_knows_fault or self._operation_had_fault
        self._check_work(enqueued)
        if driver.fault is not None:
            self._check_fault()
        if self.errors.unexpected:
            self._report_unexpected()
        if self.violations:
            raise ViolationError(self.violations[0])

    def _check_driver(self) -> None:
        """Take over what the driver has found itself (V8, V11, V12, V16), and check V7."""
        driver = self.driver
        if len(driver.violations) > self._driver_violations:
            for text in driver.violations[self._driver_violations :]:
                self.report(text)
            self._driver_violations = len(driver.violations)
        if len(driver.refused) > self._refused:
            if self._loop_knows_fault:
                self.report(f"V7 {driver.refused[-1]} was called when the loop knew of the fault")
            self._refused = len(driver.refused)

    def _check_operations(self) -> None:
        """V1, V3, V4."""
        changed = internals.changed_operations(self._unfinished)
        if changed:
            self._check_changed(changed)
        if self._borrowed:
            self._check_borrowed()

    def _check_changed(self, changed: list[Operation[Any]]) -> None:
        finished = []
        for operation in changed:
            state = internals.state_of(operation)
            self._check_transition(operation, self._unfinished[operation], state)
            self._unfinished[operation] = state
            if state >= State.DONE:
                finished.append(operation)
        for operation in finished:
            self._finished[operation] = state = self._unfinished.pop(operation)
            if state == State.FAILED:
                error = internals.error_of(operation)
                self.errors.record(error)
                self._operation_had_fault = self._operation_had_fault or isinstance(error, DeviceFault)
        if finished:
            self._check_order(finished)

    def _check_transition(self, operation: Operation[Any], before: State, now: State) -> None:
        """V1: can the state have changed like this? Several changes may happen within one step."""
        if now in TRANSITIONS[before]:
            self.transitions.add((before, now))
            return
        reachable, left = {before}, [before]
        while left:
            for following in TRANSITIONS[left.pop()]:
                if following not in reachable:
                    reachable.add(following)
                    left.append(following)
        if now not in reachable:
            self.report(f"V1 {operation!r} went from {before.name} to {now.name}")

    def _check_order(self, finished: list[Operation[Any]]) -> None:
        """V3: no operation is done while an earlier one of its stream is unfinished."""
        oldest: dict[Ring, int] = {}
        for operation in self._unfinished:
            oldest.setdefault(internals.queue_of(operation), operation.id)
        for operation in finished:
            if self._finished[operation] == State.DONE:
                if operation.id > oldest.get(internals.queue_of(operation), operation.id):
                    self.report(f"V3 {operation!r} is done, and an earlier operation of its stream is not")

    def _check_borrowed(self) -> None:
        """V4: arrays live as long as a submitted operation may use them."""
        for operation, array in self._borrowed:
            if array() is None and not internals.device_has_finished(operation) and self.driver.fault is None:
                withdrawn = operation.state == "abandoned" and not internals.was_submitted(operation)
                if not withdrawn:
                    self.report(f"V4 {operation!r} still uses an array that no longer exists")
        self._borrowed = [entry for entry in self._borrowed if not internals.device_has_finished(entry[0])]

    def _check_notifiers(self, notifier_pool: NotifierPool) -> None:
        """V5: a notifier is free again only when its tag has been read."""
        rung = self._rung.get(notifier_pool)
        if rung is None:
            rung = self._rung[notifier_pool] = internals.RungNotifiers(notifier_pool)
        if rung.has_early_reuse():
            self.report("V5 a notifier is free to be armed again, and its tag has not come yet")

    def _check_queues(self, index: int, queues: list[Ring]) -> None:
        """V4, V5 and V12 on one device."""
        device = self.devices[index]
        idle = internals.idle_event_handles(device)
        sizes = [len(queue.pending) for queue in queues]
        sizes += len(idle), len(self._unfinished)
        if sizes == self._sizes[index]:
            return  # only queries since the last check
        self._sizes[index] = sizes
        in_use: set[int] = set()
        most = 2 * internals.in_flight_limit(device) + 64
        for queue in queues:
            internals.watch_queue(queue, self.report, self._check_resolved)
            submitted = sum(map(internals.was_submitted, queue.pending))  # withdrawn operations are in the queue, too
            if submitted > most:
                self.report(f"V12 {submitted} operations of {queue.name} are submitted at once")
            in_use.update(
                handle for operation in queue.pending if (handle := internals.event_handle(operation)) is not None
            )
            internals.check_chunks(queue, self.report)
        if len(set(idle)) != len(idle):
            self.report("V5 an event is in its pool twice")
        if in_use & set(idle):
            self.report("V5 an event in use is in its pool")

    def _check_work(self, enqueued: int) -> None:
        """V14: one step does a limited amount of work."""
        resolved, self._resolved = self._resolved, 0
        # Each enqueue may also resolve operations, a limited number of them, to make room.
        if resolved > MOST_RESOLVED + MOST_PER_PUMP * max(0, enqueued - self._enqueued):
            self.report(f"V14 {resolved} operations were resolved in one step")
        self._enqueued = enqueued
        before, self._calls = self._calls, internals.call_count(self.driver)
        if self._calls - before > MOST_CALLS:
            self.report(f"V14 {self._calls - before} calls of the driver in one step")

    def _check_fault(self) -> None:
        """P3: every unfinished operation fails soon after a fault. V4: without an injected fault there is none."""
        now = self.driver.now()
        if self._fault_time is None:
            self._fault_time = now
            if not self.driver.upsets.happened:
                self.report(f"V4 a fault that was not injected: {self.driver.fault}")
        if now - self._fault_time > MOST_SECONDS_AFTER_FAULT:
            for operation in self._unfinished:
                if not internals.loop_is_closed(operation):
                    self.report(f"P3 {operation!r} is unfinished {now - self._fault_time:.3f} s after the fault")
                    return

    def _report_unexpected(self) -> None:
        for text in self.errors.unexpected:
            self.report(f"P27 the loop's exception handler was called: {text}")
        self.errors.unexpected.clear()

    # -- at the end ----------------------------------------------------------------------------------------------

    def end(self, loop_closed: bool = False) -> None:
        """Check V1, V6 and P27 when all devices are closed.

        Parameters
        ----------
        loop_closed
            True if the loop was closed early: operations then stay unfinished.
        """
        if not loop_closed:
            self._check_all_finished()
        abandoned = self.something_abandoned or any(operation.state == "abandoned" for operation in self._all)
        for held in (self._all, self._unfinished, self._finished, self._waits, self._earlier, self._borrowed):
            held.clear()  # the loop's handler is called for each failure that no caller has read
        gc.collect()
        check = None
        for check in () if loop_closed else self.final_checks:
            self.violations.extend(check())
        # The checks hold errors. The traceback of an error that a job has raised holds the driver call during which
        # this driver has run the job.
        del check
        self.final_checks.clear()
        gc.collect()
        self._report_unexpected()
        if not (loop_closed or abandoned) and self.driver.fault is None:
            unreported = self.errors.unreported_fault()
            if unreported is not None:
                self.report(f"P27 {unreported}")
        if self.devices and self.driver.fault is None:
            self._check_nothing_left(loop_closed)

    def _check_all_finished(self) -> None:
        """V1: every operation ended once, and called its callback once."""
        for operation in self._all:
            state = internals.state_of(operation)
            if state < State.DONE:
                self.report(f"V1 {operation!r} never ended")
            elif not internals.device_has_finished(operation):
                self.report(f"V1 {operation!r} ended, and its device still counts as working on it")
            elif self._callback_counts[operation.id] != 1:
                self.report(f"V1 {operation!r} called its callback {self._callback_counts[operation.id]} times")
            elif self._finished.get(operation, state) != state:
                self.report(f"V1 {operation!r} had already ended as {self._finished[operation].name}")

    def _check_nothing_left(self, loop_closed: bool) -> None:
        """V6. On CPython 3.11, a closed loop may leave coroutines that are never freed: they keep their events."""
        for device in self.devices:
            counts = device.statistics()
            if counts.in_flight:
                self.report(f"V6 {counts.in_flight} operations of {device.name} are in flight after the end")
            used = internals.device_bytes(self.driver, device.index)
            if used and not internals.has_exports(device):
                self.report(f"V6 {used} bytes of {device.name}'s memory are left after the end")
            tokens = internals.free_notifier_tokens(device)
            if tokens != self.driver.notifier_limit(device.index):
                self.report(f"V6 only {tokens} notifiers of {device.name} can be armed after the end")
        counted = dict(self.driver.statistics())
        if loop_closed:
            counted["events"] -= internals.events_in_use(self.driver)
        for kind in ("streams", "events"):
            if counted[kind]:
                self.report(f"V6 {counted[kind]} {kind} are left after the end")
        pages = internals.pinned_ranges(self.driver)
        if pages:
            self.report(f"V6 {pages} ranges of pinned memory are left after the end")
