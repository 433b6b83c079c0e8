"""EventPool: lends CUDA events, up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from .._base._checks import check_integer, flag
from .._base._log import log
from .._base._types import ProcessLocal
from .._base._wakeups import Waiters, Wakes, wake_future
from ..device import Device, Event
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, QueueFullError
from ..lowlevel import resources_of
from ._device_watch import DeviceWatch, check_device

__all__ = ["EventPool", "EventPoolStatistics"]

#: Largest limit. A program that asks for more events has made a mistake.
MOST_EVENTS = 1 << 20


class EventPoolStatistics(NamedTuple):
    """Figures of an event pool."""

    limit: int  #: events that may be lent at the same time
    lent: int  #: events that are lent
    lent_timing: int  #: the timing events among these
    peak: int  #: the largest value of ``lent`` so far
    acquired: int  #: loans so far
    waited: int  #: loans that had to wait until another event was returned
    utilisation: float  #: ``lent`` ÷ ``limit``, 0-1


class EventPool(ProcessLocal):
    """Events of one device, lent to the coroutines of one event loop.

    The limit gives back-pressure: `acquire` waits while all events are lent. A loan ends by `release`, at the end of
    `borrow`, or when the event is garbage-collected. At most ``limit`` events are lent at the same time.
    """

    def __init__(self, device: Device, limit: int = 1024) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pool is made for an aiocuda.Device, not {type(device).__name__}")
        check_integer(limit, "limit")
        if not 1 <= limit <= MOST_EVENTS:
            raise InvalidArgumentError(f"limit is from 1 to {MOST_EVENTS:,}, and this is {limit}", limit=limit)
        self._device = device
        self._resources = resources_of(device)
        self._limit = limit
        self._lent = {False: 0, True: 0}  # by timing
        self._peak = self._acquired = self._waited = 0
        self._waiting: Waiters[asyncio.Future[None]] = Waiters()
        self._watch = DeviceWatch(self._check_waiters)

    def acquire_nowait(self, timing: bool = False) -> Event:
        """Return an event that is not recorded yet. Raise `QueueFullError` if all events are lent."""
        self._check()
        lent = sum(self._lent.values())
        if lent >= self._limit:
            log("warning", "queue_full", queue="event pool", device=self._device.name, limit=self._limit)
            raise QueueFullError(f"all {self._limit} events are lent: await pool.acquire(), or release one")
        timing = flag(timing, "timing")
        event = Event(self._resources.device_state, timing, self, self._loan_ended)
        self._lent[timing] += 1
        self._acquired += 1
        self._peak = max(self._peak, lent + 1)
        return event

    async def acquire(self, timing: bool = False) -> Event:
        """Return an event that is not recorded yet. While all are lent, wait in order of arrival.

        Raise `ClosedError` or `DeviceFault` if the device has been closed or has faulted, before or during the wait.
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
                self._waiting.add_first(turn)  # another task took the event; this one stays first in the queue
            first = False
            try:
                await turn
            except asyncio.CancelledError:
                if not self._waiting.discard(turn):
                    self._wake()  # this task had been woken: wake the next one instead
                raise
            self._check()
        try:
            return self.acquire_nowait(timing)
        except BaseException:
            self._wake()  # this task did not take the event: wake the next one
            raise

    def _check(self) -> None:
        check_device(self._device, "events")

    def _check_waiters(self) -> bool:
        """Wake all waiting tasks if the device has ended, because events may never come back; True if tasks wait."""
        try:
            self._check()
        except AiocudaError:
            # Each task checks again, and raises the error itself.
            Wakes.of(asyncio.get_running_loop()).wake_all(self._waiting, wake_future)
        return bool(self._waiting)

    @contextlib.asynccontextmanager
    async def borrow(self, timing: bool = False) -> AsyncIterator[Event]:
        """Lend an event until the end of the ``async with`` block."""
        event = await self.acquire(timing)
        try:
            yield event
        finally:
            self.release(event)

    def release(self, event: Event) -> None:
        """End the loan of an event. Streams that already wait for it still do.

        Raise `StaleHandleError` if it has been released before, `InvalidArgumentError` if it is not from this pool.
        """
        if not isinstance(event, Event):
            raise InvalidTypeError(f"a pool takes an aiocuda.Event back, not {type(event).__name__}")
        if event.lender is not self:
            raise InvalidArgumentError(f"this pool has not lent {event!r}: end its loan by event.release()")
        event.release()

    def _loan_ended(self, timing: bool) -> None:
        """Count a returned event. The event calls it, on any thread if it is garbage-collected."""
        self._lent[timing] -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            try:
                turn = self._waiting.pop()
            except KeyError:
                return  # another thread has taken it
            if not turn.done():
                loop = turn.get_loop()
                if not loop.is_closed():
                    # Thread-safe, because a finaliser may return the event on any thread.
                    loop.call_soon_threadsafe(wake_future, turn)
                return

    def __repr__(self) -> str:
        return f"<EventPool {sum(self._lent.values())} of {self._limit} lent>"

    def statistics(self) -> EventPoolStatistics:
        """Return the present figures."""
        lent = sum(self._lent.values())
        return EventPoolStatistics(
            limit=self._limit, lent=lent, lent_timing=self._lent[True], peak=self._peak,
            acquired=self._acquired, waited=self._waited, utilisation=lent / self._limit,
        )  # fmt: skip
