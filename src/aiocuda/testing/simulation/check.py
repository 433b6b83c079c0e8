"""The invariants, looked at after every step of the loop."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...completion.operation import STEP, TRANSITIONS, Operation, State
from ...driver.simulated import SimulatedDriver

if TYPE_CHECKING:
    from ...completion.lane import Lane
    from ...device import Device

__all__ = ["Checker", "ViolationError"]

#: A turn of the loop that does more than this takes longer than 5 ms (256 resolves take 1.7; measured).
MOST_RESOLVED = 600
MOST_CALLS = 3_000


class ViolationError(AssertionError):
    """An invariant that does not hold: ``V6 …``."""


class _Watched(deque[Operation[Any]]):
    """A lane's pending operations, under somebody's eyes."""

    def __init__(self, operations: Iterable[Operation[Any]], checker: Checker, lane: Lane) -> None:
        super().__init__(operations)
        self._checker = checker
        self._lane = lane
        self._newest = 0

    def append(self, operation: Operation[Any]) -> None:
        if operation.kind != STEP and operation._submitted:
            if operation.id < self._newest:
                self._checker.found(f"V3 {operation!r} was given to the device after a later one of its stream")
            self._newest = operation.id
        super().append(operation)

    def popleft(self) -> Operation[Any]:
        operation = super().popleft()
        self._checker.resolving(operation)
        return operation


class Checker:
    """Looks at one device of one simulated driver.

    Operations that a program has made are followed from `follow` on; what is written down of lanes, leases and memory
    is looked at where it is.
    """

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver
        self.device: Device | None = None
        self.violations: list[str] = []
        self.transitions: set[tuple[State, State]] = set()
        self.told: Counter[int] = Counter()  # callbacks by operation
        self._states: dict[Operation[Any], int] = {}
        self._all: list[Operation[Any]] = []
        self._borrowed: list[tuple[Operation[Any], Any]] = []
        self._resolved = 0
        self._calls = 0
        self._seen_of_driver = 0
        self._refused = 0
        self._faulted = False  # the loop knew of it before this step

    def found(self, violation: str) -> None:
        """An invariant does not hold."""
        self.violations.append(violation)

    # -- what is looked at ---------------------------------------------------------------------------------------

    def follow(self, operation: Operation[Any]) -> None:
        """Look at this one from now on."""
        self._states[operation] = operation._state
        self._all.append(operation)
        operation.add_done_callback(self._tell)

    def borrow(self, operation: Operation[Any], array: Any) -> None:
        """The operation holds this array, of which only a weak reference is given, until it has passed."""
        self._borrowed.append((operation, array))

    def _tell(self, operation: Operation[Any]) -> None:
        self.told[operation.id] += 1

    def resolving(self, operation: Operation[Any]) -> None:
        """An operation leaves its lane: V2."""
        self._resolved += 1
        lease = operation._lease
        if lease is None or operation._failure is not None or self.driver.fault is not None:
            return
        event = self.driver._machine.events.get(lease.handle)
        if event is not None and not event.is_done:
            self.found(f"V2 {operation!r} was resolved before the device had done it")

    def step(self) -> None:
        """After each handle that the loop has run."""
        for text in self.driver.violations[self._seen_of_driver :]:
            self.found(text)
        self._seen_of_driver = len(self.driver.violations)
        refused = self.driver.refused
        if self._faulted and len(refused) > self._refused:
            self.found(f"V7 {refused[-1]} was called when the loop knew of the fault")
        self._refused = len(refused)
        device = self.device
        self._faulted = device is not None and any(site.reactor.faulted for site in device._sites)
        if self._resolved > MOST_RESOLVED:
            self.found(f"V14 {self._resolved} operations were resolved in one step")
        self._resolved = 0
        calls = self.driver._calls
        if calls - self._calls > MOST_CALLS:
            self.found(f"V14 {calls - self._calls} calls of the driver in one step")
        self._calls = calls
        self._look_at_states()
        self._look_at_lanes()
        if self.violations:
            raise ViolationError(self.violations[0])

    def _look_at_states(self) -> None:
        ended = []
        for operation, before in self._states.items():
            now = operation._state
            if now == before:
                continue
            self._check_way(operation, State(before), State(now))
            self._states[operation] = now
            if now >= State.DONE:
                ended.append(operation)
        for operation in ended:
            del self._states[operation]
        for operation, array in self._borrowed:
            withdrawn = operation.state == "abandoned" and not operation._submitted
            if array() is None and not operation._passed and not withdrawn and self.driver.fault is None:
                self.found(f"V4 {operation!r} still uses an array that was let go")
        if self._borrowed:
            self._borrowed = [(op, array) for op, array in self._borrowed if not op._passed]

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

    def _lanes(self) -> list[Lane]:
        device = self.device
        if device is None:
            return []
        return [lane for site in device._sites for lane in site.lanes]

    def _look_at_lanes(self) -> None:
        device = self.device
        if device is None or device.closed:
            return
        held: set[int] = set()
        for lane in self._lanes():
            if type(lane.pending) is not _Watched:
                lane.pending = _Watched(lane.pending, self, lane)
            if len(lane.pending) > 2 * device._hub.max_in_flight + 64:
                self.found(f"V12 {len(lane.pending)} operations of {lane.name} are with the device")
            for operation in lane.pending:
                lease = operation._lease
                if lease is not None:
                    held.add(lease.handle)
        idle = [lease.handle for lease in device._hub.leases.plain]
        if len(set(idle)) != len(idle):
            self.found("V5 an event is in its pool twice")
        if held & set(idle):
            self.found("V5 an event in use is in its pool")

    # -- at the end ----------------------------------------------------------------------------------------------

    def end(self, loop_closed: bool = False) -> None:
        """Everything has been closed: V1 and V6."""
        if loop_closed:
            return
        for operation in self._all:
            if not operation.done():
                self.found(f"V1 {operation!r} never ended")
            elif not operation._passed:
                self.found(f"V1 {operation!r} ended, and its device is still said to be at work on it")
            elif self.told[operation.id] != 1:
                self.found(f"V1 {operation!r} told its callback {self.told[operation.id]} times")
        device = self.device
        if device is None or self.driver.fault is not None:
            return
        counts = device.statistics()
        if counts.in_flight:
            self.found(f"V6 {counts.in_flight} operations are in flight after the end")
        counted = self.driver.statistics()
        for what in ("streams", "events"):
            if counted[what]:
                self.found(f"V6 {counted[what]} {what} are left after the end")
        used = self.driver._memory._pools[0].used
        if used:
            self.found(f"V6 {used} bytes of device memory are left after the end")
        pages = len(self.driver._pages._ranges)
        if pages:
            self.found(f"V6 {pages} ranges of pinned memory are left after the end")
