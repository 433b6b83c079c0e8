"""Verbs about graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...errors import StaleHandleError
from ..protocol._graphs import CopyNode, EmptyNode, FillNode, KernelNode, Node, check_nodes, check_update
from ._code import Code
from ._memory import Memory
from ._replay import Part, Replay
from ._work import DeviceCopy, Fill, KernelCall, Transfer
from .rules import Command, Stream

__all__ = ["Graphs"]


class Graphs(Memory, Code):
    """`aiocuda.driver.protocol._graphs.Graphs` without a GPU."""

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        """A graph. The host's side of its copies is looked up now, the device's when they run."""
        self._enter()
        self._device(device)
        check_nodes(nodes)
        with self._lock:
            parts = [self._part(device, node) for node in nodes]
            handle = next(self._graph_handles)
            self._graphs[handle] = Replay(device, list(nodes), parts)
            return handle

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        """From the next launch on, a node works on something else."""
        self._enter()
        with self._lock:
            replay = self._replay(graph)
            check_update(replay.nodes, index, node)
            replay.parts[index] = self._part(replay.device, node)

    def graph_launch(self, stream: int, graph: int) -> None:
        """Run all of it in the order of a stream, and behind the launch before."""
        self._enter()
        with self._lock:
            on, replay = self._machine.stream(stream), self._replay(graph)
            self._same_device(on, replay.device)
            replay.launch(self._machine, on, functools.partial(self._submit_part, on))
            self._advance()

    def graph_destroy(self, graph: int) -> None:
        """Forget the graph; what streams have accepted still runs."""
        self._enter_release()
        with self._lock:
            self._replay(graph)
            del self._graphs[graph]

    def _submit_part(self, on: Stream, part: Part, stream: Stream, branch: int) -> Command:
        """Put one node of a launch on ``on`` into a branch's stream. The lock is held."""
        if part.work is None:
            return self._machine.submit(stream, part.kind)
        return self._machine.submit(stream, part.kind, part.work, part.engine, self._seconds(part.kind, part.work))

    def _replay(self, graph: int) -> Replay:
        try:
            return self._graphs[graph]
        except KeyError:
            raise StaleHandleError(f"{graph} is not a graph, or the graph was destroyed", handle=graph) from None

    def _part(self, device: int, node: Node) -> Part:
        """What a node does, its memory and its function checked. The lock is held."""
        if isinstance(node, EmptyNode):
            return Part("record")
        compute = self._machine.engine(device, "compute")
        if isinstance(node, KernelNode):
            loaded = self._loaded(node.function, device, "the graph")
            keywords = {"grid": node.grid, "block": node.block} if loaded.takes_grid else {}
            return Part("kernel", KernelCall(loaded, tuple(node.values), keywords, loaded.seconds), compute)
        if isinstance(node, FillNode):
            self._check_pattern(node.pattern)
            self._belongs(node.target, device)
            return Part("fill", Fill(node.target, bytes(node.pattern), node.count), compute)
        return self._copy_part(device, node)

    def _copy_part(self, device: int, node: CopyNode) -> Part:
        if node.kind == "copy":
            self._belongs(node.target, device)
            self._belongs(node.source, device)
            work = DeviceCopy(node.target, node.source, node.nbytes)
            return Part("copy", work, self._machine.engine(device, "compute"))
        up = node.kind == "upload"
        there, here = (node.target, node.source) if up else (node.source, node.target)
        self._belongs(there, device)
        host = self._host_side(here, node.nbytes)
        transfer = Transfer(self.model.transfer_seconds(node.nbytes), there, host, up)
        return Part(node.kind, transfer, self._machine.engine(device, node.kind))
