"""PipelineAdvice: the depth, streams and concurrency that suit the times of a pipeline's stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from .._base._host_use import HostLoad
from ..errors import BusyError
from ._meter import Meter
from ._plan import Plan
from ._ring import MAX_SLOTS

__all__ = ["HostTimes", "PipelineAdvice", "advise"]

#: Seconds until the host has noticed that an item is done and has enqueued the next item in its slot.
TURNAROUND = 100e-6

#: Stages are steady if they exceed their typical time by at most this share.
SPREAD = 0.05

#: An item may take longer than typical by this share, and the slowest stage still has work. A host that other programs
#: use is sometimes late by a millisecond, and the device cannot make up for an idle time.
RESERVE = 0.15

#: If threads have the GIL for this share of the time, twice as many items at a time would want nearly all of it.
MUCH_GIL: Final = 0.4

#: Threads that compute in Python and use so much of a processor, with the event loop, do not leave half of the GIL.
MUCH_PYTHON: Final = 0.6

#: A stage that has the event loop for this share of its time does not wait in that time.
MUCH_LOOP: Final = 0.5

#: The most items at a time to recommend, in times of the present number.
MOST_GROWTH: Final = 8


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
        most one for each processor, unless the stage has more already, or its items use little of the processors and of
        the GIL. A stage that blocks the event loop keeps its number.
    period_ms
        The time from one result to the next: the measured time, less what the advised depth saves by the times of the
        stages. More items at a time than now save nothing here, since how long they take shows when they have run; and
        no depth does while threads share the GIL.
    why
        The reasons, in words.
    """

    depth: int
    streams: tuple[tuple[str, ...], ...]
    concurrency: dict[str, int]
    period_ms: float
    why: str


class HostTimes(NamedTuple):
    """What runs of a pipeline use of the host.

    Attributes
    ----------
    load
    loop_seconds
        The time for which each stage has the event loop for one item, by the stage's position.
    period
        The seconds from one result to the next.
    """

    load: HostLoad
    loop_seconds: Sequence[float]
    period: float

    @property
    def at_work(self) -> float:
        """How many processors this process uses, on average."""
        return self.load.cpu_seconds / self.load.wall_seconds if self.load.wall_seconds else 0.0

    @property
    def threads_gil(self) -> float:
        """The share of the time for which threads other than the event loop's have the GIL; 0.0 if it is not known."""
        return self.load.gil_share_of(self._threads)

    @property
    def is_python(self) -> bool:
        """True if these threads have the GIL for most of the time for which they use a processor."""
        return 0 < self._threads <= 2 * self.threads_gil * self.load.wall_seconds

    @property
    def waits_for_gil(self) -> bool:
        """True if more threads would wait for the GIL."""
        return self.threads_gil >= MUCH_GIL or (self.is_python and self.at_work >= MUCH_PYTHON)

    @property
    def _threads(self) -> float:
        return max(0.0, self.load.cpu_seconds - self.load.own_seconds)


class _Times(NamedTuple):
    """Seconds for one item.

    Attributes
    ----------
    stages, loop
        By the stage's position: its time, and the part of it for which it has the event loop.
    outside
        What else takes time, with its name.
    gil
        The share of the time for which threads have the GIL, if that is too much for more of them, else 0.0.
    varies
        True if a stage's times vary.
    """

    stages: list[float]
    loop: list[float]
    outside: list[tuple[float, str]]
    consumer: float
    gil: float
    varies: bool

    @classmethod
    def of(cls, meter: Meter, host: HostTimes | None) -> _Times:
        """Return the typical times. `BusyError` if they are not known yet."""
        stages = meter.typical_seconds()
        if stages is None or not meter.items:
            raise BusyError(
                "not every stage has been timed yet: run some items through the pipeline first, then ask again"
            )
        source, consumer = (total / meter.items for total in (meter.source_seconds, meter.consumer_seconds))
        outside = [(source, "the source"), (consumer, "the consumer")]
        loop, gil = [0.0] * len(stages), 0.0
        if host is not None:
            loop = [*map(min, stages, host.loop_seconds)]
            gil = host.threads_gil if host.waits_for_gil else 0.0
            outside += [(sum(loop), "the event loop"), (gil * host.period, "code with the GIL")]
        return cls(stages, loop, outside, consumer, gil, not meter.is_steady(SPREAD))

    def slowest(self, plan: Plan, at_once: Sequence[int]) -> tuple[float, str]:
        """Return the time and the name of what takes longest, if stages work on so many items at a time."""
        names = [f"stage {name!r}" for name in plan.names]
        stages = [(taken / many, name) for taken, many, name in zip(self.stages, at_once, names, strict=True)]
        return max([*stages, *self.outside])

    def slowest_known(self, plan: Plan, at_once: Sequence[int]) -> tuple[float, str]:
        """Return the same for no more items at a time than now: how long more of them would take is not known."""
        return self.slowest(
            plan, [min(many, stage.concurrency) for many, stage in zip(at_once, plan.stages, strict=True)]
        )


def advise(
    plan: Plan,
    meter: Meter,
    depth: int,
    pinned_bytes: int = 0,
    cache_bytes: int | None = None,
    processors: int = 1,
    blocking: Collection[int] = (),
    host: HostTimes | None = None,
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
    host
        None in virtual time.
    """
    times = _Times.of(meter, host)
    seconds, consumer = times.stages, times.consumer
    steady = not (times.varies or times.gil)
    needed_at_once = _concurrency(plan, times, steady, range(len(seconds)) if times.gil else blocking)
    at_once = _limited(plan, needed_at_once, processors, host)
    period, slowest = times.slowest(plan, at_once)
    path_seconds, path = plan.longest_path(seconds)
    needed = _needed_slots(path_seconds + consumer, period)
    in_cache = max(1, cache_bytes // pinned_bytes) if cache_bytes and pinned_bytes else MAX_SLOTS
    present, depth = depth, needed if steady else max(needed + times.varies, min(depth, in_cache))
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.stream_groups
    known, slowest_now = times.slowest_known(plan, at_once)
    cure = "the pipeline cannot be faster than that" if known == period else "more items at a time help"
    why = [
        f"{slowest_now} takes {_ms(known)} for each item, more than any other: {cure}",
        _path_reason(plan, path, path_seconds, consumer if consumer > SPREAD * period else 0.0, needed, slowest),
        *_concurrency_reasons(plan, seconds, at_once, needed_at_once, processors),
        *_host_reasons(plan, times, blocking),
        *(_shared_streams(plan, groups, slowest) if steady else ()),
    ]
    if max(present, depth) > in_cache and cache_bytes:
        why.append(_outside_cache(depth if depth > in_cache else present, in_cache, pinned_bytes, cache_bytes))
    if times.varies:
        why.append(f"one in ten times is more than {SPREAD:.0%} longer: one slot more, and not fewer than now")
    return PipelineAdvice(
        depth=min(depth, MAX_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        concurrency={stage.name: many for stage, many in zip(plan.stages, at_once, strict=True) if stage.awaits},
        period_ms=_expected_period(known, max(known, (path_seconds + consumer) / present), host, times.gil) * 1e3,
        why="; ".join(why),
    )


def _expected_period(advised: float, present: float, host: HostTimes | None, gil: float) -> float:
    """Return the expected time from one result to the next with the advised settings.

    Parameters
    ----------
    advised, present
        The time that the stages alone need, with the advised and with the present settings.
    host
        Has the measured time with the present settings, in which the host may have needed more; None in virtual time.
    gil
        Not 0 if code waits for the GIL: then the advised settings do not change the period.
    """
    if host is None:
        return advised
    if gil or not present:
        return host.period
    return host.period * advised / present


def _concurrency(plan: Plan, times: _Times, steady: bool, keeping: Collection[int]) -> list[int]:
    """Return for each stage the number of items at a time with which it does not limit the others.

    The stages at the positions ``keeping`` keep their concurrency; and if nothing else takes time, all do.
    """
    awaits = [stage.awaits and position not in keeping for position, stage in enumerate(plan.stages)]
    others = max(seconds for seconds, _ in times.outside)
    others = max([others, *(taken for taken, free in zip(times.stages, awaits, strict=True) if not free)])
    found = []
    for taken, stage, free in zip(times.stages, plan.stages, awaits, strict=True):
        needed = math.ceil(taken / ((1 + SPREAD) * others)) if others else stage.concurrency
        found.append(max(needed, 1 if steady else stage.concurrency) if free else stage.concurrency)
    return found


def _limited(plan: Plan, needed: Sequence[int], processors: int, host: HostTimes | None) -> list[int]:
    """Return the numbers of items at a time: at most as many as the processors are enough for, or as there are now."""
    return [
        min(wanted, max(stage.concurrency, _affordable(stage.concurrency, processors, host)))
        for wanted, stage in zip(needed, plan.stages, strict=True)
    ]


def _affordable(present: int, processors: int, host: HostTimes | None) -> int:
    """Return how many items at a time the processors are enough for, if so many use what they use now.

    It is one for each processor if that use is not known. Python code has one processor only.
    """
    if host is None or host.load.gil_share is None:
        return processors
    room = (1 if host.is_python else processors) / max(host.at_work, 1e-3)
    return round(min(MOST_GROWTH, room) * present)


def _shared_streams(plan: Plan, groups: Sequence[Sequence[int]], slowest: str) -> list[str]:
    """Return the reason for groups of several stages, if there are any."""
    shared = [" and ".join(plan.names[one] for one in group) for group in groups if len(group) > 1]
    return [f"{', '.join(shared)} together take no longer than {slowest}: they can share a stream"] if shared else []


def _path_reason(plan: Plan, path: Sequence[int], seconds: float, consumer: float, needed: int, slowest: str) -> str:
    stages = " → ".join(plan.names[one] for one in path)
    held = f", and for {_ms(consumer)} at the consumer" if consumer else ""
    keep = f"{_slots(needed)} keep{'s' if needed == 1 else ''} {slowest} at work"
    return f"an item uses its slot for {_ms(seconds)} ({stages}){held}: {keep}"


def _concurrency_reasons(
    plan: Plan, seconds: Sequence[float], at_once: Sequence[int], needed: Sequence[int], processors: int
) -> list[str]:
    return [
        f"stage {name!r} takes {_ms(taken)} for one item: concurrency={many} suits it"
        + ("" if wanted <= many else ", one item for each processor" if many == processors else ", for now")
        + (". How long it takes then shows when it has run: measure again" if many > stage.concurrency else "")
        for name, taken, many, wanted, stage in zip(plan.names, seconds, at_once, needed, plan.stages, strict=True)
        if many > 1
    ]


def _host_reasons(plan: Plan, times: _Times, blocking: Collection[int]) -> list[str]:
    """Return the reasons against more items at a time: stages that have the event loop, and the GIL."""
    blocked = [
        f"stage {plan.names[position]!r} blocks the event loop, and more items at a time do not help: run the function "
        "that blocks by `await device.offload(function, ...)`, then ask again"
        for position in sorted(blocking)
    ]
    busy = [
        f"stage {name!r} has the event loop for {_ms(own)} of the {_ms(taken)} for one item, and no other item goes on "
        "in that time: run a function that waits by `await device.offload(function, ...)`, and one that computes in "
        "Python in a process, then ask again"
        for position, (name, taken, own) in enumerate(zip(plan.names, times.stages, times.loop, strict=True))
        if own >= MUCH_LOOP * taken and plan.stages[position].awaits and position not in blocking
    ]
    waiting = [
        f"threads share the GIL, and have it for {times.gil:.0%} of the time: more items at a time only wait for it. "
        "Functions that compute in Python help in processes, by `await loop.run_in_executor(ProcessPoolExecutor(), "
        "function, ...)`"
    ]
    return [*blocked, *busy, *(waiting if times.gil else ())]


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
