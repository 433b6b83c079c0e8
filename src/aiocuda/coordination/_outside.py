"""Outside: what a graph comes behind that is no operation of its own: functions of the host, other streams' work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._event import Event
from .._user_code import LEAVES_LOOP
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import Operation
from ..errors import ClosedError
from ._node import GIVEN, WAITING, Cause, Node
from ._watching import hear

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = ["add", "call", "node", "until_landed"]


def call(
    scheduler: Scheduler, node: Node[Any], function: Callable[..., Any], args: tuple[Any, ...], is_coroutine: bool
) -> None:
    """Let a node be a function of the host."""

    async def run() -> None:
        task = asyncio.current_task()
        try:
            node._value = await (function(*args) if is_coroutine else _offloaded(scheduler, function, args))
        except BaseException as error:
            if asyncio.current_task(scheduler.loop) is not task:
                raise  # the loop is closed, and Python closes this coroutine
            scheduler.fail(node, error, raised=True)
            scheduler.advance()
            if isinstance(error, (asyncio.CancelledError, *LEAVES_LOOP)):
                raise
        else:
            scheduler.stand_in(node)
            scheduler.advance()

    def ended(task: asyncio.Task[None]) -> None:
        scheduler.hosted.discard(task)
        if not task.cancelled():
            task.exception()  # it has left the loop: asyncio need not report it
        elif node._state == WAITING:  # before its first step, so that nothing of it ever ran
            scheduler.fail(node, asyncio.CancelledError())
            scheduler.advance()

    def begin(_: object) -> Any:
        task = scheduler.loop.create_task(run(), name=node.name)
        scheduler.hosted.add(task)
        task.add_done_callback(ended)

    node._work = begin


async def _offloaded(scheduler: Scheduler, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a plain function returns on a worker thread, also while the device closes."""
    device = scheduler.device
    loop_state = device._loop_states.here() if device._closing and not device.closed else device._loop_state()
    return await device._offload(loop_state, function, *args)


def until_landed(node: Node[Any]) -> None:
    """The host looks at what those bring that it comes behind: they have to be done, not only in streams."""
    for other in node._needs:
        node._until_done(other)


def node(scheduler: Scheduler, thing: Operation[Any] | Event) -> Node[Any]:
    """An operation or an event of somebody else's stream."""
    outer: Node[Any] = Node(scheduler, 0, "synchronization", "outside", 2, "", None, 0.0)
    if isinstance(thing, Event):
        thing._check()
        operation = thing._operation
        if operation is None:
            outer._role = "event"
            outer.description = f"an event that nobody has recorded, {thing!r}"
            thing._when_recorded(lambda operation: _stand(scheduler, outer, operation))
            return outer
        thing = operation
    thing.queue.check_loop()
    _stand(scheduler, outer, thing)
    return outer


def _stand(scheduler: Scheduler, outer: Node[Any], operation: Operation[Any]) -> None:
    outer._operation = operation
    outer._role = "outside"
    if operation.lease is None and scheduler.driver.fault is None:
        queue = operation.queue.host_queue.entries
        if operation.status < OPERATION_DONE or any(entry is operation for entry in queue):
            # Still on the host, in front of its stream; also if it is abandoned, for that stream may be left yet.
            hear(scheduler, operation, lambda _: _stand(scheduler, outer, operation))
            return
    outer._state = GIVEN
    failure = operation.failure
    if failure is not None:
        outer._error = operation.value
        outer._cause = Cause(failure.poison.error, repr(operation), failure)
        outer._cause.delivered = True  # not here, at the end, but by the operation, whose failure it is
    scheduler.stand(outer)


def add(scheduler: Scheduler, dependent: Node[Any], prerequisite: Node[Any]) -> None:
    """One more edge."""
    is_host = dependent._role == "host"
    # One that has all it waited for is with its stream, or waits for a place; a function of the host runs.
    begun = not dependent._unmet and (is_host or dependent not in scheduler.waiting)
    if dependent._state != WAITING or begun:
        done = "runs already" if is_host else "has been given to a stream"
        raise ClosedError(f"{dependent!r} {done}: say what it comes behind when it is made")
    before = dependent._unmet
    dependent._come_behind(prerequisite, True, landed=is_host)
    if not before and (dependent._unmet or prerequisite._cause is not None):
        scheduler.unready(dependent)
        if not dependent._unmet:  # that stands already, and has failed
            scheduler.met(dependent)
