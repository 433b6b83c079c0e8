"""Event pools of a random program: loans up to a limit, waits that are cut short, events that are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ... import EventPool
from ..._event import Event
from ...errors import QueueFullError, StaleHandleError

if TYPE_CHECKING:
    from ..._device import Device
    from .actions import Actions

__all__ = ["Loans"]


class Loans:
    """An event pool of each device, which all tasks of a program share: V5, V6 and V12 of it."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions._checker
        self._pools: dict[Device, EventPool] = {}
        self._lent: weakref.WeakSet[Event] = weakref.WeakSet()
        self._checker.at_end.append(self._ended)

    def doing(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What a task may do."""
        return 3 * [self.loan]

    async def loan(self) -> None:
        """An event, recorded and waited for, and given back one way or another."""
        actions = self._actions
        device = actions._device()
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = EventPool(device, 1 + actions.below(3))
        actions.count("loan")
        limit = actions._seconds(4) if actions.below(3) == 0 else None
        with contextlib.suppress(TimeoutError, QueueFullError):
            async with asyncio.timeout(limit):
                timing = actions.below(3) == 0
                event = pool.acquire_nowait(timing) if actions.below(4) == 0 else await pool.acquire(timing)
                try:
                    self._look(pool, event)
                    await self._use(device, event)
                except BaseException:
                    event.release()  # what it has failed with holds it
                    raise
                if actions.below(3):
                    self._give_back(pool, event)

    def _give_back(self, pool: EventPool, event: Event) -> None:
        pool.release(event)
        try:
            event.release()
        except StaleHandleError:
            return
        self._checker.found("V5 an event could be given back twice")

    def _look(self, pool: EventPool, event: Event) -> None:
        lent = [other for other in self._lent if other._lease is not None and other.lender is pool]
        if len(lent) + 1 > pool._limit:
            self._checker.found(f"V12 {len(lent) + 1} events of a pool are lent, and {pool._limit} may be")
        if any(other.handle == event.handle for other in lent):
            self._checker.found(f"V5 {event!r} is lent to somebody else, too")
        self._lent.add(event)

    async def _use(self, device: Device, event: Event) -> None:
        actions = self._actions
        for _ in range(actions.below(3)):
            stream, other = actions._stream(device), actions._stream()
            stream.record(event=event)
            operation = actions._keep(event.operation)
            self._checker.order(actions._keep(other.wait(event)), operation)
            if actions.below(2):
                await event

    def _ended(self) -> Iterator[str]:
        if self._checker.driver.fault is not None:
            return  # what has failed with it keeps what it had
        for pool in self._pools.values():
            lent = pool.statistics().lent
            if lent:
                yield f"V6 {lent} events of a pool are lent after the end"
