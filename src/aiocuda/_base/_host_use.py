"""HostUse: what this process uses of the host's processors, and the share of the time for which the GIL is taken.

No function of Python returns how long a thread waits for the GIL. So a thread of this module asks for it again and
again, once, for a second of a long measurement.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from ._processor import throttled_periods
from ._thread_times import Schedstat, thread_times

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle

__all__ = ["PROBED_AFTER", "HostLoad", "HostUse"]

#: Seconds of a measurement before the probe for the GIL, and those of the probe.
PROBE_AFTER: Final = 3.0
PROBE_SECONDS: Final = 1.0
PROBED_AFTER: Final = PROBE_AFTER + PROBE_SECONDS

#: Seconds between two requests for the GIL, on average. A thread that has it gives it up for them.
PERIOD: Final = 0.01

#: Seconds. After a longer wait the GIL was taken: without other threads, a timer is late by 50 to 100 µs.
TAKEN: Final = 2e-4

#: The fractional parts of its multiples are spread evenly: a program with a period of its own is probed at all times.
GOLDEN: Final = (5**0.5 - 1) / 2


class HostLoad(NamedTuple):
    """What `HostUse` has measured."""

    seconds: float = 0.0
    own_cpu: float = 0.0  #: for which the thread that started the measurement, the event loop's, was on a processor
    own_queued: float = 0.0  #: for which it was queued for one
    cpu: float = 0.0  #: processor time of all threads of this process
    periods: float = 0.0  #: of the quota of processor time
    throttled_periods: float = 0.0  #: of them, those in which the control group had used up its quota
    gil_share: float | None = None  #: of the requests for the GIL, the share that had to wait; None if not measured

    @property
    def throttled(self) -> float:
        """The share of periods in which the quota was used up."""
        return self.throttled_periods / self.periods if self.periods else 0.0


class HostUse:
    """Measures the use of the host from `start` to `stop`, which may be called several times."""

    __slots__ = ("_before", "_began", "_loop", "_probe", "_schedstat", "_thread", "_timer")

    def __init__(self) -> None:
        self._began: tuple[float, ...] = ()
        self._before: tuple[float, ...] = (0.0,) * 6  # the sum of the measurements that have ended
        self._thread = 0
        self._schedstat: Schedstat | None = None  # of that thread, while it measures
        self._loop: AbstractEventLoop | None = None  # while it measures, and probes the GIL
        self._probe = _Probe()
        self._timer: TimerHandle | None = None

    def start(self, loop: AbstractEventLoop | None) -> None:
        """Begin. Without effect if it has begun. If there is a loop, it starts the probe for the GIL, once."""
        if not self._began:
            self._thread, self._schedstat, self._loop = threading.get_ident(), Schedstat(), loop
            self._began = self._now()
            if self._probe.gil_share is None:
                self._start_probe()

    def stop(self) -> None:
        """End. Without effect if it has not begun."""
        self._before, self._began, self._schedstat, self._loop = self._sum(), (), None, None
        self._stop_probe()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self._before = (0.0,) * 6
        self._stop_probe()
        self._probe = _Probe()
        if self._began:
            self._began = self._now()
            self._start_probe()

    def load(self) -> HostLoad:
        """Return what was measured so far."""
        return HostLoad(*self._sum())._replace(gil_share=self._probe.gil_share)

    def _sum(self) -> tuple[float, ...]:
        if not self._began:
            return self._before
        return tuple(old + new - began for old, new, began in zip(self._before, self._now(), self._began, strict=True))

    def _now(self) -> tuple[float, ...]:
        # In another thread, the processor time of the loop's is not known.
        own = self._began[1] if threading.get_ident() != self._thread else time.thread_time()
        queued = self._schedstat.queued() if self._schedstat is not None else 0.0
        return (time.monotonic(), own, queued, time.process_time(), *throttled_periods())

    def _start_probe(self) -> None:
        if self._loop is not None and self._schedstat is not None and self._schedstat.is_open:
            self._probe = _Probe()
            self._timer = self._loop.call_later(PROBE_AFTER, self._probe.start, context=contextvars.Context())

    def _stop_probe(self) -> None:
        self._probe.is_wanted = False
        if self._timer is not None:
            self._timer.cancel()


class _Probe:
    """A thread that asks for the GIL again and again, for a second. It sleeps in between.

    The time from the end of a sleep until the thread goes on, without the time for which it was queued for a processor,
    is the wait for the GIL.
    """

    __slots__ = ("gil_share", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted = True
        self.gil_share: float | None = None

    def start(self) -> None:
        """Start the thread."""
        if self.is_wanted:
            with contextlib.suppress(RuntimeError):  # no thread can be started: nothing is measured
                threading.Thread(target=self._run, name="aiocuda-gil-probe", daemon=True).start()

    def _run(self) -> None:
        end, requests, taken = time.monotonic() + PROBE_SECONDS, 0, 0
        while self.is_wanted and (time.monotonic() < end or not requests):
            requests += 1
            seconds = PERIOD * (0.5 + requests * GOLDEN % 1)
            began, _, queued = thread_times()
            time.sleep(seconds)  # noqa: TID251 - it gives up the GIL, and asks for it
            ended, _, queued_then = thread_times()
            taken += ended - began - seconds - (queued_then - queued) > TAKEN
        if self.is_wanted:
            self.gil_share = taken / requests
