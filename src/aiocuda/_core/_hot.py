"""What the core reads and counts for each operation: `DeviceHot` of a device, `ReactorHot` of a reactor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ._turn import Turn

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ._lease import Lease
    from ._ring import Ring

__all__ = ["DeviceHot", "ReactorHot"]


class DeviceHot:
    """What the core reads of a device for each operation. The `DeviceState` holds and writes it.

    Attributes
    ----------
    listeners : Listeners or None
        Their hooks get the submission and the end of each operation; None without a listener.
    starts : dict of int to Lease
        The timing event before each operation, by its id, while a listener wants timing.
    limit : int
        The present limit for each stream, with regard to the hardware queues.
    guarded : bool
        True if another library may be capturing a stream. Queries then take 0.8 µs more per pass.
    linger : float
        `CompletionPolicy.linger`.
    idle_leases : list of Lease
        The idle events without timing, of `EventLeases`.
    """

    __slots__ = ("guarded", "idle_leases", "limit", "linger", "listeners", "starts")

    def __init__(self, limit: int, linger: float, idle_leases: list[Lease]) -> None:
        self.limit = limit
        self.linger = linger
        self.idle_leases = idle_leases
        self.guarded = False
        self.listeners: Any = None
        self.starts: dict[int, Lease] = {}


class ReactorHot:
    """What the core reads and counts of a reactor for each operation. The `Reactor` holds it.

    Attributes
    ----------
    turn : Turn
    faulted : bool
        The reactor has failed its operations because of a device fault.
    polls, resolved : int
        Counters.
    attended : dict of Ring
        The queues with a waiter.
    on_progress : callable or None
        Called after operations were resolved, while the staging buffers need it.
    """

    __slots__ = ("attended", "faulted", "on_progress", "polls", "resolved", "turn")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self.turn = Turn(loop, now)
        self.faulted = False
        self.polls = self.resolved = 0
        self.on_progress: Callable[[], None] | None = None
        # A dictionary instead of a set: a simulation visits its keys in the same order in every process.
        self.attended: dict[Ring, None] = {}

    def due(self, reached: float, quiet_from: float, longest: float, step: float) -> tuple[list[Ring], float]:
        """Return the parked queues whose time is reached, and the earliest time of the others.

        A query beside an armed notifier is put off by steps until ``quiet_from``, or ``longest`` after the last one.
        """
        found: list[Ring] = []
        following = math.inf
        for queue in self.attended:
            watch = queue.watch
            if watch.polling:
                continue
            if watch.armed is not None and not watch.poll_until:
                while watch.poll_from < quiet_from and watch.poll_from < watch.looked + longest:
                    watch.poll_from += step
            if watch.poll_from <= reached:
                found.append(queue)
            elif watch.poll_from < following:
                following = watch.poll_from
        return found, following
