"""Prediction: how long an operation is likely to take, from those like it.

A duration runs from max(submitted, previous resolve in the queue) to the resolve, by the host's clock. Two kinds of
sample exist. A *caught* one was seen unfinished and then finished by polling, and is exact to a loop turn. A *coarse*
one was found finished after a sleep or a park, and is only an upper bound: on the machines measured, a parked thread
wakes 0.4-0.7 ms late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["INSTANT", "Estimate", "Predictor"]

#: Weight of a new sample: five operations forget half of a change, one outlier moves a fifth.
WEIGHT = 0.2

#: Estimates kept; the least recently made goes first.
MOST_KEYS = 1024


class Estimate:
    """Expected seconds of one kind of operation, None while nothing is known, and how much they vary.

    The spread is the mean deviation, as TCP keeps it for its time-outs (RFC 6298). Without it one late wake feeds the
    next: in a pipeline the bubble that it leaves comes round again as an operation that is late by as much.
    """

    __slots__ = ("_behind_wait", "kernel", "seconds", "spread")

    def __init__(self, kernel: str | None = None) -> None:
        self.kernel = kernel  # its name, of a launch
        self.seconds: float | None = None
        self.spread = 0.0
        self._behind_wait: Estimate | None = None

    @property
    def behind_wait(self) -> Estimate:
        """The same operation right behind a wait for another stream: it takes that wait's time, too.

        In a pipeline that is the beat of the whole, and it repeats.
        """
        if self._behind_wait is None:
            self._behind_wait = Estimate(self.kernel)
        return self._behind_wait

    def caught(self, sample: float) -> None:
        """An exact sample."""
        known = self.seconds
        if known is None:
            self.seconds = sample
        else:
            self.seconds = known + WEIGHT * (sample - known)
            self.spread += WEIGHT * (abs(sample - known) - self.spread)

    def overslept(self, bound: float) -> None:
        """It had ended already when first looked at, ``bound`` seconds after its start: at most that long."""
        if self.seconds is None or bound < self.seconds:
            self.seconds = bound

    def overdue(self, bound: float) -> None:
        """It outlived its estimate and was parked; it ended shortly before ``bound``."""
        if self.seconds is None:
            self.seconds = bound
        elif bound > self.seconds:
            self.spread = max(self.spread, (bound - self.seconds) / 2)
            self.seconds += (bound - self.seconds) / 2


class _Instant(Estimate):
    """Of what only marks a place in the order, or waits for another stream; there is nothing to learn."""

    __slots__ = ()

    def caught(self, sample: float) -> None:
        """Nothing."""

    def overslept(self, bound: float) -> None:
        """Nothing."""

    def overdue(self, bound: float) -> None:
        """Nothing."""


INSTANT = _Instant()
INSTANT.seconds = 0.0


class Predictor:
    """Estimates by kind, kernel or size class, and grid."""

    __slots__ = ("_estimates",)

    def __init__(self) -> None:
        self._estimates: OrderedDict[Hashable, Estimate] = OrderedDict()

    def estimate(self, key: Hashable, kernel: str | None = None) -> Estimate:
        """The estimate for a key; a new, empty one if there is none, which keeps the name of a launch's kernel."""
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = Estimate(kernel)
            if len(self._estimates) > MOST_KEYS:
                self._estimates.popitem(last=False)
        return found
