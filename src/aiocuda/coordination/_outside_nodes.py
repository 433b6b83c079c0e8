"""OutsideNodes: the nodes that stand for operations and events of streams outside a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..device import Event
from ..lowlevel import StreamOperation, when_passed
from ._scheduled_node import ABANDONED, OPERATION_DONE, ScheduledNode

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["OutsideNodes"]


class OutsideNodes:
    """Makes the nodes that ``after=`` needs for operations and events."""

    __slots__ = ("_scheduler", "_unrecorded")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Nodes of events that have not been recorded. Each function lets the event forget its node.
        self._unrecorded: dict[ScheduledNode[Any], Callable[[], None]] = {}

    def node_of(self, thing: StreamOperation[Any] | Event) -> ScheduledNode[Any]:
        """Return a node for an operation or an event of a stream outside the coordinator."""
        node: ScheduledNode[Any] = ScheduledNode(self._scheduler, 0, "synchronization", "outside", 2, "", None, 0.0)
        if isinstance(thing, Event):
            thing._check()
            operation = thing._operation
            if operation is None:
                node.role = "event"
                node.description = f"an event that was never recorded, {thing!r}"
                self._unrecorded[node] = thing._when_recorded(lambda operation: self._recorded(node, operation))
                return node
            thing = operation
        thing.queue.check_loop()
        self._attach(node, thing)
        return node

    def _recorded(self, node: ScheduledNode[Any], operation: StreamOperation[Any]) -> None:
        """Let the node of an event become that of the operation that records it."""
        self._unrecorded.pop(node, None)
        self._attach(node, operation)

    def _attach(self, node: ScheduledNode[Any], operation: StreamOperation[Any]) -> None:
        """Make the node of outside work waitable as soon as its stream has accepted the operation."""
        node.operation = operation
        if operation.lease is None and self._scheduler.driver.fault is None:
            entries = operation.queue.on_host
            if operation.status < OPERATION_DONE or any(entry is operation for entry in entries):
                # Still on the host. An abandoned operation, too: its stream may be waiting for it.
                when_passed(operation, lambda _: self._attach(node, operation), self._scheduler.context)
                return
        node.attach(operation)
        node.become_waitable()

    def forget_event(self, node: ScheduledNode[Any]) -> None:
        """Let an event that has not been recorded forget its node: nothing waits for it any more."""
        forget = self._unrecorded.pop(node, None)
        if forget is not None:
            forget()

    def abandon_events(self) -> None:
        """Withdraw the nodes of events that have not been recorded: those that wait for them have been abandoned."""
        for node in list(self._unrecorded):
            self.forget_event(node)
            node.end_early(ABANDONED)
            node.become_waitable()
