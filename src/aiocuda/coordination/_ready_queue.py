"""ReadyQueue: the nodes that wait for a place, and their order.

The nodes are in five ranks; within a rank they are in the order of registration. A node is *overtaken* when a node that
was registered later gets a place before it. A node that has been overtaken 64 times moves up one rank. The lowest rank
has four ranks above it, so at most 256 later nodes overtake any node.

Counting this for each of 100 000 waiting nodes, each time a place is assigned, would cost more than the rest of the
scheduler. So each rank keeps the ids of the nodes that have overtaken its first node: a node was overtaken by those of
them that are larger than its own id. Only the first node of a rank needs to be checked, since no later node of the rank
has been overtaken more often. So there are fewer than 64 ids.

The requests of an `aiocuda.serving.MicroBatcher` wait in the same order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from ._node import PRIORITIES

__all__ = ["RISES_AFTER", "Ranked", "ReadyQueue"]

#: After how many overtakings a node moves up one rank.
RISES_AFTER = 64

#: So many removed nodes may stay in a rank whatever its length.
FEW_REMOVED = 32


class Ranked(Protocol):
    """A node, or a request, in a `ReadyQueue`.

    Attributes
    ----------
    id : int
        Increases in the order of registration.
    rank : int
        The index of its priority. The queue lowers it.
    """

    id: int
    rank: int


R = TypeVar("R", bound=Ranked)


class _Removed:
    """The place of a node that was removed."""

    __slots__ = ("id",)

    def __init__(self, node: Ranked) -> None:
        self.id = node.id


class _Rank(Generic[R]):
    """The nodes of one rank, in the order of registration.

    It is empty if `first` is the length of `nodes`: a removed node is never the first one.
    """

    __slots__ = ("first", "nodes", "overtakers", "removed")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.first = 0  # the index of the first node, which was not removed; the entries before it are None
        self.overtakers: list[int] = []  # the sorted ids of the nodes that have overtaken the first node
        self.removed = 0  # entries after the first node that were removed

    def __len__(self) -> int:
        return len(self.nodes) - self.first - self.removed

    def index_of(self, number: int) -> int:
        """Return the index of the first node with an id of at least ``number``."""
        return bisect_left(self.nodes, number, self.first, key=_number)

    def insert(self, node: R) -> None:
        nodes = self.nodes
        if len(nodes) == self.first or nodes[-1].id < node.id:
            nodes.append(node)
        else:
            nodes.insert(self.index_of(node.id), node)

    def remove(self, node: R) -> None:
        if self.nodes[self.first] is node:
            self.pop()
            return
        self.nodes[self.index_of(node.id)] = _Removed(node)
        self.removed += 1
        if self.removed > FEW_REMOVED and self.removed > len(self):
            self._compact()

    def pop(self) -> R:
        nodes = self.nodes
        node: R = nodes[self.first]
        while True:
            nodes[self.first] = None
            self.first += 1
            if not self.removed or type(nodes[self.first]) is not _Removed:
                break
            self.removed -= 1
        if self.overtakers:
            del self.overtakers[
                : bisect_left(self.overtakers, nodes[self.first].id) if self.first < len(nodes) else None
            ]
        if self.first >= 64 and self.first * 2 >= len(nodes):
            del nodes[: self.first]
            self.first = 0
        return node

    def _compact(self) -> None:
        self.nodes = [entry for entry in self.nodes[self.first :] if type(entry) is not _Removed]
        self.first = self.removed = 0

    def overtake(self, number: int) -> None:
        """Count that the node with this id gets a place before the nodes of this rank."""
        if number > self.nodes[self.first].id:
            insort(self.overtakers, number)

    def overtakers_of(self, node: R) -> list[int]:
        """Return the ids of the nodes that have overtaken a node of this rank."""
        return self.overtakers[bisect_right(self.overtakers, node.id) :]


class ReadyQueue(Generic[R]):
    """The nodes that can be submitted and wait for a place. Each call takes constant or logarithmic time."""

    __slots__ = ("_ranks", "size")

    def __init__(self) -> None:
        self._ranks: list[_Rank[R]] = []  # made for the first node that waits: they take 1 KB
        self.size = 0

    @property
    def highest(self) -> int:
        """The rank of the next node; the number of ranks if the queue is empty."""
        for rank, waiting in enumerate(self._ranks):
            if waiting.first < len(waiting.nodes):
                return rank
        return len(PRIORITIES)

    @property
    def first(self) -> R:
        """The next node. The queue is not empty."""
        waiting = self._ranks[self.highest]
        node: R = waiting.nodes[waiting.first]
        return node

    def push(self, node: R) -> None:
        """Add a node."""
        if not self._ranks:
            self._ranks = [_Rank() for _ in PRIORITIES]
        self._ranks[node.rank].insert(node)
        self.size += 1

    def remove(self, node: R) -> None:
        """Remove a node without a place for it."""
        self._ranks[node.rank].remove(node)
        self.size -= 1

    def pop(self) -> R:
        """Remove and return the next node."""
        self.size -= 1
        return self._ranks[self.highest].pop()

    def served(self, node: R) -> Sequence[R]:
        """Count that a node got a place: earlier nodes of lower ranks have been overtaken.

        Return the nodes that have moved up one rank because of that.
        """
        moved: list[R] = []
        for rank in range(node.rank + 1, len(self._ranks)):
            waiting = self._ranks[rank]
            if waiting.first == len(waiting.nodes):
                continue
            waiting.overtake(node.id)
            if len(waiting.overtakers) >= RISES_AFTER:
                self._raise(rank, moved)
        return moved

    def change_rank(self, node: R, rank: int) -> None:
        """Move a node to another rank. How often it was overtaken still counts."""
        before = self._ranks[node.rank].overtakers_of(node)
        self.remove(node)
        node.rank = rank
        self.push(node)
        if before and rank:
            joined = self._ranks[rank]
            joined.overtakers = sorted({*joined.overtakers, *before})
            self._raise(rank, [])

    def _raise(self, rank: int, moved: list[R]) -> None:
        """Move the nodes of a rank that have been overtaken often enough up one rank."""
        waiting = self._ranks[rank]
        while len(waiting.overtakers) >= RISES_AFTER:  # not if it is empty
            risen = waiting.pop()
            risen.rank = rank - 1
            self._ranks[rank - 1].insert(risen)
            moved.append(risen)


def _number(entry: Any) -> int:
    number: int = entry.id
    return number
