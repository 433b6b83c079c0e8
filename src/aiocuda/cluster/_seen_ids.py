"""SeenIds: a set of integers that arrive roughly in order."""

from __future__ import annotations

__all__ = ["SeenIds"]


class SeenIds:
    """A set of integers from 0 on that arrive roughly in order. It needs memory only for those after the first gap."""

    __slots__ = ("_after", "_below")

    def __init__(self) -> None:
        self._below = 0  # all integers below this one are in the set
        self._after: set[int] = set()  # those above

    def add(self, number: int) -> bool:
        """Add an integer. Return False if it was in the set."""
        if number < self._below or number in self._after:
            return False
        self._after.add(number)
        while self._below in self._after:
            self._after.remove(self._below)
            self._below += 1
        return True
