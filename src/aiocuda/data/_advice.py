"""LoaderAdvice: the arguments that suit the measured times of a loader. PartLimit: the part that limits it, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from .._base._host_use import PROBED_AFTER
from .._base._limits import BUSY, MUCH_GIL, HostLimit, HostWork, in_flight, ms
from .._base._mistakes import refuses
from .._base._processor import processors_within_quota
from ..errors import BusyError
from ._names import lacks
from ._options import MAX_PREFETCH, Executor

if TYPE_CHECKING:
    from ._statistics import LoaderStats

__all__ = ["LoaderAdvice", "PartLimit", "advise", "part_limit_of"]

#: If threads have the GIL for less than this share of the time, the others hardly wait for it.
LITTLE_GIL: Final = 0.15

#: The most workers to recommend, in times of the present number. A thread costs little, a process has its own memory.
MOST_GROWTH: Final[dict[Executor, int]] = {"thread": 8, "process": 4}

#: Decoding may take so many times its mean, and does not limit the loader: times vary.
RESERVE: Final = 1.5

#: If all loading takes less than this share of the consumer's time, overlap gains nearly nothing.
NO_GAIN: Final = 0.05

_Part: TypeAlias = Literal["source", "decode", "upload", "consumer"]


@lacks
@refuses(__getitem__="has attributes: advice.workers, advice.prefetch and advice.executor")
@dataclasses.dataclass(frozen=True, slots=True)
class LoaderAdvice:
    """The advice of `DataLoader.advice`.

    Attributes
    ----------
    workers, prefetch
        The arguments that suit the measured times. ``prefetch`` is never smaller than now. There are no more workers
        than samples, and if decoding computes, no more than processors.
    period_ms
        The time from one batch to the next with the present arguments, as it was measured. What other arguments give
        is known when they have run.
    why
        The reasons, in words.
    executor
        The argument that suits the measured times: ``"process"`` where threads wait for the GIL.
    """

    workers: int
    prefetch: int
    period_ms: float
    why: str
    executor: Executor = "thread"


class PartLimit(NamedTuple):
    """What limits a loader, and what would help."""

    name: _Part  #: the part that limits it
    share: float  #: of the time: for which it is at work, or for which threads that decode in Python have the GIL
    why: str
    executor: Executor  #: the arguments that help, or the present ones
    workers: int


def part_limit_of(stats: LoaderStats, available: int) -> PartLimit:
    """Return what limits a loader with these statistics, on a machine with so many processors."""
    decode, wall, workers = _decoding(stats, available), stats.wall_seconds, stats.workers
    parts: dict[_Part, float] = {
        "consumer": stats.consumer_seconds,
        "source": stats.source_seconds,
        "decode": stats.decode_seconds / workers,
        "upload": stats.upload_seconds,
    }
    name = max(parts, key=parts.__getitem__)
    kind, most = decode.limit(MOST_GROWTH[stats.executor])
    if decode.gil >= MUCH_GIL and name != "upload":
        if kind == "GIL":
            return _python_limit(name, decode, stats)
        name = "decode"  # its threads are queued for a processor, and the others wait for the GIL meanwhile
    share = min(1.0, parts[name] / wall) if wall else 1.0  # in virtual time it may be zero
    needed = _needed(stats.decode_seconds, _others(stats))
    if share < BUSY and not (name == "decode" and kind in ("waits", "quota", "other programs")):
        why = (
            f"it takes longest, and yet it is at work for only {share:.0%} of the time. In the rest it waits for the "
            "other parts, as at the start of an epoch, or when their times vary: prefetch= may help, more workers= do "
            "not"
        )
    elif name == "decode":
        workers, why = max(workers, min(most, needed)), _decode_reason(kind, decode)
    else:
        workers, why = min(workers, needed), _other_reason(name, decode, stats)
    if decode.computes:
        workers = min(workers, available)
    return PartLimit(name, share, f"{ms(parts[name] / stats.batches)} a batch, {why}", stats.executor, workers)


def _decoding(stats: LoaderStats, available: int) -> HostWork:
    """Return what decoding does on the host, in all batches."""
    wall, cpu, decode_cpu = stats.wall_seconds, stats.process_cpu_seconds, stats.decode_cpu_seconds
    taken = stats.gil_share if cpu else 0.0  # in virtual time nothing is measured
    if stats.executor == "process":
        cpu, taken = cpu + decode_cpu, 0.0  # each process has a GIL of its own
    # The other threads may have had the GIL for all of their processor time.
    gil = max(0.0, taken - (cpu - decode_cpu) / wall) if taken and wall and decode_cpu else 0.0
    return HostWork(
        available, stats.workers, wall, stats.decode_seconds, decode_cpu, stats.decode_queued_seconds,
        cpu / wall if wall else 0.0, taken, gil, stats.throttled_share,
    )  # fmt: skip


def _others(stats: LoaderStats) -> float:
    """Return the time of the slowest part other than decoding."""
    return max(stats.source_seconds, stats.upload_seconds, stats.consumer_seconds)


def _needed(decode: float, others: float) -> int:
    """Return the number of workers with which decoding does not limit the other parts."""
    return max(1, math.ceil(RESERVE * decode / others)) if others else 1 << 16


def _python_limit(longest: _Part, decode: HostWork, stats: LoaderStats) -> PartLimit:
    """Return the limit of a loader whose threads share the GIL. One part takes longest, with its waits."""
    gil, has = decode.gil, f"for {decode.gil:.0%} of the time"
    why = f"the threads of decode= share the GIL, and have it {has}, so more threads would only wait for it"
    if longest == "consumer":
        each = stats.consumer_seconds / stats.batches
        why = f"the consumer has each batch for {ms(each)}, and up to {ms(gil * each)} of that are waits for the GIL, "
        why += f"which the threads of decode= have {has}"
    if decode.processors == 1:
        why += ": only a quicker decode= helps, since processes would share the one processor"
        return PartLimit("decode", gil, why, stats.executor, stats.workers)
    why += ": executor='process' ends these waits, since each process has a GIL of its own"
    # Without waits for the GIL, decoding takes at least the time for which it has the GIL, and the consumer the rest.
    others = max(stats.upload_seconds, stats.consumer_seconds * (1 - gil))
    needed = _needed(max(decode.cpu, gil * stats.wall_seconds), others)
    workers = min(needed, decode.processors, MOST_GROWTH["thread"] * stats.workers)
    return PartLimit("decode", gil, why, "process", workers)


def _decode_reason(kind: HostLimit, decode: HostWork) -> str:
    decoding = f"{decode.at_once} workers decode at a time" if decode.at_once > 1 else "1 worker decodes at a time"
    seconds = decode.seconds or 1.0
    queued = decode.reason(kind, f"decode= is queued for a processor for {decode.queued / seconds:.0%} of its time")
    if queued:
        return f"{queued}. More workers= would be queued, too"
    if kind == "other threads":
        return (
            f"{decoding}, and the GIL is taken for {decode.taken:.0%} of the time, mostly by other threads of the "
            "program: more workers= would wait for it, too. To see how much that is, compare executor='process'"
        )
    if kind == "program":
        return (
            f"{decoding}, and the program uses {decode.used:.1f} of {decode.processors} processors: only a quicker "
            "decode=, or more processors, help"
        )
    if decode.taken is None and decode.cpu >= MUCH_GIL * decode.period:
        return (
            f"{decoding}: more workers= help, unless decode= computes in Python, where threads share the GIL. Waits "
            "for it are not measured yet"
        )
    if kind == "waits":
        return (
            f"decode= waits for {decode.waiting / seconds:.0%} of its time: more workers= help, also more than there "
            "are processors"
        )
    return f"{decoding}, on {decode.processors} processors: more workers=, or a quicker decode=, help"


def _other_reason(name: _Part, decode: HostWork, stats: LoaderStats) -> str:
    if name == "source":
        return "it is read by one thread: a source with __len__ and __getitem__ is read by all workers"
    if name == "upload":
        return "the link to the device is the limit: smaller samples help, such as uint8 instead of float32"
    longer = "it has each batch for longer than loading takes"
    if decode.gil >= LITTLE_GIL:
        return (
            f"{longer}, and up to {ms(decode.gil * stats.consumer_seconds / stats.batches)} of that are waits for the "
            f"GIL, which the threads of decode= have for {decode.gil:.0%} of the time: a quicker consumer helps; to "
            "see how much of it is the GIL, compare executor='process'"
        )
    only = "a" if decode.taken is None and decode.cpu >= LITTLE_GIL * decode.period else "only a"
    return f"{longer}: {only} quicker consumer helps"


def _start_of_processes(stats: LoaderStats) -> str:
    if stats.executor == "process":
        return f"the processes were ready {stats.start_seconds:.2g} s after the loader had begun to open"
    return (
        "processes are ready when the packages that the program and decode= name have been imported once more, and "
        "statistics().start_seconds is that time"
    )


def advise(stats: LoaderStats, batch_size: int, prefetch: int, samples: int) -> LoaderAdvice:
    """Return the advice for a loader with these statistics, and so many samples in an epoch.

    Raises
    ------
    BusyError
        No batch has been delivered yet.
    """
    if not stats.batches:
        raise BusyError("no batch has been delivered yet: load some batches first, then ask again")
    available, count = processors_within_quota(), stats.batches
    limit, work = part_limit_of(stats, available), _decoding(stats, available)
    consumer, upload = stats.consumer_seconds / count, stats.upload_seconds / count
    why = [
        f"{limit.name}: {limit.why}",
        f"decoding a batch takes {ms(stats.decode_seconds / count)} of one worker ({ms(work.cpu / count)} on a "
        f"processor, {ms(work.queued / count)} queued for one, {ms(work.waiting / count)} waiting), the upload "
        f"{ms(upload)}, and the consumer has it for {ms(consumer)}",
    ]
    workers = max(1, min(limit.workers, samples))
    if workers < limit.workers:
        why.append(f"more workers= have nothing to do with {samples} samples")
    if work.taken is None:
        why.append(f"waits for the GIL are not measured: that takes {PROBED_AFTER:.0f} s of an epoch, on Linux")
    decode = (stats.decode_seconds if limit.executor == stats.executor else stats.decode_cpu_seconds) / count
    latency = stats.source_seconds / count + decode / min(workers, batch_size) + upload
    # One more, since times vary; and two samples for each worker are on their way.
    ahead = max(
        1 + in_flight(latency, max(_others(stats) / count, decode / workers)), math.ceil(2 * workers / batch_size)
    )
    present: dict[str, object] = {"executor": stats.executor, "workers": stats.workers, "prefetch": prefetch}
    prefetch = min(MAX_PREFETCH, max(prefetch, ahead))
    advised = {"executor": limit.executor, "workers": workers, "prefetch": prefetch}
    changed = [f"{name}={value!r}" for name, value in advised.items() if value != present[name]]
    if changed:
        why.append(f"use {', '.join(changed)}, and measure again: how fast that is shows when it has run")
    if limit.executor == "process":
        why.append(_start_of_processes(stats))
    if latency < NO_GAIN * consumer:
        why.append("loading takes less than a twentieth of the consumer's time: without a loader it is nearly as quick")
    return LoaderAdvice(workers, prefetch, stats.wall_seconds / count * 1e3, "; ".join(why), limit.executor)
