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

from ..errors import DeadlockError
from ..waiting import deadlock, find_stuck, waiting
from .node import GIVEN, OPEN, WAITING, Cause, Node

if TYPE_CHECKING:
    from .flow import Flow

__all__ = ["STILL_SECONDS", "Watch"]

#: Seconds between two looks at a coordinator in which something waits. Still between two of them, it is blocked.
STILL_SECONDS = 0.25


class Watch:
    """What looks for deadlocks in one coordinator."""

    __slots__ = ("_flow", "_progress", "_timer", "found")

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._timer: asyncio.TimerHandle | None = None
        self._progress = -1
        self.found = 0

    def look(self) -> None:
        """Something waits: look after a while whether it still does."""
        if self._timer is None:
            self._timer = self._flow.loop.call_later(STILL_SECONDS, self._tick)

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
        flow = self._flow
        blocker = self._blocker(node)
        if blocker is not None:
            return f"{node.name}, which comes behind {blocker.name} ({blocker.state})"
        if len(flow.open) >= flow.max_in_flight:
            holders = ", ".join(holder.name for holder in list(flow.open)[:4])
            return f"{node.name}, for which there is no place of {flow.max_in_flight}: they are held by {holders}"
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
        flow = self._flow
        if not any(task is not None and task in stuck for task in flow.open.values()):
            return True  # all that it comes behind goes on by itself, and so do the places
        place = (
            flow.in_flight < flow.max_in_flight
            or flow.in_flight > len(flow.open)
            or any(task is None or task not in stuck for task in flow.open.values())
        )
        for other in self._before(node):
            if other._state == OPEN:
                task = flow.open.get(other)
                if task is not None and task in stuck:
                    return False
            elif other._state == WAITING:
                if not (place or other._role in ("host", "outside", "event")):
                    return False
        return True

    def _tick(self) -> None:
        self._timer = None
        flow = self._flow
        if flow.closed or not flow.waiting:
            return
        if flow.device.closed:  # no stream is given anything more; what waits for a block is told when that is left
            if flow.open:
                self.look()
            else:
                flow.leave()
            return
        if flow.driver.fault is not None or flow.progress == self._progress:
            flow.ask()  # what has passed counts as moved, although nobody had the host told of it
        if flow.progress != self._progress:
            self._progress = flow.progress
        elif flow.in_flight == len(flow.open) and not flow.hosted:
            self._still()
        if flow.waiting:
            self.look()

    def _still(self) -> None:
        """Nothing is under way on the device or on a thread, and nothing has moved for a while."""
        flow = self._flow
        site = flow.device._sites.here()
        for lane in list(site.lanes):
            lane.poll()
        if site.blocking() or any(not lane.idle for lane in site.lanes):
            return  # that is not the coordinator's, but somebody may wait for it, and bring what is missing then
        stuck = find_stuck(flow.loop, patient=False)
        tasks = {wait.task for wait in stuck}
        if not all(task in tasks for task in flow.open.values()):
            return  # somebody is at work inside his bracket
        mine = set(flow.open.values())
        if mine:
            for wait in stuck:
                if wait.task in mine and not wait.future.done():
                    self.found += 1
                    wait.future.set_exception(deadlock(stuck))
            return
        for node in list(flow.waiting):
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
        flow = self._flow
        node._cause = Cause(error, node.name)
        node._error = error
        flow.note_unread(node._cause)
        for other in blockers:
            if other._dependants is not None and node in other._dependants:
                other._dependants.remove(node)
                node._unmet -= 1
            del node._needs[other]
        node._tell_given()
        if not node._unmet:
            flow.met(node)


def _is_held(node: Node[Any]) -> bool:
    """Does somebody else have to do something before it can be given: record an event, enter a bracket, leave it?"""
    return node._state == OPEN or (node._state == WAITING and node._role in ("event", "bracket"))
