"""DeadlockDetector: finds waits in a coordinator that cannot end.

It uses two tests. By *structure*, immediately when a task begins to wait: a node can never be submitted because tasks
that wait themselves hold all places or a prerequisite of the node. By *inactivity*: an event that is never recorded, a
bracket that no task enters, a missing party of a barrier. It cannot be proved that these never come; but if everything
in the coordinator has been blocked for half a second, the detector assumes so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from .._deadlock import deadlock, find_stuck, waiting
from .._device import Device
from .._device_resources import DeviceResources
from ..errors import DeadlockError
from ._scheduled_node import ABANDONED, OPEN, SUBMITTED, NodeScheduler, ScheduledNode

__all__ = ["STILL_SECONDS", "DeadlockDetector"]

#: Seconds between two checks of a coordinator in which a node waits. No progress between two checks: it is blocked.
STILL_SECONDS = 0.25


class ObservedScheduler(NodeScheduler, Protocol):
    """The part of `Scheduler` that the detector uses."""

    device: Device
    resources: DeviceResources
    max_in_flight: int
    in_flight: int
    progress: int
    closed: bool
    waiting: dict[ScheduledNode[Any], None]
    open: dict[ScheduledNode[Any], asyncio.Task[Any] | None]
    host_tasks: set[asyncio.Task[None]]

    def poll(self) -> None: ...

    def leave(self) -> None: ...


class DeadlockDetector:
    """The deadlock detector of one coordinator.

    Attributes
    ----------
    found : int
        How many deadlocks it has found.
    """

    __slots__ = ("_progress", "_scheduler", "_timer", "found")

    def __init__(self, scheduler: ObservedScheduler) -> None:
        self._scheduler = scheduler
        self._timer: asyncio.TimerHandle | None = None
        self._progress = -1
        self.found = 0

    def start(self) -> None:
        """Check the coordinator periodically as long as nodes wait."""
        if self._timer is None:
            self._timer = self._scheduler.loop.call_later(STILL_SECONDS, self._tick)

    def stop(self) -> None:
        """Stop: the coordinator has been closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextlib.contextmanager
    def waiting(self, node: ScheduledNode[Any], future: asyncio.Future[None]) -> Iterator[None]:
        """Declare that the current task waits until a node is submitted. Raise `DeadlockError` if it never is."""
        try:
            with waiting(lambda: self._describe(node), future, lambda stuck: self._can_be_submitted(node, stuck)):
                yield
        except DeadlockError:
            if not future.done():
                self.found += 1  # found by structure; an error set on the future has been counted
            raise

    # -- by structure --------------------------------------------------------------------------------------------

    def _describe(self, node: ScheduledNode[Any]) -> str:
        """Return the name of a node, and what blocks it: a prerequisite, or the nodes that hold all places."""
        scheduler = self._scheduler
        blocker = next((other for other in _with_prerequisites(node) if other is not node and _is_held(other)), None)
        if blocker is not None:
            return f"{node.name}, which waits for {blocker.name} ({blocker.state})"
        if len(scheduler.open) >= scheduler.max_in_flight:
            holders = ", ".join(holder.name for holder in list(scheduler.open)[:4])
            return f"{node.name}, for which none of {scheduler.max_in_flight} places is free: held by {holders}"
        return node.name

    def _can_be_submitted(self, node: ScheduledNode[Any], stuck: Collection[asyncio.Task[Any]]) -> bool:
        """True if the node can be submitted although none of the ``stuck`` tasks ever continues."""
        if node.phase >= SUBMITTED:
            return True
        scheduler = self._scheduler
        if not any(task is not None and task in stuck for task in scheduler.open.values()):
            return True  # no stuck task holds a bracket, so all prerequisites and places make progress
        has_place = (
            scheduler.in_flight < scheduler.max_in_flight
            or scheduler.in_flight > len(scheduler.open)
            or any(task is None or task not in stuck for task in scheduler.open.values())
        )
        for other in _with_prerequisites(node):
            if other.phase == OPEN:
                task = scheduler.open.get(other)
                if task is not None and task in stuck:
                    return False
            elif other.phase < OPEN:
                if not (has_place or other.role in ("host", "outside", "event")):
                    return False
        return True

    # -- by inactivity -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = None
        scheduler = self._scheduler
        if scheduler.closed or not scheduler.waiting:
            return
        if scheduler.device.closed:  # nothing more is submitted
            if scheduler.open:  # when they have ended, `leave` wakes the tasks that wait for a bracket
                self.start()
            else:
                scheduler.leave()
            return
        if scheduler.device.driver.fault is not None or scheduler.progress == self._progress:
            scheduler.poll()  # operations may have passed without a notification
        if scheduler.progress != self._progress:
            self._progress = scheduler.progress
        elif scheduler.in_flight == len(scheduler.open) and not scheduler.host_tasks:
            self._check_inactive()
        if scheduler.waiting:
            self.start()

    def _check_inactive(self) -> None:
        """Fail what is blocked: neither the device nor a thread works, and there was no progress for a while."""
        scheduler = self._scheduler
        loop_state = scheduler.resources.loop_states.here()
        for queue in list(loop_state.queues):
            queue.poll()
        if loop_state.blocking() or any(not queue.idle for queue in loop_state.queues):
            return  # a task may wait for work outside the coordinator, and then unblock the coordinator
        stuck = find_stuck(scheduler.loop, patient=False)
        tasks = {wait.task for wait in stuck}
        if not all(task in tasks for task in scheduler.open.values()):
            return  # a task is at work inside its bracket
        bracket_tasks = set(scheduler.open.values())
        if bracket_tasks:
            for wait in stuck:
                if wait.task in bracket_tasks and not wait.future.done():
                    self.found += 1
                    wait.future.set_exception(deadlock(stuck))
            return
        for node in list(scheduler.waiting):
            blockers = [other for other in node.prerequisites if not other.waitable and _is_held(other)]
            if blockers and node.phase < OPEN and not _is_held(node):
                self._fail(node, blockers)
            elif blockers and node.phase == ABANDONED:  # it has its error, and only keeps its place in the order
                self._release(node, blockers)

    def _fail(self, node: ScheduledNode[Any], blockers: list[ScheduledNode[Any]]) -> None:
        """Fail a node, and remove its edges to the prerequisites that never come."""
        self.found += 1
        names = tuple(other.description or other.name for other in blockers)
        error = DeadlockError(
            f"{node.name} waits for {', '.join(names)}; everything in the coordinator is blocked",
            path=(node.name, *names),
        )
        self._scheduler.note_unread(node.fail(error))
        node.wake_waiters()
        self._release(node, blockers)

    def _release(self, node: ScheduledNode[Any], blockers: list[ScheduledNode[Any]]) -> None:
        """Remove the edges of a node to the prerequisites that never come."""
        for other in blockers:
            node.drop_prerequisite(other)
        if not node.unmet:
            self._scheduler.prerequisites_met((node,))


def _with_prerequisites(node: ScheduledNode[Any]) -> Iterator[ScheduledNode[Any]]:
    """Yield the node and all its direct and indirect prerequisites that are not waitable yet."""
    seen = {node}
    left = [node]
    while left:
        current = left.pop()
        yield current
        for other in current.prerequisites:
            if not other.waitable and other not in seen:
                seen.add(other)
                left.append(other)


def _is_held(node: ScheduledNode[Any]) -> bool:
    """True if a task must act before the node is submitted: record an event, or enter or leave a bracket."""
    return node.phase == OPEN or (node.phase < OPEN and node.role in ("event", "bracket"))
