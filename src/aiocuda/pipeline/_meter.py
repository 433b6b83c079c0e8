"""Meters: the times and counts of a pipeline.

Host times are measured for every item. Device times need two events for each stage, so only some items are timed:
`SingleItemMeter` times single items, `WindowMeter` windows of consecutive items.
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .._base._percentiles import mean_p50_p99
from ..device import Event
from ._plan import Plan
from ._ring import PipelineRing
from ._statistics import PipelineStats

__all__ = ["Meter", "SingleItemMeter", "WindowMeter", "WindowSchedule", "covered", "meter_of"]

#: Times of items that are kept for the percentiles.
MAX_ITEM_TIMES = 4096

#: Times of each stage that are kept for its median.
MAX_STAGE_TIMES = 256


def meter_of(plan: Plan, depth: int) -> Meter:
    """Return the meter for such a pipeline.

    If several stages process, their work overlaps, also that of neighbouring items: then windows of items are timed.
    """
    processing = [
        position for position, stage in enumerate(plan.stages)
        if plan.states[position] == "processing" and not stage.awaits
    ]  # fmt: skip
    meter = WindowMeter if len(processing) > 1 else SingleItemMeter
    return meter(plan, depth, processing)


class Meter(abc.ABC):
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

    def __init__(self, plan: Plan, depth: int, processing: list[int]) -> None:
        self._plan = plan
        self._depth = depth
        self._processing = processing  # positions of the stages that process and enqueue
        self.reset()

    def reset(self) -> None:
        """Restart all times and counts."""
        self._begun = self.items = self.skipped = self.results_copied = self.blocks_replaced = 0
        self.source_seconds = self.consumer_seconds = 0.0
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

    @abc.abstractmethod
    def begin(self) -> bool:
        """Count an item that begins. Return True if events are to time it."""

    @abc.abstractmethod
    def add_host_time(self, position: int, seconds: float, at_once: int = 1) -> None:
        """Count a stage's work on one item, timed on the host, for ``at_once`` items at a time.

        It represents no other item.
        """

    @abc.abstractmethod
    def add_device_time(self, position: int, number: int, start: Event, end: Event) -> None:
        """Count a stage's work on the item with this number, timed by two events. It may represent other items."""

    def add_item(self, seconds: float) -> None:
        """Count an item that passed all stages."""
        self.items += 1
        self._item_seconds.append(seconds)

    def forget_events(self) -> None:  # noqa: B027 - a meter may keep none
        """Release the device's events."""

    # -- results -------------------------------------------------------------------------------------------------

    def typical_seconds(self) -> list[float] | None:
        """Return the median time of each stage; None before each stage has been timed."""
        return [_median(times) for times in self._stage_times] if all(self._stage_times) else None

    def is_steady(self, within: float) -> bool:
        """True if no stage exceeds its median by more than this share for more than one item in ten."""
        return all(float(np.percentile(times, 90)) <= (1 + within) * _median(times) for times in self._stage_times)

    @abc.abstractmethod
    def _stage_seconds(self) -> list[float]:
        """Return the seconds of each stage for all items."""

    @abc.abstractmethod
    def _processing_seconds(self, stage_seconds: list[float]) -> float:
        """Return the seconds in which at least one stage that processes was at work."""

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
            utilisation=_share(self._processing_seconds(seconds), wall),
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


def _median(times: deque[float]) -> float:
    """Return the median. `statistics.median` would take an import of 2 ms, and NumPy is imported already."""
    return float(np.median(times))


def _share(busy: float, wall: float) -> float:
    return min(1.0, busy / wall) if wall else 0.0


class Total(NamedTuple):
    """Seconds of a number of items.

    Attributes
    ----------
    seconds : float
    items : int
    elapsed : float
        The device time from the end of the item before them to the end of the last one.
    """

    seconds: float = 0.0
    items: int = 0
    elapsed: float = 0.0

    def plus(self, seconds: float, items: int, elapsed: float = 0.0) -> Total:
        """Add items that represent only themselves."""
        return Total(self.seconds + seconds, self.items + items, self.elapsed + elapsed)

    def plus_sample(self, seconds: float, upto: int) -> Total:
        """Add one item that represents all of the first ``upto`` items that are not counted yet."""
        items = max(1, upto - self.items)
        return self.plus(seconds * items, items)

    @property
    def mean(self) -> float:
        """Seconds for one item."""
        return self.seconds / self.items if self.items else 0.0


# -- single items ----------------------------------------------------------------------------------------------------

#: The first items are all timed; after them, one item in so many. Two events for each of three stages take 40 µs of the
#: host, as much as all other work for the item, and 15 µs of the device (measured).
ALL_TIMED = 16
ONE_IN = 16

#: Where no stage takes half a millisecond, one in 16 would cost a pipeline a hundredth of its throughput.
BRIEF_SECONDS = 5e-4
ONE_IN_BRIEF = 64


class SingleItemMeter(Meter):
    """A meter that times single items: at most one stage processes. An item represents those before it."""

    def reset(self) -> None:
        """Restart all times and counts."""
        super().reset()
        self._totals = [Total()] * len(self._plan.stages)

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
        """Count a stage's work on one item, timed on the host. It represents no other item."""
        self._totals[position] = self._totals[position].plus(seconds / at_once, 1)
        self._stage_times[position].append(seconds)

    def add_device_time(self, position: int, number: int, start: Event, end: Event) -> None:
        """Count a stage's work on an item, timed by two events."""
        self.add_sample(position, start.elapsed_ms(end) * 1e-3)

    def add_sample(self, position: int, seconds: float) -> None:
        """Count a stage's work on an item, which represents the items before it that were not timed."""
        self._totals[position] = self._totals[position].plus_sample(seconds, self.items + 1)
        self._stage_times[position].append(seconds)

    def _stage_seconds(self) -> list[float]:
        """Return the seconds of each stage. Items after the last timed one take the median.

        The mean would include the compilation of a kernel.
        """
        return [
            total.seconds + max(0, self.items - total.items) * (_median(times) if times else 0.0)
            for total, times in zip(self._totals, self._stage_times, strict=True)
        ]

    def _processing_seconds(self, stage_seconds: list[float]) -> float:
        return max([stage_seconds[position] for position in self._processing] or stage_seconds)


# -- windows of items ------------------------------------------------------------------------------------------------

#: One item in so many is timed. An item and stage costs at most 1.3 times as much as in a pipeline of three stages.
ONE_IN_WINDOWS = 8

#: While items are brief, one window in two is timed after so many items, which make the figures precise to 0.02; one in
#: three after twice as many, and so on, down to one in eight. An item and stage then costs no more than with one stage
#: that processes.
PRECISE = 400
ONE_IN_BRIEF_WINDOWS = 8

#: The first items that are all timed, and the fewest items that a later window counts.
ALL_IN_WINDOW = 24
MIN_COUNTED = 6

#: Stages are busy from this share of the device's time on; and two estimates agree that differ by at most this share.
BUSY = 0.8
AGREE = 0.05

#: Milliseconds after which device times refer to a newer event. CUDA returns them in single precision: up to 8 s, that
#: resolves half a microsecond.
MAX_ELAPSED_MS = 4e3

#: The fractional parts of its multiples are spread evenly.
GOLDEN = (math.sqrt(5) - 1) / 2


class WindowMeter(Meter):
    """A meter that times windows of consecutive items: several stages process, and their work overlaps."""

    def reset(self) -> None:
        """Restart all times and counts."""
        super().reset()
        self._windows = WindowSchedule(self._depth)
        self._left_out = 0  # windows since the last one that was timed
        self._busy = [BusyTime(self._depth) for _ in self._plan.stages]  # by the stage's position
        self._busy_processing = BusyTime(self._depth)  # of all stages that process
        self._origin: tuple[Event, float] | None = None  # an event, and its time on the device's clock
        self._latest_ms = 0.0  # the device's clock begins at the first event

    def begin(self) -> bool:
        """Count an item that begins. Return True if events are to time it."""
        number = self._begun
        self._begun += 1
        if number == self._windows.end:
            self._windows.advance()
        elif number and number == self._windows.begin:
            self._begin_window(number)
        return number >= self._windows.begin

    def _begin_window(self, number: int) -> None:
        """Begin the next window, or leave it out. All items of the one before have ended."""
        most_left_out = min(number // PRECISE, ONE_IN_BRIEF_WINDOWS - 1)
        if self._left_out < most_left_out and self._are_items_brief():
            self._left_out += 1
            self._windows.leave_out()
            return
        self._left_out = 0
        for busy in (*self._busy, self._busy_processing):
            busy.end_window()

    def _are_items_brief(self) -> bool:
        """Return whether the slots pass items on within half a millisecond each.

        Every item has this time. The times of the stages would be those of the last window, many items ago.
        """
        return bool(self._item_seconds) and self._item_seconds[-1] < BRIEF_SECONDS * self._depth

    def add_host_time(self, position: int, seconds: float, at_once: int = 1) -> None:
        """Count a stage's work on one item, timed on the host. It overlaps no work of another stage that processes."""
        self._stage_times[position].append(seconds)
        self._busy[position].add_items(seconds / at_once, 1)
        if position in self._processing:
            self._busy_processing.add_items(seconds / at_once, position == self._processing[0])

    def add_device_time(self, position: int, number: int, start: Event, end: Event) -> None:
        """Count a stage's work on the item with this number: the time between two events, by the device's clock."""
        milliseconds = start.elapsed_ms(end)
        begin_ms = self._device_clock_ms(start)
        end_ms = begin_ms + milliseconds
        self._stage_times[position].append(milliseconds * 1e-3)
        self._latest_ms = max(self._latest_ms, end_ms)
        span = begin_ms * 1e-3, end_ms * 1e-3
        items_so_far = self.items + 1  # `add_item` counts this one when all its stages are read
        self._busy[position].add_span(number, span, items_so_far)
        if position in self._processing:
            self._busy_processing.add_span(number, span, items_so_far)

    def _device_clock_ms(self, event: Event) -> float:
        """Return the time of the event on the device's clock, in milliseconds."""
        if self._origin is None:
            self._origin = event, self._latest_ms
        origin, origin_ms = self._origin
        event_ms = origin_ms + origin.elapsed_ms(event)
        if event_ms - origin_ms > MAX_ELAPSED_MS:
            self._origin = event, event_ms
        return event_ms

    def forget_events(self) -> None:
        """Release the device's events. Later times refer to another origin."""
        self._origin = None

    def _stage_seconds(self) -> list[float]:
        return [busy.total(self.items) for busy in self._busy]

    def _processing_seconds(self, stage_seconds: list[float]) -> float:
        return self._busy_processing.total(self.items)


class WindowSchedule:
    """The windows of items to time: the first items, then one window in each period.

    The position of a window in its period varies, so that items that recur with a period are not over-represented.

    A window begins with the `neighbours` of the items that it counts. It counts a multiple of ``depth`` items: the
    slots take turns, so the pattern of what overlaps repeats after ``depth`` items.

    Attributes
    ----------
    begin, end : int
        The number of the window's first item, and of the first item after it. The next window begins at least
        ``depth`` items after the end, when all items of this window have ended.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._length = neighbours(depth) + depth * math.ceil(MIN_COUNTED / depth)
        self._period = ONE_IN_WINDOWS * self._length
        self._number = 0  # of windows that were not left out
        self.begin, self.end = 0, max(ALL_IN_WINDOW, 3 * depth)
        self._next_period = self.end

    def advance(self) -> None:
        """Go on to the next window."""
        spare = self._period - self._length - self._depth
        self._number += 1
        self.begin = self._next_period + self._depth + round(spare * (self._number * GOLDEN % 1))
        self.end = self.begin + self._length
        self._next_period += self._period

    def leave_out(self) -> None:
        """Move the window to the next period."""
        self.begin += self._period
        self.end += self._period
        self._next_period += self._period


def neighbours(depth: int) -> int:
    """Return how many items before an item may overlap it; at least one."""
    return max(1, depth - 1)


class BusyTime:
    """The seconds in which one stage, or at least one of several stages, is at work, from windows of items.

    An item adds the time that its stages cover and those of earlier items do not. So the sum over all items is the time
    that all stages cover together.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._total = self._typical = Total()
        self._spans: dict[int, list[tuple[float, float]]] = {}  # of the items of this window, by the item's number
        self._upto = 0  # the count of all items up to the last one of this window
        self._last_end = 0.0  # of the window before
        self._is_first = True

    def add_items(self, seconds: float, items: int) -> None:
        """Count items that represent only themselves."""
        self._total = self._total.plus(seconds, items)

    def add_span(self, number: int, span: tuple[float, float], upto: int) -> None:
        """Count a stage's work on an item of this window, the ``upto``-th of all items."""
        self._spans.setdefault(number, []).append(span)
        self._upto = upto

    def end_window(self) -> None:
        """End the window. It represents the items between the last window and itself, too."""
        counted, typical = self._window()
        self._typical = self._typical.plus(*typical)
        if counted.items:
            end = max(end for spans in self._spans.values() for _, end in spans)
            between = max(0, self._upto - self._total.items - counted.items)
            if between:
                seconds = self._seconds_between(between, end - counted.elapsed - self._last_end, counted)
                self._total = self._total.plus(seconds, between)
            self._total = self._total.plus(*counted)
            self._last_end = end
        self._spans = {}
        self._is_first = False

    def _seconds_between(self, items: int, elapsed: float, window: Total) -> float:
        """Return the seconds of the items between two windows.

        If the stages are busy, their share of the device's time varies less than their time for an item. But the device
        may have been idle between the windows, for example because the consumer paused. Then the estimate by share is
        too large, and the mean of the window is used.
        """
        typical = self._typical
        if typical.seconds >= BUSY * typical.elapsed > 0:
            by_share = elapsed * typical.seconds / typical.elapsed
            if abs(by_share - items * typical.mean) <= AGREE * by_share:
                return by_share
        return items * window.mean

    def _window(self, later_items: int = 0) -> tuple[Total, Total]:
        """Return what the items of the window add, and the part of it that is typical.

        ``later_items`` is the number of items after the window. The first window leaves out some of its last items, so
        that its items and the later ones make whole turns of the slots.
        """
        spans = [self._spans[number] for number in sorted(self._spans)]
        if self._is_first:  # its first items are not typical: they overlap less, and kernels are compiled
            typical = _added(spans, self._depth + len(spans) % self._depth)
            return _added(spans[: len(spans) - -later_items % self._depth], 0), typical
        skip = neighbours(self._depth)
        counted = _added(spans[: len(spans) - (len(spans) - skip) % self._depth], skip)
        return counted, counted

    def total(self, items: int) -> float:
        """Return the seconds of all items; items that no window represents take the typical time."""
        window, typical = self._window(max(0, items - self._total.items - len(self._spans)))
        counted, typical = self._total.plus(*window), self._typical.plus(*typical)
        return counted.seconds + max(0, items - counted.items) * (typical if typical.items else counted).mean


def _added(items: list[list[tuple[float, float]]], skip: int) -> Total:
    """Return what all items but the first ``skip`` add to the time that those cover."""
    if len(items) <= skip:
        return Total()
    before = [span for item in items[:skip] for span in item]
    both = before + [span for item in items[skip:] for span in item]
    start = max((end for _, end in before), default=min(both)[0])
    return Total(covered(both) - covered(before), len(items) - skip, max(end for _, end in both) - start)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    seconds, upto = 0.0, -math.inf
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return seconds
