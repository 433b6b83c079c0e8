"""Blocked: streams that have something on the host, a kernel that is being loaded or an array that is being staged.

Nothing of a coordinator is put behind that, since its failure would be theirs. `block` and `mark` are `Scheduler`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._wakeups import Callback
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import INTERNAL, Operation, new_operation
from ..completion._prediction import INSTANT
from ..completion._stream_queue import StreamQueue, nothing
from ._node import Node

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["block", "mark"]


def block(scheduler: Scheduler, queue: StreamQueue, node: Node[Any]) -> None:
    """Nothing of ours is put behind what is still on the host: its failure would be theirs."""
    scheduler.waiting[node] = None
    if queue not in scheduler.blocked:
        scheduler.blocked[queue] = {}
        if queue not in scheduler.unaccepted:
            scheduler.mark(queue)
    scheduler.blocked[queue][node] = None


def mark(scheduler: Scheduler, queue: StreamQueue) -> None:
    """Hear of it when the stream has all that it was given so far, or has failed."""
    marker: Operation[Any] = new_operation(queue, INTERNAL, INSTANT, None)
    marker.on_settled = nothing
    told = False

    def opened(_: object = None) -> None:
        nonlocal told
        if not told:
            told = True
            marker.waiters = None
            queue.loop.call_soon(_opened, scheduler, queue, context=scheduler.context)

    marker.add_waiter(Callback(opened, scheduler.context))
    queue.host_queue.put(marker, opened, ())


def _opened(scheduler: Scheduler, queue: StreamQueue) -> None:
    for node in scheduler.unaccepted.pop(queue, ()):
        operation = node._operation
        if operation is None:
            continue
        if operation.lease is not None or operation.status >= OPERATION_DONE:
            scheduler.stand(node)
        elif operation.failure is not None:
            scheduler.refused(node, queue, operation)
        else:
            scheduler.unaccepted.setdefault(queue, []).append(node)
    if queue in scheduler.unaccepted:
        scheduler.mark(queue)
    else:
        for node in scheduler.blocked.pop(queue, ()):
            scheduler.ready.push(node)
    scheduler.advance()
