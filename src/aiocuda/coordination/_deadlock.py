"""Deadlock: waits in a coordinator that nothing can end.

Two things are looked for. By *structure*, at once, when a task begins to wait: an operation that can never be given to
a stream, since all places, or what it comes behind, are held by tasks that wait themselves. And by *stillness*: an
event that was never recorded, a bracket that nobody enters, a barrier's missing party. Nobody can prove that these
never come; but if all that the coordinator has is blocked, and that for half a second, they are taken not to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from .._deadlock import deadlock, find_stuck, waiting
from ..errors import DeadlockError
from ._node import GIVEN, OPEN, WAITING, Cause, Node

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["STILL_SECONDS", "Watch"]

#: Seconds between two looks at a coordinator in which something waits. Still between two of them, it is blocked.
STILL_SECONDS = 0.25


class Watch:
    """What looks for deadlocks in one coordinator."""

    __slots__ = ("_progress", "_scheduler", "_timer", "found")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._timer: asyncio.TimerHandle | None = None
        self._progress = -1
        self.found = 0

    def look(self) -> None:
        """Something waits: look after a while whether it still does."""
        if self._timer is None:
            self._timer = self._scheduler.loop.call_later(STILL_SECONDS, self._tick)

    def stop(self) -> None:
        """Nothing will wait any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextlib.contextmanager
    def waiting(self, node: Node[Any], future: asyncio.Future[None]) -> Iterator[None]:
        """The current task waits until a node has been given to a stream."""
        try:
            with waiting(lambda: self._named(node), future, lambda stuck: self._can_be_given(node, stuck)):
                yield
        except DeadlockError:
            if not future.done():
                self.found += 1  # by structure; through the future it has been counted
            raise

    def _named(self, node: Node[Any]) -> str:
        """A node and, if it is a place that it lacks, who has them."""
        scheduler = self._scheduler
        blocker = self._blocker(node)
        if blocker is not None:
            return f"{node.name}, which comes behind {blocker.name} ({blocker.state})"
        if len(scheduler.open) >= scheduler.max_in_flight:
            holders = ", ".join(holder.name for holder in list(scheduler.open)[:4])
            return f"{node.name}, for which there is no place of {scheduler.max_in_flight}: they are held by {holders}"
        return node.name

    def _blocker(self, node: Node[Any]) -> Node[Any] | None:
        """Something that it comes behind and that need not come by itself."""
        return next((other for other in self._before(node) if other is not node and _is_held(other)), None)

    @staticmethod
    def _before(node: Node[Any]) -> Iterator[Node[Any]]:
        """The node, and all that it comes behind and that does not stand yet."""
        seen = {node}
        left = [node]
        while left:
            one = left.pop()
            yield one
            for other in one._needs:
                if not other._standing and other not in seen:
                    seen.add(other)
                    left.append(other)

    def _can_be_given(self, node: Node[Any], stuck: Collection[asyncio.Task[Any]]) -> bool:
        """Can it be, if none of these tasks ever goes on?"""
        if node._state >= GIVEN:
            return True
        scheduler = self._scheduler
        if not any(task is not None and task in stuck for task in scheduler.open.values()):
            return True  # all that it comes behind goes on by itself, and so do the places
        place = (
            scheduler.in_flight < scheduler.max_in_flight
            or scheduler.in_flight > len(scheduler.open)
            or any(task is None or task not in stuck for task in scheduler.open.values())
        )
        for other in self._before(node):
            if other._state == OPEN:
                task = scheduler.open.get(other)
                if task is not None and task in stuck:
                    return False
            elif other._state == WAITING:
                if not (place or other._role in ("host", "outside", "event")):
                    return False
        return True

    def _tick(self) -> None:
        self._timer = None
        scheduler = self._scheduler
        if scheduler.closed or not scheduler.waiting:
            return
        if (
            scheduler.device.closed
        ):  # no stream is given anything more; what waits for a block is told when that is left
            if scheduler.open:
                self.look()
            else:
                scheduler.leave()
            return
        if scheduler.driver.fault is not None or scheduler.progress == self._progress:
            scheduler.ask()  # what has passed counts as moved, although nobody had the host told of it
        if scheduler.progress != self._progress:
            self._progress = scheduler.progress
        elif scheduler.in_flight == len(scheduler.open) and not scheduler.hosted:
            self._still()
        if scheduler.waiting:
            self.look()

    def _still(self) -> None:
        """Nothing is under way on the device or on a thread, and nothing has moved for a while."""
        scheduler = self._scheduler
        loop_state = scheduler.device._loop_states.here()
        for queue in list(loop_state.queues):
            queue.poll()
        if loop_state.blocking() or any(not queue.idle for queue in loop_state.queues):
            return  # that is not the coordinator's, but somebody may wait for it, and bring what is missing then
        stuck = find_stuck(scheduler.loop, patient=False)
        tasks = {wait.task for wait in stuck}
        if not all(task in tasks for task in scheduler.open.values()):
            return  # somebody is at work inside his bracket
        mine = set(scheduler.open.values())
        if mine:
            for wait in stuck:
                if wait.task in mine and not wait.future.done():
                    self.found += 1
                    wait.future.set_exception(deadlock(stuck))
            return
        for node in list(scheduler.waiting):
            blockers = [other for other in node._needs if not other._standing and _is_held(other)]
            if blockers and node._state == WAITING and not _is_held(node):
                self.found += 1
                names = tuple(other.description or other.name for other in blockers)
                error = DeadlockError(
                    f"{node.name} waits for what nobody brings: {', '.join(names)}; all that the coordinator has is "
                    "blocked",
                    path=(node.name, *names),
                )
                self._release(node, blockers, error)

    def _release(self, node: Node[Any], blockers: list[Node[Any]], error: DeadlockError) -> None:
        """The node fails; it comes behind the others no more."""
        scheduler = self._scheduler
        node._cause = Cause(error, node.name)
        node._error = error
        scheduler.note_unread(node._cause)
        for other in blockers:
            if other._dependants is not None and node in other._dependants:
                other._dependants.remove(node)
                node._unmet -= 1
            del node._needs[other]
        node._tell_given()
        if not node._unmet:
            scheduler.met(node)


def _is_held(node: Node[Any]) -> bool:
    """Does somebody else have to do something before it can be given: record an event, enter a bracket, leave it?"""
    return node._state == OPEN or (node._state == WAITING and node._role in ("event", "bracket"))
