"""The methods about graphs, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...errors import StaleHandleError
from ..protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node, check_nodes, check_update
from ._code import Code
from ._memory import Memory
from ._replay import NodeWork, Replay
from ._work import DeviceCopy, Fill, KernelCall, Transfer
from .rules import Command, Stream

__all__ = ["Graphs"]


class Graphs(Memory, Code):
    """`aiocuda.driver.protocol.Graphs` without a GPU."""

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        """Return a graph. The host memory of its copies is looked up now, the device memory when they run."""
        self._enter_device(device)
        check_nodes(nodes)
        with self._lock:
            work = [self._node_work(device, node) for node in nodes]
            handle = next(self._graph_handles)
            self._graphs[handle] = Replay(device, list(nodes), work)
            return handle

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        self._enter()
        with self._lock:
            replay = self._replay(graph)
            check_update(replay.nodes, index, node)
            replay.work[index] = self._node_work(replay.device, node)

    def graph_launch(self, stream: int, graph: int) -> None:
        self._enter()
        with self._lock:
            on, replay = self._machine.stream(stream), self._replay(graph)
            self._check_same_device(on, replay.device)
            replay.launch(self._machine, on, functools.partial(self._submit_node, on))
            self._advance()

    def graph_destroy(self, graph: int) -> None:
        self._enter_release()
        with self._lock:
            self._replay(graph)
            del self._graphs[graph]

    def _submit_node(self, on: Stream, node: NodeWork, stream: Stream, branch: int) -> Command:
        """Submit one node of a launch on ``on`` to a branch's stream. The caller holds the lock."""
        if node.work is None:
            return self._machine.submit(stream, node.kind)
        return self._machine.submit(stream, node.kind, node.work, node.engine, self._duration(node.kind, node.work))

    def _replay(self, graph: int) -> Replay:
        try:
            return self._graphs[graph]
        except KeyError:
            raise StaleHandleError(f"{graph} is not a graph, or the graph was destroyed", handle=graph) from None

    def _node_work(self, device: int, node: Node) -> NodeWork:
        """Check a node's memory and function, and return its work. The caller holds the lock."""
        if isinstance(node, EmptyNode):
            return NodeWork("record")
        compute = self._machine.engine(device, "compute")
        if isinstance(node, KernelNode):
            loaded = self._find_function(node.function, device, "the graph")
            keywords = {"grid": node.grid, "block": node.block} if loaded.takes_grid else {}
            return NodeWork("kernel", KernelCall(loaded, tuple(node.values), keywords, loaded.seconds), compute)
        if isinstance(node, FillNode):
            self._check_pattern(node.pattern)
            self._check_owner(node.target, device)
            return NodeWork("fill", Fill(node.target, bytes(node.pattern), node.count), compute)
        return self._copy_work(device, node)

    def _copy_work(self, device: int, node: CopyNode) -> NodeWork:
        if node.kind == "copy":
            self._check_owner(node.target, device)
            self._check_owner(node.source, device)
            work = DeviceCopy(node.target, node.source, node.nbytes)
            return NodeWork("copy", work, self._machine.engine(device, "compute"))
        up = node.kind == "upload"
        address, host_address = (node.target, node.source) if up else (node.source, node.target)
        self._check_owner(address, device)
        host = self._host_bytes(host_address, node.nbytes)
        transfer = Transfer(self.model.transfer_seconds(node.nbytes), address, host, up)
        return NodeWork(node.kind, transfer, self._machine.engine(device, node.kind))
