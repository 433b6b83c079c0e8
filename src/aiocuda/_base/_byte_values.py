"""Byte values: a value for each byte of a range of memory, stored as runs of equal values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Generic, TypeVar

__all__ = ["ByteValues"]

T = TypeVar("T")


class ByteValues(Generic[T]):
    """A value for each byte from 0 to ``nbytes``; initially ``value`` for all bytes."""

    __slots__ = ("_starts", "_values", "nbytes")

    def __init__(self, nbytes: int, value: T) -> None:
        self.nbytes = nbytes
        self._starts = [0]  # sorted; each run ends where the next one starts
        self._values = [value]

    def within(self, start: int, stop: int) -> list[tuple[int, T]]:
        """Return (length, value) of each run between two bytes, in order."""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        edges = [start, *self._starts[first + 1 : last], stop]
        return [
            (after - before, value)
            for (before, after), value in zip(pairwise(edges), self._values[first:last], strict=True)
        ]

    def change(self, start: int, stop: int, change: Callable[[T], T]) -> None:
        """Replace the value of each byte between two by ``change(value)``."""
        first = self._cut(start)
        last = self._cut(stop)
        changed = [change(value) for value in self._values[first:last]]
        low, high = (max(first - 1, 0), min(last + 1, len(self._starts)))  # merges adjacent runs that are now equal
        starts: list[int] = []
        values: list[T] = []
        new = [*self._values[low:first], *changed, *self._values[last:high]]
        for at, value in zip(self._starts[low:high], new, strict=True):
            if not values or values[-1] != value:
                starts.append(at)
                values.append(value)
        self._starts[low:high] = starts
        self._values[low:high] = values

    def _cut(self, at: int) -> int:
        """Return the index of the run that starts at a byte. Split a run if none starts there."""
        index = bisect_left(self._starts, at)
        if at < self.nbytes and (index == len(self._starts) or self._starts[index] != at):
            self._starts.insert(index, at)
            self._values.insert(index, self._values[index - 1])
        return index
