"""Lost wake-ups: all tasks wait, and nothing will wake any of them."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ..completion._reactor import WATCHDOG_SECONDS

__all__ = ["HousekeepingTimer", "LostWakeupError", "is_housekeeping", "lost_wakeup"]

#: Periods of aiocuda's watchdog with nothing but housekeeping, after which a wake-up counts as lost. A rescue by the
#: watchdog takes 3.
_MOST_PERIODS: Final = 8
_PERIOD_NS: Final = round(WATCHDOG_SECONDS * 1e9)

_PACKAGE: Final = __name__.partition(".")[0] + "."
_TESTING: Final = __name__.rpartition(".")[0] + "."
_ASYNCIO: Final = str(Path(asyncio.__file__).parent) + os.sep


class LostWakeupError(AssertionError):
    """All tasks of a `SimulatedLoop` wait, and nothing will wake any of them. The message lists where they wait."""


class HousekeepingTimer:
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
        """Start again: the loop has run something else."""
        self._periods = 0

    def has_expired(self, now_ns: int, timers_made: int) -> bool:
        """Count another turn of housekeeping. True if it is time to check whether anything can still happen."""
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
        return all(map(is_housekeeping, ready)) and all(
            handle.cancelled() or (order >= self._timers_before and is_housekeeping(handle))
            for _, order, handle in timers
        )


def is_housekeeping(handle: asyncio.Handle) -> bool:
    """True for a callback of aiocuda itself, outside of `aiocuda.testing`. A step of a task is none."""
    callback = handle._callback  # type: ignore[attr-defined]
    while isinstance(callback, functools.partial):
        callback = callback.func
    module = getattr(callback, "__module__", None)
    return isinstance(module, str) and module.startswith(_PACKAGE) and not module.startswith(_TESTING)


def lost_wakeup(loop: asyncio.AbstractEventLoop, reason: str) -> LostWakeupError:
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
