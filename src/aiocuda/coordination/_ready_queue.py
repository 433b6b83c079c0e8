"""ReadyQueue: the nodes that wait for a place, and their order.

The nodes are in five ranks; within a rank they are in the order of registration. A node is *overtaken* when a node that
was registered later gets a place before it. A node that has been overtaken 64 times moves up one rank. The lowest rank
has four ranks above it, so at most 256 later nodes overtake any node.

Counting this for each of 100 000 waiting nodes, each time a place is assigned, would cost more than the rest of the
scheduler. But the nodes of a rank that are overtaken together are always its first ones: all that were registered
before the overtaking node. So only the last of them is marked, and a node has been overtaken as often as the sum of the
marks from this node to the end of its rank. Only the first node of a rank needs to be checked, since no later node of
the rank has been overtaken more often.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from ._node import PRIORITIES
from ._scheduled_node import ScheduledNode

__all__ = ["RISES_AFTER", "ReadyQueue"]

#: After how many overtakings a node moves up one rank.
RISES_AFTER = 64


class _Rank:
    """The nodes of one rank, in the order of registration."""

    __slots__ = ("first", "nodes", "overtaken")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.first = 0  # the index of the first node; the entries before it are None
        self.overtaken = 0  # how often the first node was overtaken

    def __len__(self) -> int:
        return len(self.nodes) - self.first

    def index_of(self, number: int) -> int:
        """Return the index of the first node with an id of at least ``number``."""
        return bisect_left(self.nodes, number, self.first, key=_number)

    def insert(self, node: ScheduledNode[Any]) -> None:
        nodes = self.nodes
        node.overtakings = 0
        if len(nodes) == self.first or nodes[-1].id < node.id:
            nodes.append(node)
        else:
            nodes.insert(self.index_of(node.id), node)

    def remove(self, node: ScheduledNode[Any]) -> None:
        at = self.index_of(node.id)
        if at == self.first:
            self.pop()
            return
        self.nodes[at - 1].overtakings += node.overtakings  # a node that overtook this one overtook the earlier ones
        del self.nodes[at]

    def pop(self) -> ScheduledNode[Any]:
        node: ScheduledNode[Any] = self.nodes[self.first]
        self.nodes[self.first] = None
        self.overtaken -= node.overtakings
        self.first += 1
        if self.first >= 64 and self.first * 2 >= len(self.nodes):
            del self.nodes[: self.first]
            self.first = 0
        return node

    def overtake(self, number: int) -> None:
        """Count that the node with this id gets a place before the nodes of this rank."""
        nodes = self.nodes
        last = len(nodes) - 1
        if nodes[last].id > number:
            last = self.index_of(number) - 1
        if last >= self.first:
            nodes[last].overtakings += 1
            self.overtaken += 1


class ReadyQueue:
    """The nodes that can be submitted and wait for a place."""

    __slots__ = ("_ranks", "size")

    def __init__(self) -> None:
        self._ranks = [_Rank() for _ in PRIORITIES]
        self.size = 0

    @property
    def highest(self) -> int:
        """The rank of the next node; the number of ranks if the queue is empty."""
        for rank, waiting in enumerate(self._ranks):
            if len(waiting):
                return rank
        return len(self._ranks)

    def push(self, node: ScheduledNode[Any]) -> None:
        """Add a node."""
        self._ranks[node.rank].insert(node)
        self.size += 1

    def remove(self, node: ScheduledNode[Any]) -> None:
        """Remove a node without a place for it."""
        self._ranks[node.rank].remove(node)
        self.size -= 1

    def pop(self) -> ScheduledNode[Any]:
        """Remove and return the next node."""
        self.size -= 1
        return self._ranks[self.highest].pop()

    def served(self, node: ScheduledNode[Any]) -> None:
        """Count that a node got a place: earlier nodes of lower ranks have been overtaken."""
        for rank in range(node.rank + 1, len(self._ranks)):
            waiting = self._ranks[rank]
            if not len(waiting):
                continue
            waiting.overtake(node.id)
            while len(waiting) and waiting.overtaken >= RISES_AFTER:
                risen = waiting.pop()
                risen.rank = rank - 1
                self._ranks[rank - 1].insert(risen)


def _number(node: ScheduledNode[Any]) -> int:
    return node.id
