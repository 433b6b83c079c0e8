"""Limit: what limits a loader, and what would help. Both texts of a loader, `why` here and there, are made from it."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

from ._options import Executor

__all__ = ["Limit", "PartName", "Times", "limit_of", "ms"]

PartName = Literal["source", "decode", "upload", "consumer"]

#: A part that is at work for this share of the time limits the loader. Below it, waits do.
BUSY: Final = 0.75

#: If threads have the GIL for this share of the time, twice as many would want nearly all of the time. Below
#: `LITTLE_GIL`, the others hardly wait for it.
MUCH_GIL: Final = 0.4
LITTLE_GIL: Final = 0.15

#: A decoder that uses a processor for less than this share of its time waits for something else. One that uses it for
#: `COMPUTES` computes. Between the two, it may also wait for a processor, which other programs use.
WAITS: Final = 0.25
COMPUTES: Final = 0.8

#: The most workers to recommend, in times of the present number. A thread costs little, a process has its own memory.
MOST_GROWTH: Final[dict[Executor, int]] = {"thread": 8, "process": 4}

#: Of workers that wait, at least so many are recommended, in times of the present number, even if the loop then uses a
#: whole processor: a worker that waits takes none from it.
LEAST_GROWTH: Final = 4

#: Decoding may take longer than its mean by this share, and does not limit the loader: times vary, and other programs
#: use the processors, too.
RESERVE: Final = 0.5


class Limit(NamedTuple):
    """What limits a loader, and what would help.

    Attributes
    ----------
    name
        The part that limits it.
    share
        Busy ÷ wall of that part, 0-1. If threads decode in Python, the share of the time for which they have the GIL.
    why
        The reason, and what helps, in words.
    executor, workers
        The arguments that help, or the present ones.
    """

    name: PartName
    share: float
    why: str
    executor: Executor
    workers: int


class Times(NamedTuple):
    """The workers of a loader, seconds for a batch, and shares of the time.

    Attributes
    ----------
    executor, workers
    wall
        From one batch to the next.
    decode, cpu
        The time of all workers together, and their processor time.
    source, upload, consumer
    gil, decode_gil
        The share of the time for which the GIL is taken, and for which threads that decode have it. None if it is not
        known.
    at_work
        How many processors the workers and this process use, on average.
    """

    executor: Executor
    workers: int
    wall: float
    decode: float
    cpu: float
    source: float
    upload: float
    consumer: float
    gil: float | None
    decode_gil: float | None
    at_work: float

    @property
    def others(self) -> float:
        """The time of the slowest part other than decoding."""
        return max(self.source, self.upload, self.consumer)

    @property
    def computing(self) -> float:
        """The share of its time for which decoding uses a processor."""
        return self.cpu / self.decode if self.decode else 1.0

    @property
    def may_share_gil(self) -> bool:
        """True if the workers may wait for the GIL. Threads that compute in Python use a whole processor together."""
        return self.workers * self.computing >= MUCH_GIL if self.gil is None else self.gil >= MUCH_GIL

    @property
    def waits(self) -> bool:
        """True if decoding waits for files or the network, and not for the GIL or for a processor."""
        return self.computing < WAITS and (not self.may_share_gil or self._waits_elsewhere)

    @property
    def _waits_elsewhere(self) -> bool:
        """True if other waits than those for the GIL, which last only while it is taken, are a third of decoding."""
        decode = self.decode / self.workers
        return self.gil is not None and decode - self.cpu / self.workers - self.gil * self.wall >= decode / 3


def limit_of(times: Times, available: int) -> Limit:
    """Return what limits a loader with these times, on a machine with so many processors."""
    parts: dict[PartName, float] = {
        "consumer": times.consumer,
        "source": times.source,
        "decode": times.decode / times.workers,
        "upload": times.upload,
    }
    name = max(parts, key=parts.__getitem__)
    share = min(1.0, parts[name] / times.wall) if times.wall else 1.0  # in virtual time it may be zero
    if times.decode_gil is not None and times.decode_gil >= MUCH_GIL and name != "upload":
        return _python_limit(name, times, times.decode_gil, available)
    workers = times.workers
    if share < BUSY and not (name == "decode" and times.waits):
        why = (
            f"it takes longest, and yet it is at work for only {share:.0%} of the time. In the rest it waits for the "
            "other parts, as at the start of an epoch, or when their times vary: prefetch= may help, more workers= do "
            "not"
        )
    elif name == "decode":
        needed = _needed(times.decode, times.others)
        workers = max(workers, min(_most_workers(times, share, available), needed))
        why = _decode_reason(times, workers, available)
    else:
        workers = min(workers, _needed(times.decode, times.others))
        why = _other_reason(name, times)
    return Limit(name, share, f"{ms(parts[name])} a batch, {why}", times.executor, workers)


def _python_limit(longest: PartName, times: Times, gil: float, available: int) -> Limit:
    """Return the limit of a loader whose threads share the GIL. One part takes longest, with its waits."""
    if longest == "consumer":
        why = (
            f"the consumer has each batch for {ms(times.consumer)}, and up to {ms(gil * times.consumer)} of that are "
            f"waits for the GIL, which the threads of decode= have for {gil:.0%} of the time"
        )
    else:
        why = (
            f"the threads of decode= share the GIL, and have it for {gil:.0%} of the time, so more threads would only "
            "wait for it"
        )
    if available == 1:
        why += ": only a quicker decode= helps, since processes would share the one processor"
        return Limit("decode", gil, why, times.executor, times.workers)
    why += ": executor='process' ends these waits, since each process has a GIL of its own"
    # Without waits for the GIL, decoding takes at least the time for which it has the GIL, and the consumer the rest.
    decode, consumer = max(times.cpu, gil * times.wall), times.consumer * (1 - gil)
    needed = _needed(decode, max(times.upload, consumer))
    return Limit("decode", gil, why, "process", min(needed, available, MOST_GROWTH["thread"] * times.workers))


# -- workers ---------------------------------------------------------------------------------------------------------


def _needed(decode: float, others: float) -> int:
    """Return the number of workers with which decoding does not limit the other parts."""
    return max(1, math.ceil((1 + RESERVE) * decode / others)) if others else 1 << 16


def _most_workers(times: Times, share: float, available: int) -> int:
    """Return as many workers as the processors and the GIL are enough for. The present ones decode for that share.

    Of workers that wait, at least `LEAST_GROWTH` times as many, unless the processors are busy.
    """
    most = float(MOST_GROWTH[times.executor] * times.workers)
    if times.at_work:
        most = min(most, round(times.workers * available * share / times.at_work))
    if times.gil and not times.waits:
        most = min(most, times.workers / times.gil)
    if times.waits and times.at_work < BUSY * available:
        most = max(most, LEAST_GROWTH * times.workers)
    return int(most)


# -- reasons ---------------------------------------------------------------------------------------------------------


def _decode_reason(times: Times, workers: int, available: int) -> str:
    decoding = f"{times.workers} workers decode at a time" if times.workers > 1 else "1 worker decodes at a time"
    if workers == times.workers and times.at_work < BUSY * available and times.gil:
        return (
            f"{decoding}, and the GIL is taken for {times.gil:.0%} of the time, mostly by other threads of the "
            "program: more workers= would wait for it, too. To see how much that is, compare executor='process'"
        )
    if workers == times.workers:
        return (
            f"{decoding}, and the program uses {times.at_work:.1f} of {available} processors: only a quicker decode=, "
            "or more processors, help"
        )
    if times.waits:
        return (
            f"decode= waits for {1 - times.computing:.0%} of its time: more workers= help, also more than there are "
            "processors"
        )
    if times.gil is None:
        return (
            f"{decoding}: more workers= help, unless decode= computes in Python, where threads share the GIL, or the "
            "processors are busy. To find out, compare executor='process', and look at `top`"
        )
    if times.computing < COMPUTES:
        gil, find_out = "", ""
        if times.may_share_gil:
            gil = f", or for the GIL, which is taken for {times.gil:.0%} of the time"
            find_out = ", and compare executor='process'"
        return (
            f"decode= uses a processor for {times.computing:.0%} of its time: more workers= help if it waits for files "
            f"or the network in the rest, and not if it waits for a processor{gil}. To find out, look at `top`"
            f"{find_out}"
        )
    return f"{decoding}, on {available} processors: more workers=, or a quicker decode=, help"


def _other_reason(name: PartName, times: Times) -> str:
    if name == "source":
        return "it is read by one thread: a source with __len__ and __getitem__ is read by all workers"
    if name == "upload":
        return "the link to the device is the limit: smaller samples help, such as uint8 instead of float32"
    gil = times.decode_gil
    if gil is None and times.cpu >= LITTLE_GIL * times.wall:
        return (
            "it has each batch for longer than loading takes: a quicker consumer helps. If decode= computes in Python, "
            "a part of that time are waits for the GIL: to find out, compare executor='process'"
        )
    if gil is not None and gil >= LITTLE_GIL:
        return (
            f"it has each batch for longer than loading takes, and up to {ms(gil * times.consumer)} of that are waits "
            f"for the GIL, which the threads of decode= have for {gil:.0%} of the time: a quicker consumer helps; to "
            "see how much of it is the GIL, compare executor='process'"
        )
    return "it has each batch for longer than loading takes: only a quicker consumer helps"


def ms(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds * 1e3:.3g} ms"
