"""HostUse: the processor time that this process uses, and the share of the time for which the GIL is taken.

Threads that compute in Python take turns with the GIL. No function of Python returns how long a thread waits for it, so
a thread of this module asks for it now and then. The thread sleeps in a read of a ``timerfd`` (Linux). When the thread
has a processor again, the read counts the periods of the timer; then it waits for the GIL. So the time from the last
counted period until the read returns is the wait for the GIL, without the wait for a processor.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["HostLoad", "HostUse", "thread_clock"]

#: Seconds between two samples, on average. A sample takes 50 to 120 µs of a processor, and a thread that has the GIL
#: gives it up for it.
PERIOD: Final = 0.02

#: Seconds. After a longer wait the GIL was taken: without other threads a wait is 50 µs.
TAKEN: Final = 2e-4

#: Fewer samples say nothing.
FEWEST: Final = 5

#: Seconds after which the thread ends if nothing wants samples. Each run of a pipeline wants some, and the start of a
#: thread waits for the GIL.
IDLE_SECONDS: Final = 0.5

#: Seconds of a period of the timer, once it has expired: the resolution of the moment at which the thread runs again.
TICK: Final = 1e-5

#: The fractional parts of its multiples are spread evenly: a program with a period of its own is sampled at all times.
GOLDEN: Final = (5**0.5 - 1) / 2

_CLOCK_MONOTONIC: Final = 1
_TFD_CLOEXEC = 0o2000000  # as `os.O_CLOEXEC`, which other systems lack
_TFD_TIMER_ABSTIME: Final = 1

# These two calls do not block: releasing and taking the GIL would cost more than the calls.
_libc = ctypes.PyDLL(None) if sys.platform == "linux" else None
_create: Callable[[int, int], int] | None = getattr(_libc, "timerfd_create", None)
_settime: Callable[..., int] | None = getattr(_libc, "timerfd_settime", None)


class HostLoad(NamedTuple):
    """What `HostUse` has measured.

    Attributes
    ----------
    wall_seconds
        Time.
    cpu_seconds
        Processor time of all threads of this process.
    own_seconds
        Processor time of the thread that started the measurement.
    gil_share
        The share of the time for which another thread had to wait for the GIL, 0-1. None if it is not known: it was
        measured for too short a time, or not at all, or the system has no ``timerfd``.
    """

    wall_seconds: float
    cpu_seconds: float
    own_seconds: float
    gil_share: float | None

    def gil_share_of(self, seconds: float) -> float:
        """Return the share of the time for which some threads had the GIL, at most; 0.0 if it is not known.

        They used a processor for so many seconds, with the GIL or without. The other threads may have had the GIL for
        all of their processor time. On busy processors, a thread that waits for one keeps the GIL, so the GIL's time
        exceeds the processor time: then each thread gets the part that it has of the processor time.
        """
        if self.gil_share is None or not seconds:
            return 0.0
        others = max(0.0, self.cpu_seconds - seconds)
        return max(0.0, min(self.gil_share - others / self.wall_seconds, self.gil_share * seconds / (seconds + others)))


class HostUse:
    """Measures the use of processors and GIL from `start` to `stop`, which may be called several times."""

    def __init__(self) -> None:
        self._began: _Counts | None = None
        self._before = _Counts()  # the sum of the measurements that have ended
        self._thread = 0
        self._with_gil = False

    def start(self, *, with_gil: bool) -> None:
        """Begin. Without effect if it has begun. ``with_gil`` also samples the GIL, by a thread."""
        if self._began is None:
            self._thread = threading.get_ident()
            self._with_gil = with_gil
            if with_gil:
                _sampler.enter(self)
            self._began = self._now()

    def stop(self) -> None:
        """End. Without effect if it has not begun."""
        if self._began is not None:
            self._before = self._sum()
            self._began = None
            _sampler.leave(self)

    def reset(self) -> None:
        """Forget what was measured so far."""
        self._before = _Counts()
        if self._began is not None:
            self._began = self._now()

    def load(self) -> HostLoad:
        """Return what was measured so far."""
        counts = self._sum()
        share = counts.taken / counts.samples if counts.samples >= FEWEST else None
        return HostLoad(counts.wall, counts.cpu, counts.own, share)

    def _sum(self) -> _Counts:
        if self._began is None:
            return self._before
        now = self._now()
        return _Counts(*(old + new - began for old, new, began in zip(self._before, now, self._began, strict=True)))

    def _now(self) -> _Counts:
        # In another thread, its own processor time is not known, and what it was at the start stands for it.
        is_own = threading.get_ident() == self._thread
        own = time.thread_time() if is_own or self._began is None else self._began.own
        samples = _sampler.counts if self._with_gil else (0, 0)
        return _Counts(time.monotonic(), time.process_time(), own, *samples)


class _Counts(NamedTuple):
    wall: float = 0.0
    cpu: float = 0.0
    own: float = 0.0
    samples: float = 0.0
    taken: float = 0.0


class _Sampler:
    """The thread that samples the GIL while a `HostUse` wants samples. It ends when none has wanted any for a while.

    Attributes
    ----------
    counts
        The samples so far, and how many of them found the GIL taken.
    """

    def __init__(self) -> None:
        self.counts = (0, 0)
        self.forget_thread()

    def forget_thread(self) -> None:
        """Have no thread and no users. A forked child begins with that."""
        self._users: weakref.WeakSet[HostUse] = weakref.WeakSet()
        self._lock = threading.RLock()  # the garbage collector may end a run, and so a use, in any line
        self._entered = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: _Timer | None = None  # of the thread, while it takes samples

    @property
    def is_at_work(self) -> bool:
        """True while it takes samples, and has a descriptor."""
        return self._timer is not None

    def enter(self, user: HostUse) -> None:
        """Take samples from now on."""
        if _create is None:
            return
        with self._lock:
            self._users.add(user)
            self._entered.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="aiocuda-gil-samples", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be started: the share of the GIL is not known
                    self._thread = None

    def leave(self, user: HostUse) -> None:
        """Take no samples any more if nothing else wants them."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._timer is not None:
                self._timer.set(1e-9)  # it is in the past, and ends the sleep

    def _run(self) -> None:
        while self._take_samples() and self._has_users_soon():
            pass

    def _take_samples(self) -> bool:
        """Take samples while there are users. Return False if the system refuses a descriptor."""
        with self._lock:
            timer = self._timer = _Timer()
        samples, taken = self.counts
        while self._users and timer.is_open:
            samples += 1
            taken += timer.gil_wait(PERIOD * (0.5 + samples * GOLDEN % 1)) > TAKEN
            self.counts = samples, taken
        with self._lock:
            self._timer = None
            if not timer.is_open:
                self._thread = None
                return False
            timer.close()
            if not self._users:
                self._entered.clear()
            return True

    def _has_users_soon(self) -> bool:
        """Wait for users. Return False if there are none: the thread ends."""
        self._entered.wait(IDLE_SECONDS)
        with self._lock:
            if not self._users:
                self._thread = None
            return self._thread is not None


class _Timer:
    """Sleeps, and measures how long the thread then waits for the GIL."""

    def __init__(self) -> None:
        self._descriptor = -1 if _create is None else _create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)

    @property
    def is_open(self) -> bool:
        """False if the system has refused a descriptor, or other code has closed it."""
        return self._descriptor >= 0

    def set(self, due: float) -> None:
        """Expire at this time, and then once for each `TICK`."""
        whole = int(due)
        setting = (ctypes.c_long * 4)(0, int(TICK * 1e9), whole, int((due - whole) * 1e9))  # seconds, nanoseconds
        if _settime is None or _settime(self._descriptor, _TFD_TIMER_ABSTIME, setting, None):
            self._descriptor = -1

    def gil_wait(self, seconds: float) -> float:
        """Sleep, and return the seconds from the moment at which the thread has a processor until it has the GIL."""
        due = time.monotonic() + seconds
        self.set(due)
        if not self.is_open:
            return 0.0
        ticks = int.from_bytes(os.read(self._descriptor, 8), sys.byteorder)
        return time.monotonic() - due - (ticks - 1) * TICK

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


_sampler = _Sampler()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sampler.forget_thread)


def thread_clock(now: Callable[[], float]) -> Callable[[], float]:
    """Return the clock of the calling thread's processor time. In virtual time it is the same clock."""
    return time.thread_time if now is time.monotonic else now
