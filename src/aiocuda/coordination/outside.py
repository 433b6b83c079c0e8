"""Outside: what a graph comes behind that is no operation of its own: functions of the host, other streams' work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..completion.operation import DONE as OPERATION_DONE
from ..completion.operation import Operation
from ..errors import ClosedError
from ..event import Event
from ..user_code import LEAVES_LOOP
from .node import GIVEN, WAITING, Cause, Node
from .watching import hear

if TYPE_CHECKING:
    from .flow import Flow

__all__ = ["add", "call", "node", "until_landed"]


def call(flow: Flow, node: Node[Any], function: Callable[..., Any], args: tuple[Any, ...], is_coroutine: bool) -> None:
    """Let a node be a function of the host."""

    async def run() -> None:
        task = asyncio.current_task()
        try:
            node._value = await (function(*args) if is_coroutine else _offloaded(flow, function, args))
        except BaseException as error:
            if asyncio.current_task(flow.loop) is not task:
                raise  # the loop is closed, and Python closes this coroutine
            flow.fail(node, error, raised=True)
            flow.advance()
            if isinstance(error, (asyncio.CancelledError, *LEAVES_LOOP)):
                raise
        else:
            flow.stand_in(node)
            flow.advance()

    def ended(task: asyncio.Task[None]) -> None:
        flow.hosted.discard(task)
        if not task.cancelled():
            task.exception()  # it has left the loop: asyncio need not report it
        elif node._state == WAITING:  # before its first step, so that nothing of it ever ran
            flow.fail(node, asyncio.CancelledError())
            flow.advance()

    def begin(_: object) -> Any:
        task = flow.loop.create_task(run(), name=node.name)
        flow.hosted.add(task)
        task.add_done_callback(ended)

    node._work = begin


async def _offloaded(flow: Flow, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a plain function returns on a worker thread, also while the device closes."""
    device = flow.device
    site = device._sites.here() if device._closing and not device.closed else device._site()
    return await device._offload(site, function, *args)


def until_landed(node: Node[Any]) -> None:
    """The host looks at what those bring that it comes behind: they have to be done, not only in streams."""
    for other in node._needs:
        node._until_done(other)


def node(flow: Flow, thing: Operation[Any] | Event) -> Node[Any]:
    """An operation or an event of somebody else's stream."""
    outer: Node[Any] = Node(flow, 0, "synchronization", "outside", 2, "", None, 0.0)
    if isinstance(thing, Event):
        thing._check()
        operation = thing._operation
        if operation is None:
            outer._role = "event"
            outer.description = f"an event that nobody has recorded, {thing!r}"
            thing._when_recorded(lambda operation: _stand(flow, outer, operation))
            return outer
        thing = operation
    thing._lane.check_loop()
    _stand(flow, outer, thing)
    return outer


def _stand(flow: Flow, outer: Node[Any], operation: Operation[Any]) -> None:
    outer._operation = operation
    outer._role = "outside"
    if operation._lease is None and flow.driver.fault is None:
        queue = operation._lane.queue.entries
        if operation._state < OPERATION_DONE or any(entry is operation for entry in queue):
            # Still on the host, in front of its stream; also if it is abandoned, for that stream may be left yet.
            hear(flow, operation, lambda _: _stand(flow, outer, operation))
            return
    outer._state = GIVEN
    failure = operation._failure
    if failure is not None:
        outer._error = operation._value
        outer._cause = Cause(failure.spoiled.error, repr(operation), failure)
        outer._cause.delivered = True  # not here, at the end, but by the operation, whose failure it is
    flow.stand(outer)


def add(flow: Flow, dependent: Node[Any], prerequisite: Node[Any]) -> None:
    """One more edge."""
    is_host = dependent._role == "host"
    # One that has all it waited for is with its stream, or waits for a place; a function of the host runs.
    begun = not dependent._unmet and (is_host or dependent not in flow.waiting)
    if dependent._state != WAITING or begun:
        done = "runs already" if is_host else "has been given to a stream"
        raise ClosedError(f"{dependent!r} {done}: say what it comes behind when it is made")
    before = dependent._unmet
    dependent._come_behind(prerequisite, True, landed=is_host)
    if not before and (dependent._unmet or prerequisite._cause is not None):
        flow.unready(dependent)
        if not dependent._unmet:  # that stands already, and has failed
            flow.met(dependent)
