"""An event loop in virtual time, which finds lost wake-ups: all tasks wait, and nothing will wake any of them.

It uses asyncio's tasks, futures and handles, but not asyncio's loop: its order and timing differ between versions of
Python.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import math
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar, TypeVarTuple

from .._base._clock import Clock
from .._base._wakeups import WATCHDOG_SECONDS
from ._loop_base import LoopBase, logger

__all__ = ["LostWakeupError", "SimulatedLoop"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: The virtual time of one turn of the loop. It must not be 0: a task that polls in every turn would stop the clock.
#: A turn of asyncio's own loop takes 2.0 µs with one step of a task, and 3.3 µs with two steps, a descriptor and a
#: timer (measured).
TURN_NS: Final = 3_000

#: Cancelled timers are removed when there are twice as many timers as after the last removal, and at least this many.
_MIN_TIMERS_TO_SWEEP: Final = 128

#: Periods of aiocuda's watchdog with nothing but housekeeping, after which a wake-up counts as lost. A rescue by the
#: watchdog takes 3.
_MOST_PERIODS: Final = 8
_PERIOD_NS: Final = round(WATCHDOG_SECONDS * 1e9)

_PACKAGE: Final = __name__.partition(".")[0] + "."
_TESTING: Final = __name__.rpartition(".")[0] + "."
_ASYNCIO: Final = str(Path(asyncio.__file__).parent) + os.sep


class SimulatedLoop(LoopBase):
    """An event loop without threads, descriptors and real time: the same program always takes the same steps.

    It is a `loop_factory` for `asyncio.Runner`, `asyncio.run` (Python 3.12 and later), pytest-asyncio's hook
    ``pytest_asyncio_loop_factories`` and anyio's ``anyio_backend``::

        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(main())

    One turn runs the callbacks that are ready at its beginning, in order, and takes 3 µs of virtual time. When no
    callback is ready, the time jumps to the next entry of the clock or the next timer. If there is neither,
    `run_until_complete` raises `LostWakeupError`. It also raises this error if only aiocuda's own timers are left, and
    they have woken nothing for eight periods of its watchdog.

    ``run_in_executor(None, function)``, and so `asyncio.to_thread`, calls the function in a later turn, in the thread
    of the loop. The function must not wait for anything that the loop has to do.

    Attributes
    ----------
    clock : Clock
        The virtual time. While the loop runs, `aiocuda._base._clock.running_clock` returns this clock.
    steps : int
        The number of callbacks and steps of tasks so far.
    on_step : callable or None
        Called after each of them. If it raises, the run ends by that error, and `on_step` becomes None, so that the
        tasks can be cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.steps = 0
        self.on_step: Callable[[], object] | None = None
        self.slow_callback_duration = 0.1  # of virtual time, in debug mode
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []  # nanoseconds, order
        self._timers_made = 0
        self._sweep_at = _MIN_TIMERS_TO_SWEEP
        self._housekeeping = _HousekeepingTimer()
        self._executor_shut = self._stopping = False

    def __repr__(self) -> str:
        return f"<SimulatedLoop running={self._running} closed={self._closed} debug={self._debug} at {self.time():.9f}>"

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"unclosed event loop {self!r}", ResourceWarning, stacklevel=2, source=self)

    # -- running -------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        self._check_closed()
        self._check_not_running()
        hooks = sys.get_asyncgen_hooks()
        depth = sys.get_coroutine_origin_tracking_depth()
        self._thread = threading.get_ident()
        self._running = True
        try:
            sys.set_asyncgen_hooks(firstiter=self._begin_asyncgen, finalizer=self._finalize_asyncgen)
            self._track_origins()
            asyncio._set_running_loop(self)
            with self.clock:
                while True:
                    self._turn()
                    if self._stopping:
                        break
        finally:
            self._stopping = self._running = False
            asyncio._set_running_loop(None)
            sys.set_coroutine_origin_tracking_depth(depth)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Any) -> Any:
        self._check_closed()
        self._check_not_running()
        made_here = not asyncio.isfuture(future)
        future = asyncio.ensure_future(future, loop=self)
        if made_here:
            future._log_destroy_pending = False  # the caller gets an exception instead
        future.add_done_callback(_stop_loop)
        try:
            self.run_forever()
        except BaseException:
            if made_here and future.done() and not future.cancelled():
                future.exception()  # marks it as retrieved: it is being raised
            raise
        finally:
            future.remove_done_callback(_stop_loop)
        if not future.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return future.result()

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        if self._running:
            raise RuntimeError("Cannot close a running event loop")
        self._closed = self._executor_shut = True
        self._ready.clear()
        self._timers.clear()

    def _turn(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        else:
            self._take_due()
        quiet = self.clock.next_ns() is None
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if quiet:
                quiet = _is_housekeeping(handle)
            if self._debug:
                self._run_timed(handle)
            else:
                handle._run()
            self.steps += 1
            if self.on_step is not None:
                try:
                    self.on_step()
                except BaseException:
                    self.on_step = None
                    raise
            del handle  # a task's failure holds this frame by its traceback, and the handle holds the task
        self.clock.spend(TURN_NS)
        if not quiet:
            self._housekeeping.reset()
        elif self._housekeeping.has_expired(self.clock.now_ns, self._timers_made):
            self._check_lost()

    def _run_timed(self, handle: asyncio.Handle) -> None:
        self._current = handle
        began = self.time()
        try:
            handle._run()
        finally:
            self._current = None
        seconds = self.time() - began
        if seconds >= self.slow_callback_duration:
            logger.warning("Executing %r took %.3f seconds of virtual time", handle, seconds)

    # -- time ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of virtual time."""
        return self.clock.now_ns / 1e9

    def _advance(self) -> None:
        """Advance the time until a callback is ready."""
        while not self._ready and not self._stopping:
            timers = self._timers
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            entry = self.clock.next_ns()
            if timers:
                due = timers[0][0]
                self.clock.advance(due if entry is None else min(due, entry))
            elif entry is not None:
                self.clock.advance(entry)
            else:
                raise _lost_wakeup(self, "no callback is ready, no timer is set, and the device has nothing to do")
            self._take_due()

    def _take_due(self) -> None:
        timers, now = self._timers, self.clock.now_ns
        while timers and timers[0][0] <= now:
            self._ready.append(heapq.heappop(timers)[2])

    def _check_lost(self) -> None:
        if self.clock.next_ns() is None and self._housekeeping.is_all_that_is_left(self._ready, self._timers):
            raise _lost_wakeup(self, "the device has nothing to do, and aiocuda's own timers wake nothing")

    # -- callbacks -----------------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check_closed()
        if self._debug:
            self._check_callback(callback, "call_soon")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Do the same as `call_soon`. Signal handlers use it.

        Raises
        ------
        RuntimeError
            Called in another thread: no seed decides when that thread would call.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"call_soon_threadsafe from thread {threading.current_thread().name!r}: a simulated loop has no "
                "threads, because their work cannot be replayed; run it as a task, or by asyncio.to_thread"
            )
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if delay is None:
            raise TypeError("delay must not be None")
        wait = _nanoseconds(delay)
        return self._call_at_ns(
            None if wait is None else self.clock.now_ns + wait, callback, args, context, "call_later"
        )

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if when is None:
            raise TypeError("when cannot be None")
        return self._call_at_ns(_nanoseconds(when), callback, args, context, "call_at")

    def _call_at_ns(
        self,
        when_ns: int | None,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        method: str,
    ) -> asyncio.TimerHandle:
        self._check_closed()
        if self._debug:
            self._check_callback(callback, method)
        handle = asyncio.TimerHandle(math.inf if when_ns is None else when_ns / 1e9, callback, args, self, context)
        if when_ns is not None:  # a timer at infinity would keep a lost wake-up from being detected
            timers = self._timers
            heapq.heappush(timers, (when_ns, self._timers_made, handle))
            self._timers_made += 1
            if len(timers) >= self._sweep_at:
                timers[:] = [entry for entry in timers if not entry[2].cancelled()]
                heapq.heapify(timers)
                self._sweep_at = max(_MIN_TIMERS_TO_SWEEP, 2 * len(timers))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: `_call_at_ns` removes cancelled timers. `asyncio.TimerHandle.cancel` calls this."""

    # -- executors -----------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        self._check_closed()
        if executor is not None:
            raise NotImplementedError(
                f"run_in_executor({executor!r}, …): a simulated loop has no threads; pass None, and the function is "
                "called in a later turn of the loop"
            )
        if self._executor_shut:
            raise RuntimeError("Executor shutdown has been called")
        if self._debug:
            self._check_callback(func, "run_in_executor")
        future: asyncio.Future[_T] = self.create_future()
        self.call_soon(self._run_inline, future, func, args, context=contextvars.Context())  # as in a new thread
        return future

    def _run_inline(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        asyncio._set_running_loop(None)  # as in a thread of an executor
        try:
            result = func(*args)
        except KeyboardInterrupt:
            raise
        except StopIteration as error:  # a future refuses it
            wrapped = RuntimeError(f"{func!r} raised StopIteration")
            wrapped.__cause__ = error
            future.set_exception(wrapped)
        except BaseException as error:  # noqa: BLE001 - raised by `await`
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            asyncio._set_running_loop(self)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's
        self._executor_shut = True


def _stop_loop(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and isinstance(future.exception(), SystemExit | KeyboardInterrupt):
        return  # the loop raises it
    future.get_loop().stop()


def _nanoseconds(seconds: float) -> int | None:
    """Round up to nanoseconds. Return None for infinity."""
    seconds = float(seconds)
    product = seconds * 1e9
    if math.isinf(product):
        return None if product > 0 else 0
    nearest = round(product)
    return nearest if nearest / 1e9 >= seconds else nearest + 1


class LostWakeupError(AssertionError):
    """All tasks of a `SimulatedLoop` wait, and nothing will wake any of them. The message lists where they wait."""


class _HousekeepingTimer:
    """Measures how long a loop has run only aiocuda's own callbacks while the device had nothing to do.

    aiocuda's watchdog re-arms itself as long as an operation is unresolved. Its periods are counted, not the turns of
    the loop: a stream queue that is polled every millisecond takes many turns in one period.
    """

    __slots__ = ("_next_ns", "_periods", "_timers_before")

    def __init__(self) -> None:
        self._periods = 0
        self._next_ns = 0
        self._timers_before = 0

    def reset(self) -> None:
        """Begin a new idle period: the loop has run a callback that is not housekeeping."""
        self._periods = 0

    def has_expired(self, now_ns: int, timers_made: int) -> bool:
        """Count an iteration with housekeeping only. True if it is time to check whether a task can still be woken."""
        if not self._periods:
            self._next_ns = now_ns
            self._timers_before = timers_made
        if now_ns >= self._next_ns:
            self._periods += 1
            self._next_ns = now_ns + _PERIOD_NS
        return self._periods > _MOST_PERIODS

    def is_all_that_is_left(
        self, ready: Iterable[asyncio.Handle], timers: Iterable[tuple[float, int, asyncio.TimerHandle]]
    ) -> bool:
        """True if only housekeeping is left, set since `reset`. An older timer may still wake a task."""
        return all(map(_is_housekeeping, ready)) and all(
            handle.cancelled() or (order >= self._timers_before and _is_housekeeping(handle))
            for _, order, handle in timers
        )


def _is_housekeeping(handle: asyncio.Handle) -> bool:
    """True for a callback of aiocuda itself, outside of `aiocuda.testing`. A step of a task is none."""
    callback = handle._callback  # type: ignore[attr-defined]
    while isinstance(callback, functools.partial):
        callback = callback.func
    module = getattr(callback, "__module__", None)
    return isinstance(module, str) and module.startswith(_PACKAGE) and not module.startswith(_TESTING)


def _lost_wakeup(loop: asyncio.AbstractEventLoop, reason: str) -> LostWakeupError:
    """Return the error, with all unfinished tasks of the loop and the lines at which they wait."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (getattr(task, "order", math.inf), task.get_name()))
    places = "".join(f"\n  {task.get_name()} at {_place(task)}" for task in tasks) or " no task"
    return LostWakeupError(
        f"lost wake-up at {loop.time():.9f} s of virtual time: {reason}. Find what should have woken these tasks; "
        f"unfinished:{places}"
    )


def _place(task: asyncio.Task[Any]) -> str:
    """Return the lines at which a task waits, innermost first; without those in asyncio, unless there are no others."""
    lines: list[str] = []
    within_asyncio = "no line of Python"
    awaited: object = task.get_coro()
    while awaited is not None:
        frame: FrameType | None = _first_attribute(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
            if frame.f_code.co_filename.startswith(_ASYNCIO):
                within_asyncio = line
            else:
                lines.append(line)
        awaited = _first_attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return ", awaited at ".join(reversed(lines)) or within_asyncio


def _first_attribute(value: object, *names: str) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)
