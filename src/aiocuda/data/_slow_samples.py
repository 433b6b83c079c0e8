"""SlowSamples: logs the samples that take long to decode."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from .._base._log import log

__all__ = ["SlowSamples"]

#: Seconds after which a sample is reported.
SLOW_SECONDS: Final = 30.0


class SlowSamples:
    """Logs each sample that takes long to decode, once. All methods are called on the loop.

    Parameters
    ----------
    running
        Returns the index of each sample that is being decoded now, by a key of its own.
    device
        For the event.
    """

    def __init__(self, running: Callable[[], Mapping[Any, int]], device: str) -> None:
        self._running = running
        self._device = device
        self._seen: dict[Any, float] = {}  # when each sample was first seen; infinity once it was reported
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Samples are decoded now: look at them until there are none."""
        if self._timer is None:
            look = weakref.WeakMethod(self.look)  # the timer keeps no loader that the program has dropped
            self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS / 2, _call, look)

    def look(self) -> None:
        """Report the samples that were seen long ago."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        running = self._running()
        self._seen = {key: self._seen.get(key, now) for key in running}
        for key, since in self._seen.items():
            if now - since >= SLOW_SECONDS:
                self._seen[key] = math.inf
                log(
                    "warning", "sample_slow", device=self._device, index=running[key], seconds=round(now - since, 1),
                    reason="decode= or the source has not returned for this sample: timeout= would end it",
                )  # fmt: skip
        if running:
            self.begin()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object is gone."""
    found = method()
    if found is not None:
        found()
