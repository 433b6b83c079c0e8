"""Alarm: wakes the loop at a given time, and learns how late the wake-ups are.

A loop's own timers end on whole milliseconds: ``asyncio`` rounds up twice, so 8.5 ms take 10.1 ms (measured). If the
loop watches descriptors, the alarm is a ``timerfd`` (Linux): then 8.5 ms take 8.6 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import sys
import time
import weakref
from collections.abc import Callable

__all__ = ["Alarm"]

#: The alarm comes at most this many seconds early, however late it was before.
MOST_EARLY = 0.001

#: uvloop's time is the time at which the turn began. A clock that differs by more is simulated.
A_LONG_TURN = 60.0

#: The alarm comes earlier by the mean lateness and so many mean deviations. A wait has a host callback, too: where the
#: alarm is late once, that callback ends the wait; where it is early, a core is busy.
SPREADS = 1.0

#: Weight of a new sample of the lateness.
WEIGHT = 0.2

#: An alarm that is later than this is lost: after Ctrl-C, or because a forked child has read the shared descriptor.
LOST = 0.005

_CLOCK_MONOTONIC = 1

# These two calls do not block: releasing and taking the GIL would cost more than the calls.
_libc = ctypes.PyDLL(None) if os.name == "posix" else None
_create: Callable[[int, int], int] | None = getattr(_libc, "timerfd_create", None)
_settime: Callable[..., int] | None = getattr(_libc, "timerfd_settime", None)


class Alarm:
    """Calls ``ring(now)`` in the loop, once for each time that it is set.

    The timer is set ahead by its usual lateness, so that the alarm usually rings in time.

    Parameters
    ----------
    loop
        The event loop.
    now
        The clock, in seconds.
    ring
        Called in the loop.
    watches
        False if the loop does not watch descriptors. Then the loop's own timers are used; they are, too, if the loop
        refuses to watch one, or if its time is not the system's.

    Attributes
    ----------
    at : float
        The time for which the alarm is set; infinite if it is not set.
    early : float
        Seconds by which the timer is set ahead, to compensate for the lateness. The alarm may ring early by as much.
    reached : float
        The time for which it was set when it rang last: `at` of that moment. ``early`` may have changed since then.
    """

    __slots__ = ("__weakref__", "_close", "_descriptor", "_due", "_handle", "_loop", "_mean", "_now", "_ring",
                 "_setting", "_spread", "at", "early", "reached")  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        ring: Callable[[float], object],
        *,
        watches: bool,
    ) -> None:
        self._loop = loop
        self._now = now
        self._ring = ring
        self.at = math.inf
        self.reached = -math.inf
        self.early = 0.0
        self._due = math.inf  # the time for which the timer is set: ``early`` seconds before ``at``
        self._mean = self._spread = 0.0  # of the lateness: its mean, and its mean deviation
        self._handle: asyncio.TimerHandle | None = None
        self._descriptor = _timer(loop) if watches else None
        if self._descriptor is not None:
            self._setting = (ctypes.c_long * 4)()  # an interval, then a time: seconds and nanoseconds each
            # Closes the descriptor also if the loop is collected without having been closed.
            self._close = weakref.finalize(self, os.close, self._descriptor)
            self._close.atexit = False
            try:
                loop.add_reader(self._descriptor, self._rang)
            except NotImplementedError:  # such a loop has only its own timers
                self._descriptor = None
                self._close()

    def set(self, when: float, now: float) -> None:
        """Set the alarm, ``early`` seconds ahead, unless it is set for an earlier time: that alarm stays."""
        if when >= self.at:
            if now < self.at + LOST:
                return
            when = now  # the earlier alarm was lost: ring at once
        self.at = when
        seconds = max(when - self.early - now, 1e-6)  # zero would stop it
        self._due = now + seconds
        if self._descriptor is not None and _settime is not None:
            setting = self._setting
            setting[2] = whole = int(seconds)
            setting[3] = int((seconds - whole) * 1e9)
            if not _settime(self._descriptor, 0, setting, None):
                return  # 0 is success
            # Other code has closed the descriptor, which may be in use again: use the loop's own timers.
            self._descriptor = None
            self._close.detach()
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._rang)

    def _rang(self) -> None:
        """Learn how late the expired timer is, and call ``ring``."""
        if self._handle is not None:  # it was a timer of the loop
            self._handle = None
        elif self._descriptor is None:
            return  # it has been closed
        else:
            try:
                os.read(self._descriptor, 8)
            except BlockingIOError:
                return  # it was set again after the loop saw it
        now = self._now()
        late = max(min(now - self._due, MOST_EARLY), -MOST_EARLY)  # one long turn of the loop must not count much
        self._spread += WEIGHT * (abs(late - self._mean) - self._spread)
        self._mean += WEIGHT * (late - self._mean)
        self.early = max(0.0, min(self._mean + SPREADS * self._spread, MOST_EARLY))
        self.reached = self.at
        self.at = self._due = math.inf
        self._ring(now)

    def close(self) -> None:
        """Stop the alarm. The loop may be closed already."""
        self.at = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._descriptor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            with contextlib.suppress(OSError):  # other code has closed it
                self._close()
            self._descriptor = None  # last: after Ctrl-C, the next call closes it


def _timer(loop: asyncio.AbstractEventLoop) -> int | None:
    """Return the descriptor of a new timer; None if the system has none, or if the loop has a clock of its own."""
    if sys.platform != "linux" or _create is None or abs(loop.time() - time.monotonic()) > A_LONG_TURN:
        return None
    descriptor = _create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return descriptor if descriptor >= 0 else None
