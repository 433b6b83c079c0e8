"""PipelineAdvice: how deep a pipeline should be, and how many streams it wants, by what its stages take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..errors import BusyError
from ._meter import Meter
from ._plan import Plan
from ._ring import MOST_SLOTS

__all__ = ["PipelineAdvice", "advise"]

#: Seconds until the host has noticed that an item is done and has enqueued the next one in its slot.
TURN = 100e-6

#: What stages may take more than they typically do, as a share, and still count as steady.
SPREAD = 0.05

#: What an item's way may take longer for once, as a share, and the slowest stage still has something to do: a host
#: that others use as well is late by a millisecond now and then, and what is lost so is not made up for.
RESERVE = 0.15


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineAdvice:
    """What `Pipeline.advice` says.

    Attributes
    ----------
    depth
        How many slots.
    streams
        Groups of stages that one stream is enough for, as `Pipeline` takes them: so many streams as there are groups.
    period_ms
        From one result to the next, at that depth, if the stages take what they took.
    why
        In words.
    """

    depth: int
    streams: tuple[tuple[str, ...], ...]
    period_ms: float
    why: str


def advise(plan: Plan, meter: Meter, depth: int) -> PipelineAdvice:
    """What a pipeline of such a depth should be like.

    A stage takes one item after the other, and a slot is taken until its item has gone the longest way and its consumer
    is done with the result. So the period is that of the slowest stage, or the slot's way ÷ depth if that is longer.
    """
    seconds = meter.typical()
    if seconds is None or not meter.iterations:
        raise BusyError("not every stage has been timed yet: run some items through the pipeline first, then ask again")
    source, consumer = (total / meter.iterations for total in (meter.source_seconds, meter.consumer_seconds))
    whole = [*zip(seconds, map("stage {!r}".format, plan.names), strict=True)]
    period, slowest = max([*whole, (source, "the source"), (consumer, "the consumer")])
    way, longest = plan.longest(seconds)
    steady = meter.is_steady(SPREAD)
    wanted = _slots(way + consumer, period)
    depth = wanted if steady else max(wanted + 1, depth)
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.groups
    why = [
        f"{slowest} takes {_ms(period)} for each item, longest of all, and nothing is quicker than that",
        f"an item takes {_ms(way)} on its longest way, {' → '.join(plan.names[one] for one in longest)}"
        f"{f', and its consumer has it for {_ms(consumer)}' if consumer > SPREAD * period else ''}: "
        f"with {wanted} slots there is always one more that waits for {slowest}",
    ]
    if not steady:
        why.append(f"times vary, one in ten by more than {SPREAD:.0%}: one slot more, and no fewer than there are")
    elif shared := [group for group in groups if len(group) > 1]:
        together = ", ".join("+".join(plan.names[one] for one in group) for group in shared)
        why.append(f"{together}: one behind the other they take less than {slowest}, so that one stream is enough")
    return PipelineAdvice(
        depth=min(depth, MOST_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        period_ms=period * 1e3,
        why="; ".join(why),
    )


def _slots(way: float, period: float) -> int:
    """One more than are on their way at once."""
    return 1 + math.floor((1 + RESERVE) * (way + TURN) / period) if period else 1


def _groups(plan: Plan, seconds: Sequence[float], most: float) -> list[tuple[int, ...]]:
    """Chains of stages that enqueue, each the only one behind the one before it, that together take less."""
    groups: list[tuple[int, ...]] = []
    for position, stage in enumerate(plan.stages):
        before = plan.before[position]
        last = next((group for group in groups if before == group[-1:]), None)
        if (
            last is None
            or stage.awaits
            or plan.stages[before[0]].awaits
            or plan.behind[before[0]] != (position,)
            or sum(seconds[one] for one in (*last, position)) > most
        ):
            groups.append((position,))
        else:
            groups[groups.index(last)] = (*last, position)
    return groups


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
