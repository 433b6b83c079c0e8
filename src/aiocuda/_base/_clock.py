"""`Clock`: virtual time, with a list of actions that are due later."""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

__all__ = ["Clock", "running_clock"]

#: Time, order, owner and action.
_Entry: TypeAlias = tuple[int, int, object, Callable[[], object]]


class _Running(threading.local):
    """The clock of the simulated event loop that runs, by thread."""

    clock: Clock | None = None

    def begin(self, clock: Clock) -> None:
        """A loop begins to run in this thread."""
        self.clock = clock

    def end(self) -> None:
        """It runs no longer."""
        self.clock = None


_running: Final = _Running()


def running_clock() -> Clock | None:
    """Return the clock of the simulated event loop that runs in this thread, or None."""
    return _running.clock


class ClockFollower(Protocol):
    """An object that uses the clock of the simulated loop that runs."""

    def follow_running_clock(self) -> None:
        """Use the clock of the loop that begins to run."""


class Clock:
    """A time in whole nanoseconds, and entries: actions with the time at which they are due.

    Time passes only by calls of `advance` and `spend`. They run the entries that become due, in the order of their
    times; entries with equal times run in the order of `at`. Times are integers, because a sum of floats depends on the
    order of its terms.
    """

    __slots__ = ("_entries", "_followers", "_is_advancing", "_order", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._entries: list[_Entry] = []  # a heap
        self._order = itertools.count()
        self._is_advancing = False
        self._followers: dict[weakref.ref[ClockFollower], None] = {}  # not a set: its order depends on addresses

    def at(self, when_ns: int, owner: object, action: Callable[[], object]) -> None:
        """Call ``action`` at a time, or at the next `advance` if that time has passed."""
        heapq.heappush(self._entries, (when_ns, next(self._order), owner, action))

    def next_ns(self) -> int | None:
        """Return the time of the next entry; None if there is none."""
        return self._entries[0][0] if self._entries else None

    def advance(self, until_ns: int) -> None:
        """Advance to ``until_ns`` or later, and run the entries that become due.

        A call from a running entry only advances the time.
        """
        if self._is_advancing:
            self.now_ns = max(self.now_ns, until_ns)
            return
        entries = self._entries
        self._is_advancing = True
        try:
            while entries and entries[0][0] <= until_ns:
                when, _, _, action = heapq.heappop(entries)
                self.now_ns = max(self.now_ns, when)
                action()
        finally:
            self._is_advancing = False
        self.now_ns = max(self.now_ns, until_ns)

    def spend(self, nanoseconds: int) -> None:
        """Advance by a number of nanoseconds, during which the host is busy."""
        until_ns = self.now_ns + nanoseconds
        if self._entries and self._entries[0][0] <= until_ns:
            self.advance(until_ns)
        else:
            self.now_ns = until_ns

    def move_entries(self, owner: object, source: Clock) -> None:
        """Move an owner's entries from another clock to this one. The remaining time of each stays the same."""
        shift = self.now_ns - source.now_ns
        for when, _, _, action in source._take_entries(owner):
            self.at(when + shift, owner, action)

    def _take_entries(self, owner: object) -> list[_Entry]:
        """Remove and return an owner's entries, in their order."""
        taken = sorted(entry for entry in self._entries if entry[2] is owner)
        self._entries = [entry for entry in self._entries if entry[2] is not owner]
        heapq.heapify(self._entries)
        return taken

    def add_follower(self, follower: ClockFollower) -> None:
        """Call the follower's `ClockFollower.follow_running_clock` whenever this clock's loop begins to run."""
        self._followers[weakref.ref(follower, lambda gone: self._followers.pop(gone, None))] = None

    def __enter__(self) -> None:
        _running.begin(self)
        for reference in list(self._followers):
            follower = reference()
            if follower is not None:
                follower.follow_running_clock()

    def __exit__(self, *exc: object) -> None:
        _running.end()
