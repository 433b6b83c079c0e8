"""PipelineAdvice: the depth, streams and concurrency that suit the times of a pipeline's stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
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

    def work(self, seconds: float, at_once: int, processors: int) -> HostWork:
        """Return the work of a stage that awaits, and takes so long for an item.

        What all threads but the event loop's use for an item is the most that this stage may use.
        """
        load, period = self.load, self.period
        cpu = min(seconds, (load.cpu - load.own_cpu) / load.seconds * period)
        used, taken = load.cpu / load.seconds, load.gil_share
        return HostWork(processors, at_once, period, seconds, cpu, 0.0, used, taken, self.gil, load.throttled)

    def most(self, work: HostWork) -> int:
        """Return how many items at a time such a stage may work on.

        If it may be queued for a processor, or share the GIL, it is one for each processor.
        """
        most = work.limit(MOST_GROWTH)[1]
        is_unknown = work.taken is None and not 0 < work.used < MUCH_GIL
        return max(work.at_once, min(most, work.processors)) if is_unknown or self.is_queued else most


class _Times(NamedTuple):
    """Seconds for one item."""

    stages: list[float]  #: by the stage's position
    loop: list[float]  #: the part of it for which it has the event loop
    outside: list[tuple[float, str]]  #: what else takes time, with its name
    consumer: float
    gil: float  #: the share of the time for which threads have the GIL, if it is too much for more of them, else 0.0
    varies: bool  #: True if a stage's times vary

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
            gil = host.gil if host.gil >= MUCH_GIL else 0.0
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

    ``pinned_bytes`` is the pinned memory of one slot, ``cache_bytes`` the size of the last-level cache, None if it is
    unknown, and ``blocking`` are the positions of the stages that have blocked the event loop. ``host`` is None in
    virtual time.
    """
    times = _Times.of(meter, host)
    seconds, consumer = times.stages, times.consumer
    steady = not (times.varies or times.gil)
    needed_at_once = _concurrency(plan, times, steady, blocking)
    stages = zip(seconds, plan.stages, strict=True)
    work = [] if host is None else [host.work(taken, stage.concurrency, processors) for taken, stage in stages]
    most = [max(stage.concurrency, processors) for stage in plan.stages] if host is None else map(host.most, work)
    at_once = [*map(min, needed_at_once, most)]
    period, slowest = times.slowest(plan, at_once)
    path_seconds, path = plan.longest_path(seconds)
    needed = in_flight(path_seconds + consumer, period)
    in_cache = max(1, cache_bytes // pinned_bytes) if cache_bytes and pinned_bytes else MAX_SLOTS
    present, depth = depth, needed if steady else max(needed + times.varies, min(depth, in_cache))
    groups = _groups(plan, seconds, period / (1 + SPREAD)) if steady else plan.stream_groups
    known, slowest_now = times.slowest_known(plan, at_once)
    cure = "the pipeline cannot be faster than that" if known == period else "more items at a time help"
    why = [
        f"{slowest_now} takes {ms(known)} for each item, more than any other: {cure}",
        _path_reason(plan, path, path_seconds, consumer if consumer > SPREAD * period else 0.0, needed, slowest),
        *_concurrency_reasons(plan, seconds, at_once, needed_at_once, processors),
        *_loop_reasons(plan, times, blocking),
        *([] if host is None else _host_reasons(host, times.gil, work)),
        *(_shared_streams(plan, groups, slowest) if steady else ()),
    ]
    if max(present, depth) > in_cache and cache_bytes:
        why.append(_outside_cache(depth if depth > in_cache else present, in_cache, pinned_bytes, cache_bytes))
    if times.varies:
        why.append(f"one in ten times is more than {SPREAD:.0%} longer: one slot more, and not fewer than now")
    expected = known
    if host is not None:  # it may have needed more time than the stages, and will need it again
        now = max(known, (path_seconds + consumer) / present)
        expected = host.period * (1 if times.gil or host.is_queued or not now else known / now)
    return PipelineAdvice(
        depth=min(depth, MAX_SLOTS),
        streams=tuple(tuple(plan.names[one] for one in group) for group in groups),
        concurrency={stage.name: many for stage, many in zip(plan.stages, at_once, strict=True) if stage.awaits},
        period_ms=expected * 1e3,
        why="; ".join(why),
    )


def _concurrency(plan: Plan, times: _Times, steady: bool, blocking: Collection[int]) -> list[int]:
    """Return for each stage the number of items at a time with which it does not limit the others.

    Stages that have the event loop keep their concurrency; and if nothing else takes time, or threads share the GIL,
    all do.
    """
    awaits = [
        stage.awaits and position not in blocking and not (times.gil or 0 < BUSY * taken <= loop)
        for position, (stage, taken, loop) in enumerate(zip(plan.stages, times.stages, times.loop, strict=True))
    ]
    others = max(seconds for seconds, _ in times.outside)
    others = max([others, *(taken for taken, free in zip(times.stages, awaits, strict=True) if not free)])
    found = []
    for taken, stage, free in zip(times.stages, plan.stages, awaits, strict=True):
        needed = math.ceil(taken / ((1 + SPREAD) * others)) if others else stage.concurrency
        found.append(max(needed, 1 if steady else stage.concurrency) if free else stage.concurrency)
    return found


def _shared_streams(plan: Plan, groups: Sequence[Sequence[int]], slowest: str) -> list[str]:
    """Return the reason for groups of several stages, if there are any."""
    shared = [" and ".join(plan.names[one] for one in group) for group in groups if len(group) > 1]
    return [f"{', '.join(shared)} together take no longer than {slowest}: they can share a stream"] if shared else []


def _path_reason(plan: Plan, path: Sequence[int], seconds: float, consumer: float, needed: int, slowest: str) -> str:
    stages = " → ".join(plan.names[one] for one in path)
    held = f", and for {ms(consumer)} at the consumer" if consumer else ""
    keep = f"{_slots(needed)} keep{'s' if needed == 1 else ''} {slowest} at work"
    return f"an item uses its slot for {ms(seconds)} ({stages}){held}: {keep}"


def _concurrency_reasons(
    plan: Plan, seconds: Sequence[float], at_once: Sequence[int], needed: Sequence[int], processors: int
) -> list[str]:
    return [
        f"stage {name!r} takes {ms(taken)} for one item: concurrency={many} suits it"
        + ("" if wanted <= many else ", one item for each processor" if many == processors else ", for now")
        + (". How long it takes then shows when it has run: measure again" if many > stage.concurrency else "")
        for name, taken, many, wanted, stage in zip(plan.names, seconds, at_once, needed, plan.stages, strict=True)
        if many > 1
    ]


def _loop_reasons(plan: Plan, times: _Times, blocking: Collection[int]) -> list[str]:
    """Return the reasons of stages that have the event loop."""
    blocked = [
        f"stage {plan.names[position]!r} blocks the event loop, and more items at a time do not help: run the function "
        "that blocks by `await device.offload(function, ...)`, then ask again"
        for position in sorted(blocking)
    ]
    busy = [
        f"stage {name!r} has the event loop for {ms(own)} of the {ms(taken)} for one item, and no other item goes on "
        "in that time: run a function that waits by `await device.offload(function, ...)`, and one that computes in "
        "Python in a process, then ask again"
        for position, (name, taken, own) in enumerate(zip(plan.names, times.stages, times.loop, strict=True))
        if own >= MUCH_LOOP * taken and plan.stages[position].awaits and position not in blocking
    ]
    return [*blocked, *busy]


def _host_reasons(host: HostTimes, gil: float, work: Sequence[HostWork]) -> list[str]:
    """Return the reasons that concern the whole process."""
    load, why = host.load, []
    if gil:
        why.append(
            f"threads share the GIL, and have it for {gil:.0%} of the time: more items at a time only wait for it. "
            "Functions that compute in Python help in processes, by `await loop.run_in_executor(ProcessPoolExecutor(), "
            "function, ...)`"
        )
    elif any(each.limit(MOST_GROWTH)[0] == "other threads" for each in work):
        why.append(f"the event loop has the GIL for most of the time, {load.gil_share:.0%}: other threads wait for it")
    if host.is_queued:
        queued = f"the event loop was queued for one for {load.own_queued:.3g} s of {load.seconds:.3g} s"
        why.append(work[0].reason(work[0].cause_of_queues(), queued))
    if load.gil_share is None and host.probes:
        why.append(f"waits for the GIL are not measured: that takes {PROBED_AFTER:.0f} s of a run, on Linux")
    return [*filter(None, why)]


def _outside_cache(depth: int, in_cache: int, pinned_bytes: int, cache_bytes: int) -> str:
    return (
        f"{_slots(depth)} have {depth * pinned_bytes / 1e6:.3g} MB of pinned memory, and the processor's cache has "
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
