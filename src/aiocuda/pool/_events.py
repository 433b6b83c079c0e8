"""EventPool: events on loan, never more than a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from .._checks import flag
from .._device import Device
from .._event import Event
from .._types import ProcessLocal
from .._wakeups import Waiters, Wakes, wake_future
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, QueueFullError
from ._watch import Watch, check_device

__all__ = ["EventPool", "EventPoolStatistics"]


class EventPoolStatistics(NamedTuple):
    """Figures of an event pool.

    Attributes
    ----------
    limit, lent, lent_timing
        How many may be lent at once, how many are, and how many of those take time.
    peak
        The most that were lent at once.
    acquired, waited
        Loans so far, and how many of them had to wait for another one's return.
    utilisation
        ``lent`` ÷ ``limit``, 0-1.
    """

    limit: int
    lent: int
    lent_timing: int
    peak: int
    acquired: int
    waited: int
    utilisation: float


class EventPool(ProcessLocal):
    """Events of one device, lent to one loop's coroutines.

    The limit is back-pressure: who asks for one more waits for a return. An event comes back by `release`, at the end
    of `borrow`, or when nobody holds it any more.

    Parameters
    ----------
    device
        Whose events.
    limit
        How many may be lent at once.
    """

    def __init__(self, device: Device, limit: int = 1024) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pool is made for an aiocuda.Device, not {type(device).__name__}")
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise InvalidTypeError(f"limit is an integer, not {limit!r}")
        if not 1 <= limit <= MOST_EVENTS:
            raise InvalidArgumentError(f"limit is from 1 to {MOST_EVENTS:,}, and this is {limit}", limit=limit)
        self._device = device
        self._limit = limit
        self._lent = {False: 0, True: 0}
        self._peak = self._acquired = self._waited = 0
        self._waiting: Waiters[asyncio.Future[None]] = Waiters()
        self._watch = Watch(self._look)

    def acquire_nowait(self, timing: bool = False) -> Event:
        """An event, not recorded yet. `QueueFullError` if all are lent."""
        self._check()
        lent = sum(self._lent.values())
        if lent >= self._limit:
            raise QueueFullError(f"all {self._limit} events are lent: await pool.acquire(), or release one")
        timing = flag(timing, "timing")
        event = Event(self._device._device_state, timing, self)
        self._lent[timing] += 1
        self._acquired += 1
        self._peak = max(self._peak, lent + 1)
        return event

    async def acquire(self, timing: bool = False) -> Event:
        """An event, not recorded yet; waits, first come first served, while all are lent.

        Raises
        ------
        ClosedError, DeviceFault
            The device has been closed, or has faulted, meanwhile too.
        """
        self._check()
        first = True
        while sum(self._lent.values()) >= self._limit or (first and self._waiting):
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            self._watch.start()
            if first:
                self._waited += 1
                self._waiting.add(turn)
            else:
                self._waiting.add_first(turn)  # somebody was quicker; the place in the line is kept
            first = False
            try:
                await turn
            except asyncio.CancelledError:
                if not self._waiting.discard(turn):
                    self._wake()  # the place was ours already: pass it on
                raise
            self._check()
        try:
            return self.acquire_nowait(timing)
        except BaseException:
            self._wake()  # the place was ours, and nobody has it now: the next one may
            raise

    def _check(self) -> None:
        check_device(self._device, "events")

    def _look(self) -> bool:
        """While anybody waits: of a closed device, or of one that has faulted, no event may ever come back."""
        try:
            self._check()
        except AiocudaError:
            # Each of them asks again, and is told.
            Wakes.of(asyncio.get_running_loop()).wake_all(self._waiting, wake_future)
        return bool(self._waiting)

    @contextlib.asynccontextmanager
    async def borrow(self, timing: bool = False) -> AsyncIterator[Event]:
        """An event for as long as the block lasts."""
        event = await self.acquire(timing)
        try:
            yield event
        finally:
            self.release(event)

    def release(self, event: Event) -> None:
        """Take an event back; streams that were told to wait for it still do.

        Raises
        ------
        StaleHandleError
            It has been released before.
        InvalidArgumentError, InvalidTypeError
            This pool has not lent it; it is no event.
        """
        if not isinstance(event, Event):
            raise InvalidTypeError(f"a pool takes an aiocuda.Event back, not {type(event).__name__}")
        if event.lender is not self:
            raise InvalidArgumentError(f"this pool has not lent {event!r}: end its loan by event.release()")
        event.release()

    def returned(self, timing: bool) -> None:
        """A loan has ended: called by its event, whichever way it ended."""
        self._lent[timing] -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            try:
                turn = self._waiting.pop()
            except KeyError:
                return  # another thread was quicker
            if not turn.done():
                loop = turn.get_loop()
                if not loop.is_closed():
                    # A finaliser may be what returns it, on any thread.
                    loop.call_soon_threadsafe(wake_future, turn)
                return

    def __repr__(self) -> str:
        return f"<EventPool {sum(self._lent.values())} of {self._limit} lent>"

    def statistics(self) -> EventPoolStatistics:
        """A snapshot."""
        lent = sum(self._lent.values())
        return EventPoolStatistics(
            limit=self._limit,
            lent=lent,
            lent_timing=self._lent[True],
            peak=self._peak,
            acquired=self._acquired,
            waited=self._waited,
            utilisation=lent / self._limit,
        )


#: More events than any program has work for: a limit beyond it is a mistake.
MOST_EVENTS = 1 << 20
