"""Blocked: streams that have something on the host, a kernel that is being loaded or an array that is being staged.

Nothing of a coordinator is put behind that, since its failure would be theirs. `block` and `mark` are `Flow`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..completion.ending import nothing
from ..completion.lane import Lane
from ..completion.operation import DONE as OPERATION_DONE
from ..completion.operation import STEP, Operation, new_operation
from ..completion.predict import INSTANT
from ..waking import Callback
from .node import Node

if TYPE_CHECKING:
    from .flow import Flow

__all__ = ["block", "mark"]


def block(flow: Flow, lane: Lane, node: Node[Any]) -> None:
    """Nothing of ours is put behind what is still on the host: its failure would be theirs."""
    flow.waiting[node] = None
    if lane not in flow.blocked:
        flow.blocked[lane] = {}
        if lane not in flow.unaccepted:
            flow.mark(lane)
    flow.blocked[lane][node] = None


def mark(flow: Flow, lane: Lane) -> None:
    """Hear of it when the stream has all that it was given so far, or has failed."""
    marker: Operation[Any] = new_operation(lane, STEP, INSTANT, None)
    marker._release = nothing
    told = False

    def opened(_: object = None) -> None:
        nonlocal told
        if not told:
            told = True
            marker._waiters = None
            lane.loop.call_soon(_opened, flow, lane, context=flow.context)

    marker._add_waiter(Callback(opened, flow.context))
    lane.queue.put(marker, opened, ())


def _opened(flow: Flow, lane: Lane) -> None:
    for node in flow.unaccepted.pop(lane, ()):
        operation = node._operation
        if operation is None:
            continue
        if operation._lease is not None or operation._state >= OPERATION_DONE:
            flow.stand(node)
        elif operation._failure is not None:
            flow.refused(node, lane, operation)
        else:
            flow.unaccepted.setdefault(lane, []).append(node)
    if lane in flow.unaccepted:
        flow.mark(lane)
    else:
        for node in flow.blocked.pop(lane, ()):
            flow.ready.push(node)
    flow.advance()
