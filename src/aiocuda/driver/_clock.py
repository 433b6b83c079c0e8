"""Virtual time: what is going to happen when."""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["Clock", "running_clock"]

_local: Final = threading.local()


def running_clock() -> Clock | None:
    """The clock of the simulated event loop that runs in this thread, if one does."""
    clock: Clock | None = getattr(_local, "running", None)
    return clock


class CrossDeviceUse(Protocol):
    """Who goes by the clock of whatever loop runs."""

    def adopt(self) -> None:
        """A loop begins to run: go by its clock."""


class Clock:
    """Time in whole nanoseconds, and an agenda.

    Nothing passes by itself: whoever holds the clock says how far it goes, and what is due on the way happens in the
    order of its time, and of its entry where times are equal. Integers, since sums of floats differ with their order.
    """

    __slots__ = ("_agenda", "_guests", "_happening", "_order", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._agenda: list[tuple[int, int, object, Callable[[], object]]] = []
        self._order = itertools.count()
        self._happening = False
        self._guests: dict[weakref.ref[CrossDeviceUse], None] = {}  # and no set: its order follows addresses

    def at(self, when_ns: int, owner: object, action: Callable[[], object]) -> None:
        """``action`` happens at a time, or as soon as it can where that has passed."""
        heapq.heappush(self._agenda, (when_ns, next(self._order), owner, action))

    def next_ns(self) -> int | None:
        """When the next entry is due; None if there is none."""
        return self._agenda[0][0] if self._agenda else None

    def advance(self, until_ns: int) -> None:
        """Let the time go on, at least to ``until_ns``: what is due by then happens.

        Called by what happens just now, it only lets the time go on.
        """
        if self._happening:
            self.now_ns = max(self.now_ns, until_ns)
            return
        agenda = self._agenda
        self._happening = True
        try:
            while agenda and agenda[0][0] <= until_ns:
                when, _, _, action = heapq.heappop(agenda)
                self.now_ns = max(self.now_ns, when)
                action()
        finally:
            self._happening = False
        self.now_ns = max(self.now_ns, until_ns)

    def spend(self, nanoseconds: int) -> None:
        """The host is busy that long."""
        until_ns = self.now_ns + nanoseconds
        if self._agenda and self._agenda[0][0] <= until_ns:
            self.advance(until_ns)
        else:
            self.now_ns = until_ns

    def take_over(self, owner: object, other: Clock) -> None:
        """Move an owner's entries here, as far in the future as they are there."""
        shift = self.now_ns - other.now_ns
        mine = sorted(entry for entry in other._agenda if entry[2] is owner)
        other._agenda = [entry for entry in other._agenda if entry[2] is not owner]
        heapq.heapify(other._agenda)
        for when, _, _, action in mine:
            self.at(when + shift, owner, action)

    def invite(self, cross_device_use: CrossDeviceUse) -> None:
        """Whenever this clock's loop begins to run, the guest is told."""
        self._guests[weakref.ref(cross_device_use, lambda gone: self._guests.pop(gone, None))] = None

    def __enter__(self) -> None:
        _local.running = self
        for known in list(self._guests):
            cross_device_use = known()
            if cross_device_use is not None:
                cross_device_use.adopt()

    def __exit__(self, *exc: object) -> None:
        _local.running = None
