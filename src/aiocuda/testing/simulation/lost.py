"""Lost wake-ups: everybody waits, and nothing is going to happen any more."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ...completion._reactor import WATCHDOG_SECONDS

__all__ = ["LostWakeupError", "Quiet", "describe", "is_housekeeping"]

#: With nothing but aiocuda's own timers left to fire, this many of the watchdog's periods. It needs 3 for a rescue.
_MOST: Final = 8
_PERIOD_NS: Final = round(WATCHDOG_SECONDS * 1e9)

_PACKAGE: Final = __name__.partition(".")[0] + "."
_TESTING: Final = __name__.rpartition(".simulation.")[0] + "."
_ASYNCIO: Final = str(Path(asyncio.__file__).parent) + os.sep


class LostWakeupError(AssertionError):
    """Everybody waits, and nothing is going to happen any more."""


class Quiet:
    """How long a loop has done nothing but aiocuda's own housekeeping, while the device had nothing to do.

    aiocuda's watchdog re-arms itself as long as anything is unresolved. Periods are counted and not turns, since a
    queue that is polled or asked every millisecond takes many turns in each.
    """

    __slots__ = ("_next_ns", "_periods", "_timers_before")

    def __init__(self) -> None:
        self._periods = 0
        self._next_ns = 0
        self._timers_before = 0

    def end(self) -> None:
        """Something else was done."""
        self._periods = 0

    def is_too_long(self, now_ns: int, timers_made: int) -> bool:
        """Another turn of housekeeping: is it time to look whether anything can still come of it?"""
        if not self._periods:
            self._next_ns = now_ns
            self._timers_before = timers_made
        if now_ns >= self._next_ns:
            self._periods += 1
            self._next_ns = now_ns + _PERIOD_NS
        return self._periods > _MOST

    def leads_nowhere(
        self, ready: Iterable[asyncio.Handle], timers: Iterable[tuple[float, int, asyncio.TimerHandle]]
    ) -> bool:
        """Nothing is left but what housekeeping itself has set: what was set before may lead somewhere yet."""
        return all(map(is_housekeeping, ready)) and all(
            handle.cancelled() or (order >= self._timers_before and is_housekeeping(handle))
            for _, order, handle in timers
        )


def is_housekeeping(handle: asyncio.Handle) -> bool:
    """Is it a callback of aiocuda's own? No step of a task is, nor what a program has asked to be called."""
    callback = handle._callback  # type: ignore[attr-defined]
    while isinstance(callback, functools.partial):
        callback = callback.func
    module = getattr(callback, "__module__", None)
    return isinstance(module, str) and module.startswith(_PACKAGE) and not module.startswith(_TESTING)


def describe(loop: asyncio.AbstractEventLoop, what: str) -> LostWakeupError:
    """The error, with every unfinished task of the loop and where it stands."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (getattr(task, "order", math.inf), task.get_name()))
    places = "".join(f"\n  {task.get_name()} at {_place(task)}" for task in tasks) or " no task"
    return LostWakeupError(
        f"lost wake-up at {loop.time():.9f} s of virtual time: {what}. Find who was to wake these, and why he has not; "
        f"unfinished:{places}"
    )


def _place(task: asyncio.Task[Any]) -> str:
    """Its lines from the innermost on; no news is in those of asyncio, unless there are no others."""
    lines: list[str] = []
    within_asyncio = "no line of Python"
    awaited: object = task.get_coro()
    while awaited is not None:
        frame: FrameType | None = _attribute(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
            if frame.f_code.co_filename.startswith(_ASYNCIO):
                within_asyncio = line
            else:
                lines.append(line)
        awaited = _attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return ", awaited at ".join(reversed(lines)) or within_asyncio


def _attribute(thing: object, *names: str) -> Any:
    return next((getattr(thing, name) for name in names if hasattr(thing, name)), None)
