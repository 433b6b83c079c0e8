"""PipelineAdvice: the depth, streams and concurrency that suit the times of a pipeline's stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

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
        most one for each processor, unless the stage has more already. A stage that blocks the event loop keeps its
        number.
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
    plan: Plan,
    meter: Meter,
    depth: int,
    pinned_bytes: int = 0,
    cache_bytes: int | None = None,
    processors: int = 1,
    blocking: Collection[int] = (),
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
    blocking
        The positions of the stages that have blocked the event loop.
    """
    seconds = meter.typical_seconds()
    if seconds is None or not meter.items:
        raise BusyError("not every stage has been timed yet: run some items through the pipeline first, then ask again")
    source, consumer = (total / meter.items for total in (meter.source_seconds, meter.consumer_seconds))
    steady = meter.is_steady(SPREAD)
    needed_at_once = _concurrency(plan, seconds, max(source, consumer), steady, blocking)
    at_once = _limited(plan, needed_at_once, processors)
    stages = [(taken / many, f"stage {name!r}") for taken, many, name in zip(seconds, at_once, plan.names, strict=True)]
    period, slowest = max([*stages, (source, "the source"), (consumer, "the consumer")])
    path_seconds, path = plan.longest_path(seconds)
    needed = _needed_slots(path_seconds + consumer, period)
    in_cache = max(1, cache_bytes // pinned_bytes) if cache_bytes and pinned_bytes else MAX_SLOTS
    present, depth = depth, needed if steady else max(needed + 1, min(depth, in_cache))
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.stream_groups
    why = [
        f"{slowest} takes {_ms(period)} for each item, more than any other: the pipeline cannot be faster than that",
        f"an item uses its slot for {_ms(path_seconds)} ({' → '.join(plan.names[one] for one in path)})"
        f"{f', and for {_ms(consumer)} at the consumer' if consumer > SPREAD * period else ''}: "
        f"{_slots(needed)} keep{'s' if needed == 1 else ''} {slowest} at work",
        *_concurrency_reasons(plan, seconds, at_once, needed_at_once, blocking),
    ]
    if max(present, depth) > in_cache:
        why.append(_outside_cache(depth if depth > in_cache else present, in_cache, pinned_bytes, cache_bytes or 0))
    if not steady:
        why.append(f"one in ten times is more than {SPREAD:.0%} longer: one slot more, and not fewer than now")
    else:
        why += _shared_streams(plan, groups, slowest)
    return PipelineAdvice(
        depth=min(depth, MAX_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        concurrency={stage.name: many for stage, many in zip(plan.stages, at_once, strict=True) if stage.awaits},
        period_ms=period * 1e3,
        why="; ".join(why),
    )


def _concurrency(
    plan: Plan, seconds: Sequence[float], outside: float, steady: bool, blocking: Collection[int]
) -> list[int]:
    """Return for each stage the number of items at a time with which it does not limit the others.

    ``outside`` are the seconds of source or consumer for an item, whichever is longer. If nothing else takes time, the
    stages keep their concurrency.
    """
    awaits = [stage.awaits and position not in blocking for position, stage in enumerate(plan.stages)]
    others = max([outside, *(taken for taken, free in zip(seconds, awaits, strict=True) if not free)])
    found = []
    for taken, stage, free in zip(seconds, plan.stages, awaits, strict=True):
        needed = math.ceil(taken / ((1 + SPREAD) * others)) if others else stage.concurrency
        found.append(max(needed, 1 if steady else stage.concurrency) if free else stage.concurrency)
    return found


def _limited(plan: Plan, needed: Sequence[int], processors: int) -> list[int]:
    """Return the numbers of items at a time: at most one for each processor, unless a stage has more already."""
    return [min(wanted, max(stage.concurrency, processors)) for wanted, stage in zip(needed, plan.stages, strict=True)]


def _shared_streams(plan: Plan, groups: Sequence[Sequence[int]], slowest: str) -> list[str]:
    """Return the reason for groups of several stages, if there are any."""
    shared = [" and ".join(plan.names[one] for one in group) for group in groups if len(group) > 1]
    return [f"{', '.join(shared)} together take no longer than {slowest}: they can share a stream"] if shared else []


def _concurrency_reasons(
    plan: Plan, seconds: Sequence[float], at_once: Sequence[int], needed: Sequence[int], blocking: Collection[int]
) -> list[str]:
    return [
        f"stage {name!r} takes {_ms(taken)} for one item: concurrency={many} suits it"
        + (", one item for each processor" if wanted > many else "")
        for name, taken, many, wanted in zip(plan.names, seconds, at_once, needed, strict=True)
        if many > 1
    ] + [
        f"stage {plan.names[position]!r} blocks the event loop, and more items at a time do not help: run the function "
        "that blocks by `await device.offload(function, ...)`, then ask again"
        for position in sorted(blocking)
    ]


def _outside_cache(depth: int, in_cache: int, pinned_bytes: int, cache_bytes: int) -> str:
    return (
        f"{_slots(depth)} have {depth * pinned_bytes / 1e6:.3g} MB of pinned memory, and the processor's cache has "
        f"{cache_bytes / 1e6:.3g} MB: the host writes to memory outside the cache, which is slower. "
        f"{_slots(in_cache)} fit{'s' if in_cache == 1 else ''}"
    )


def _slots(count: int) -> str:
    """Return a number of slots in words."""
    return f"{count} slot" if count == 1 else f"{count} slots"


def _needed_slots(seconds: float, period: float) -> int:
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
