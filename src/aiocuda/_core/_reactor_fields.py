"""ReactorFields: the attributes of a `Reactor` that the core uses, and the search for waits that are due."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._turn import Turn

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ..completion._device_state import DeviceState
    from ._ring import Ring

__all__ = ["ReactorFields"]


class ReactorFields:
    """The attributes of `aiocuda.completion._reactor.Reactor` that the core uses for each operation.

    Attributes
    ----------
    device_state : DeviceState
    loop : asyncio.AbstractEventLoop
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

    __slots__ = ("attended", "device_state", "faulted", "loop", "on_progress", "polls", "resolved", "turn")

    def __init__(self, device_state: DeviceState, loop: asyncio.AbstractEventLoop) -> None:
        self.device_state = device_state
        self.loop = loop
        self.turn = Turn(loop, device_state.driver.now)
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
