"""Clocks of the checker: which operations come before which."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Clock", "Stamp"]


class Stamp(NamedTuple):
    """The place of an operation in the order."""

    number: int  # of its stream
    tick: int  # its number in the stream
    seen: dict[int, int]  # the ticks of the other streams that come before it, by their numbers

    def add_to(self, ticks: dict[int, int]) -> None:
        """Add the operation, and all before it, to the newest ticks of each stream."""
        for number, tick in [*self.seen.items(), (self.number, self.tick)]:
            if tick > ticks.get(number, 0):
                ticks[number] = tick

    def covers(self, number: int, tick: int) -> bool:
        """Return whether it is this operation, or comes after it."""
        return (self.tick if number == self.number else self.seen.get(number, 0)) >= tick


class Clock:
    """The vector clock of a stream: what comes before its next operation."""

    __slots__ = ("name", "number", "seen", "tick")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.tick = 0  # the number of its own operations
        self.seen: dict[int, int] = {}  # of other streams; never changed in place, since operations refer to it

    def advance(self) -> Stamp:
        """Count an operation of the stream. Return its stamp."""
        self.tick += 1
        return self.stamp()

    def stamp(self) -> Stamp:
        """Return the stamp of the newest operation."""
        return Stamp(self.number, self.tick, self.seen)

    def join(self, stamp: Stamp) -> None:
        """Put the next operation of the stream after the operation of a stamp."""
        joined = dict(self.seen)
        stamp.add_to(joined)
        joined.pop(self.number, None)
        self.seen = joined
