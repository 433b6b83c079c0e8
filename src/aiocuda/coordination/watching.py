"""Watching: how the host hears that something has passed, and who waits for that.

These functions are methods of `Flow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ..completion.ending import nothing
from ..completion.operation import ABANDONED as OPERATION_ABANDONED
from ..completion.operation import DONE as OPERATION_DONE
from ..completion.operation import STEP, Operation, new_operation
from ..completion.predict import INSTANT
from ..waking import Waiters, wake_future
from .node import Node

if TYPE_CHECKING:
    from .flow import Flow

__all__ = [
    "call_producers",
    "drain",
    "hear",
    "room",
    "tidy_soon",
    "until",
    "until_passed",
    "watch_end",
    "watch_for_room",
]


def watch_for_room(flow: Flow) -> None:
    """Have the host told of room: of the middle of what each stream has, or of its next if somebody hurries."""
    hurry = flow.ready.highest < 2
    for lane, nodes in flow.given.items():
        if not nodes or (lane in flow.watched and not hurry):
            continue
        node = nodes[0 if hurry else len(nodes) // 2] if flow.ready.size else nodes[-1]
        operation = node._operation
        if operation is None or flow.watched.get(lane) is operation:
            continue
        flow.watched[lane] = operation
        hear(flow, operation, functools.partial(_noticed, flow, operation))
    if flow.lingering and not flow.watched:
        for operation in flow.lingering[-1]._stands:
            if operation._lane not in flow.watched:
                flow.watched[operation._lane] = operation
                hear(flow, operation, functools.partial(_noticed, flow, operation))
    flow.watch.look()


def hear(flow: Flow, operation: Operation[Any], then: Callable[[Operation[Any]], object]) -> None:
    """Have it called when the device is done with it; what has been abandoned is finished before that."""
    lane = operation._lane
    if operation._state == OPERATION_ABANDONED and not operation._passed and flow.driver.fault is None:
        if any(entry is operation for entry in lane.queue.entries):  # a mark would overtake it
            operation = new_operation(lane, STEP, INSTANT, None)
            operation._release = nothing
            lane.queue.put(operation, None, ())
        else:
            operation = lane.mark()
    operation.add_done_callback(then, context=flow.context)


def _noticed(flow: Flow, operation: Operation[Any], _: Operation[Any]) -> None:
    if flow.watched.get(operation._lane) is operation:
        del flow.watched[operation._lane]
    flow.advance()


def tidy_soon(flow: Flow) -> None:
    """A sink has been awaited: let go of what came before it, and of its memory, once per turn of the loop."""
    if not flow.tidying:
        flow.tidying = True
        flow.loop.call_soon(_tidy, flow)


def _tidy(flow: Flow) -> None:
    flow.tidying = False
    if not flow.closed:
        flow.ask()


def watch_end(flow: Flow, node: Node[Any]) -> None:
    """Somebody wants to be told of its end."""
    for operation in node._marks():
        hear(flow, operation, functools.partial(_passed, flow, node))


def _passed(flow: Flow, node: Node[Any], operation: Operation[Any]) -> None:
    flow.advance()
    if node._callbacks is None:
        return
    if node.done():
        node._tell_done()  # it was abandoned: its end is now, and the device's may be long after
    elif not operation._passed:
        hear(flow, operation, functools.partial(_passed, flow, node))


def until(flow: Flow, node: Node[Any], least: int) -> Generator[Any, None, None]:
    """Until it has come so far: GIVEN, when there is something in a stream to wait for, or OPEN."""
    while node._state < least:
        future: asyncio.Future[None] = flow.loop.create_future()
        if node._waiters is None:
            node._waiters = Waiters()
        node._waiters.add(future)
        try:
            with flow.watch.waiting(node, future):
                yield from future
        finally:
            if node._waiters is not None:
                node._waiters.discard(future)


def until_passed(flow: Flow, operations: tuple[Operation[Any], ...]) -> Generator[Any, None, None]:
    """Until the device is done with them, whatever became of them."""
    for operation in operations:
        if operation._state < OPERATION_DONE:
            with contextlib.suppress(Exception):  # it is another one's failure, and that one tells of it
                yield from operation.__await__()
        if not operation._passed:
            yield from operation.settle().__await__()


async def room(flow: Flow) -> None:
    """Until no more wait than there are places."""
    flow.check_loop()
    flow.ask()
    await asyncio.sleep(0)  # whoever produces without end lets others go on
    while flow.crowded and not flow.closed:
        producer: asyncio.Future[None] = flow.loop.create_future()
        flow.producers.add(producer)
        flow.watch_for_room()
        try:
            await producer
        finally:
            if not flow.producers.discard(producer):
                flow.called -= 1
                if flow.producers:  # this one may register nothing: then there is room for another one
                    flow.loop.call_soon(flow.call_producers)


def call_producers(flow: Flow) -> None:
    """Wake as many producers as there is room for, the first ones first."""
    if flow.producers and not flow.crowded:
        flow.wakes.wake(flow.call_producer)


def call_producer(flow: Flow) -> bool:
    """Wake one producer if there is room for it, and for those that were woken and have not registered anything yet."""
    if not flow.producers or (flow.in_flight > len(flow.open) and len(flow.waiting) + flow.called > flow.max_in_flight):
        return False
    flow.called += 1
    wake_future(flow.producers.pop())
    return True


async def drain(flow: Flow) -> None:
    """Wait until all that was registered has finished."""
    flow.check_loop()
    while True:
        flow.ask()
        if flow.idle or flow.closed:
            return
        drainer: asyncio.Future[None] = flow.loop.create_future()
        flow.drainers.add(drainer)
        try:
            flow.watch_for_room()
            await drainer
        finally:
            flow.drainers.discard(drainer)
