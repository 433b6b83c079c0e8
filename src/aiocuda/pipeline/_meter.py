"""Meter: the times and counts of a pipeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .._event import Event
from ._plan import Plan
from ._ring import TripleBuffer
from ._statistics import PipelineStats

__all__ = ["Meter", "Windows", "covered"]

#: Iterations whose times are kept for the percentiles.
MOST_TIMES = 4096

#: Times of each stage that are kept for its median.
MOST_STAGE_TIMES = 256

#: The first items are all timed, by events on the device; after them, one in so many is. Two events for each of three
#: stages cost 40 µs of the host's time, as much as all else, and 15 of the device's (measured).
ALL_TIMED = 16
ONE_IN = 16

#: Where no stage takes half a millisecond, one in 16 would cost a pipeline a hundredth of its throughput.
BRIEF_SECONDS = 5e-4
ONE_IN_BRIEF = 64

#: If several stages process, windows of consecutive items are timed: one item in so many. An item and stage costs at
#: most 1.3 times as much as in a pipeline of three stages.
ONE_IN_WINDOWS = 8

#: The first items that are all timed then, and the fewest items that a later window counts.
ALL_IN_WINDOW = 24
FEWEST_COUNTED = 6

#: The share of the device's time from which on stages are busy, and how far two estimates may be apart, as a share,
#: and still agree: see `Sample`.
BUSY = 0.8
AGREE = 0.05

#: Milliseconds after which device times are told from a newer event: CUDA tells them in single precision, which
#: resolves half a microsecond up to 8 s.
MOST_ELAPSED_MS = 4e3

#: Multiples of the golden ratio, without their integers, are spread evenly.
GOLDEN = (math.sqrt(5) - 1) / 2


class Meter:
    """Times and counts of one pipeline.

    If at most one stage processes, single items are timed. If several stages process, their work overlaps, and the
    items to which it belongs are neighbours: then windows of consecutive items are timed.
    """

    def __init__(self, plan: Plan, depth: int) -> None:
        self._plan = plan
        self._depth = depth
        states = zip(plan.states, plan.stages, strict=True)
        self._processing = [
            one for one, (state, stage) in enumerate(states) if state == "processing" and not stage.awaits
        ]
        self._windowed = len(self._processing) > 1
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        stages = len(self._plan.stages)
        self._busy = [Total()] * stages
        self._windows = Windows(self._depth)
        self._samples = [Sample(self._depth) for _ in range(stages if self._windowed else 0)]  # by the stage's position
        self._together = Sample(self._depth)  # of all stages that process
        self._recent: list[deque[float]] = [deque(maxlen=MOST_STAGE_TIMES) for _ in range(stages)]
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        self._begun = self._iterations = 0
        self._origin: tuple[Event, float] | None = None
        self._latest = 0.0  # milliseconds of the device's clock; 0 is the first event
        self.source_seconds = self.consumer_seconds = 0.0

    def begin(self) -> bool:
        """Count an item that begins, and return True if events time it. It stands for those before it that were not."""
        number = self._begun
        self._begun += 1
        if self._windowed:
            if number == self._windows.end:
                self._windows.advance()
            elif number and number == self._windows.begin:  # all items of the window before have ended
                self._settle()
            return number >= self._windows.begin
        if number < ALL_TIMED:
            return True
        if number % ONE_IN:
            return False
        brief = max((times[-1] for times in self._recent if times), default=0.0) < BRIEF_SECONDS
        return not (brief and number % ONE_IN_BRIEF)

    def _settle(self) -> None:
        for sample in (*self._samples, self._together):
            sample.settle()

    def stage(self, position: int, seconds: float) -> None:
        """Count a stage's work on one item, which overlapped with no work of another stage that is counted with it."""
        self._busy[position] = self._busy[position].plus(seconds, 1)
        self._recent[position].append(seconds)
        if self._windowed:
            self._samples[position].count(seconds, 1)
            if position in self._processing:
                self._together.count(seconds, position == self._processing[0])

    def device(self, position: int, number: int, start: Event, end: Event) -> None:
        """Count the device's work between two events, a stage's work on the item with this number."""
        milliseconds = start.elapsed_ms(end)
        if not self._windowed:
            self.sample(position, milliseconds * 1e-3)
            return
        self._recent[position].append(milliseconds * 1e-3)
        begin = self._since_origin(start)
        self._latest = max(self._latest, begin + milliseconds)
        span = begin * 1e-3, (begin + milliseconds) * 1e-3
        self._samples[position].add(number, span, self._iterations + 1)
        if position in self._processing:
            self._together.add(number, span, self._iterations + 1)

    def sample(self, position: int, seconds: float) -> None:
        """Count a stage's work on one item, which stands for those before it that were not timed."""
        self._busy[position] = self._busy[position].sampled(seconds, 1, self._iterations + 1)
        self._recent[position].append(seconds)

    def _since_origin(self, event: Event) -> float:
        """Return milliseconds of the device's clock."""
        if self._origin is None:
            self._origin = event, self._latest
        origin, before = self._origin
        elapsed = before + origin.elapsed_ms(event)
        if elapsed - before > MOST_ELAPSED_MS:
            self._origin = event, elapsed
        return elapsed

    def forget_events(self) -> None:
        """Release the device's events. Later times are told from another origin."""
        self._origin = None

    def iteration(self, seconds: float) -> None:
        """An item went all the way."""
        self._iterations += 1
        self._times.append(seconds)

    # -- what is told --------------------------------------------------------------------------------------------

    def typical(self) -> list[float] | None:
        """Seconds that each stage takes, the median of those last timed; None before each has been timed."""
        return [_median(times) for times in self._recent] if all(self._recent) else None

    def is_steady(self, within: float) -> bool:
        """Do all stages, nine times in ten, take at most so much more, as a share, than they typically do?"""
        return all(float(np.percentile(times, 90)) <= (1 + within) * _median(times) for times in self._recent)

    @property
    def iterations(self) -> int:
        """Items that went all the way."""
        return self._iterations

    def _stage_seconds(self) -> list[float]:
        """Return each stage's seconds. The items behind the last that was timed take what is typical."""
        if self._windowed:
            return [sample.total(self._iterations) for sample in self._samples]
        return [  # the median: the mean has a kernel's compilation in it
            busy.seconds + max(0, self._iterations - busy.items) * (_median(recent) if recent else 0.0)
            for busy, recent in zip(self._busy, self._recent, strict=True)
        ]

    def statistics(self, ring: TripleBuffer) -> PipelineStats:
        """A snapshot."""
        wall = ring.busy_seconds
        times = np.fromiter(self._times, float)
        average, p50, p99 = 0.0, 0.0, 0.0
        if times.size:
            average = float(times.mean())
            p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
        seconds = self._stage_seconds()
        if self._windowed:
            processing = self._together.total(self._iterations)
        else:
            processing = max([seconds[one] for one in self._processing] or seconds)
        return PipelineStats(
            iterations=self._iterations,
            average_ms=average * 1e3,
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            throughput=self._iterations / wall if wall else 0.0,
            utilisation=_share(processing, wall),
            overlap_efficiency=_share(max(seconds), wall),
            peak_busy_slots=ring.peak_busy,
            wall_seconds=wall,
            stage_seconds=dict(zip(self._plan.names, seconds, strict=True)),
            source_seconds=self.source_seconds,
            consumer_seconds=self.consumer_seconds,
        )


class Windows:
    """Which items are timed if several stages process: the first ones, then a window of each period.

    A window's place within its period varies, so that items that recur with some period are not over-represented.

    A window begins with the `neighbours` of the items that it counts. It counts a multiple of ``depth`` items: the
    slots take turns, so the pattern of what overlaps repeats after ``depth`` items.

    Attributes
    ----------
    begin, end : int
        The number of the window's first item, and that of the first item behind it. The next window begins at least
        ``depth`` items behind the end, when all of the window's items have ended.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._length = neighbours(depth) + depth * math.ceil(FEWEST_COUNTED / depth)
        self._number = 0
        self.begin, self.end = 0, max(ALL_IN_WINDOW, 3 * depth)
        self._first_end = self.end

    def advance(self) -> None:
        """Go on to the next window."""
        period = ONE_IN_WINDOWS * self._length
        spare = period - self._length - self._depth
        place = self._depth + round(spare * ((self._number + 1) * GOLDEN % 1))
        self.begin = self._first_end + self._number * period + place
        self.end = self.begin + self._length
        self._number += 1


def neighbours(depth: int) -> int:
    """Return how many items before an item to look at: those that can be at work at the same time, at least one."""
    return max(1, depth - 1)


class Total(NamedTuple):
    """Seconds of so many items, and the device time from the end of the item before them to that of the last one."""

    seconds: float = 0.0
    items: int = 0
    elapsed: float = 0.0

    def plus(self, seconds: float, items: int, elapsed: float = 0.0) -> Total:
        """Add items that stand for themselves."""
        return Total(self.seconds + seconds, self.items + items, self.elapsed + elapsed)

    def sampled(self, seconds: float, items: int, upto: int) -> Total:
        """Add items that stand for all of the first ``upto`` items that are not counted."""
        every = max(items, upto - self.items)
        return self.plus(seconds / items * every, every)

    @property
    def mean(self) -> float:
        return self.seconds / self.items if self.items else 0.0


class Sample:
    """The seconds in which one stage, or at least one of several stages, is at work, from windows of items.

    An item adds what its stages cover and the items before it do not. The sum over all items is what all cover.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._total = self._typical = Total()
        self._spans: dict[int, list[tuple[float, float]]] = {}  # of the window's items, by their numbers
        self._upto = 0  # items, of all, up to the last of the window
        self._end = 0.0  # of the last window
        self._is_first = True

    def count(self, seconds: float, items: int) -> None:
        """Count items that stand for themselves."""
        self._total = self._total.plus(seconds, items)

    def add(self, number: int, span: tuple[float, float], upto: int) -> None:
        """Count a stage's work on an item of the present window, the ``upto``-th of all."""
        self._spans.setdefault(number, []).append(span)
        self._upto = upto

    def settle(self) -> None:
        """End the window."""
        counted, typical = self._window()
        self._typical = self._typical.plus(*typical)
        if counted.items:
            end = max(end for spans in self._spans.values() for _, end in spans)
            between = max(0, self._upto - self._total.items - counted.items)
            if between:
                seconds = self._between(between, end - counted.elapsed - self._end, counted)
                self._total = self._total.plus(seconds, between)
            self._total = self._total.plus(*counted)
            self._end = end
        self._spans = {}
        self._is_first = False

    def _between(self, items: int, elapsed: float, window: Total) -> float:
        """Return the seconds of the items between two windows.

        Of busy stages, the share of the device's time varies less than the items do. But the device may have been idle
        between the windows, because the consumer made a pause, say: then that estimate is too large.
        """
        typical = self._typical
        if typical.seconds >= BUSY * typical.elapsed > 0:
            by_share = elapsed * typical.seconds / typical.elapsed
            if abs(by_share - items * typical.mean) <= AGREE * by_share:
                return by_share
        return items * window.mean

    def _window(self, behind: int = 0) -> tuple[Total, Total]:
        """Return what the items of the window add, and those of them that are typical.

        ``behind`` is the number of items behind it. The first window leaves out some of its last items, so that whole
        turns of the slots remain.
        """
        spans = [self._spans[number] for number in sorted(self._spans)]
        if self._is_first:  # the first items are not typical: they overlap less, and kernels are compiled
            typical = _added(spans, self._depth + len(spans) % self._depth)
            return _added(spans[: len(spans) - -behind % self._depth], 0), typical
        skip = neighbours(self._depth)
        counted = _added(spans[: len(spans) - (len(spans) - skip) % self._depth], skip)
        return counted, counted

    def total(self, items: int) -> float:
        """Return the seconds of all items; those that no window stands for take what is typical."""
        window, typical = self._window(max(0, items - self._total.items - len(self._spans)))
        counted, typical = self._total.plus(*window), self._typical.plus(*typical)
        return counted.seconds + max(0, items - counted.items) * (typical if typical.items else counted).mean


def _added(items: list[list[tuple[float, float]]], skip: int) -> Total:
    """Return what all items but the first ones add to what those cover."""
    if len(items) <= skip:
        return Total()
    before = [span for item in items[:skip] for span in item]
    both = before + [span for item in items[skip:] for span in item]
    began = max((end for _, end in before), default=min(both)[0])
    return Total(covered(both) - covered(before), len(items) - skip, max(end for _, end in both) - began)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    seconds, upto = 0.0, -math.inf
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return seconds


def _median(times: deque[float]) -> float:
    """Not the standard library's: to import that takes 2 ms, and NumPy is there."""
    return float(np.median(times))


def _share(busy: float, wall: float) -> float:
    return min(1.0, busy / wall) if wall else 0.0
