"""The durations of the iterations of an event loop.

Three ways were considered. A chain of ``call_soon`` never lets the loop sleep: it would use the core that is being
measured and hide the cost of parking. Timing ``_run_once`` uses a private method, and cannot distinguish work from
sleep. A *selector* is a public parameter of `asyncio.SelectorEventLoop`, and is called exactly once per iteration: the
time between two of its calls is one iteration. It costs two clock readings and does not change the loop.

uvloop accepts no selector, so rows on uvloop report no iterations.
"""

from __future__ import annotations

import asyncio
import selectors
from time import perf_counter


class TurnMeter(selectors.DefaultSelector):
    """A selector that remembers the longest turn."""

    def __init__(self) -> None:
        super().__init__()
        self._resumed = perf_counter()
        self._longest = 0.0
        self._recorded: list[float] | None = None
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        called = perf_counter()
        self._longest = max(self._longest, called - self._resumed)
        if self._recorded is not None:
            self._recorded.append(called - self._resumed)
        self.turns += 1
        ready = super().select(timeout)
        # With work at hand the loop asks with a time-out of 0. Whatever that takes is time that the loop could not
        # use, for instance because another thread had the GIL: it belongs to the turn that follows.
        self._resumed = called if timeout is not None and timeout <= 0 else perf_counter()
        return ready

    def reset(self) -> None:
        """Forget what was; the turn under way counts from here."""
        self._longest = 0.0
        self._resumed = perf_counter()

    def record(self) -> None:
        """Forget what was, and keep the time of each turn from here on, until `recorded`."""
        self.reset()
        self._recorded = []

    def recorded(self) -> list[float]:
        """Seconds of each turn since `record`, the one under way included."""
        recorded, self._recorded = self._recorded or [], None
        return [*recorded, perf_counter() - self._resumed]

    def longest(self) -> float:
        """Seconds of the longest turn since `reset`, the one under way included."""
        return max(self._longest, perf_counter() - self._resumed)


def metered_loop() -> tuple[asyncio.AbstractEventLoop, TurnMeter]:
    """asyncio's own loop over a `TurnMeter`."""
    meter = TurnMeter()
    return asyncio.SelectorEventLoop(meter), meter
