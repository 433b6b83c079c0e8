"""Predictor: the estimates of the durations of operations, from the durations of similar ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from .._core import Estimate

__all__ = ["Predictor"]

#: The most estimates that are kept; the oldest is removed first.
MOST_KEYS = 1024


class Predictor:
    """The estimates, by kind, kernel or size class, and grid."""

    __slots__ = ("_estimates",)

    def __init__(self) -> None:
        self._estimates: OrderedDict[Hashable, Estimate] = OrderedDict()

    def estimate(self, key: Hashable, kernel: str | None = None) -> Estimate:
        """Return the estimate for a key; if there is none, a new one with the name of the kernel of a launch."""
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = Estimate(kernel)
            if len(self._estimates) > MOST_KEYS:
                self._estimates.popitem(last=False)
        return found
