"""A graph on the machine: each launch is commands of streams, forked from the one that it is launched on.

A node goes on in the stream of one that it waits for, if that is the last one there; else it gets a side stream, and
waits there for all that it waits for. So what is not ordered by an edge is not ordered at all. The first root stands in
the launch's own stream, which at the end waits for every branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ..protocol._graphs import Node
from ._work import Work
from .rules import Command, Engine, Kind, Machine, Stream

__all__ = ["Part", "Replay", "Submit"]


class Part(NamedTuple):
    """What one node does: work for an engine, or nothing."""

    kind: Kind
    work: Work | None = None
    engine: Engine | None = None


#: Puts a part into a stream, that of a branch: 0 is the launch's own.
Submit: TypeAlias = Callable[[Part, Stream, int], Command]


@dataclasses.dataclass(slots=True)
class Replay:
    """One graph."""

    device: int
    nodes: list[Node]
    parts: list[Part]  #: what they do now; a launch's commands keep what they were given
    last: Command | None = None  #: the end of the newest launch

    def launch(self, machine: Machine, on: Stream, submit: Submit) -> None:
        """Put all of it into the stream, behind the launch before."""
        if self.last is not None:
            machine.follow(on, self.last)
        roots = sum(not node.after for node in self.nodes)
        start = machine.submit(on, "record") if roots > 1 else None
        free: Stream | None = on  # for the first root
        ends: list[Command] = []
        tails: dict[int, tuple[Stream, int]] = {}  # node → its stream and branch, while it is the last one there
        branches = 0
        for node, part in zip(self.nodes, self.parts, strict=True):
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
            ends.append(submit(part, stream, branch))
        for index, (stream, _) in tails.items():
            if stream is not on:
                machine.follow(on, ends[index])
        self.last = machine.submit(on, "record")
