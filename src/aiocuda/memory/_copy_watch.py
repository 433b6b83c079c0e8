"""CopyWatch: finds tasks that copy much pageable memory, one array after the other."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, Final

from .._base._advice import advise
from .._base._types import SourceLine

__all__ = ["CopyWatch"]

#: Copies of one task that are looked at together. A task that copies a few arrays, such as a request, is left alone.
COPIES: Final = 100

#: Seconds after which the count begins again.
LONGEST: Final = 10.0

#: The share of the time in which the host works on staged copies. The cure saves a little less: with the host driver,
#: uploads of 4 MB take 4.7 ms from an array and 3.4 ms from pinned memory.
LEAST_SHARE: Final = 0.2

#: Bytes per second that a host copies at least. The rest of a longer time is that of another thread or process, or of a
#: CUDA call that waits for one: a GPU on which other processes create contexts holds calls for 0.3 s.
SLOWEST: Final = 0.5e9

#: The packages through which a program calls the methods of a stream. Calls by the others, such as loaders, are theirs.
_METHODS = ("_core", "memory", "device/streams", "pool")


class CopyWatch:
    """Counts the staged copies of one loop, and the time that the host spends on them.

    It sees only copies that are divided into chunks: small ones take the loop a few microseconds each. The time of an
    upload ends when the last chunk is submitted, the time of a download begins when the first chunk has arrived.
    """

    __slots__ = ("_copies", "_nbytes", "_seconds", "_since", "_task", "now")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._task: Callable[[], object] = _none
        self._copies = self._nbytes = 0
        self._since = self._seconds = 0.0

    def count(self, nbytes: int) -> None:
        """Count a copy that the running task enqueues. Warn if a hundred of them took much of the time."""
        task: asyncio.Task[Any] | None = asyncio.current_task()
        now = self.now()
        if task is None or self._task() is not task or now - self._since > LONGEST:
            self._task = _none if task is None else weakref.ref(task)
            self._copies = self._nbytes = 0
            self._since, self._seconds = now, 0.0
        self._copies += 1
        self._nbytes += nbytes
        if self._copies >= COPIES:
            copies, seconds, taken, nbytes = self._copies, now - self._since, self._seconds, self._nbytes
            self._task = _none
            line = SourceLine.of_direct_caller(*_METHODS)
            if line is not None and taken >= LEAST_SHARE * seconds:
                _advise_pinned(line, copies, nbytes, seconds, taken)

    def add(self, seconds: float, nbytes: int) -> None:
        """Add the time that the host spent on one copy."""
        self._seconds += min(seconds, nbytes / SLOWEST)


def _none() -> None:
    """Stand for a task that does not exist."""


def _advise_pinned(line: SourceLine, copies: int, nbytes: int, seconds: float, taken: float) -> None:
    advise(
        "pageable copies",
        line,
        f"a task copied pageable memory {copies} times, {nbytes / 1e6:,.0f} MB in {seconds:.2g} s, and the host spent "
        f"{min(taken, seconds):.2g} s of it on copies between that memory and pinned memory: keep the data in pinned "
        "memory, device.pinned(shape, dtype) or `async with device.pin(array)`, or load batches by "
        "aiocuda.data.to_device",
    )
