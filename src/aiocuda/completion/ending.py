"""Ending: how a lane is emptied, drained and left. These functions are methods of `Lane`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from . import observed
from .operation import ABANDONED, DONE, STEP, Operation, new_operation
from .predict import INSTANT

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["finish", "flush", "let_in", "nothing", "orphan", "passed", "reclaim", "refuse", "settle", "withdraw_all"]


def refuse(lane: Lane, draining: bool = False) -> None:
    """Refuse new work from now on. What was accepted goes on: it does not come through `Lane.check`.

    Parameters
    ----------
    draining
        Its coordinator or its device closes it, and waits for the operations that a coordinator has registered and not
        submitted yet: `let_in` takes these.
    """
    if not lane.closed:
        lane.draining = draining
        lane.closed = True


def let_in(lane: Lane) -> None:
    """Take work that a coordinator accepted before the lane closed. The caller sets `closed` again behind it."""
    if not lane.draining:
        lane.check()
    lane.closed = False


def finish(lane: Lane) -> None:
    """Refuse everything: nobody waits for its work any more, or nothing of it is left."""
    lane.draining = False
    lane.closed = lane.ended = True


def withdraw_all(lane: Lane) -> None:
    """Abandon all that is still on the host; the device never hears of it."""
    for operation in lane.queue.withdraw():
        operation._land = None
        if operation._state < DONE:
            lane.abandon(operation)
        _let_go(lane, operation)


def _let_go(lane: Lane, operation: Operation[Any]) -> None:
    """The device never hears of it. But it may have chunks of a copy: that has passed when they have."""
    operation._abandoned = bool(lane.pending)
    if lane.pending:
        lane.pending.append(operation)  # with what it holds, whose addresses it may still claim
    else:
        operation._keep = None
        _release(operation)


def _release(operation: Operation[Any]) -> None:
    release, operation._release = operation._release, None
    if release is not None:
        release()


async def flush(lane: Lane) -> None:
    """Wait until nothing is left on the host."""
    if lane.queue.entries:
        await _behind_all(lane, on_submit=True)


async def settle(lane: Lane) -> None:
    """Wait until everything given so far has passed; what became of it is left for others to read."""
    while not lane.idle and not lane.reactor.closed:
        if not await _behind_all(lane, on_submit=False):
            return  # else what was on the host has been withdrawn, and that with it: again, behind what is left


async def _behind_all(lane: Lane, on_submit: bool) -> bool:
    """Wait for a marker's turn; True if it was withdrawn before that."""
    told: asyncio.Future[None] = lane.loop.create_future()
    marker: Operation[Any] = new_operation(lane, STEP, INSTANT, None)
    marker._release = nothing
    if lane.shared:
        lane.submit(marker, None, (), ahead=True)
    else:
        lane.queue.put(marker, _tell if on_submit else None, (told,) if on_submit else ())
    if marker._state < DONE and not told.done():
        marker._add_waiter(told)
        lane.attend()
        await told
    return marker._state == ABANDONED


def orphan(lane: Lane) -> None:
    """Nobody watches it any more. Who waits is told, if the loop is there to tell him; nothing new is accepted.

    On the lane's own loop, unless that is closed.
    """
    lane.finish()
    lane.reactor.retire(lane)
    withdrawn = lane.queue.withdraw()
    gone = lane.loop.is_closed()
    for operation in [*withdrawn, *lane.pending]:
        operation._land = None
        if operation.kind is STEP:
            operation._release = None  # which would ask for the next chunk
        if gone:
            operation._waiters = None
        if operation._state < DONE:
            lane.abandon(operation)
        operation._abandoned = True
    for operation in withdrawn:
        _let_go(lane, operation)


def passed(lane: Lane) -> bool:
    """Has the device done all that it has accepted? Asks the driver, tells nobody."""
    if lane._driver.fault is not None:
        return True
    return all(
        operation._lease is None or lane._driver.event_query(operation._lease.handle)
        for operation in reversed(lane.pending)
    )


def reclaim(lane: Lane) -> None:
    """Let go of what an orphan held. The device has passed."""
    while lane.pending:
        operation = lane.pending.popleft()
        operation._abandoned = False
        lease, operation._lease = operation._lease, None
        ours = lease is not None and not lease.lent  # a lent one goes back with its `Event`, perhaps in the next line
        operation._keep = None
        if lane._driver.fault is None:
            if lease is not None and ours:
                lane.hub.leases.give(lease)
            observed.forget(lane, operation)
        _release(operation)
    if lane._driver.fault is None:
        lane._driver.stream_destroy(lane.handle)  # an import is forgotten
        if not lane.imported:
            lane.hub.stream_opened(-1)


def nothing() -> None:
    """Nothing is to be let go."""


def _tell(future: asyncio.Future[None]) -> None:
    """Wake whoever waits for this moment, unless he has left."""
    if not future.done():
        future.set_result(None)
