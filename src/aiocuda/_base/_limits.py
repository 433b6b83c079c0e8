"""HostWork: what limits work on the host, and how many items at a time help. For stages that await, and for decoders.

It follows from measured times only: on a processor, queued for one, the rest, which is a wait, and the GIL.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["BUSY", "MUCH_GIL", "HostLimit", "HostWork", "in_flight", "ms"]

#: What is at work for this share of the time limits the others; below it, waits do. So it is with the processors.
BUSY: Final = 0.75

#: If threads have the GIL for this share of the time, twice as many would want nearly all of it.
MUCH_GIL: Final = 0.4

#: Work computes if it uses a processor for this share of its time, without the time for which it is queued for one.
COMPUTES: Final = 0.9

#: A quota that is used up in this share of its periods is the reason for which threads are queued.
THROTTLED: Final = 0.25

#: An item may take longer than typical by this share, and the slowest part still has work. A host that other programs
#: use is sometimes late by a millisecond, and the device cannot make up for an idle time.
RESERVE: Final = 0.15

#: Seconds until the host has noticed that an item is done and has begun the next one.
TURNAROUND: Final = 100e-6

#: The work *waits* or *computes*, and more items at a time help. Or they do not: the *quota* of the control group is
#: used up, *other programs* have the processors, this *program* uses all of them, the threads of this work share the
#: *GIL*, or *other threads* have it.
HostLimit: TypeAlias = Literal["waits", "computes", "quota", "other programs", "program", "GIL", "other threads"]


class HostWork(NamedTuple):
    """What one part of a pipeline or a loader does on the host, and what the program uses meanwhile."""

    processors: int  #: that this process may use
    at_once: int  #: items or samples in work at a time
    period: float  #: the time in which the following seconds were spent
    seconds: float  #: of all threads or items together
    cpu: float = 0.0  #: of them, on a processor
    queued: float = 0.0  #: of them, queued for one
    used: float = 0.0  #: how many processors this process and its workers use, on average
    taken: float | None = None  #: the share of the time for which the GIL is taken; None if that is not measured
    gil: float = 0.0  #: the share for which threads of this work have it, at least
    throttled: float = 0.0  #: the share of periods in which the quota of processor time was used up

    @property
    def waiting(self) -> float:
        """The rest of the time: waits for files, for the network, for locks, and for the GIL."""
        return max(0.0, self.seconds - self.cpu - self.queued)

    @property
    def demand(self) -> float:
        """How many processors each item would use if it was never queued for one."""
        return self.cpu / max(self.seconds - self.queued, 1e-9)

    @property
    def computes(self) -> bool:
        """True if it hardly waits."""
        return self.demand >= COMPUTES

    def limit(self, growth: int) -> tuple[HostLimit, int]:
        """Return what limits it, and how many items at a time the processors and the GIL are enough for.

        They are at least as many as now, and at most ``growth`` times as many. If each uses what it uses now, they may
        use what other threads of this process leave of the processors.
        """
        now, taken = self.at_once, self.taken or 0.0
        if self.queued > self.seconds / 2:
            return self.cause_of_queues(), now
        if self.gil >= MUCH_GIL:
            return "GIL", now
        if taken >= MUCH_GIL and not self.computes and self.waiting - taken * self.period * now < self.seconds / 3:
            return "other threads", now
        free = self.processors - (max(0.0, self.used - self.cpu / self.period) if self.period else 0.0)
        most = round(min(now * growth, free / max(self.demand, 1e-9), now / max(self.gil, 1e-9)))
        if self.computes:
            most = min(most, self.processors)
        return ("computes" if self.computes else "waits", most) if most > now else ("program", now)

    def cause_of_queues(self) -> HostLimit:
        """Return what has the processors for which threads are queued."""
        if self.throttled >= THROTTLED:
            return "quota"
        return "program" if self.used >= BUSY * self.processors else "other programs"

    def reason(self, kind: HostLimit, queued: str) -> str:
        """Return the reason for which threads are queued so much, in words; none if it is this program."""
        causes = {
            "quota": f"the control group has used up its quota in {self.throttled:.0%} of the periods",
            "other programs": "other programs have the processors",
        }
        use = f"{queued}, and this program uses {self.used:.1f} of {self.processors}"
        return f"{causes[kind]}: {use}" if kind in causes else ""


def in_flight(seconds: float, period: float) -> int:
    """Return the number of items that are in work at the same time, each for so many seconds, and one more."""
    return 1 + math.floor((1 + RESERVE) * (seconds + TURNAROUND) / period) if period else 1


def ms(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds * 1e3:.3g} ms"
