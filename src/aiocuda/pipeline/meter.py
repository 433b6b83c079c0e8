"""Meter: what a pipeline counts."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque

import numpy as np

from ..event import Event
from .plan import Plan
from .ring import TripleBuffer
from .stats import PipelineStats

__all__ = ["Meter", "Union"]

#: Iterations whose times are kept for the percentiles.
MOST_TIMES = 4096

#: Times of each stage that are kept for its median.
MOST_STAGE_TIMES = 256

#: The first iterations are timed by events on the device, each of them; then one in so many. Two events for each of
#: three stages cost 40 µs of the host's time, as much as all else, and 15 of the device's (measured).
ALL_TIMED = 16
ONE_IN = 16

#: Where no stage takes half a millisecond, one in 16 would cost a pipeline a hundredth of its throughput.
BRIEF_SECONDS = 5e-4
ONE_IN_BRIEF = 64

#: Milliseconds after which device times are told from a newer event: CUDA tells them in single precision, which
#: resolves half a microsecond up to 8 s.
MOST_ELAPSED_MS = 4e3


class Meter:
    """Times and counts of one pipeline."""

    def __init__(self, plan: Plan, depth: int) -> None:
        self._plan = plan
        states = zip(plan.states, plan.stages, strict=True)
        self._processing = [
            one for one, (state, stage) in enumerate(states) if state == "processing" and not stage.awaits
        ]
        self._together = Union(4 * depth * len(plan.stages)) if len(self._processing) > 1 else None
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        stages = len(self._plan.stages)
        self._busy = [0.0] * stages
        self._counted = [0] * stages  # items that those seconds are of
        self._recent: list[deque[float]] = [deque(maxlen=MOST_STAGE_TIMES) for _ in range(stages)]
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        self._begun = self._iterations = 0
        self._origin: tuple[Event, float] | None = None
        self._processed = 0.0  # of stages that process, one at a time
        if self._together is not None:
            self._together.clear()
        self.source_seconds = self.consumer_seconds = 0.0

    def begin(self) -> bool:
        """An item begins. Is it timed by events? Then it stands for those in front of it that were not."""
        number = self._begun
        self._begun += 1
        if number < ALL_TIMED or self._together is not None:
            return True
        if number % ONE_IN:
            return False
        brief = max((times[-1] for times in self._recent if times), default=0.0) < BRIEF_SECONDS
        return not (brief and number % ONE_IN_BRIEF)

    def stage(self, position: int, seconds: float) -> None:
        """A stage was at work on an item for so long, and no other one that counts with it."""
        self._add(position, seconds, 1)
        if position in self._processing:
            self._processed += seconds

    def device(self, position: int, start: Event, end: Event) -> None:
        """The device was at a stage's work from one event to the other."""
        milliseconds = start.elapsed_ms(end)
        self.sample(position, milliseconds * 1e-3)
        if self._together is not None and position in self._processing:
            begin = self._since_origin(start)
            self._together.add(begin * 1e-3, (begin + milliseconds) * 1e-3)

    def sample(self, position: int, seconds: float) -> None:
        """A stage was at work on an item for so long, and on each of those in front of it that were not timed."""
        self._add(position, seconds, max(1, self._iterations + 1 - self._counted[position]))

    def _add(self, position: int, seconds: float, items: int) -> None:
        self._busy[position] += seconds * items
        self._counted[position] += items
        self._recent[position].append(seconds)

    def _since_origin(self, event: Event) -> float:
        """Milliseconds of the device's clock."""
        if self._origin is None:
            self._origin = event, 0.0
        origin, before = self._origin
        elapsed = before + origin.elapsed_ms(event)
        if elapsed - before > MOST_ELAPSED_MS:
            self._origin = event, elapsed
        return elapsed

    def forget_events(self) -> None:
        """No event of the device is held any more; device times go on from the next one."""
        if self._together is not None:
            self._together.close()
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
        """Those behind the last that was timed take what is typical; not the mean, which has a kernel's compilation."""
        every = zip(self._busy, self._counted, self._recent, strict=True)
        return [
            busy + (self._iterations - counted) * _median(recent) if recent and self._iterations > counted else busy
            for busy, counted, recent in every
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
        if self._together is not None:
            processing = self._together.seconds + self._processed
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


class Union:
    """How long at least one of many intervals lasted.

    Parameters
    ----------
    most
        Of the intervals that are kept apart: one that comes begins after the end of all but so many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._kept: list[tuple[float, float]] = []
        self._seconds = 0.0

    def add(self, begin: float, end: float) -> None:
        """One more."""
        insort(self._kept, (begin, end))
        if len(self._kept) > 2 * self._most:
            merged = _merged(self._kept)
            passed = merged[: max(0, len(merged) - self._most)]
            self._seconds += sum(last - first for first, last in passed)
            self._kept = merged[len(passed) :]

    def close(self) -> None:
        """Those that come now are told from another time: they meet none of those before."""
        self._seconds, self._kept = self.seconds, []

    @property
    def seconds(self) -> float:
        """The sum, what several cover counted once."""
        return self._seconds + sum(last - first for first, last in _merged(self._kept))


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted ones, those that meet made one."""
    merged = intervals[:1]
    for begin, end in itertools.islice(intervals, 1, None):
        first, last = merged[-1]
        if begin > last:
            merged.append((begin, end))
        else:
            merged[-1] = first, max(last, end)
    return merged


def _median(times: deque[float]) -> float:
    """Not the standard library's: to import that takes 2 ms, and NumPy is there."""
    return float(np.median(times))


def _share(busy: float, wall: float) -> float:
    return min(1.0, busy / wall) if wall else 0.0
