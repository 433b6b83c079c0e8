"""How long the turns of an event loop take.

Three ways were weighed. A chain of ``call_soon`` never lets the loop sleep: it would eat the core that is being
measured and hide what parking costs. Timing ``_run_once`` takes a private method, and cannot tell work from sleep.
A *selector* is a public parameter of `asyncio.SelectorEventLoop`, and is called exactly once per turn: what lies
between two of its calls is the turn. It costs two clock readings, and the loop behaves as ever.

uvloop takes no selector; rows on uvloop report no turns.
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
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        called = perf_counter()
        self._longest = max(self._longest, called - self._resumed)
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

    def longest(self) -> float:
        """Seconds of the longest turn since `reset`, the one under way included."""
        return max(self._longest, perf_counter() - self._resumed)


def metered_loop() -> tuple[asyncio.AbstractEventLoop, TurnMeter]:
    """asyncio's own loop over a `TurnMeter`."""
    meter = TurnMeter()
    return asyncio.SelectorEventLoop(meter), meter
