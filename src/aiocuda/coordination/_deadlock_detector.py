"""DeadlockDetector: finds waits in a coordinator that cannot end.

It has two tests. By *structure*: a node can never be submitted because tasks that wait themselves hold all places or a
prerequisite of the node. This is proof, and raises `DeadlockError` immediately. By *stillness*: nothing in the
coordinator moves because of an event that is not recorded, a bracket that no task enters, or a missing party of a
barrier. These may only be late, for example because a task waits for a database. So stillness is logged, and is an
error only after the program's own ``deadlock_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from .._base._deadlock import Wait, deadlock, find_stuck, waiting
from .._base._log import log
from .._base._loop_watch import LoopWatch
from ..errors import DeadlockError
from ._scheduled_node import OPEN, SUBMITTED, ScheduledNode

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["STILL_SECONDS", "DeadlockDetector"]

#: Seconds without progress after which a coordinator counts as still.
STILL_SECONDS = 0.5

#: Seconds between two checks of a coordinator in which a node waits; fewer if its `deadlock_timeout` is short.
CHECK_SECONDS = 0.25

#: Seconds between two checks at least, however short the `deadlock_timeout` is.
LEAST_CHECK_SECONDS = 0.01

#: Iterations of the loop between the check that finds the timeout over and the next one: what the first check has woken
#: passes through some of them before its task takes its next step.
ITERATIONS_OF_A_STEP = 8

#: How many blocked nodes the text of the log event describes.
MOST_DESCRIBED = 4


class DeadlockDetector:
    """The deadlock detector of one coordinator.

    Parameters
    ----------
    scheduler
        The coordinator's scheduler.
    timeout
        Seconds of stillness after which the blocked nodes and waits get a `DeadlockError`; None for never.

    Attributes
    ----------
    found : int
        How many deadlocks it has found.
    """

    __slots__ = ("__weakref__", "_counts", "_late", "_logged", "_period", "_scheduler", "_still_since", "_timeout",
                 "_timer", "_told", "found")  # fmt: skip

    def __init__(self, scheduler: Scheduler, timeout: float | None = None) -> None:
        self._scheduler = scheduler
        self._timeout = timeout
        self._period = CHECK_SECONDS if timeout is None else min(CHECK_SECONDS, max(timeout / 4, LEAST_CHECK_SECONDS))
        self._timer: asyncio.Handle | None = None
        self._still_since = 0.0  # the loop's time
        self._counts = (0, 0)  # registrations, and submissions and ends of nodes, at `_still_since`
        self._told = False  # True if the event for this `_still_since` was logged
        self._late = False  # True if the last check has found the timeout over
        self._logged: Collection[int] = ()  # the ids of the blocked nodes that were logged last
        self.found = 0

    def start(self) -> None:
        """Check the coordinator periodically as long as nodes wait."""
        scheduler = self._scheduler
        if self._timer is None and not scheduler.closed:
            self._restart()
            self._arm()
            if scheduler.resources.driver.now is time.monotonic:
                LoopWatch.of(scheduler.loop).watch_while(self._is_on)

    def _is_on(self) -> bool:
        return self._timer is not None and not self._scheduler.loop.is_closed()

    def stop(self) -> None:
        """Stop: no node waits, or the coordinator has been closed."""
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
        blocker = next((other for other in _with_prerequisites(node) if other is not node and _is_held(other)), None)
        if blocker is not None:
            return f"{node.name}, which waits for {blocker.name} ({blocker.state})"
        for other in _with_prerequisites(node):
            scheduler = other.scheduler
            if len(scheduler.open) >= scheduler.max_in_flight:
                name = node.name if other is node else f"{node.name}, which waits for {other.name}"
                holders = ", ".join(holder.name for holder in list(scheduler.open)[:4])
                return f"{name}, for which none of {scheduler.max_in_flight} places is free: held by {holders}"
        return node.name

    def _can_be_submitted(self, node: ScheduledNode[Any], stuck: Collection[asyncio.Task[Any]]) -> bool:
        """True if the node can be submitted although none of the ``stuck`` tasks ever continues."""
        scheduler = self._scheduler
        if node.phase >= SUBMITTED or scheduler.driver.fault is not None:  # after a fault, each node fails
            return True
        if not scheduler.others and not any(task is not None and task in stuck for task in scheduler.open.values()):
            return True  # no stuck task holds a bracket, so all prerequisites and places make progress
        has_place: dict[Scheduler, bool] = {}
        for other in _with_prerequisites(node):
            scheduler = other.scheduler
            if other.phase == OPEN:
                task = scheduler.open.get(other)
                if task is not None and task in stuck:
                    return False
            elif other.phase < OPEN and other.role not in ("host", "outside", "event"):
                if scheduler not in has_place:
                    has_place[scheduler] = _has_place(scheduler, stuck)
                if not has_place[scheduler]:
                    return False
        return True

    def _fail(self, node: ScheduledNode[Any], error: DeadlockError) -> None:
        """Record that a node fails because a prerequisite never comes."""
        self.found += 1
        self._scheduler.note_unread(node.fail(error))

    # -- by stillness --------------------------------------------------------------------------------------------

    def _arm(self, iterations: int = 0) -> None:
        """Check again after so many iterations of the loop and `_period`."""
        # In an empty context: the log event belongs to no task, and the timer keeps no task's variables.
        scheduler = self._scheduler
        if self._timer is not None:
            self._timer.cancel()
        if iterations:
            self._timer = scheduler.loop.call_soon(self._arm, iterations - 1, context=scheduler.context)
        else:
            self._timer = scheduler.loop.call_later(self._period, self._tick, context=scheduler.context)

    def _restart(self) -> None:
        """Measure stillness from now on: something moves."""
        scheduler = self._scheduler
        self._still_since = scheduler.loop.time()
        self._counts = scheduler.registered, scheduler.progress
        self._told = self._late = False

    def _tick(self) -> None:
        scheduler = self._scheduler
        try:
            if scheduler.waiting and not scheduler.closed:
                self._check()
        finally:  # not earlier: a check may call `start`, which must not measure anew
            if scheduler.waiting and not scheduler.closed:
                self._arm(ITERATIONS_OF_A_STEP if self._late else 0)
            else:
                self.stop()

    def _check(self) -> None:
        scheduler = self._scheduler
        if scheduler.device.closed:  # nothing more is submitted
            if not scheduler.open:  # when they have ended, `leave` wakes the tasks that wait for a bracket
                scheduler.leave()
            return
        scheduler.poll()  # operations may have passed without a notification
        if self._counts != (scheduler.registered, scheduler.progress):
            self._restart()
        elif not self._told or self._timeout is not None:
            self._check_still()

    def _is_at_work(self) -> bool:
        """True if the device or a thread works: a task may wait for that, and then unblock the coordinator."""
        for scheduler in self._scheduler.connected():
            if scheduler.in_flight > len(scheduler.open) or scheduler.host_functions.tasks:
                return True
            loop_state = scheduler.resources.loop_states.here()
            for queue in list(loop_state.queues):
                queue.poll()
            if loop_state.blocking() or any(queue.tail() is not None for queue in loop_state.queues):
                return True
        return False

    def _check_still(self) -> None:
        """Log what is blocked, once it has been still for long enough; fail it after the timeout."""
        if self._is_at_work():
            self._restart()
            return
        was_late, self._late = self._late, False
        nodes, stuck = self._find_blocked()
        if not nodes:
            return
        bracket_tasks = {task for scheduler in self._scheduler.connected() for task in scheduler.open.values()}
        waits = [wait for wait in stuck if wait.task in bracket_tasks]
        # A bracket moves when its task begins to wait for something else.
        still = self._scheduler.loop.time() - max([self._still_since, *(wait.since for wait in waits)])
        if still >= STILL_SECONDS and not self._told:
            self._told = True
            self._log(nodes, stuck)
        if self._timeout is not None and still >= self._timeout:
            if not was_late:  # a task may have been woken, and its next step ends the stillness: check once more
                self._late = True
                return
            self._restart()
            if stuck:
                self._end_waits(waits, stuck)
            else:
                self._end_nodes(nodes)

    def _find_blocked(self) -> tuple[list[ScheduledNode[Any]], list[Wait]]:
        """Return the nodes that only a task can unblock; if these are open brackets, also the waits of all such tasks.

        A bracket is blocked if its task waits in a call of the library, and no other task is known to end this wait.
        If the task of one bracket is at work, nothing counts as blocked.
        """
        scheduler = self._scheduler
        brackets = {bracket: task for each in self._scheduler.connected() for bracket, task in each.open.items()}
        if not brackets:
            return [node for node in scheduler.waiting if node.phase != OPEN and _blockers(node)], []
        stuck = find_stuck(scheduler.loop, patient=False)
        tasks = {wait.task for wait in stuck}
        if all(task in tasks for task in brackets.values()):
            return list(brackets), stuck
        return [], []

    def _log(self, nodes: list[ScheduledNode[Any]], stuck: list[Wait]) -> None:
        """Write one log event for each set of blocked nodes. A part of a set that was logged has been named in it."""
        blocked = frozenset(node.id for node in nodes)
        if blocked.issubset(self._logged):
            return
        self._logged = blocked
        if stuck:
            text = str(deadlock(stuck))
        else:
            texts = [str(_still_error(node, _blockers(node))) for node in nodes[:MOST_DESCRIBED]]
            more = len(nodes) - len(texts)
            text = "; ".join([*texts, f"and {more} more"] if more else texts)
        device = self._scheduler.device.name
        log("warning", "coordinator_still", device=device, blocked=len(nodes), seconds=STILL_SECONDS, error=text)

    def _end_waits(self, waits: list[Wait], stuck: list[Wait]) -> None:
        """Raise `DeadlockError` in the tasks of the open brackets."""
        for wait in waits:
            if not wait.future.done():
                self.found += 1
                wait.future.set_exception(deadlock(stuck))

    def _end_nodes(self, nodes: list[ScheduledNode[Any]]) -> None:
        """Fail the blocked nodes, and remove their edges to the prerequisites that never come."""
        for node in nodes:
            blockers = _blockers(node)
            if not blockers:
                continue  # a node that was released before it has changed this one
            if node.phase < OPEN:  # an abandoned one has its error, and only keeps its place in the order
                self._fail(node, _still_error(node, blockers))
                node.wake_waiters()
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


def _has_place(scheduler: Scheduler, stuck: Collection[asyncio.Task[Any]]) -> bool:
    """True if the coordinator has a place, or gets one although none of the ``stuck`` tasks ever continues."""
    return (
        scheduler.in_flight < scheduler.max_in_flight
        or scheduler.in_flight > len(scheduler.open)
        or any(task is None or task not in stuck for task in scheduler.open.values())
    )


def _is_held(node: ScheduledNode[Any]) -> bool:
    """True if a task must act before the node is submitted: record an event, or enter or leave a bracket."""
    return node.phase == OPEN or (node.phase < OPEN and node.role in ("event", "bracket"))


def _still_error(node: ScheduledNode[Any], blockers: list[ScheduledNode[Any]]) -> DeadlockError:
    """Return the error of a node that waits for these prerequisites and for nothing else."""
    names = tuple(other.description if other.role == "event" else other.name for other in blockers)
    text = f"{node.name} waits for {', '.join(names)}; everything in the coordinator is blocked"
    return DeadlockError(text, path=(node.name, *names))


def _blockers(node: ScheduledNode[Any]) -> list[ScheduledNode[Any]]:
    """Return the prerequisites of a waiting node that a task must act for."""
    return [other for other in node.prerequisites if not other.waitable and _is_held(other)]
