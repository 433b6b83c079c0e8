"""EventPool: lends CUDA events, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple, TypeAlias

from .._base._async_block import async_block
from .._base._checks import check_integer, flag
from .._base._log import log
from .._base._mistakes import figures, keywords, lacks, refuses
from .._base._types import ProcessLocal
from .._base._wakeups import Waiters, Wakes, wake_future
from ..device import Device, Event
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, QueueFullError
from ..lowlevel import resources_of
from ._device_watch import DeviceWatch, check_device

__all__ = ["EventPool", "EventPoolStatistics"]

#: The number of a task that waits, in order of arrival, and its future.
_Turn: TypeAlias = tuple[int, asyncio.Future[None]]

#: Largest limit. A program that asks for more events has made a mistake.
MOST_EVENTS = 1 << 20


@figures
class EventPoolStatistics(NamedTuple):
    """Figures of an event pool."""

    limit: int  #: events that may be lent at the same time
    lent: int  #: events that are lent
    lent_timing: int  #: the timing events among these
    peak: int  #: the largest value of ``lent`` so far
    acquired: int  #: loans so far
    waited: int  #: loans that had to wait until another event was returned
    utilisation: float  #: ``lent`` ÷ ``limit``, 0-1


_NO_BLOCK = "is no block, and is not closed: `async with pool.borrow() as event` lends an event"


@lacks
@refuses(__enter__=_NO_BLOCK, __aenter__=_NO_BLOCK)
class EventPool(ProcessLocal):
    """Events of one device, lent to the coroutines of one event loop.

    The limit gives back-pressure: `acquire` waits while all events are lent. A loan ends by `release`, at the end of
    `borrow`, or when the event is garbage-collected.

    Parameters
    ----------
    device
        The device of the events.
    limit
        The most events that are lent at the same time, of both kinds together.
    timing, plain
        The most events with timing, and without, that are lent at the same time; None for no limit beside ``limit``.
        So a kind has its share, and loans of one kind need not wait for the other: with ``timing + plain <= limit``
        they never do.
    """

    @keywords(
        "EventPool takes a device, limit=, timing= and plain=",
        "EventPool(device, limit=1024)",
        **dict.fromkeys(("maximum", "size", "max_size", "max_events"), "use limit="),
    )
    def __init__(
        self, device: Device, limit: int = 1024, *, timing: int | None = None, plain: int | None = None
    ) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pool is made for an aiocuda.Device, not {type(device).__name__}")
        self._device = device
        self._resources = resources_of(device)
        self._limit = _checked(limit, "limit", MOST_EVENTS)
        self._limits = {  # by timing
            kind: self._limit if value is None else _checked(value, name, self._limit)
            for kind, name, value in ((False, "plain", plain), (True, "timing", timing))
        }
        self._lent = {False: 0, True: 0}  # by timing
        self._peak = self._acquired = self._waited = 0
        self._waiting: dict[bool, Waiters[_Turn]] = {False: Waiters(), True: Waiters()}  # by timing
        self._watch = DeviceWatch()

    def acquire_nowait(self, timing: bool = False) -> Event:
        """Return an event that is not recorded yet. Raise `QueueFullError` if all, or all of the kind, are lent."""
        self._check()
        timing = flag(timing, "timing")
        if not self._has_room(timing):
            lent = sum(self._lent.values())
            limit, kind = self._limit, ""
            if lent < limit:
                limit, kind = self._limits[timing], " with timing" if timing else " without timing"
            log("warning", "queue_full", queue="event pool", device=self._device.name, limit=limit)
            raise QueueFullError(f"all {limit} events{kind} are lent: await pool.acquire(), or release one")
        event = Event(self._resources.device_state, timing, self, self._loan_ended)
        self._lent[timing] += 1
        self._acquired += 1
        self._peak = max(self._peak, sum(self._lent.values()))
        return event

    def _has_room(self, timing: bool) -> bool:
        return sum(self._lent.values()) < self._limit and self._lent[timing] < self._limits[timing]

    async def acquire(self, timing: bool = False) -> Event:
        """Return an event that is not recorded yet. While all are lent, wait in order of arrival.

        If only this kind has no room, requests for the other kind do not wait.

        Raise `ClosedError` or `DeviceFault` if the device has been closed or has faulted, before or during the wait.
        """
        self._check()
        timing = flag(timing, "timing")
        waiting = self._waiting[timing]
        arrival: int | None = None
        while not self._has_room(timing) or (arrival is None and waiting):
            self._watch.start(self._check_waiters)
            if arrival is None:
                self._waited += 1
                arrival = self._waited
                add = waiting.add
            else:
                add = waiting.add_first  # another task took the event; this one stays first in the queue
            turn = arrival, asyncio.get_running_loop().create_future()
            add(turn)
            try:
                await turn[1]
            except asyncio.CancelledError:
                if not waiting.discard(turn):
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
            for waiting in self._waiting.values():
                Wakes.of(asyncio.get_running_loop()).wake_all(waiting, _wake_turn)
        return any(self._waiting.values())

    @async_block("pool.borrow()", "lends an event for an `async with` block: `async with pool.borrow() as event`")
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
        """Wake the task that has waited longest, of those whose kind has room."""
        while True:
            try:
                ready = [each for timing, each in self._waiting.items() if each and self._has_room(timing)]
                if not ready:
                    return
                _, turn = min(ready, key=lambda each: each.first[0]).pop()
            except (KeyError, StopIteration, RuntimeError):
                continue  # another thread has taken one
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


def _checked(value: int, name: str, most: int) -> int:
    """Return a limit of a pool, an integer from 1 to ``most``."""
    check_integer(value, name)
    if not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is from 1 to {most:,}, and this is {value}", limit=value)
    return value


def _wake_turn(turn: _Turn) -> None:
    wake_future(turn[1])
