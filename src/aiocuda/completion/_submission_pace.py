"""SubmissionPace: limits the time that submitted functions take in one iteration of the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .._core import Ring

__all__ = ["SubmissionPace"]

#: Seconds. Later functions wait for the next iteration, in which the other tasks of the loop run, too.
MOST_SECONDS: Final = 5e-3

#: Seconds. While the functions have taken less, no callback notes the end of the iteration: it would take 1 µs of each.
UNMARKED_SECONDS: Final = 5e-4


class SubmissionPace:
    """The time that submitted functions have taken in this iteration of the loop, and the queues that wait.

    A hundred tasks that resume in one iteration would enqueue a hundred models in it, one after the other. There is one
    pace for each reactor. The time may include functions of earlier iterations, of `UNMARKED_SECONDS` in all.

    Attributes
    ----------
    is_used_up : bool
        True if no other function may be called in this iteration.
    """

    __slots__ = ("_loop", "_scheduled", "_seconds", "_waiting", "is_used_up")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._seconds = 0.0
        self._scheduled = self.is_used_up = False
        self._waiting: dict[Ring, None] = {}

    def put_off(self, queue: Ring) -> None:
        """Pump the host queue of a queue in the next iteration."""
        self._waiting[queue] = None

    def add(self, seconds: float) -> None:
        """Count the time of a function."""
        self._seconds += seconds
        if self._seconds >= UNMARKED_SECONDS:
            self.is_used_up = self._seconds >= MOST_SECONDS
            if not self._scheduled:
                self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin an iteration: pump the host queues that wait, in their order, until its time is used."""
        self._scheduled = self.is_used_up = False
        self._seconds = 0.0
        try:
            while self._waiting and not self.is_used_up:
                queue = next(iter(self._waiting))
                del self._waiting[queue]
                queue.rare.host_queue.pump()
                queue.attend()
        finally:
            if self._waiting and not self._scheduled:  # Ctrl-C in a function
                self._schedule()
