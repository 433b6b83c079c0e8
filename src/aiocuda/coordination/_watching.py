"""Watching: how the host hears that something has passed, and who waits for that.

These functions are methods of `Scheduler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .._wakeups import Waiters, wake_future
from ..completion._operation import ABANDONED as OPERATION_ABANDONED
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import INTERNAL, Operation, new_operation
from ..completion._prediction import INSTANT
from ..completion._stream_queue import nothing
from ._node import Node

if TYPE_CHECKING:
    from ._scheduler import Scheduler

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


def watch_for_room(scheduler: Scheduler) -> None:
    """Have the host told of room: of the middle of what each stream has, or of its next if somebody hurries."""
    hurry = scheduler.ready.highest < 2
    for queue, nodes in scheduler.given.items():
        if not nodes or (queue in scheduler.watched and not hurry):
            continue
        node = nodes[0 if hurry else len(nodes) // 2] if scheduler.ready.size else nodes[-1]
        operation = node._operation
        if operation is None or scheduler.watched.get(queue) is operation:
            continue
        scheduler.watched[queue] = operation
        hear(scheduler, operation, functools.partial(_noticed, scheduler, operation))
    if scheduler.lingering and not scheduler.watched:
        for operation in scheduler.lingering[-1]._stands:
            if operation.queue not in scheduler.watched:
                scheduler.watched[operation.queue] = operation
                hear(scheduler, operation, functools.partial(_noticed, scheduler, operation))
    scheduler.watch.look()


def hear(scheduler: Scheduler, operation: Operation[Any], then: Callable[[Operation[Any]], object]) -> None:
    """Have it called when the device is done with it; what has been abandoned is finished before that."""
    queue = operation.queue
    if operation.status == OPERATION_ABANDONED and not operation.is_settled and scheduler.driver.fault is None:
        if any(entry is operation for entry in queue.host_queue.entries):  # a mark would overtake it
            operation = new_operation(queue, INTERNAL, INSTANT, None)
            operation.on_settled = nothing
            queue.host_queue.put(operation, None, ())
        else:
            operation = queue.submit_marker()
    operation.add_done_callback(then, context=scheduler.context)


def _noticed(scheduler: Scheduler, operation: Operation[Any], _: Operation[Any]) -> None:
    if scheduler.watched.get(operation.queue) is operation:
        del scheduler.watched[operation.queue]
    scheduler.advance()


def tidy_soon(scheduler: Scheduler) -> None:
    """A sink has been awaited: let go of what came before it, and of its memory, once per turn of the loop."""
    if not scheduler.tidying:
        scheduler.tidying = True
        scheduler.loop.call_soon(_tidy, scheduler)


def _tidy(scheduler: Scheduler) -> None:
    scheduler.tidying = False
    if not scheduler.closed:
        scheduler.ask()


def watch_end(scheduler: Scheduler, node: Node[Any]) -> None:
    """Somebody wants to be told of its end."""
    for operation in node._marks():
        hear(scheduler, operation, functools.partial(_passed, scheduler, node))


def _passed(scheduler: Scheduler, node: Node[Any], operation: Operation[Any]) -> None:
    scheduler.advance()
    if node._callbacks is None:
        return
    if node.done():
        node._tell_done()  # it was abandoned: its end is now, and the device's may be long after
    elif not operation.is_settled:
        hear(scheduler, operation, functools.partial(_passed, scheduler, node))


def until(scheduler: Scheduler, node: Node[Any], least: int) -> Generator[Any, None, None]:
    """Until it has come so far: GIVEN, when there is something in a stream to wait for, or OPEN."""
    while node._state < least:
        future: asyncio.Future[None] = scheduler.loop.create_future()
        if node._waiters is None:
            node._waiters = Waiters()
        node._waiters.add(future)
        try:
            with scheduler.watch.waiting(node, future):
                yield from future
        finally:
            if node._waiters is not None:
                node._waiters.discard(future)


def until_passed(scheduler: Scheduler, operations: tuple[Operation[Any], ...]) -> Generator[Any, None, None]:
    """Until the device is done with them, whatever became of them."""
    for operation in operations:
        if operation.status < OPERATION_DONE:
            with contextlib.suppress(Exception):  # it is another one's failure, and that one tells of it
                yield from operation.__await__()
        if not operation.is_settled:
            yield from operation.settle().__await__()


async def room(scheduler: Scheduler) -> None:
    """Until no more wait than there are places."""
    scheduler.check_loop()
    scheduler.ask()
    await asyncio.sleep(0)  # whoever produces without end lets others go on
    while scheduler.crowded and not scheduler.closed:
        producer: asyncio.Future[None] = scheduler.loop.create_future()
        scheduler.producers.add(producer)
        scheduler.watch_for_room()
        try:
            await producer
        finally:
            if not scheduler.producers.discard(producer):
                scheduler.called -= 1
                if scheduler.producers:  # this one may register nothing: then there is room for another one
                    scheduler.loop.call_soon(scheduler.call_producers)


def call_producers(scheduler: Scheduler) -> None:
    """Wake as many producers as there is room for, the first ones first."""
    if scheduler.producers and not scheduler.crowded:
        scheduler.wakes.wake(scheduler.call_producer)


def call_producer(scheduler: Scheduler) -> bool:
    """Wake one producer if there is room for it, and for those that were woken and have not registered anything yet."""
    if not scheduler.producers or (
        scheduler.in_flight > len(scheduler.open)
        and len(scheduler.waiting) + scheduler.called > scheduler.max_in_flight
    ):
        return False
    scheduler.called += 1
    wake_future(scheduler.producers.pop())
    return True


async def drain(scheduler: Scheduler) -> None:
    """Wait until all that was registered has finished."""
    scheduler.check_loop()
    while True:
        scheduler.ask()
        if scheduler.idle or scheduler.closed:
            return
        drainer: asyncio.Future[None] = scheduler.loop.create_future()
        scheduler.drainers.add(drainer)
        try:
            scheduler.watch_for_room()
            await drainer
        finally:
            scheduler.drainers.discard(drainer)
