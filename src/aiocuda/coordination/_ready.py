"""Schedule: who is given the next place.

What waits for a place stands in one of five ranks, in each of them in the order of registration. An operation is
*overtaken* when one that was registered later is given a place before it. Overtaken 64 times, it rises one rank; the
lowest has four above it, so that at most 256 later ones overtake anybody.

To count that for each of 100 000 that wait, at each place given, would cost more than the places. But who is overtaken
in one rank is always a row from its first on: all that were registered before the one that overtook. So only the last
of that row is marked, and how often somebody was overtaken is the sum of the marks from him on. Only the first of a
rank need be asked, since nobody behind him has more.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from ._node import PRIORITIES, Node

__all__ = ["RISES_AFTER", "Ready"]

#: How often an operation is overtaken before it rises one rank.
RISES_AFTER = 64


class _Rank:
    """The operations of one rank, in the order of registration."""

    __slots__ = ("first", "nodes", "overtaken")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.first = 0  # those before it have left, and are None
        self.overtaken = 0  # how often the first one was

    def __len__(self) -> int:
        return len(self.nodes) - self.first

    def place_of(self, number: int) -> int:
        """The index of the first one that was registered at ``number`` or later."""
        return bisect_left(self.nodes, number, self.first, key=_number)

    def insert(self, node: Node[Any]) -> None:
        nodes = self.nodes
        node._ends = 0
        if len(nodes) == self.first or nodes[-1].id < node.id:
            nodes.append(node)
        else:
            nodes.insert(self.place_of(node.id), node)

    def remove(self, node: Node[Any]) -> None:
        at = self.place_of(node.id)
        if at == self.first:
            self.pop()
            return
        self.nodes[at - 1]._ends += node._ends  # who overtook him overtook those before him
        del self.nodes[at]

    def pop(self) -> Node[Any]:
        node: Node[Any] = self.nodes[self.first]
        self.nodes[self.first] = None
        self.overtaken -= node._ends
        self.first += 1
        if self.first >= 64 and self.first * 2 >= len(self.nodes):
            del self.nodes[: self.first]
            self.first = 0
        return node

    def overtake(self, number: int) -> None:
        """One that was registered at ``number`` goes before those in here."""
        nodes = self.nodes
        last = len(nodes) - 1
        if nodes[last].id > number:
            last = self.place_of(number) - 1
        if last >= self.first:
            nodes[last]._ends += 1
            self.overtaken += 1


class Ready:
    """What could be given to a stream, and waits for a place."""

    __slots__ = ("_ranks", "size")

    def __init__(self) -> None:
        self._ranks = [_Rank() for _ in PRIORITIES]
        self.size = 0

    @property
    def highest(self) -> int:
        """The rank that is served next; behind the last one if nobody waits."""
        for rank, waiting in enumerate(self._ranks):
            if len(waiting):
                return rank
        return len(self._ranks)

    def push(self, node: Node[Any]) -> None:
        """It waits from now on."""
        self._ranks[node._rank].insert(node)
        self.size += 1

    def remove(self, node: Node[Any]) -> None:
        """It waits no more."""
        self._ranks[node._rank].remove(node)
        self.size -= 1

    def pop(self) -> Node[Any]:
        """Who is served next."""
        self.size -= 1
        return self._ranks[self.highest].pop()

    def served(self, node: Node[Any]) -> None:
        """It was given a place: those of the lower ranks that were registered before it have been overtaken."""
        for rank in range(node._rank + 1, len(self._ranks)):
            waiting = self._ranks[rank]
            if not len(waiting):
                continue
            waiting.overtake(node.id)
            while len(waiting) and waiting.overtaken >= RISES_AFTER:
                risen = waiting.pop()
                risen._rank = rank - 1
                self._ranks[rank - 1].insert(risen)

    def everybody(self) -> list[Node[Any]]:
        """All that wait, the next one first."""
        return [node for rank in self._ranks for node in rank.nodes[rank.first :]]


def _number(node: Node[Any]) -> int:
    return node.id
