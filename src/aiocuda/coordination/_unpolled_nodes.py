"""UnpolledNodes: the finished nodes that `AsyncCoordinator.poll` returns next."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from ._node import Node
from ._scheduled_node import ScheduledNode

__all__ = ["UnpolledNodes"]

#: How many finished nodes are kept between two polls. The oldest are dropped.
MOST_UNPOLLED = 4096

#: References to finished nodes, before the first poll, from which the dead ones are forgotten.
LEAST_BEFORE = 64


class UnpolledNodes:
    """The nodes that have finished since the program polled last.

    Until the first poll, it refers to nodes only weakly: a program that never polls keeps no node. From then on it
    keeps them, without arguments and results. A node with a result is kept only weakly, with a copy that replaces it if
    the program has dropped it.

    Attributes
    ----------
    dropped : int
        How many nodes were dropped because the program did not poll.
    """

    __slots__ = ("_before", "_most_before", "_nodes", "dropped")

    def __init__(self) -> None:
        #: None from the first poll on; a deque once there were many: an empty one takes 760 bytes.
        self._before: list[weakref.ref[ScheduledNode[Any]]] | deque[weakref.ref[ScheduledNode[Any]]] | None = []
        self._most_before = LEAST_BEFORE  # more make it forget the dead ones: constant time for each
        self._nodes: deque[tuple[weakref.ref[ScheduledNode[Any]] | None, ScheduledNode[Any]]] | None = None
        self.dropped = 0

    def keep(self) -> None:
        """Keep nodes from now on: the program polls."""
        before = self._before
        if before is None:
            return
        finished = [node for each in before if (node := each()) is not None]
        try:
            self._before, self._nodes = None, deque()
            for node in finished:
                self.add(node)
        except BaseException:  # Ctrl-C: the next call begins again
            self._before, self._nodes = before, None
            raise

    def add(self, node: ScheduledNode[Any]) -> None:
        """Add a node that has finished. Hot: each node comes here."""
        before = self._before
        if before is not None:
            before.append(weakref.ref(node))
            if len(before) > self._most_before:
                alive = self._before = deque([each for each in before if each() is not None], MOST_UNPOLLED)
                self._most_before = min(max(LEAST_BEFORE, 2 * len(alive)), MOST_UNPOLLED)
            return
        nodes = self._nodes
        assert nodes is not None
        if len(nodes) == MOST_UNPOLLED:
            nodes.popleft()
            self.dropped += 1
        node.declared = None
        if node.has_result:
            nodes.append((weakref.ref(node), node.without_result()))
        else:
            nodes.append((None, node))

    def take(self) -> list[Node[Any]]:
        """Return the nodes in the order in which they have finished, and forget them."""
        nodes: list[Node[Any]] = []
        while self._nodes:
            reference, kept = self._nodes.popleft()
            node = None if reference is None else reference()
            nodes.append((kept if node is None else node).public)
        return nodes
