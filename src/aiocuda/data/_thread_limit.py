"""ThreadLimit: whether all threads of a loader decode, or one."""

from __future__ import annotations

from .._base._checks import has_gil

__all__ = ["ThreadLimit"]

#: One thread may decode more samples than several if each takes at most so many seconds on a processor, and in all, and
#: if all threads use at most so many processors.
MOST_CPU, MOST_SECONDS, MOST_PROCESSORS = 0.2e-3, 5e-3, 1.5

#: Seconds in which samples are counted.
WINDOW = 0.05

#: Seconds from the first run to the first trial; a pause that is four times as long each time, up to the most.
FIRST, MOST_PAUSE = 0.1, 10.0


class ThreadLimit:
    """Finds whether one thread decodes as many samples per second as all, and lets it decode alone then.

    A thread that needs the GIL often gives it to another thread each time. That one has to wake up, which takes longer
    than a quick sample. A trial counts the samples in a window of time, as they were counted before it with the other
    number of threads. One thread that is never idle is compared again after a pause.

    The threads call it without a lock: a run more or less in a window changes nothing.

    Attributes
    ----------
    is_one
        True while one thread decodes alone.
    runs
        The number of runs so far.
    """

    __slots__ = ("_before", "_began", "_cpu", "_is_trial", "_next", "_pause", "_rows", "_seconds", "_threads",
                 "_was_idle", "is_one", "runs")  # fmt: skip

    def __init__(self, threads: int) -> None:
        self._threads = threads if has_gil() else 1
        self.is_one = False
        self.runs = 0
        self._is_trial = False
        self._before = 0.0  # samples per second before the trial
        self._next: float | None = None  # the time of the next trial
        self._pause = FIRST
        self._began: float | None = None  # the begin of the window
        self._rows = 0
        self._seconds = self._cpu = 0.0  # of the runs in the window
        self._was_idle = False

    def idle(self) -> None:
        """Note that a thread has found no sample."""
        self._was_idle = True

    def end(self) -> None:
        """Let all threads decode: the only one does not return from a sample."""
        self.is_one = self._is_trial = False
        self._began = self._next = None
        self._pause = MOST_PAUSE

    def note(self, threads: int, seconds: float, cpu: float, rows: int, now: float) -> bool:
        """Count a run of so many threads at a time. Return True if from now on more threads may decode."""
        self.runs += 1
        if self._threads <= 1 or (self.is_one and threads > 1):  # it began before there was one
            return False
        if self._next is None:
            self._next = now + self._pause
        took = 0.0 if self._began is None else now - self._began
        if self._began is None or took > 4 * WINDOW:  # the consumer has taken no batch for a while
            self._began, self._rows, self._seconds, self._cpu, self._was_idle = now, 0, 0.0, 0.0, False
            return False
        self._rows += rows
        self._seconds += seconds
        self._cpu += cpu
        if took < WINDOW:
            return False
        self._began = None
        return self._compare(self._rows / took, took, now)

    def _compare(self, rate: float, took: float, now: float) -> bool:
        if self._is_trial:
            self._is_trial = False
            self._pause = min(4 * self._pause, MOST_PAUSE)
            self._next = now + self._pause
            wanted = 0.95 if self.is_one else 1.1
            if rate < wanted * self._before:
                self.is_one = not self.is_one
                return not self.is_one
        elif now >= (self._next or 0.0) and (not self._was_idle if self.is_one else self._may_be_slow(took)):
            self._is_trial, self._before = True, rate
            self.is_one = not self.is_one
            return not self.is_one
        return False

    def _may_be_slow(self, took: float) -> bool:
        each, cpu = self._seconds / self._rows, self._cpu / self._rows
        return each < MOST_SECONDS and cpu < MOST_CPU and self._cpu < MOST_PROCESSORS * took
