"""PipelineAdvice: the depth, streams and concurrency that suit the times of a pipeline's stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..errors import BusyError
from ._meter import Meter
from ._plan import Plan
from ._ring import MAX_SLOTS

__all__ = ["PipelineAdvice", "advise"]

#: Seconds until the host has noticed that an item is done and has enqueued the next item in its slot.
TURNAROUND = 100e-6

#: Stages are steady if they exceed their typical time by at most this share.
SPREAD = 0.05

#: An item may take longer than typical by this share, and the slowest stage still has work. A host that other programs
#: use is sometimes late by a millisecond, and the device cannot make up for an idle time.
RESERVE = 0.15


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineAdvice:
    """The advice of `Pipeline.advice`.

    Attributes
    ----------
    depth
        The number of slots.
    streams
        Groups of stages that one stream is enough for, as `Pipeline` takes them. There are as many streams as groups.
    concurrency
        For each stage that awaits, by its name: how many items it works on at a time, so that it limits nothing. At
        most one for each processor, unless the stage has more already.
    period_ms
        The time from one result to the next, at that depth and concurrency, if the stages take as long as measured.
    why
        The reasons, in words.
    """

    depth: int
    streams: tuple[tuple[str, ...], ...]
    concurrency: dict[str, int]
    period_ms: float
    why: str


def advise(
    plan: Plan, meter: Meter, depth: int, pinned_bytes: int = 0, cache_bytes: int | None = None, processors: int = 1
) -> PipelineAdvice:
    """Return the advice for a pipeline of this depth.

    A stage processes one item at a time, or as many as its concurrency. A slot is busy until its item has passed the
    longest path through the stages and the consumer has finished with the result. So the period is the time of the
    slowest stage ÷ its concurrency, or the slot's busy time ÷ depth if that is longer.

    Parameters
    ----------
    pinned_bytes
        The pinned memory of one slot.
    cache_bytes
        The size of the processor's last-level cache; None if unknown.
    processors
        The processors that this process may use.
    """
    seconds = meter.typical_seconds()
    if seconds is None or not meter.items:
        raise BusyError("not every stage has been timed yet: run some items through the pipeline first, then ask again")
    source, consumer = (total / meter.items for total in (meter.source_seconds, meter.consumer_seconds))
    steady = meter.is_steady(SPREAD)
    at_once = _concurrency(plan, seconds, max(source, consumer), processors, steady)
    stages = [(taken / many, f"stage {name!r}") for taken, many, name in zip(seconds, at_once, plan.names, strict=True)]
    period, slowest = max([*stages, (source, "the source"), (consumer, "the consumer")])
    path_seconds, path = plan.longest_path(seconds)
    needed = _slots(path_seconds + consumer, period)
    in_cache = max(1, cache_bytes // pinned_bytes) if cache_bytes and pinned_bytes else MAX_SLOTS
    present, depth = depth, needed if steady else max(needed + 1, min(depth, in_cache))
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.stream_groups
    why = [
        f"{slowest} takes {_ms(period)} for each item, longest of all, and nothing is quicker than that",
        f"an item takes {_ms(path_seconds)} on its longest way, {' → '.join(plan.names[one] for one in path)}"
        f"{f', and its consumer has it for {_ms(consumer)}' if consumer > SPREAD * period else ''}: "
        f"with {needed} slots there is always one more that waits for {slowest}",
        *(
            f"stage {stage.name!r} takes {_ms(taken)} for one item and works on {many} at a time"
            for stage, taken, many in zip(plan.stages, seconds, at_once, strict=True)
            if many > 1
        ),
    ]
    if max(present, depth) > in_cache:
        why.append(_outside_cache(depth if depth > in_cache else present, in_cache, pinned_bytes, cache_bytes or 0))
    if not steady:
        why.append(f"times vary, one in ten by more than {SPREAD:.0%}: one slot more, and no fewer than there are")
    elif shared := [group for group in groups if len(group) > 1]:
        together = ", ".join("+".join(plan.names[one] for one in group) for group in shared)
        why.append(f"{together}: one after the other they take less than {slowest}, so that one stream is enough")
    return PipelineAdvice(
        depth=min(depth, MAX_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        concurrency={stage.name: many for stage, many in zip(plan.stages, at_once, strict=True) if stage.awaits},
        period_ms=period * 1e3,
        why="; ".join(why),
    )


def _concurrency(plan: Plan, seconds: Sequence[float], outside: float, processors: int, steady: bool) -> list[int]:
    """Return for each stage how many items it works on at a time, so that no stage that awaits limits the others.

    ``outside`` are the seconds of source or consumer for an item, whichever is longer. If nothing else takes time, the
    stages keep their concurrency.
    """
    others = max([outside, *(taken for taken, stage in zip(seconds, plan.stages, strict=True) if not stage.awaits)])
    found = []
    for taken, stage in zip(seconds, plan.stages, strict=True):
        needed = math.ceil(taken / ((1 + SPREAD) * others)) if others else stage.concurrency
        most = max(stage.concurrency, processors)
        found.append(min(max(needed, 1 if steady else stage.concurrency), most) if stage.awaits else 1)
    return found


def _outside_cache(depth: int, in_cache: int, pinned_bytes: int, cache_bytes: int) -> str:
    return (
        f"{depth} slots have {depth * pinned_bytes / 1e6:.3g} MB of pinned memory, and the processor's cache has "
        f"{cache_bytes / 1e6:.3g} MB: the host writes to memory outside the cache, which is slower. "
        f"{in_cache} {'slots fit' if in_cache > 1 else 'slot fits at most'}"
    )


def _slots(seconds: float, period: float) -> int:
    """Return the number of slots that are busy at the same time, each for so many seconds, and one more."""
    return 1 + math.floor((1 + RESERVE) * (seconds + TURNAROUND) / period) if period else 1


def _groups(plan: Plan, seconds: Sequence[float], most: float) -> list[tuple[int, ...]]:
    """Return the positions of the stages, in groups that may share a stream.

    A group is a chain of stages that do not await, each the only successor of the one before it. The stages of a group
    take at most ``most`` seconds together. Every other stage is a group of its own.
    """
    groups: list[tuple[int, ...]] = []
    for position, stage in enumerate(plan.stages):
        before = plan.prerequisites[position]
        chain = next((group for group in groups if before == group[-1:]), None)
        if (
            chain is None
            or stage.awaits
            or plan.stages[before[0]].awaits
            or plan.successors[before[0]] != (position,)
            or sum(seconds[one] for one in (*chain, position)) > most
        ):
            groups.append((position,))
        else:
            groups[groups.index(chain)] = (*chain, position)
    return groups


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
