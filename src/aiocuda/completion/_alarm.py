"""Alarm: wakes the loop once, at a moment, and learns how late it is with that.

A loop's own timers end on whole milliseconds: ``asyncio`` rounds up twice, and 8.5 ms take 10.1 (measured). So where
the loop watches descriptors, the alarm is a ``timerfd`` (Linux), whose 8.5 ms take 8.6.
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

#: It rings at most this much before its moment, however late it has been.
MOST_EARLY = 0.001

#: uvloop's time is that of the beginning of the turn. What differs by more is simulated.
A_LONG_TURN = 60.0

#: Weight of a new sample of how late it was.
WEIGHT = 0.2

#: Later than this it comes no more: Ctrl-C fell in between, or a forked child has read the descriptor that it shares.
LOST = 0.005

_CLOCK_MONOTONIC = 1

# These two return at once: to let go of the interpreter and to take it again would cost more.
_libc = ctypes.PyDLL(None) if os.name == "posix" else None
_create: Callable[[int, int], int] | None = getattr(_libc, "timerfd_create", None)
_settime: Callable[..., int] | None = getattr(_libc, "timerfd_settime", None)


class Alarm:
    """Rings once for each time that it is set, by calling ``ring`` with the time.

    It is set ahead by as much as it is usually late: what sleeps until shortly before a moment must not miss it.

    Parameters
    ----------
    loop
        Where it rings.
    now
        The clock, in seconds.
    ring
        Called in the loop.
    watches
        Does the loop watch descriptors? Else its own timers have to do, as they do where it has a time of its own.
    """

    __slots__ = ("__weakref__", "_close", "_descriptor", "_due", "_handle", "_loop", "_mean", "_now", "_ring",
                 "_setting", "_spread", "at", "early")  # fmt: skip

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
        #: When it is wanted; infinite while it is not set.
        self.at = math.inf
        #: Seconds that it rings before that.
        self.early = 0.0
        self._due = math.inf  # what the system was told
        self._mean = self._spread = 0.0  # of how late it was
        self._handle: asyncio.TimerHandle | None = None
        self._descriptor = _timer(loop) if watches else None
        if self._descriptor is not None:
            self._setting = (ctypes.c_long * 4)()  # an interval, then a time: seconds and nanoseconds each
            # Also when the loop was forgotten without having been closed.
            self._close = weakref.finalize(self, os.close, self._descriptor)
            self._close.atexit = False
            loop.add_reader(self._descriptor, self._rang)

    def set(self, when: float, now: float) -> None:
        """Ring then, less what it is usually late by; unless it is set to an earlier moment already."""
        if when >= self.at:
            if now < self.at + LOST:
                return
            when = now  # at once: nobody was told of the earlier moment
        self.at = when
        seconds = max(when - self.early - now, 1e-6)  # zero would stop it
        self._due = now + seconds
        if self._descriptor is not None and _settime is not None:
            setting = self._setting
            setting[2] = whole = int(seconds)
            setting[3] = int((seconds - whole) * 1e9)
            if not _settime(self._descriptor, 0, setting, None):
                return
            # Somebody has closed it, and by now it may be somebody else's: leave it alone, the loop's own timers do.
            self._descriptor = None
            self._close.detach()
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._rang)

    def _rang(self) -> None:
        if self._handle is not None:
            self._handle = None
        elif self._descriptor is None:
            return  # it has been closed
        else:
            try:
                os.read(self._descriptor, 8)
            except BlockingIOError:
                return  # it was set anew since the loop saw it
        now = self._now()
        late = max(min(now - self._due, MOST_EARLY), -MOST_EARLY)
        self._spread += WEIGHT * (abs(late - self._mean) - self._spread)
        self._mean += WEIGHT * (late - self._mean)
        self.early = max(0.0, min(self._mean + 2.0 * self._spread, MOST_EARLY))
        self.at = self._due = math.inf
        self._ring(now)

    def close(self) -> None:
        """It rings no more. The loop may be closed already."""
        self.at = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._descriptor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            with contextlib.suppress(OSError):  # somebody has closed it before
                self._close()
            self._descriptor = None  # and not before: what Ctrl-C has interrupted is closed by the next one


def _timer(loop: asyncio.AbstractEventLoop) -> int | None:
    """A timer's descriptor; None where there are none, or none left, or where it would tell another time."""
    if sys.platform != "linux" or _create is None or abs(loop.time() - time.monotonic()) > A_LONG_TURN:
        return None
    descriptor = _create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return descriptor if descriptor >= 0 else None
