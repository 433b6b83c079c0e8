"""RunClock: how long the runs of a thread take, on a processor, and queued for one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ._thread_times import ThreadTimes, own_schedstat

__all__ = ["READ_SECONDS", "RunClock"]

#: Seconds between two reads of ``schedstat`` by a `RunClock`.
READ_SECONDS = 0.02


class RunClock:
    """Measures the runs of the thread that makes it: a run is some work without a pause.

    ``schedstat`` is read after a run, and then not for 20 ms: where eight threads want the GIL, a read takes 28 µs of
    it. So the time for which a thread was queued is that of the last runs together. In virtual time, a thread is always
    on a processor.
    """

    __slots__ = ("_began", "_cpu", "_next", "_now", "_queued", "_schedstat", "_waited", "queued_share")

    def __init__(self, now: Callable[[], float]) -> None:
        is_real = now is time.monotonic
        self._now = now
        self._cpu = time.thread_time if is_real else now
        self._schedstat = own_schedstat() if is_real else None
        self._queued = self._schedstat.queued() if self._schedstat is not None else 0.0
        self._began: tuple[float, float] | None = None
        self._next = 0.0 if is_real else math.inf  # when the file is read again
        self._waited = 0.0  # in runs since it was read
        self.queued_share = 0.0  #: of the time in which the last runs were on no processor, that in the queue for one

    def begin(self) -> float:
        """Begin a run, at the end of the last one if there was no pause. Return the time of its begin."""
        if self._began is None:
            self._began = self._now(), self._cpu()
        return self._began[0]

    def end(self) -> ThreadTimes:
        """End a run, and return its times; that for which it was queued with those of earlier runs, or 0.0."""
        assert self._began is not None
        began, self._began = self._began, (self._now(), self._cpu())
        seconds, cpu = self._began[0] - began[0], self._began[1] - began[1]
        self._waited += max(0.0, seconds - cpu)
        return ThreadTimes(seconds, cpu, self._read() if self._began[0] >= self._next else 0.0)

    def pause(self) -> None:
        """Let the next run begin when `begin` is called, not at the end of the last one."""
        self._began = None

    def _read(self) -> float:
        assert self._schedstat is not None
        before, self._queued = self._queued, self._schedstat.queued()
        queued = max(0.0, min(self._queued - before, self._waited))  # without that in pauses
        self.queued_share = queued / self._waited if queued else 0.0
        self._waited, self._next = 0.0, time.monotonic() + READ_SECONDS
        return queued
