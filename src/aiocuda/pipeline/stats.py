"""Figures of a pipeline: what is kept, and what is told."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from .ring import TripleBuffer
from .slot import SlotState
from .stage import Stage

__all__ = ["Meter", "PipelineStats"]

#: Iterations whose times are kept for the percentiles.
MOST_TIMES = 4096

#: The first iterations are timed by events on the device, each of them; then one in so many. Two events a stage cost
#: about 10 µs of the host's time, which an iteration of less than 100 µs would feel.
ALL_TIMED = 16
ONE_IN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStats:
    """A pipeline since it was made, or since `Pipeline.reset_statistics`.

    *Busy* is how long a stage was at work. For a stage that enqueues it is device time between two timing events around
    its work, of the first 16 iterations and then of one in eight, which stands for all eight; a kernel's compilation
    before its first launch counts. For one that awaits it is host time from call to return. Without overlap it is host
    time from call to completion. *Wall* is host time during which at least one slot was busy; a slot is busy until the
    consumer of its result asks for the next one.

    Attributes
    ----------
    iterations
        Items that went all the way.
    average_ms, p50_ms, p99_ms
        From the slot taken to the result delivered, host clock; of the last 4 096.
    throughput
        Iterations per second of wall.
    utilisation
        Busy ÷ wall, 0-1, of the busiest stage that *processes*: one between the first and the last stage that enqueues.
        Of the busiest of all where there is none between.
    overlap_efficiency
        Busy ÷ wall, 0-1, of the busiest stage: 1 means that the pipeline takes no longer than its slowest stage.
    peak_busy_slots
        The most slots busy at once.
    wall_seconds
        Wall.
    stage_seconds
        Busy, by the stage's name.
    """

    iterations: int
    average_ms: float
    p50_ms: float
    p99_ms: float
    throughput: float
    utilisation: float
    overlap_efficiency: float
    peak_busy_slots: int
    wall_seconds: float
    stage_seconds: dict[str, float]


class Meter:
    """What a pipeline counts."""

    def __init__(self, stages: Sequence[Stage], states: Sequence[SlotState]) -> None:
        self._names = [stage.name for stage in stages]
        self._states = states
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._busy = [0.0] * len(self._names)
        self._counted = [0] * len(self._names)  # items that those seconds are of
        self._sampled = False
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        self._begun = self._iterations = 0

    def begin(self) -> int:
        """An item begins. For how many items its timing events stand; 0: it has none."""
        number = self._begun
        self._begun += 1
        if number < ALL_TIMED:
            return 1
        return 0 if number % ONE_IN else ONE_IN

    def stage(self, position: int, seconds: float, items: int = 1) -> None:
        """A stage was at work for so long, on each of so many items."""
        self._busy[position] += seconds * items
        self._counted[position] += items
        self._sampled = self._sampled or items > 1

    def iteration(self, seconds: float) -> None:
        """An item went all the way."""
        self._iterations += 1
        self._times.append(seconds)

    def _stage_seconds(self) -> list[float]:
        """The last sample stands for items that may not have come."""
        if not self._sampled:
            return list(self._busy)
        counts = zip(self._busy, self._counted, strict=True)
        return [busy * min(1.0, self._iterations / counted) if counted else 0.0 for busy, counted in counts]

    def statistics(self, ring: TripleBuffer) -> PipelineStats:
        """A snapshot."""
        wall = ring.busy_seconds
        times = np.fromiter(self._times, float)
        average, p50, p99 = 0.0, 0.0, 0.0
        if times.size:
            average = float(times.mean())
            p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
        seconds = self._stage_seconds()
        processing = [busy for busy, state in zip(seconds, self._states, strict=True) if state == "processing"]
        return PipelineStats(
            iterations=self._iterations,
            average_ms=average * 1e3,
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            throughput=self._iterations / wall if wall else 0.0,
            utilisation=_share(max(processing or seconds), wall),
            overlap_efficiency=_share(max(seconds), wall),
            peak_busy_slots=ring.peak_busy,
            wall_seconds=wall,
            stage_seconds=dict(zip(self._names, seconds, strict=True)),
        )


def _share(busy: float, wall: float) -> float:
    return min(1.0, busy / wall) if wall else 0.0
