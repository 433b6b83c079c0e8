"""Ending: how a lane is emptied, drained and left. These functions are methods of `Lane`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .operation import ABANDONED, DONE, STEP, Operation
from .predict import INSTANT

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["flush", "nothing", "orphan", "passed", "reclaim", "settle", "withdraw_all"]


def withdraw_all(lane: Lane) -> None:
    """Abandon all that is still on the host; the device never hears of it."""
    for operation in lane.queue.withdraw():
        operation._keep = operation._land = None
        if operation._state < DONE:
            lane.abandon(operation)
        operation._abandoned = False


async def flush(lane: Lane) -> None:
    """Wait until nothing is left on the host."""
    if lane.queue.entries:
        await _behind_all(lane, on_submit=True)


async def settle(lane: Lane) -> None:
    """Wait until everything given so far has passed; what became of it is left for others to read."""
    if not lane.idle:
        await _behind_all(lane, on_submit=False)


async def _behind_all(lane: Lane, on_submit: bool) -> None:
    told: asyncio.Future[None] = lane.loop.create_future()
    marker: Operation[Any] = Operation(lane, STEP, INSTANT, None)
    marker._release = nothing
    if lane.shared:
        lane.submit(marker, None, ())
    else:
        lane.queue.put(marker, _tell if on_submit else None, (told,) if on_submit else ())
    if marker._state < DONE and not told.done():
        marker._add_waiter(told)
        lane.attend()
        await told


def orphan(lane: Lane) -> None:
    """The loop has gone: nobody is told any more, and nothing new is accepted."""
    lane.closed = True
    lane.reactor.retire(lane)
    withdrawn = lane.queue.withdraw()
    for operation in [*withdrawn, *lane.pending]:
        operation._waiters = operation._land = operation._release = None
        if operation._state < DONE:
            lane.reactor.abandoned += operation.kind is not STEP
            operation._state = ABANDONED
        operation._abandoned = True
    for operation in withdrawn:  # the device never hears of them
        operation._keep = None
        operation._abandoned = False


def passed(lane: Lane) -> bool:
    """Has the device done all that it has accepted? Asks the driver, tells nobody."""
    if lane._driver.fault is not None:
        return True
    return all(
        operation._lease is None or lane._driver.event_query(operation._lease.handle)
        for operation in reversed(lane.pending)
    )


def reclaim(lane: Lane) -> bool:
    """Let go of what an orphan held, once the device has passed."""
    if not lane.passed():
        return False
    while lane.pending:
        operation = lane.pending.popleft()
        operation._abandoned = False
        operation._keep = None
        lease, operation._lease = operation._lease, None
        if lease is not None and not lease.lent and lane._driver.fault is None:
            lane.hub.leases.give(lease)
    if not lane.imported and lane._driver.fault is None:
        lane.hub.stream_opened(-1)
        lane._driver.stream_destroy(lane.handle)
    return True


def nothing() -> None:
    """Nothing is to be let go."""


def _tell(future: asyncio.Future[None]) -> None:
    """Wake whoever waits for this moment, unless he has left."""
    if not future.done():
        future.set_result(None)
