"""ThreadLimit: whether all threads of a loader decode, or one."""

from __future__ import annotations

import threading

from .._base._checks import has_gil

__all__ = ["ThreadLimit"]

#: One thread may decode more samples than several if each takes at most so many seconds on a processor, and in all, and
#: if all threads use at most so many processors.
MOST_CPU, MOST_SECONDS, MOST_PROCESSORS = 0.2e-3, 5e-3, 1.5

#: Samples that take longer than that, and four times as long as in a trial, are decoded by all threads.
SLOW_SECONDS = 0.5e-3

#: Seconds in which samples are counted.
WINDOW = 0.05

#: Seconds from the first run to the first trial; a pause that is four times as long each time, up to the most.
FIRST, MOST_PAUSE = 0.1, 10.0


class ThreadLimit:
    """Finds whether one thread decodes as many samples per second as all, and lets it decode alone then.

    A thread that needs the GIL often gives it to another thread each time. That one has to wake up, which takes longer
    than a quick sample. A trial counts the samples in a window of time, as they were counted before it with the other
    number of threads. One thread that is never idle is compared again after a pause. All decode again if samples take
    longer, or one takes 20 ms.

    The threads count without a lock: a run more or less in a window changes nothing. One of them compares.

    Attributes
    ----------
    is_one
        True while one thread decodes alone.
    """

    __slots__ = ("_before", "_began", "_cpu", "_each", "_is_trial", "_lock", "_next", "_pause", "_rows", "_seconds",
                 "_threads", "_was_idle", "is_one")  # fmt: skip

    def __init__(self, threads: int) -> None:
        self._threads = threads if has_gil() else 1
        self.is_one = False
        self._is_trial = False
        self._before = 0.0  # samples per second before the trial
        self._each = 0.0  # seconds of a sample in the trial; 0.0 before its end
        self._next: float | None = None  # the time of the next trial
        self._pause = FIRST
        self._began: float | None = None  # the begin of the window
        self._rows = 0
        self._seconds = self._cpu = 0.0  # of the runs in the window
        self._was_idle = False
        self._lock = threading.Lock()

    def idle(self) -> None:
        """Note that a thread has found no sample."""
        self._was_idle = True

    def end(self) -> None:
        """Let all threads decode: the only one does not return from a sample."""
        with self._lock:
            self.is_one = self._is_trial = False
            self._began = self._next = None
            self._pause = MOST_PAUSE

    def note(self, threads: int, seconds: float, cpu: float, rows: int, now: float) -> bool:
        """Count a run of so many threads at a time. Return True if from now on more threads may decode."""
        if self._threads <= 1 or (self.is_one and threads > 1):  # it began before there was one
            return False
        if self._next is None:
            self._next = now + self._pause
        began = self._began
        took = 0.0 if began is None else now - began
        if began is None or took > 4 * WINDOW:  # the consumer has taken no batch for a while
            self._began, self._rows, self._seconds, self._cpu, self._was_idle = now, 0, 0.0, 0.0, False
            return False
        self._rows += rows
        self._seconds += seconds
        self._cpu += cpu
        if took < WINDOW:
            return False
        with self._lock:
            counted = self._rows, self._seconds, self._cpu
            # Looked at last: another thread has compared, or has begun a window, of which it sets the begin first.
            if self._began != began or (self.is_one and threads > 1):
                return False
            self._began = None
            return self._compare(*counted, took, now)

    def _compare(self, rows: int, seconds: float, cpu: float, took: float, now: float) -> bool:
        """Decide, from the runs of a window, how many threads decode from now on. Return the result of `note`."""
        rate, each = rows / took, seconds / rows
        if self.is_one and each > max(SLOW_SECONDS, 4 * (self._each or each)):
            self._plan_trial(now)
            self.is_one = False
            return True
        if self._is_trial:
            self._plan_trial(now)
            self._each = each
            wanted = 0.95 if self.is_one else 1.1
            if rate < wanted * self._before:
                self.is_one = not self.is_one
                return not self.is_one
        elif now >= (self._next or 0.0) and (
            not self._was_idle if self.is_one else _is_quick(rows, seconds, cpu, took)
        ):
            self._is_trial, self._before, self._each = True, rate, 0.0
            self.is_one = not self.is_one
            return not self.is_one
        return False

    def _plan_trial(self, now: float) -> None:
        self._is_trial = False
        self._pause = min(4 * self._pause, MOST_PAUSE)
        self._next = now + self._pause


def _is_quick(rows: int, seconds: float, cpu: float, took: float) -> bool:
    """True if several threads may decode fewer samples than one: quick ones, with few processors."""
    return seconds < MOST_SECONDS * rows and cpu < MOST_CPU * rows and cpu < MOST_PROCESSORS * took
