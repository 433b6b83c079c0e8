"""`Replay`: a graph, and its launch as commands of streams.

The first node without dependencies runs in the stream of the launch. Every other node runs in the stream of a node that
it waits for, if that node is still the last one in its stream. Otherwise it gets a side stream, in which it waits for
all its dependencies. Nodes without a path between them are therefore unordered. At the end the stream of the launch
waits for all side streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ..protocol import Node
from ._work import Work
from .rules import Command, Engine, Kind, Machine, Stream

__all__ = ["NodeWork", "Replay", "Submit"]


class NodeWork(NamedTuple):
    """The work of one node: work for an engine, or none."""

    kind: Kind
    work: Work | None = None
    engine: Engine | None = None


#: Submits a node to the stream of a branch. Branch 0 is the stream of the launch.
Submit: TypeAlias = Callable[[NodeWork, Stream, int], Command]


@dataclasses.dataclass(slots=True)
class Replay:
    """One graph that can be launched."""

    device: int
    nodes: list[Node]
    work: list[NodeWork]  #: of each node, after updates; the commands of earlier launches keep theirs
    last: Command | None = None  #: the last command of the newest launch

    def launch(self, machine: Machine, on: Stream, submit: Submit) -> None:
        """Submit all nodes in the order of a stream, after the previous launch."""
        if self.last is not None:
            machine.follow(on, self.last)
        roots = sum(not node.after for node in self.nodes)
        start = machine.submit(on, "record") if roots > 1 else None
        free: Stream | None = on  # for the first root
        ends: list[Command] = []
        tails: dict[int, tuple[Stream, int]] = {}  # node → (stream, branch), while it is the last node in that stream
        branches = 0
        for node, work in zip(self.nodes, self.work, strict=True):
            place = next((tails.pop(other) for other in node.after if other in tails), None)
            if place is not None:
                stream, branch = place
            elif not node.after and free is not None:
                stream, branch, free = free, 0, None
            else:
                branches += 1
                stream, branch = machine.side_stream(on.device, on.priority), branches
                if start is not None and not node.after:
                    machine.follow(stream, start)
            for other in node.after:
                if ends[other].stream is not stream:
                    machine.follow(stream, ends[other])
            tails[len(ends)] = stream, branch
            ends.append(submit(work, stream, branch))
        for index, (stream, _) in tails.items():
            if stream is not on:
                machine.follow(on, ends[index])
        self.last = machine.submit(on, "record")
