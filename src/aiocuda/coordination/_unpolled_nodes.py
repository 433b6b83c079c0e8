"""UnpolledNodes: the finished nodes that `AsyncCoordinator.poll` returns next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from ._node import Node
from ._scheduled_node import ScheduledNode

__all__ = ["MOST_UNPOLLED", "UnpolledNodes"]

#: How many finished nodes are kept between two polls. The oldest are dropped.
MOST_UNPOLLED = 4096


class UnpolledNodes:
    """The nodes that have finished since the program polled last.

    It keeps neither arguments nor results of nodes. A node with a result is kept only weakly, with a copy that replaces
    it if the program has dropped it.

    Parameters
    ----------
    finished
        The nodes that have finished before.

    Attributes
    ----------
    dropped : int
        How many nodes were dropped because the program did not poll.
    """

    __slots__ = ("_nodes", "dropped")

    def __init__(self, finished: Iterable[ScheduledNode[Any]] = ()) -> None:
        self._nodes: deque[tuple[weakref.ref[ScheduledNode[Any]] | None, ScheduledNode[Any]]] = deque()
        self.dropped = 0
        for node in finished:
            self.add(node)

    def add(self, node: ScheduledNode[Any]) -> None:
        """Keep a finished node."""
        if len(self._nodes) == MOST_UNPOLLED:
            self._nodes.popleft()
            self.dropped += 1
        node.declared = None
        if node.has_result:
            self._nodes.append((weakref.ref(node), node.without_result()))
        else:
            self._nodes.append((None, node))

    def take(self) -> list[Node[Any]]:
        """Return the nodes in the order in which they have finished, and forget them."""
        nodes: list[Node[Any]] = []
        while self._nodes:
            reference, kept = self._nodes.popleft()
            node = None if reference is None else reference()
            nodes.append((kept if node is None else node).public)
        return nodes
