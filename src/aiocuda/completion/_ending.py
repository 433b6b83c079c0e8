"""Ending: how a queue is emptied, drained and left. These functions are methods of `StreamQueue`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from . import _observed
from ._operation import ABANDONED, DONE, STEP, Operation, new_operation
from ._prediction import INSTANT

if TYPE_CHECKING:
    from ._stream_queue import StreamQueue

__all__ = ["finish", "flush", "let_in", "nothing", "orphan", "passed", "reclaim", "refuse", "settle", "withdraw_all"]


def refuse(queue: StreamQueue, draining: bool = False) -> None:
    """Refuse new work from now on. What was accepted goes on: it does not come through `StreamQueue.check`.

    Parameters
    ----------
    draining
        Its coordinator or its device closes it, and waits for the operations that a coordinator has registered and not
        submitted yet: `let_in` takes these.
    """
    if not queue.closed:
        queue.draining = draining
        queue.closed = True


def let_in(queue: StreamQueue) -> None:
    """Take work that a coordinator accepted before the queue closed. The caller sets `closed` again behind it."""
    if not queue.draining:
        queue.check()
    queue.closed = False


def finish(queue: StreamQueue) -> None:
    """Refuse everything: nobody waits for its work any more, or nothing of it is left."""
    queue.draining = False
    queue.closed = queue.ended = True


def withdraw_all(queue: StreamQueue) -> None:
    """Abandon all that is still on the host; the device never hears of it."""
    for operation in queue.host_queue.withdraw():
        operation._land = None
        if operation._state < DONE:
            queue.abandon(operation)
        _let_go(queue, operation)


def _let_go(queue: StreamQueue, operation: Operation[Any]) -> None:
    """The device never hears of it. But it may have chunks of a copy: that has passed when they have."""
    operation._abandoned = bool(queue.pending)
    if queue.pending:
        queue.pending.append(operation)  # with what it holds, whose addresses it may still claim
    else:
        operation._keep = None
        _release(operation)


def _release(operation: Operation[Any]) -> None:
    release, operation._release = operation._release, None
    if release is not None:
        release()


async def flush(queue: StreamQueue) -> None:
    """Wait until nothing is left on the host."""
    if queue.host_queue.entries:
        await _behind_all(queue, on_submit=True)


async def settle(queue: StreamQueue) -> None:
    """Wait until everything given so far has passed; what became of it is left for others to read."""
    while not queue.idle and not queue.reactor.closed:
        if not await _behind_all(queue, on_submit=False):
            return  # else what was on the host has been withdrawn, and that with it: again, behind what is left


async def _behind_all(queue: StreamQueue, on_submit: bool) -> bool:
    """Wait for a marker's turn; True if it was withdrawn before that."""
    told: asyncio.Future[None] = queue.loop.create_future()
    marker: Operation[Any] = new_operation(queue, STEP, INSTANT, None)
    marker._release = nothing
    if queue.shared:
        queue.submit(marker, None, (), ahead=True)
    else:
        queue.host_queue.put(marker, _tell if on_submit else None, (told,) if on_submit else ())
    if marker._state < DONE and not told.done():
        marker._add_waiter(told)
        queue.attend()
        await told
    return marker._state == ABANDONED


def orphan(queue: StreamQueue) -> None:
    """Nobody watches it any more. Who waits is told, if the loop is there to tell him; nothing new is accepted.

    On the queue's own loop, unless that is closed.
    """
    queue.finish()
    queue.reactor.retire(queue)
    withdrawn = queue.host_queue.withdraw()
    gone = queue.loop.is_closed()
    for operation in [*withdrawn, *queue.pending]:
        operation._land = None
        if operation.kind is STEP:
            operation._release = None  # which would ask for the next chunk
        if gone:
            operation._waiters = None
        if operation._state < DONE:
            queue.abandon(operation)
        operation._abandoned = True
    for operation in withdrawn:
        _let_go(queue, operation)


def passed(queue: StreamQueue) -> bool:
    """Has the device done all that it has accepted? Asks the driver, tells nobody."""
    if queue._driver.fault is not None:
        return True
    return all(
        operation._lease is None or queue._driver.event_query(operation._lease.handle)
        for operation in reversed(queue.pending)
    )


def reclaim(queue: StreamQueue) -> None:
    """Let go of what an orphan held. The device has passed."""
    while queue.pending:
        operation = queue.pending.popleft()
        operation._abandoned = False
        lease, operation._lease = operation._lease, None
        ours = lease is not None and not lease.lent  # a lent one goes back with its `Event`, perhaps in the next line
        operation._keep = None
        if queue._driver.fault is None:
            if lease is not None and ours:
                queue.device_state.leases.give(lease)
            _observed.forget(queue, operation)
        _release(operation)
    if queue._driver.fault is None:
        queue._driver.stream_destroy(queue.handle)  # an import is forgotten
        if not queue.imported:
            queue.device_state.stream_opened(-1)


def nothing() -> None:
    """Nothing is to be let go."""


def _tell(future: asyncio.Future[None]) -> None:
    """Wake whoever waits for this moment, unless he has left."""
    if not future.done():
        future.set_result(None)
