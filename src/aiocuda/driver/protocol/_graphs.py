"""Graphs: work that is described once, with its dependencies, and launched as a whole, often.

A graph is built from nodes, explicitly; nothing here captures a stream. What a node works on can be changed between
launches; which nodes there are, and what comes before what, cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from ..._types import Dim3
from ...errors import InvalidArgumentError

__all__ = ["CopyNode", "EmptyNode", "FillNode", "Graphs", "KernelNode", "Node", "check_nodes", "check_update"]


@dataclasses.dataclass(frozen=True, slots=True)
class KernelNode:
    """A launch."""

    function: int
    grid: Dim3
    block: Dim3
    shared_bytes: int
    values: tuple[Any, ...]  #: as a launcher takes them
    after: tuple[int, ...] = ()  #: the nodes that it waits for, by their places: all before its own


@dataclasses.dataclass(frozen=True, slots=True)
class CopyNode:
    """A copy between the device and page-locked memory, or within the device."""

    kind: Literal["upload", "download", "copy"]
    target: int
    source: int
    nbytes: int  #: more than 0
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FillNode:
    """A pattern of 1, 2, 4, 8 or 16 bytes, repeated."""

    target: int
    pattern: bytes
    count: int  #: more than 0
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyNode:
    """Nothing: a place where others meet."""

    after: tuple[int, ...] = ()


Node: TypeAlias = KernelNode | CopyNode | FillNode | EmptyNode


class Graphs(Protocol):
    """Verbs about graphs. One graph is used by one thread at a time."""

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        """A graph that can be launched on streams of a device, its code and parameters there. **May block.**

        ``cuGraphCreate``, ``cuGraphAddKernelNode`` and its kin, ``cuGraphInstantiateWithParams``. A node that waits for
        one that does not come before it: `InvalidArgumentError`; a function of another device: `WrongDeviceError`.
        """

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        """From the next launch on, this node works on something else. ``cuGraphExecKernelNodeSetParams`` and its kin.

        The node is of the same class, a copy of the same kind, a fill with a pattern of as many bytes; its ``after`` is
        ignored. Launches that a stream has accepted keep what they were launched with.
        """

    def graph_launch(self, stream: int, graph: int) -> None:
        """Run all of it in the order of a stream. ``cuGraphLaunch``.

        A launch comes behind every earlier launch of the same graph, too, in whatever stream. Nodes that do not wait
        for one another may run in any order, and at once.
        """

    def graph_destroy(self, graph: int) -> None:
        """Give it back; launches that streams have accepted still run. **May block.** ``cuGraphExecDestroy``."""


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise unless each node waits for earlier ones only, and copies and fills have something to do."""
    for index, node in enumerate(nodes):
        check_size(node)
        for other in node.after:
            if not 0 <= other < index:
                raise InvalidArgumentError(f"node {index} of a graph waits for node {other}, which is not before it")
        if len(set(node.after)) != len(node.after):
            raise InvalidArgumentError(f"node {index} of a graph waits for one node twice: {node.after}")


def check_size(node: Node) -> None:
    """Raise if it copies or fills nothing."""
    size = node.nbytes if isinstance(node, CopyNode) else node.count if isinstance(node, FillNode) else 1
    if size < 1:
        raise InvalidArgumentError(f"{node!r} has nothing to do: a node of a graph copies or fills at least one item")


def check_update(nodes: Sequence[Node], index: int, new: Node) -> None:
    """Raise unless there is such a node, and this one can take its place."""
    if not 0 <= index < len(nodes):
        raise InvalidArgumentError(f"the graph has no node {index}: it has {len(nodes)}, counted from 0")
    old = nodes[index]
    same = type(old) is type(new)
    if isinstance(old, CopyNode) and isinstance(new, CopyNode):
        same = old.kind == new.kind
    if isinstance(old, FillNode) and isinstance(new, FillNode):
        same = len(old.pattern) == len(new.pattern)
    if not same:
        raise InvalidArgumentError(f"{new!r} cannot take the place of {old!r}: build another graph")
    check_size(new)
