"""ThreadTimes: how long threads have been on a processor, and queued for one.

Linux counts for each thread how long it was queued for a processor (``schedstat``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Schedstat", "ThreadTimes", "own_schedstat", "pread", "thread_times"]

# In a call that releases the GIL, a thread beside others in Python code loses it for 5 ms. This one takes 2 µs.
pread: Callable[..., int] = ctypes.PyDLL(None).pread if sys.platform == "linux" else lambda *_: -1


class ThreadTimes(NamedTuple):
    """Seconds of one thread or several: all, on a processor, and queued for one. 0.0 where that is not counted."""

    seconds: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0

    def plus(self, other: ThreadTimes) -> ThreadTimes:
        """Return the sums."""
        return ThreadTimes(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: ThreadTimes) -> ThreadTimes:
        """Return the differences: the times since the others were read."""
        return ThreadTimes(self[0] - other[0], self[1] - other[1], self[2] - other[2])


class Schedstat:
    """The open ``schedstat`` of the thread that makes this object."""

    __slots__ = ("_buffer", "_descriptor")

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(64)
        self._descriptor = -1
        with contextlib.suppress(OSError):  # no such file, or no descriptor is left
            self._descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    @property
    def is_open(self) -> bool:
        """False if the system does not count, or has refused a descriptor."""
        return self._descriptor >= 0

    def queued(self) -> float:
        """Return the seconds for which the thread has been queued for a processor so far; 0.0 if it is not known."""
        try:
            known = pread(self._descriptor, self._buffer, 63, 0) > 0
            return int(self._buffer.value.split()[1]) * 1e-9 if known else 0.0
        except (ValueError, IndexError):  # other code has closed the descriptor, and opened a file
            return 0.0

    def __del__(self) -> None:
        if self.is_open:
            os.close(self._descriptor)


_own = threading.local()  # the object of each thread, until the thread ends
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _own.__dict__.clear())


def thread_times() -> ThreadTimes:
    """Return the times of the calling thread."""
    return ThreadTimes(time.monotonic(), time.thread_time(), own_schedstat().queued())


def own_schedstat() -> Schedstat:
    """Return the file of the calling thread, which is open until the thread ends."""
    try:
        found: Schedstat = _own.schedstat
    except AttributeError:
        found = _own.schedstat = Schedstat()
    return found
