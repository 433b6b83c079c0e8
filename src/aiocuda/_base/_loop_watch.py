"""LoopWatch: finds iterations of an event loop that take longer than 50 ms, and the callbacks that cause them."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import os.path
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

from . import _collections
from ._checks import has_gil
from ._collections import COLLECTIONS
from ._log import is_heard, log
from ._stacks import stack_of
from ._wakeups import WATCHDOG_SECONDS

__all__ = ["LIMIT", "LoopWatch", "Sampled", "cancel_sample", "running_callback", "sample_at"]

#: Seconds that a timer may be late. After this time, a callback is blocking the loop.
LIMIT: Final = 0.05

#: Seconds after which the thread ends if no loop is watched.
IDLE_SECONDS: Final = 0.5

#: The function with which asyncio's loop runs a callback.
_RUN_HANDLE: Final = asyncio.Handle._run.__code__

#: Ends of the names of files: of asyncio's loop, and of the code that runs any loop.
_ASYNCIO_LOOP: Final = os.path.join("asyncio", "base_events.py")
_RUNNERS: Final = (os.path.join("asyncio", "runners.py"), os.path.join("uvloop", "__init__.py"))


class Sampled(Protocol):
    """An object for which the thread samples a stack."""

    def sample(self) -> None:
        """Sample the stack. Called by the thread."""


class Calls(Protocol):
    """The calls of a driver that may hold the threads that launch: see `aiocuda.completion`."""

    def longest(self, start: float, end: float) -> str | None:
        """Return the call that has taken more than half of the time between two times; None if there is none."""


class LoopWatch:
    """Reports late timers of one event loop as the event ``loop_blocked``.

    The reactor says when it expects its next timer. If the timer does not come, a thread, shared by all loops, samples
    the stack of the loop's thread. When the timer comes at last, the loop itself logs the event. So an iteration is
    found while the device has unfinished work, and if a handler for warnings exists. While requests wait, the watch has
    timers of its own: the device may be idle because the loop is blocked.

    Attributes
    ----------
    calls : weak set of Calls
        Of the drivers that the loop uses: the event names the call that was in progress meanwhile, on any thread.
    """

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._due = 0.0  # the time of the reactors' next timer; 0 if none is expected
        self._own_due = 0.0  # that of a timer of its own
        self._earliest = 0.0  # of both
        self._reported = 0.0  # the time of the last report
        self._sample: tuple[str, str] | None = None
        self._waits: set[weakref.WeakMethod[Callable[[], bool]]] = set()
        self._has_timer = False  # of its own
        self.calls: weakref.WeakSet[Calls] = weakref.WeakSet()
        self._idle = False  # the loop waited for events when it was sampled: another process had the processor

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopWatch:
        """Return the watch of a loop, which its reactors share. Called on the loop's thread."""
        watch = _watches.get(loop)
        if watch is None:
            watch = _watches[loop] = cls()
        return watch

    def expect(self, seconds: float) -> None:
        """Note that a timer of a reactor is due after these seconds. `arrived` or `rest` follows."""
        if not self._due:  # else another reactor has an earlier timer
            self._due = _due_after(seconds)
            self._watch_earliest()

    def arrived(self) -> None:
        """Report the iteration before the timer if the timer is late. `expect` or `rest` follows."""
        due, self._due = self._due, 0.0
        self._report(due)
        self._watch_earliest()

    def rest(self) -> None:
        """Expect no timer of a reactor any more."""
        self._due = 0.0
        self._watch_earliest()

    def watch_while(self, waits: Callable[[], bool]) -> None:
        """Watch the loop also while ``waits`` returns True, because requests wait. Call it until it returns False."""
        self._waits.add(weakref.WeakMethod(waits))
        if not self._has_timer:
            self._set_timer()

    def _set_timer(self) -> None:
        self._has_timer = True
        # In an empty context: what is logged concerns no single task.
        asyncio.get_running_loop().call_later(WATCHDOG_SECONDS, self._on_timer, context=contextvars.Context())
        self._own_due = _due_after(WATCHDOG_SECONDS)
        self._watch_earliest()

    def _on_timer(self) -> None:
        self._has_timer = False
        due, self._own_due = self._own_due, 0.0
        self._report(due)
        for known in tuple(self._waits):
            waits = known()
            if waits is None or not waits():
                self._waits.discard(known)
        if self._waits:
            self._set_timer()
        else:
            self._watch_earliest()

    def _report(self, due: float) -> None:
        """Log the iteration before a timer that has come, if the timer is late and no other one has reported it."""
        now = time.monotonic()
        if due and now - due > LIMIT and due > self._reported and not self._idle:
            self._reported = now
            callback, line = self._sample or ("unknown", "unknown")
            collection = COLLECTIONS.longest(due, now)
            if collection is not None and collection.seconds > (now - due) / 2:
                if collection.intended:
                    return
                callback, line = str(collection), callback  # the innermost line is that of the observer
            call = next(filter(None, (calls.longest(due, now) for calls in self.calls)), None)
            named = {} if call is None else {"driver_call": call}
            log("warning", "loop_blocked", seconds=round(now - due, 3), callback=callback, line=line, **named)

    def _watch_earliest(self) -> None:
        """Have the thread sample the loop if the earliest timer does not come; not again if that timer is the same."""
        earliest = min(filter(None, (self._due, self._own_due)), default=0.0)
        if earliest == self._earliest:
            return
        self._earliest, self._sample, self._idle = earliest, None, False
        if earliest:
            _sampler.watch(self, earliest + LIMIT)
        else:
            _sampler.forget(self)

    def sample(self) -> None:
        """Note the callback that runs in the loop now, and its innermost line. Called by the thread."""
        self._sample = running_callback(self._thread_id)
        self._idle = self._sample is None and has_gil()  # without the GIL, no callback is known


def _due_after(seconds: float) -> float:
    """Return the time after these seconds; 0 if nothing handles warnings, so that the thread does not run."""
    return time.monotonic() + seconds if is_heard("warning") else 0.0


def running_callback(thread_id: int) -> tuple[str, str] | None:
    """Return the callback that the loop of a thread runs now, and its innermost line; None if it waits for events."""
    frames = _frames_of_callback(stack_of(thread_id))
    return (_described(frames[-1]), _described(frames[0])) if frames else None


def _frames_of_callback(stack: list[FrameType]) -> list[FrameType]:
    """Return the frames of the loop's current callback, the innermost first; none if the loop waits for events."""
    frames: list[FrameType] = []
    for frame in stack:
        if frame.f_code is _RUN_HANDLE:
            return frames
        frames.append(frame)
        if frame.f_code.co_filename == _collections.__file__:
            frames.clear()  # the collector has called at a line of the program, which is that of the next frame
    # Other loops have no Python frame between the frames of their callbacks and those of the code that runs the loop.
    if any(each.f_code.co_filename.endswith(_ASYNCIO_LOOP) for each in frames):
        return []  # asyncio's loop, between two callbacks
    return list(itertools.takewhile(lambda each: not each.f_code.co_filename.endswith(_RUNNERS), frames))


def _described(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


class _Sampler:
    """The thread that samples the stacks of late loops. It runs while a loop is watched."""

    def __init__(self) -> None:
        self._deadlines: dict[Sampled, float] = {}
        self._lock = threading.Lock()  # for the start and the end of the thread
        self._thread: threading.Thread | None = None
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch(self, watch: Sampled, deadline: float) -> None:
        """Sample the watch's loop at the deadline, unless it is forgotten or moved before."""
        is_next = deadline < min(list(self._deadlines.values()), default=math.inf)
        self._deadlines[watch] = deadline
        if is_next:
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="aiocuda-loop-watch", daemon=True)
                    self._thread.start()
            self._wakes.put(None)

    def forget(self, watch: Sampled) -> None:
        """Sample the watch's loop no more."""
        self._deadlines.pop(watch, None)

    def _run(self) -> None:
        while True:
            due = min(list(self._deadlines.values()), default=None)
            seconds = IDLE_SECONDS if due is None else due - time.monotonic()
            if seconds > 0:
                try:
                    self._wakes.get(timeout=seconds)
                except queue.Empty:
                    if due is None and self._ends():
                        return
                continue
            for watch, deadline in list(self._deadlines.items()):
                if deadline == due:
                    self._deadlines.pop(watch, None)
                    watch.sample()

    def _ends(self) -> bool:
        """Forget the thread if no loop is watched; return whether it ends."""
        with self._lock:
            if not self._deadlines:
                self._thread = None
            return self._thread is None


_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = weakref.WeakKeyDictionary()
_sampler = _Sampler()


def sample_at(sampled: Sampled, deadline: float) -> None:
    """Have the thread call ``sampled.sample()`` at this time, in seconds of `time.monotonic`."""
    _sampler.watch(sampled, deadline)


def cancel_sample(sampled: Sampled) -> None:
    """Cancel the call of `sample_at`, if it is still to come."""
    _sampler.forget(sampled)
