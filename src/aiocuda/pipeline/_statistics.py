"""PipelineStats: the statistics of a pipeline, and what limits its throughput."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .._base._mistakes import figures

__all__ = ["Bottleneck", "PipelineStats"]

#: A stage that is at work for this share of the time limits the pipeline. Below it, the waits do.
SATURATED = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limited the throughput of a pipeline.

    Attributes
    ----------
    name
        A stage's name; ``"source"`` or ``"consumer"`` where `kind` is that; ``""`` before anything has run.
    kind
        ``"stage"``, ``"source"``, ``"consumer"`` or ``"nothing"``.
    share
        Busy ÷ wall, 0-1: the share of the time for which it was at work.
    why
        The reason, in words.
    """

    name: str
    kind: Literal["stage", "source", "consumer", "nothing"]
    share: float
    why: str


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStats:
    """The statistics of a pipeline since it was made, or since `Pipeline.reset_statistics`.

    *Busy* is the time for which a stage was at work. For a stage that enqueues, it is device time between two timing
    events around its work, of a sample of the items: the first 16, and then one in 16, or one in 64 while no stage
    takes 0.5 ms. An item represents those before it. Items after the last timed one take the median.

    A kernel's compilation before its first launch counts. For a stage that awaits, busy is host time from call to
    return, divided by the number of items that it works on at the same time. Without overlap it is host time from call
    to completion. *Wall* is host time during which at least one slot was busy; a slot is busy until the consumer of its
    result asks for the next one.

    Attributes
    ----------
    iterations
        Items that passed all stages.
    average_ms, p50_ms, p99_ms
        Host time from the reserved slot to the result, of the last 4 096 items.
    throughput
        Iterations per second of wall.
    utilisation
        Busy ÷ wall, 0-1, of the busiest stage that *processes*: one that enqueues, and has other such stages both
        before and after it. If there is none, it is that of the busiest stage.
    overlap_efficiency
        Busy ÷ wall, 0-1, of the busiest stage: 1 means that the pipeline takes no longer than its slowest stage.
    peak_busy_slots
        The greatest number of slots that were busy at the same time.
    wall_seconds
        Wall.
    stage_seconds
        Busy, by the stage's name.
    source_seconds, consumer_seconds
        Host time for which a run with a free slot waited for the source's next item; host time from a result until the
        consumer asked for the next one. Runs without overlap do not count.
    skipped
        Items that a stage with ``on_error`` has skipped. They are not among the iterations.
    results_copied
        Results of which a part was in the slot's memory, and was copied.
    blocks_replaced
        Blocks of memory that something still held when the next item came. The slots got other ones.
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
    source_seconds: float = 0.0
    consumer_seconds: float = 0.0
    skipped: int = 0
    results_copied: int = 0
    blocks_replaced: int = 0

    def bottleneck(self) -> Bottleneck:
        """Return what limits the throughput: a stage, the source or the consumer; the one that was busy longest."""
        if not self.iterations:
            return Bottleneck("", "nothing", 0.0, "nothing has gone through the pipeline yet")
        stage = max(self.stage_seconds, key=self.stage_seconds.__getitem__)
        busy = self.stage_seconds[stage]
        most = max(busy, self.source_seconds, self.consumer_seconds)
        share = min(1.0, most / self.wall_seconds) if self.wall_seconds else 0.0
        each = f"{most / self.iterations * 1e3:.3g} ms"
        if most == self.source_seconds > busy:
            why = f"each item of it takes {each}, longer than any stage: only a quicker source helps"
            return Bottleneck("source", "source", share, why)
        if most == self.consumer_seconds > busy:
            why = f"it has each result for {each}, longer than any stage: only a quicker consumer helps"
            return Bottleneck("consumer", "consumer", share, why)
        if share >= SATURATED:
            why = (
                f"it is at work for {share:.0%} of the time, {each} for each item: only a quicker stage {stage!r} "
                "helps, or more items at a time in it, if it awaits. Pipeline.advice() says how many"
            )
        else:
            why = (
                f"it takes the longest, {each} for each item, but is at work for only {share:.0%} of the time: it "
                f"waits for other stages, for a free slot (at most {self.peak_busy_slots} in use at a time), or for "
                "the host. Pipeline.advice() says which"
            )
        return Bottleneck(stage, "stage", share, why)
