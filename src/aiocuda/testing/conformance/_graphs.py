"""Graphs: a launch runs all nodes in the order of the edges, and at its place in the stream."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from ...driver.protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node
from ...errors import InvalidArgumentError, StaleHandleError
from ..kernels import AFFINE, HOLD, Sample
from ._base import VERBS, Conformance
from ._rig import Array, Hold, Rig, address_of, span

__all__ = ["GraphConformance"]

_BYTES = 256
_VALUE = 0x5A


class _Sketch:
    """The nodes of a graph that is being built."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.nodes: list[Node] = []

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def kernel(self, sample: Sample, *arguments: object, after: tuple[int, ...] = ()) -> KernelNode:
        rig = self.rig
        return KernelNode(rig.function(sample), (1, 1, 1), (32, 1, 1), 0, tuple(rig.arguments(*arguments)), after)

    def affine(self, memory: int, factor: int, term: int, after: tuple[int, ...] = ()) -> int:
        return self.add(self.kernel(AFFINE, span(memory, _BYTES // 4, "u4"), _BYTES // 4, factor, term, after=after))

    def fill(self, memory: int, value: int = _VALUE, after: tuple[int, ...] = ()) -> int:
        return self.add(FillNode(memory, bytes([value]), _BYTES, after))

    def hold(self, after: tuple[int, ...] = ()) -> tuple[int, Hold]:
        """Add a kernel that runs until it is released. In later launches it ends immediately."""
        words = self.rig.small(2, "u4")
        nanoseconds = int(self.rig.hold_seconds * 1e9)
        node = self.kernel(HOLD, span(words, 2, "u4"), nanoseconds, after=after)
        self.rig.releases.append(words)
        return self.add(node), Hold(words, self.rig.patience, self.rig.pause)

    def build(self) -> int:
        return self.rig.graph(self.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """A node that writes `_VALUE` where there are zeros, and a function that reads the result."""

    node: Node
    look: Callable[[], Array]


def _mark(rig: Rig, verb: str) -> _Mark:
    host = rig.small(_BYTES, value=_VALUE if verb == "upload" else 0)
    target, source = rig.memory(_BYTES), rig.memory(_BYTES, _VALUE)
    node: Node
    if verb == "upload":
        node = CopyNode("upload", target, address_of(host), _BYTES)
    elif verb == "download":
        node = CopyNode("download", address_of(host), source, _BYTES)
    elif verb == "copy":
        node = CopyNode("copy", target, source, _BYTES)
    elif verb == "fill":
        node = FillNode(target, bytes([_VALUE]), _BYTES)
    else:
        words = _BYTES // 4
        node = _Sketch(rig).kernel(AFFINE, span(target, words, "u4"), words, 1, 0x5A5A5A5A)
    return _Mark(node, host.copy if verb == "download" else lambda: rig.look(target, _BYTES))


class GraphConformance(Conformance):
    """Rules for graphs that are built from nodes."""

    @pytest.mark.parametrize("verb", VERBS)
    def test_graph_after_a_held_kernel_is_not_visible(self, rig: Rig, verb: str) -> None:
        """A graph writes nothing while an earlier kernel of its stream runs."""
        mark, stream = _mark(rig, verb), rig.stream()
        graph = rig.graph([mark.node])
        hold = rig.hold(stream)
        with rig.unblocked("the launch of a graph"):
            rig.driver.graph_launch(stream, graph)
        rig.witness()
        assert not mark.look().any()
        assert not rig.driver.stream_query(stream)
        hold.release()
        rig.finish(stream)
        assert (mark.look() == _VALUE).all()

    def test_edges_hold_and_branches_overlap(self, rig: Rig) -> None:
        """A node waits for the nodes that it depends on, and for no others."""
        beside, behind, met = (rig.memory(_BYTES) for _ in range(3))
        sketch, stream = _Sketch(rig), rig.stream()
        first, hold = sketch.hold()
        waits = sketch.fill(behind, after=(first,))
        free = sketch.fill(beside)
        sketch.fill(met, after=(waits, free))
        graph = sketch.build()
        with rig.unblocked("the launch of a graph"):
            rig.driver.graph_launch(stream, graph)
        hold.wait_running()
        rig.wait_until(lambda: bool((rig.look(beside, _BYTES) == _VALUE).all()), "a branch that waits for nothing ends")
        assert not rig.look(behind, _BYTES).any()
        assert not rig.look(met, _BYTES).any()
        assert not rig.driver.stream_query(stream)
        hold.release()
        rig.finish(stream)
        assert all((rig.look(memory, _BYTES) == _VALUE).all() for memory in (behind, met))

    def test_work_after_a_launch_waits_for_every_branch(self, rig: Rig) -> None:
        """Work after a graph in its stream waits for all nodes of the graph."""
        behind = rig.memory(_BYTES)
        sketch, stream = _Sketch(rig), rig.stream()
        sketch.fill(rig.memory(_BYTES))
        _, hold = sketch.hold()
        graph = sketch.build()
        rig.driver.graph_launch(stream, graph)
        event = rig.record(stream)
        rig.driver.fill(stream, behind, bytes([_VALUE]), _BYTES)
        hold.wait_running()
        rig.witness()
        assert not rig.driver.event_query(event)
        assert not rig.look(behind, _BYTES).any()
        hold.release()
        rig.finish(stream)
        assert rig.driver.event_query(event)
        assert (rig.look(behind, _BYTES) == _VALUE).all()

    def test_launches_of_one_graph_do_not_overlap(self, rig: Rig) -> None:
        """Two launches of one graph in two streams run one after the other."""
        memory = rig.memory(_BYTES)
        sketch, streams = _Sketch(rig), [rig.stream(), rig.stream()]
        first, hold = sketch.hold()
        sketch.affine(memory, 3, 1, after=(first,))
        graph = sketch.build()
        for stream in streams:
            rig.driver.graph_launch(stream, graph)
        hold.wait_running()
        rig.witness()
        assert not rig.driver.stream_query(streams[1])
        hold.release()
        rig.finish(*streams)
        assert (rig.look(memory, _BYTES // 4, "u4") == 4).all()

    def test_update_reaches_later_launches_only(self, rig: Rig) -> None:
        """An update changes later launches, not those that wait in a stream."""
        memory, stream = rig.memory(_BYTES), rig.stream()
        sketch = _Sketch(rig)
        node = sketch.affine(memory, 10, 1)
        graph = sketch.build()
        words = span(memory, _BYTES // 4, "u4")
        hold = rig.hold(stream)
        with rig.unblocked("launching and updating a graph"):
            for digit in (1, 2, 3):
                rig.driver.graph_update(graph, node, sketch.kernel(AFFINE, words, _BYTES // 4, 10, digit))
                rig.driver.graph_launch(stream, graph)
        assert hold.running
        hold.release()
        rig.finish(stream)
        assert (rig.look(memory, _BYTES // 4, "u4") == 123).all()

    def test_update_of_addresses_and_values(self, rig: Rig) -> None:
        """An update changes the addresses and values of copies and fills."""
        stream = rig.stream()
        first, second = rig.memory(_BYTES), rig.memory(_BYTES)
        up, down = rig.small(_BYTES, value=7), rig.small(_BYTES)
        graph = rig.graph(
            [
                CopyNode("upload", first, address_of(up), _BYTES),
                FillNode(second, b"\x01", _BYTES),
                CopyNode("download", address_of(down), first, _BYTES, (0,)),
            ]
        )
        rig.driver.graph_launch(stream, graph)
        rig.finish(stream)
        assert (down == 7).all()
        assert (rig.look(second, _BYTES) == 1).all()
        other_up, other_down = rig.small(_BYTES, value=9), rig.small(_BYTES)
        rig.driver.graph_update(graph, 0, CopyNode("upload", second, address_of(other_up), _BYTES))
        rig.driver.graph_update(graph, 1, FillNode(first, b"\x02", _BYTES))
        rig.driver.graph_update(graph, 2, CopyNode("download", address_of(other_down), second, _BYTES))
        rig.driver.graph_launch(stream, graph)
        rig.finish(stream)
        assert (other_down == 9).all()
        assert (down == 7).all()
        assert (rig.look(first, _BYTES) == 2).all()

    @pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
    def test_pattern_of_every_size(self, rig: Rig, size: int) -> None:
        """A fill node repeats patterns of 1, 2, 4, 8 and 16 bytes."""
        memory, stream = rig.memory(_BYTES), rig.stream()
        pattern = bytes(range(1, size + 1))
        graph = rig.graph([FillNode(memory, pattern, _BYTES // size // 2)])
        rig.driver.graph_launch(stream, graph)
        rig.finish(stream)
        assert rig.look(memory, _BYTES).tobytes() == pattern * (_BYTES // size // 2) + bytes(_BYTES // 2)

    @pytest.mark.parametrize("seed", range(4))
    def test_random_graph_equals_sequential_execution(self, rig: Rig, seed: int) -> None:
        """A random graph with all necessary edges has the result of its nodes run one after the other."""
        chance, stream = random.Random(seed), rig.stream()
        memory = [rig.memory(_BYTES) for _ in range(4)]
        expected = np.zeros((4, _BYTES // 4), "u4")
        sketch = _Sketch(rig)
        steps: list[tuple[str, int, int]] = []
        touched: list[list[int]] = [[] for _ in memory]  # by buffer: the nodes that use it
        for _ in range(24):
            verb, to, origin = chance.choice(("affine", "copy", "fill")), *chance.sample(range(4), 2)
            after = tuple(sorted({*touched[to], *(touched[origin] if verb == "copy" else ())}))
            if verb == "affine":
                node = sketch.affine(memory[to], 3, 1, after)
            elif verb == "copy":
                node = sketch.add(CopyNode("copy", memory[to], memory[origin], _BYTES, after))
                touched[origin].append(node)
            else:
                node = sketch.fill(memory[to], 2, after)
            touched[to].append(node)
            steps.append((verb, to, origin))
        graph = sketch.build()
        for launch in range(3):
            for index, (verb, to, origin) in enumerate(steps):
                if verb == "affine":
                    words = span(memory[to], _BYTES // 4, "u4")
                    factor = 3 + 2 * chance.randrange(5)
                    new = sketch.kernel(AFFINE, words, _BYTES // 4, factor, launch)
                    rig.driver.graph_update(graph, index, new)
                    expected[to] = expected[to] * np.uint32(factor) + np.uint32(launch)
                else:
                    expected[to] = expected[origin] if verb == "copy" else 0x02020202
            rig.driver.graph_launch(stream, graph)
        rig.finish(stream)
        for address, content in zip(memory, expected, strict=True):
            assert (rig.look(address, _BYTES // 4, "u4") == content).all()

    def test_empty_graph_keeps_its_place(self, rig: Rig) -> None:
        """Graphs without work are done in stream order."""
        stream = rig.stream()
        for nodes in ([], [EmptyNode()], [EmptyNode(), EmptyNode(), EmptyNode((0, 1))]):
            rig.driver.graph_launch(stream, rig.graph(nodes))
        event = rig.record(stream)
        rig.finish_event(event)

    def test_destroyed_graph_still_runs_its_launches(self, rig: Rig) -> None:
        """Launches made before `graph_destroy` run; every later verb refuses the handle."""
        memory, stream = rig.memory(_BYTES), rig.stream()
        graph = rig.graph([FillNode(memory, bytes([_VALUE]), _BYTES)])
        hold = rig.hold(stream)
        rig.driver.graph_launch(stream, graph)
        rig.destroy_graph(graph)
        with pytest.raises(StaleHandleError):
            rig.driver.graph_launch(stream, graph)
        with pytest.raises(StaleHandleError):
            rig.driver.graph_update(graph, 0, FillNode(memory, b"\x01", _BYTES))
        with pytest.raises(StaleHandleError):
            rig.driver.graph_destroy(graph)
        hold.release()
        rig.finish(stream)
        assert (rig.look(memory, _BYTES) == _VALUE).all()

    def test_graphs_are_counted(self, rig: Rig) -> None:
        """`statistics` counts graphs."""
        before = rig.driver.statistics()["graphs"]
        graph = rig.graph([EmptyNode()])
        assert rig.driver.statistics()["graphs"] == before + 1
        rig.destroy_graph(graph)
        assert rig.driver.statistics()["graphs"] == before

    def test_invalid_graph_is_refused_and_leaves_nothing(self, rig: Rig) -> None:
        """`graph_build` refuses invalid nodes and edges."""
        memory, before = rig.memory(_BYTES), rig.driver.statistics()["graphs"]
        fill = FillNode(memory, b"\x01", _BYTES)
        for nodes in (
            [EmptyNode((0,))],
            [EmptyNode((1,)), EmptyNode()],
            [EmptyNode(), EmptyNode((0, 0))],
            [dataclasses.replace(fill, count=0)],
            [dataclasses.replace(fill, pattern=b"abc")],
            [CopyNode("copy", memory, memory + 64, 0)],
        ):
            with pytest.raises(InvalidArgumentError):
                rig.graph(nodes)
        with pytest.raises(StaleHandleError):
            rig.graph([KernelNode(2**40 + 1, (1, 1, 1), (1, 1, 1), 0, ())])
        assert rig.driver.statistics()["graphs"] == before

    def test_invalid_update_is_refused_and_changes_nothing(self, rig: Rig) -> None:
        """`graph_update` refuses another kind of node, another size, or an index that does not exist."""
        memory, stream = rig.memory(_BYTES), rig.stream()
        graph = rig.graph([FillNode(memory, bytes([_VALUE]), _BYTES)])
        copy = CopyNode("copy", memory, memory + 128, 64)
        for index, node in ((0, copy), (0, FillNode(memory, b"\x01\x02", 128)), (1, copy), (-1, copy)):
            with pytest.raises(InvalidArgumentError):
                rig.driver.graph_update(graph, index, node)
        rig.driver.graph_launch(stream, graph)
        rig.finish(stream)
        assert (rig.look(memory, _BYTES) == _VALUE).all()
