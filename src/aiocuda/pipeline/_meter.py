"""Meter: the times and counts of a pipeline.

Host times are measured for every item. Device times need two events for each stage, so only some items are timed.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .._base._percentiles import mean_p50_p99
from ._plan import Plan
from ._ring import PipelineRing
from ._statistics import PipelineStats

__all__ = ["Meter"]

#: Times of items that are kept for the percentiles.
MAX_ITEM_TIMES = 4096

#: Times of each stage that are kept for its median.
MAX_STAGE_TIMES = 256

#: The first items are all timed; after them, one item in so many. Two events for each of three stages take 40 µs of the
#: host, as much as all other work for the item, and 15 µs of the device (measured).
ALL_TIMED = 16
ONE_IN = 16

#: Where no stage takes half a millisecond, one in 16 would cost a pipeline a hundredth of its throughput.
BRIEF_SECONDS = 5e-4
ONE_IN_BRIEF = 64


class Total(NamedTuple):
    """Seconds of a number of items."""

    seconds: float = 0.0
    items: int = 0

    def plus(self, seconds: float, items: int) -> Total:
        """Add items that represent only themselves."""
        return Total(self.seconds + seconds, self.items + items)

    def plus_sample(self, seconds: float, upto: int) -> Total:
        """Add one item that represents all of the first ``upto`` items that are not counted yet."""
        items = max(1, upto - self.items)
        return self.plus(seconds * items, items)


class Meter:
    """Times and counts of one pipeline.

    Attributes
    ----------
    items : int
        Items that passed all stages.
    skipped : int
        Items that a stage has skipped.
    source_seconds, consumer_seconds : float
        Host time of the source and of the consumer, as in `PipelineStats`. The run adds to them.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processing = [
            position for position, stage in enumerate(plan.stages)
            if plan.states[position] == "processing" and not stage.awaits
        ] or list(range(len(plan.stages)))  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """Restart all times and counts."""
        self._begun = self.items = self.skipped = self.results_copied = self.blocks_replaced = 0
        self.source_seconds = self.consumer_seconds = 0.0
        self._totals = [Total()] * len(self._plan.stages)
        for made in ("_item_seconds", "_stage_times"):
            self.__dict__.pop(made, None)

    @cached_property  # four empty deques take 3 KB
    def _item_seconds(self) -> deque[float]:
        """Return the seconds of recent items."""
        return deque(maxlen=MAX_ITEM_TIMES)

    @cached_property
    def _stage_times(self) -> list[deque[float]]:
        """Return the seconds that each stage took for recent items, by its position."""
        return [deque(maxlen=MAX_STAGE_TIMES) for _ in self._plan.stages]

    # -- what items report ---------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Count an item that begins. Return True if events are to time it."""
        number = self._begun
        self._begun += 1
        if number < ALL_TIMED:
            return True
        if number % ONE_IN:
            return False
        is_brief = max((times[-1] for times in self._stage_times if times), default=0.0) < BRIEF_SECONDS
        return not (is_brief and number % ONE_IN_BRIEF)

    def add_host_time(self, position: int, seconds: float, at_once: int = 1) -> None:
        """Count a stage's work on one item, timed on the host, for ``at_once`` items at a time.

        It represents no other item.
        """
        self._totals[position] = self._totals[position].plus(seconds / at_once, 1)
        self._stage_times[position].append(seconds)

    def add_sample(self, position: int, seconds: float) -> None:
        """Count a stage's work on an item, timed by two events. It represents the items before it, without a time."""
        self._totals[position] = self._totals[position].plus_sample(seconds, self.items + 1)
        self._stage_times[position].append(seconds)

    def add_item(self, seconds: float) -> None:
        """Count an item that passed all stages."""
        self.items += 1
        self._item_seconds.append(seconds)

    # -- results -------------------------------------------------------------------------------------------------

    def typical_seconds(self) -> list[float] | None:
        """Return the median time of each stage; None before each stage has been timed."""
        return [_median(times) for times in self._stage_times] if all(self._stage_times) else None

    def is_steady(self, within: float) -> bool:
        """True if no stage exceeds its median by more than this share for more than one item in ten."""
        return all(float(np.percentile(times, 90)) <= (1 + within) * _median(times) for times in self._stage_times)

    def statistics(self, ring: PipelineRing) -> PipelineStats:
        """Return a snapshot."""
        wall = ring.busy_seconds
        average, p50, p99 = mean_p50_p99(self._item_seconds)
        seconds = self._stage_seconds()
        return PipelineStats(
            iterations=self.items,
            average_ms=average * 1e3,
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            throughput=self.items / wall if wall else 0.0,
            utilisation=_share(max(seconds[position] for position in self._processing), wall),
            overlap_efficiency=_share(max(seconds), wall),
            peak_busy_slots=ring.peak_busy,
            wall_seconds=wall,
            stage_seconds=dict(zip(self._plan.names, seconds, strict=True)),
            source_seconds=self.source_seconds,
            consumer_seconds=self.consumer_seconds,
            skipped=self.skipped,
            results_copied=self.results_copied,
            blocks_replaced=self.blocks_replaced,
        )

    def _stage_seconds(self) -> list[float]:
        """Return the seconds of each stage. Items after the last timed one take the median.

        The mean would include the compilation of a kernel.
        """
        return [
            total.seconds + max(0, self.items - total.items) * (_median(times) if times else 0.0)
            for total, times in zip(self._totals, self._stage_times, strict=True)
        ]


def _median(times: deque[float]) -> float:
    """Return the median. `statistics.median` would take an import of 2 ms, and NumPy is imported already."""
    return float(np.median(times))


def _share(busy: float, wall: float) -> float:
    return min(1.0, busy / wall) if wall else 0.0
