"""Event pools in a random program: loans up to a limit, waits that time out, and events that are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from aiocuda import Event, EventPool
from aiocuda.errors import QueueFullError, StaleHandleError
from tests.simulation import internals

if TYPE_CHECKING:
    from aiocuda import Device
    from tests.simulation.actions import Actions

__all__ = ["EventPoolActions"]


class EventPoolActions:
    """Actions with one event pool per device, which all tasks of a program share. Checks V5, V6 and V12.

    With ``by_kind``, the pools have limits for events with and without timing.
    """

    def __init__(self, actions: Actions, *, by_kind: bool = False) -> None:
        self._actions = actions
        self._by_kind = by_kind
        self._checker = actions.checker
        self._pools: dict[Device, EventPool] = {}
        self._lent: weakref.WeakSet[Event] = weakref.WeakSet()
        self._checker.final_checks.append(self._check_end)

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 3 * [self.borrow]

    async def borrow(self) -> None:
        """Acquire an event, record it and wait for it. Then release it, or drop it."""
        actions = self._actions
        device = actions.device()
        pool = self._pools.get(device)
        if pool is None:
            limit = 1 + actions.below(3)
            kinds = {"timing": 1 + actions.below(limit), "plain": 1 + actions.below(limit)} if self._by_kind else {}
            pool = self._pools[device] = EventPool(device, limit, **kinds)
        actions.count("loan")
        timeout = actions.seconds(4) if actions.below(3) == 0 else None
        with contextlib.suppress(TimeoutError, QueueFullError):
            async with asyncio.timeout(timeout):
                timing = actions.below(3) == 0
                event = pool.acquire_nowait(timing) if actions.below(4) == 0 else await pool.acquire(timing)
                try:
                    self._check_loan(pool, event)
                    await self._use(device, event)
                except BaseException:
                    event.release()  # the traceback holds the event, so it would not be dropped
                    raise
                if actions.below(3):
                    self._release(pool, event)

    def _release(self, pool: EventPool, event: Event) -> None:
        pool.release(event)
        try:
            event.release()
        except StaleHandleError:
            return
        self._checker.report("V5 an event could be released twice")

    def _check_loan(self, pool: EventPool, event: Event) -> None:
        lent = [other for other in self._lent if internals.event_is_lent(other, pool)]
        limit = internals.event_limit(pool)
        if len(lent) + 1 > limit:
            self._checker.report(f"V12 {len(lent) + 1} events of a pool are on loan, and the limit is {limit}")
        alike = [other for other in lent if other.timing == event.timing]
        limit = internals.event_limit(pool, event.timing)
        if len(alike) + 1 > limit:
            self._checker.report(f"V12 {len(alike) + 1} events of one kind are on loan, and their limit is {limit}")
        if any(other.handle == event.handle for other in lent):
            self._checker.report(f"V5 {event!r} is on loan twice")
        self._lent.add(event)

    async def _use(self, device: Device, event: Event) -> None:
        actions = self._actions
        for _ in range(actions.below(3)):
            stream, other = actions.stream(device), actions.stream()
            stream.record(event=event)
            operation = actions.follow(event.operation)
            self._checker.expect_wait(actions.follow(other.wait(event)), operation)
            if actions.below(2):
                await event

    def _check_end(self) -> Iterator[str]:
        if self._checker.driver.fault is not None:
            return  # operations that failed with the fault keep their events
        for pool in self._pools.values():
            lent = pool.statistics().lent
            if lent:
                yield f"V6 {lent} events of a pool are on loan after the end"
