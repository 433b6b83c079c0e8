"""Failing: what becomes of an operation that fails, is skipped or is withdrawn, and of all that come behind it.

These functions are methods of `Scheduler`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .._user_code import LEAVES_LOOP
from ..completion._failure import Poison
from ..completion._operation import ABANDONED as OPERATION_ABANDONED
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from ..errors import SkippedError
from ._node import ABANDONED, FAILED, GIVEN, WAITING, Cause, Node

if TYPE_CHECKING:
    from ._scheduler import Scheduler

__all__ = [
    "abandon",
    "broken",
    "fail",
    "latched",
    "note_unread",
    "pass_over",
    "refused",
    "stand_in",
    "take_over",
    "tell",
    "unready",
]

#: Failures that nobody has read which are kept for the coordinator's end; older ones go to the loop's handler.
MOST_UNREAD = 256


def fail(
    scheduler: Scheduler, node: Node[Any], error: BaseException, delivered: bool = False, raised: bool = False
) -> None:
    """Let a node fail that gave nothing to a stream: it stands for what it came behind.

    ``delivered``: the program knows the error already. ``raised``: a function of the program raised it.
    """
    node._failed_with(error, raised)
    cause = node._cause
    assert cause is not None
    if delivered or isinstance(error, (asyncio.CancelledError, *LEAVES_LOOP)):  # the task, or the loop, ends by it
        cause.delivered = True
    else:
        scheduler.note_unread(cause)
    scheduler.stand_in(node)


def pass_over(scheduler: Scheduler, node: Node[Any], cause: Cause) -> None:
    """What it needs has failed."""
    if node._cause is None:  # else it has been withdrawn, or has failed by itself
        node._cause = cause
        node._error = _skipped(node, cause)
    scheduler.stand_in(node)


def stand_in(scheduler: Scheduler, node: Node[Any], mark: Operation[Any] | None = None) -> None:
    """Let a node stand for all that it comes behind, and for a mark of its own stream."""
    newest: dict[StreamQueue, Operation[Any]] = {} if mark is None else {mark.queue: mark}
    for other in node._needs:
        for operation in other._marks():
            known = newest.get(operation.queue)
            if not operation.is_settled and (known is None or known.id < operation.id):
                newest[operation.queue] = operation
    node._stands = tuple(newest.values())
    node._work = None
    if node._state < GIVEN:
        node._state = GIVEN
    if newest:
        scheduler.lingering.append(node)
    else:
        scheduler.finish(node)
    scheduler.stand(node)


def refused(scheduler: Scheduler, node: Node[Any], queue: StreamQueue, operation: Operation[Any]) -> None:
    """Its stream failed it. That is told here, by the node, so the stream itself may go on."""
    failure = operation.failure
    assert failure is not None
    spoiled = failure.poison
    if node._cause is not None:  # a block has raised, and what it enqueued was refused, too
        scheduler.take_over(spoiled)
    else:
        error: BaseException = operation.value
        if scheduler.streams.owns(queue):
            error = spoiled.error
        spoiled.delivered = True
        node._cause = Cause(error, node.name)
        node._error = error
        scheduler.note_unread(node._cause)
    mark = queue.submit_marker()  # behind what its stream may have of it
    if mark.failure is not None:
        mark.failure.poison.delivered = True
    # Its stream may have skipped the waits for what it comes behind, too: it stands for those by itself.
    scheduler.given[queue].remove(node)
    scheduler.in_flight -= 1
    node._operation = None
    scheduler.stand_in(node, mark)


def broken(scheduler: Scheduler, node: Node[Any]) -> None:
    """Its operation has failed on the device, or behind it."""
    operation = node._operation
    if node._cause is not None or operation is None or operation.status <= OPERATION_DONE:
        return
    failure = operation.failure
    if operation.status == OPERATION_ABANDONED:
        node._error = node._error or operation.exception()
        if failure is None:
            return  # only its result was dropped: what comes behind it runs
        error = failure.poison.error
    else:
        error = node._error = operation.value
    if failure is not None:
        failure.poison.delivered = True
    node._cause = Cause(error, node.name)
    scheduler.note_unread(node._cause)


def note_unread(scheduler: Scheduler, cause: Cause) -> None:
    """Nobody has been told of it yet."""
    scheduler.unread[cause] = None
    if len(scheduler.unread) > MOST_UNREAD:
        for old in list(scheduler.unread)[: MOST_UNREAD // 2]:
            del scheduler.unread[old]
            if not old.delivered:
                scheduler.tell(old)


def take_over(scheduler: Scheduler, spoiled: Poison) -> None:
    """A stream has failed by what nobody has been told of. The coordinator tells it; the stream may go on."""
    if not spoiled.delivered:
        spoiled.delivered = True
        scheduler.note_unread(Cause(spoiled.error, spoiled.where))


def tell(scheduler: Scheduler, cause: Cause) -> None:
    """Nobody will ask for it any more."""
    cause.delivered = True
    scheduler.loop.call_exception_handler(
        {"message": f"aiocuda: the failure of {cause.name} was never retrieved", "exception": cause.error}
    )


def latched(scheduler: Scheduler) -> None:
    """The device has faulted: nothing that waits will run."""
    fault = scheduler.driver.fault
    if fault is None:
        return
    for node in [*scheduler.waiting, *scheduler.unentered]:
        if node._state == WAITING and node._cause is None:
            node._error = fault.again()
            node._cause = Cause(node._error, node.name)
            node._cause.delivered = True  # it is the device's, and told by all that it had
            _end_now(node, FAILED)
    while scheduler.ready.size:
        scheduler.met_now.append(scheduler.ready.pop())
    for nodes in scheduler.blocked.values():
        scheduler.met_now.extend(nodes)
    scheduler.blocked.clear()


def abandon(scheduler: Scheduler, node: Node[Any]) -> bool:
    """Withdraw it, or drop its result."""
    scheduler.check_loop()
    if node.done():
        return False
    if node._state != WAITING:
        return node._operation is not None and node._error is None and node._operation.abandon()
    if node._role == "host" and not node._unmet:
        return False  # it runs already
    node._error = node._withdrawn()
    node._cause = Cause(node._error, node.name)
    node._deliver(node._cause)
    _end_now(node, ABANDONED)
    if node not in scheduler.waiting:  # a bracket that nobody has entered: it is registered only now
        scheduler.registered += 1
        scheduler.kinds[node.kind] = scheduler.kinds.get(node.kind, 0) + 1
        scheduler.met(node)
    elif not node._unmet:
        scheduler.unready(node)
        scheduler.met(node)
    return True


def unready(scheduler: Scheduler, node: Node[Any]) -> None:
    """It could be given to a stream, and is to be no more."""
    for nodes in scheduler.blocked.values():
        if node in nodes:
            del nodes[node]
            return
    scheduler.ready.remove(node)


def _end_now(node: Node[Any], state: int) -> None:
    """It is finished for everybody; it keeps its place in the graph until all that it comes behind stand."""
    node._state = state
    node._work = None
    node._tell_given()
    node._tell_done()


def _skipped(node: Node[Any], cause: Cause) -> SkippedError:
    """What a node fails with that was not run."""
    error = SkippedError(f"{node.name} was not run: {cause.name} failed before it: {cause.error}")
    error.__cause__ = cause.error
    return error
