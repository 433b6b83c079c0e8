"""PipelineAdvice: the depth, streams and concurrency that suit the times of a pipeline's stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from .._base._host_use import PROBED_AFTER, HostLoad
from .._base._limits import BUSY, MUCH_GIL, HostWork, in_flight, ms
from ..errors import BusyError
from ._meter import Meter
from ._plan import Plan
from ._ring import MAX_SLOTS

__all__ = ["HostTimes", "PipelineAdvice", "advise"]

#: Stages are steady if they exceed their typical time by at most this share.
SPREAD: Final = 0.05

#: A stage that has the event loop for this share of its time does not wait in that time.
MUCH_LOOP: Final = 0.5

#: A thread that is queued for processors for this share of the time, and does not use one so long, is hindered.
MUCH_QUEUED: Final = 0.01

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
    """What runs of a pipeline use of the host."""

    load: HostLoad
    loop_seconds: Sequence[float]  #: for which each stage has the event loop for one item, by the stage's position
    period: float  #: seconds from one result to the next
    probes: bool = True  #: True if runs that are long enough probe the GIL

    @property
    def gil(self) -> float:
        """The share of the time for which other threads than the event loop's have the GIL, at least."""
        load = self.load
        return max(0.0, (load.gil_share or 0.0) - (load.own_cpu + load.own_queued) / load.seconds)

    @property
    def is_queued(self) -> bool:
        """True if the event loop's thread is queued for processors for much of the time for which it wants one."""
        return self.load.own_queued > max(2 * self.load.own_cpu, MUCH_QUEUED * self.load.seconds)

    def most(self, seconds: float, at_once: int, processors: int) -> int:
        """Return how many items at a time a stage may work on that takes so long for one.

        What all threads but the event loop's use for an item is the most that this stage may use. If it may be queued
        for a processor, or share the GIL, it is one for each processor.
        """
        work = self._work(seconds, at_once, processors)
        most = work.limit(MOST_GROWTH)[1]
        is_unknown = work.taken is None and not 0 < work.used < MUCH_GIL
        return max(at_once, min(most, processors)) if is_unknown or self.is_queued else most

    def _work(self, seconds: float, at_once: int, processors: int) -> HostWork:
        load, period = self.load, self.period
        cpu = min(seconds, (load.cpu - load.own_cpu) / load.seconds * period)
        used, taken = load.cpu / load.seconds, load.gil_share
        return HostWork(processors, at_once, period, seconds, cpu, 0.0, used, taken, self.gil, load.throttled)

    def reasons(self, processors: int, gil: float) -> list[str]:
        """Return the reasons that concern the whole process. ``gil`` is the share of threads that share the GIL."""
        load, work, why = self.load, self._work(self.period, 1, processors), []
        if gil:
            why.append(
                f"threads share the GIL, and have it for {gil:.0%} of the time: more items at a time only wait for it. "
                "Functions that compute in Python help in processes, by "
                "`await loop.run_in_executor(ProcessPoolExecutor(), function, ...)`"
            )
        elif work.limit(MOST_GROWTH)[0] == "other threads":
            why.append(f"the event loop has the GIL for {load.gil_share:.0%} of the time: other threads wait for it")
        if self.is_queued:
            queued = f"the event loop was queued for one for {load.own_queued:.3g} s of {load.seconds:.3g} s"
            why.append(work.reason(work.cause_of_queues(), queued))
        if load.gil_share is None and self.probes:
            why.append(f"waits for the GIL are not measured: that takes {PROBED_AFTER:.0f} s of a run, on Linux")
        return why


class _StageTimes(NamedTuple):
    """Seconds of a stage for one item, and how many items it works on at a time."""

    name: str
    seconds: float
    on_loop: float  #: the part of it for which it has the event loop
    now: int  #: its concurrency
    needed: int  #: so that it limits nothing
    most: int  #: that the host is enough for

    @property
    def advised(self) -> int:
        return min(self.needed, self.most)


class _Outside(NamedTuple):
    """Seconds for one item of what is no stage."""

    source: float
    consumer: float
    loop: float = 0.0  #: of all stages
    gil: float = 0.0  #: of threads that share it, if more of them would wait for it

    def slowest(self, stages: Iterable[tuple[float, str]]) -> tuple[float, str]:
        """Return the time and the name of what takes longest, also of these stages."""
        names = ("the source", "the consumer", "the event loop", "code with the GIL")
        return max([*((seconds, f"stage {name!r}") for seconds, name in stages), *zip(self, names, strict=True)])


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

    ``pinned_bytes`` is the pinned memory of one slot, ``cache_bytes`` the size of the last-level cache, None if it is
    unknown, and ``blocking`` are the positions of the stages that have blocked the event loop. ``host`` is None in
    virtual time.
    """
    seconds = _typical_seconds(meter)
    loop, gil = [0.0] * len(seconds), 0.0
    if host is not None:
        loop, gil = [*map(min, seconds, host.loop_seconds)], host.gil if host.gil >= MUCH_GIL else 0.0
    source, consumer = meter.source_seconds / meter.items, meter.consumer_seconds / meter.items
    outside = _Outside(source, consumer, sum(loop), gil * host.period if host is not None else 0.0)
    varies = not meter.is_steady(SPREAD)
    steady = not (varies or gil)
    stages = _stages(plan, seconds, loop, outside, steady, processors, blocking, host)
    period, slowest = outside.slowest((each.seconds / each.advised, each.name) for each in stages)
    path_seconds, path = plan.longest_path(seconds)
    needed = in_flight(path_seconds + consumer, period)
    in_cache = max(1, cache_bytes // pinned_bytes) if cache_bytes and pinned_bytes else MAX_SLOTS
    present, depth = depth, needed if steady else max(needed + varies, min(depth, in_cache))
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.stream_groups
    # With no more items at a time than now: how long more of them would take is not known.
    known, slowest_now = outside.slowest((each.seconds / min(each.advised, each.now), each.name) for each in stages)
    expected = known
    if host is not None:  # it may have needed more time than the stages, and will need it again
        now = max(known, (path_seconds + consumer) / present)
        expected = host.period * (1 if gil or host.is_queued or not now else known / now)
    cure = "the pipeline cannot be faster than that" if known == period else "more items at a time help"
    why = [
        f"{slowest_now} takes {ms(known)} for each item, more than any other: {cure}",
        _path_reason(plan, path, path_seconds, consumer if consumer > SPREAD * period else 0.0, needed, slowest),
        *(_concurrency_reason(each, processors) for each in stages if each.advised > 1),
        *(_loop_reason(each, position in blocking) for position, each in enumerate(stages)),
        *(() if host is None else host.reasons(processors, gil)),
        _shared_streams(plan, groups, slowest) if steady else "",
        _outside_cache(present, depth, in_cache, pinned_bytes, cache_bytes or 0),
        f"one in ten times is more than {SPREAD:.0%} longer: one slot more, and not fewer than now" if varies else "",
    ]
    return PipelineAdvice(
        depth=min(depth, MAX_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        concurrency={each.name: each.advised for each, stage in zip(stages, plan.stages, strict=True) if stage.awaits},
        period_ms=expected * 1e3,
        why="; ".join(filter(None, why)),
    )


def _typical_seconds(meter: Meter) -> list[float]:
    """Return the typical time of each stage. `BusyError` if it is not known yet."""
    seconds = meter.typical_seconds()
    if seconds is None or not meter.items:
        raise BusyError("not every stage has been timed yet: run some items through the pipeline first, then ask again")
    return seconds


def _stages(
    plan: Plan,
    seconds: Sequence[float],
    loop: Sequence[float],
    outside: _Outside,
    steady: bool,
    processors: int,
    blocking: Collection[int],
    host: HostTimes | None,
) -> list[_StageTimes]:
    """Return the times of the stages, and how many items each needs at a time, so that it does not limit the others.

    Stages that have the event loop keep their concurrency; and if nothing else takes time, or threads share the GIL,
    all do.
    """
    free = [
        stage.awaits
        and position not in blocking
        and not (outside.gil or 0 < BUSY * seconds[position] <= loop[position])
        for position, stage in enumerate(plan.stages)
    ]
    others = max(*outside, *(0.0 if each else taken for taken, each in zip(seconds, free, strict=True)))
    found = []
    for stage, taken, own, is_free in zip(plan.stages, seconds, loop, free, strict=True):
        now = needed = stage.concurrency
        if is_free and others:
            needed = max(math.ceil(taken / ((1 + SPREAD) * others)), 1 if steady else now)
        most = max(now, processors) if host is None else host.most(taken, now, processors)
        found.append(_StageTimes(stage.name, taken, own, now, needed, most))
    return found


def _shared_streams(plan: Plan, groups: Sequence[Sequence[int]], slowest: str) -> str:
    """Return the reason for groups of several stages; none if there are no such groups."""
    shared = [" and ".join(plan.names[one] for one in group) for group in groups if len(group) > 1]
    return f"{', '.join(shared)} together take no longer than {slowest}: they can share a stream" if shared else ""


def _path_reason(plan: Plan, path: Sequence[int], seconds: float, consumer: float, needed: int, slowest: str) -> str:
    stages = " → ".join(plan.names[one] for one in path)
    held = f", and for {ms(consumer)} at the consumer" if consumer else ""
    keep = f"{_slots(needed)} keep{'s' if needed == 1 else ''} {slowest} at work"
    return f"an item uses its slot for {ms(seconds)} ({stages}){held}: {keep}"


def _concurrency_reason(stage: _StageTimes, processors: int) -> str:
    many = stage.advised
    limited = ", one item for each processor" if many == processors else ", for now"
    again = ". How long it takes then shows when it has run: measure again"
    return (
        f"stage {stage.name!r} takes {ms(stage.seconds)} for one item: concurrency={many} suits it"
        f"{limited if many < stage.needed else ''}{again if many > stage.now else ''}"
    )


def _loop_reason(stage: _StageTimes, blocks: bool) -> str:
    """Return the reason of a stage that has the event loop; none of another one."""
    if blocks:
        return (
            f"stage {stage.name!r} blocks the event loop, and more items at a time do not help: run the function that "
            "blocks by `await device.offload(function, ...)`, then ask again"
        )
    if not 0 < MUCH_LOOP * stage.seconds <= stage.on_loop:
        return ""
    return (
        f"stage {stage.name!r} has the event loop for {ms(stage.on_loop)} of the {ms(stage.seconds)} for one item, and "
        "no other item goes on in that time: run a function that waits by `await device.offload(function, ...)`, and "
        "one that computes in Python in a process, then ask again"
    )


def _outside_cache(present: int, depth: int, in_cache: int, pinned_bytes: int, cache_bytes: int) -> str:
    slots = depth if depth > in_cache else present
    if not cache_bytes or slots <= in_cache:
        return ""
    return (
        f"{_slots(slots)} have {slots * pinned_bytes / 1e6:.3g} MB of pinned memory, and the processor's cache has "
        f"{cache_bytes / 1e6:.3g} MB: the host writes to memory outside the cache, which is slower. "
        f"{_slots(in_cache)} fit{'s' if in_cache == 1 else ''}"
    )


def _slots(count: int) -> str:
    """Return a number of slots in words."""
    return f"{count} slot" if count == 1 else f"{count} slots"


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
