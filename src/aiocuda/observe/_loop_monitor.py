"""LoopMonitor: the iterations of an event loop, those that block it, and the waits that resume in it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from .._base._collections import COLLECTIONS, Collection
from .._base._loop_watch import cancel_sample, running_callback, sample_at
from ._recording import Blocked, LoopRecord, Resume

__all__ = ["BLOCKED", "HEARTBEAT", "LoopMonitor"]

#: Seconds. A longer iteration blocks the loop: the library itself lets none of its iterations take 5 ms.
BLOCKED: Final = 5e-3
#: Seconds between two timers, so that each iteration of twice this length makes one of them late by `BLOCKED`.
HEARTBEAT: Final = 5e-3
#: Seconds. A shorter iteration in which only the timer ran is left out.
IDLE: Final = 1e-4
#: Collections of one iteration that are looked at: of several, none takes most of the time.
MOST_INSIDE: Final = 8


class LoopMonitor:
    """Observes one event loop from `start` to `stop`.

    An iteration is noticed if a hook or the timer runs in it. Its slice begins there, and ends in a function that
    `call_soon` has put into the next iteration; functions that were scheduled earlier run before that. Other iterations
    show only if they make the timer late: then the slice begins when the timer was due. The monitor schedules nothing
    else, so an idle loop wakes for the timer only. A thread samples the line at which the loop is when the timer is
    late by `BLOCKED`.

    Parameters
    ----------
    loop
        All methods but `stop` and `record` run on its thread.
    now
        The clock.
    timer
        False for a loop in virtual time, in which nothing takes time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float], *, timer: bool) -> None:
        self.loop = loop
        self._now = now
        self._has_timer = timer
        self._on_beat: Callable[[float], object] | None = None
        self._iterations: list[tuple[float, float]] = []
        self._late: list[tuple[float, float]] = []
        self._thread_id = threading.get_ident()
        self._samples: list[tuple[float, str, str]] = []  # time, callback and line while the timer is late
        self._collections: list[Collection] = []
        self._resumes: list[Resume] = []
        self._begun: float | None = None
        self._noticed_by_hook = False
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self, on_beat: Callable[[float], object]) -> None:
        """Begin. ``on_beat`` is called with the time whenever the timer runs."""
        self._on_beat = on_beat
        if self._has_timer:
            COLLECTIONS.observers.append(self._collections.append)
            self._arm(self._now())

    def stop(self) -> None:
        """Schedule nothing more. Another thread may call it: then the last timer runs, and does nothing."""
        self._stopped = True
        self._on_beat = None
        cancel_sample(self)
        with contextlib.suppress(ValueError):  # it was not started, or has been stopped before
            COLLECTIONS.observers.remove(self._collections.append)
        if asyncio._get_running_loop() is self.loop:
            now = self._now()
            if self._handle is not None:
                self._handle.cancel()
                self._check_late(now)
            if self._begun is not None:
                self._iterations.append((self._begun, now))
                self._begun = None

    def touch(self) -> float:
        """Notice the present iteration, in a hook. Return the time."""
        self._noticed_by_hook = True
        return self._notice()

    def resume(self, operation: int, name: str, label: str | None, *, soon: bool) -> None:
        """Record that an operation wakes a task.

        With ``soon`` the task is suspended: it continues in the next iteration, after a function that this method
        schedules before the task is woken. Otherwise its ``await`` continues without suspending it.
        """
        if soon and not self._stopped:
            self.loop.call_soon(self._resumed, operation, name, label)
        else:
            self._resumed(operation, name, label)

    def record(self) -> LoopRecord:
        """Return what was recorded so far. Any thread may call it."""
        iterations = tuple(self._iterations)
        blocked: list[Blocked] = []
        long = (each for each in iterations if each[1] - each[0] > BLOCKED)
        for start, end in sorted([*long, *tuple(self._late)]):
            if blocked and start <= blocked[-1].end:  # the same iteration
                blocked[-1] = Blocked(blocked[-1].start, max(blocked[-1].end, end))
            else:
                blocked.append(Blocked(start, end))
        found = _with_collections(_with_lines(blocked, tuple(self._samples)), tuple(self._collections))
        return LoopRecord(iterations, found, tuple(self._resumes))

    def sample(self) -> None:
        """Note the callback that blocks the loop now, and its innermost line. Called by the thread that samples."""
        found = running_callback(self._thread_id)
        if found is not None:  # else the loop waits for events: another process has the processor
            self._samples.append((self._now(), *found))

    def _notice(self) -> float:
        now = self._now()
        if self._begun is None and not self._stopped:
            self._begun = now
            self.loop.call_soon(self._end)
        return now

    def _end(self) -> None:
        begun, self._begun = self._begun, None
        by_hook, self._noticed_by_hook = self._noticed_by_hook, False
        if begun is not None:
            now = self._now()
            if by_hook or now - begun > IDLE:
                self._iterations.append((begun, now))

    def _resumed(self, operation: int, name: str, label: str | None) -> None:
        if not self._stopped:
            at = self.touch()
            self._resumes.append(Resume(at, len(self._iterations), operation, name, label))

    def _arm(self, now: float) -> None:
        self._due = now + HEARTBEAT
        sample_at(self, time.monotonic() + HEARTBEAT + BLOCKED)
        self._handle = self.loop.call_later(HEARTBEAT, self._beat)

    def _beat(self) -> None:
        if self._stopped:
            return
        now = self._notice()
        self._check_late(now)
        if self._on_beat is not None:
            self._on_beat(now)
        self._arm(now)

    def _check_late(self, now: float) -> None:
        if now - self._due > BLOCKED:
            self._late.append((self._due, now))


def _with_lines(blocked: Sequence[Blocked], samples: Sequence[tuple[float, str, str]]) -> tuple[Blocked, ...]:
    """Return blocked iterations with the first sample of each. Both are in the order of time."""
    found, at = [], 0
    for each in blocked:
        while at < len(samples) and samples[at][0] < each.start:
            at += 1
        if at < len(samples) and samples[at][0] <= each.end:
            each = Blocked(each.start, each.end, *samples[at][1:])
        found.append(each)
    return tuple(found)


def _with_collections(blocked: Sequence[Blocked], collections: Sequence[Collection]) -> tuple[Blocked, ...]:
    """Return blocked iterations with the garbage collection that took most of the time, in place of its callback."""
    found, at = [], 0
    for each in blocked:
        while at < len(collections) and collections[at].end < each.start:
            at += 1
        inside = [one for one in collections[at : at + MOST_INSIDE] if one.start < each.end]
        longest = max(inside, key=lambda one: one.seconds, default=None)
        if longest is not None and longest.seconds > (each.end - each.start) / 2:
            each = Blocked(each.start, each.end, str(longest), str(longest))
        found.append(each)
    return tuple(found)
