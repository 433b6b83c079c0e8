"""The oracle of coordinator graphs: the dependencies, the skipped operations and the bytes that a graph must have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from aiocuda import Operation
from aiocuda.coordination import Node
from tests.simulation import internals

__all__ = ["CELL", "CELLS", "ExpectedNode", "Fate", "Oracle", "Part"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: A buffer has this many cells, of this many items each. Operations use whole cells.
CELLS, CELL = 4, 4

#: Whether operations that need this one may run: it succeeded, it did not, or that is unknown.
Fate: TypeAlias = Literal["good", "bad", "unknown"]

#: A part of a buffer: (index of the buffer, first cell, last cell + 1).
Part: TypeAlias = "tuple[int, int, int]"


class ExpectedNode:
    """One operation of a graph, as the oracle sees it.

    Parameters
    ----------
    kind
        ``"upload"``, ``"bump"``, ``"blend"``, ``"download"``, ``"bracket"``, ``"host"``, ``"relay"`` or ``"outside"``.
    node
        The coordinator's node; None for an operation of a stream (``"outside"``).
    reads, writes
        The parts of buffers.
    value
        The argument of the operation.

    Attributes
    ----------
    dependencies : dict
        The nodes that this one comes after; True where it needs the result, False where only the order matters.
    submitted : Operation or None
        The operation that a stream was given; for ``"outside"``, that operation.
    shares : bool
        It runs in a stream of the program, which other tasks may close, or poison by a failure.
    withdrawn, abandoned : bool
        It was abandoned before it was submitted; it was abandoned at any time.
    raised, cancelled : bool
        Its function or block has raised; its block was left by a cancellation.
    upload_of : ExpectedNode or None
        The download into the host array that this node uploads.
    is_relayed : bool
        Another node uploads the array that this node downloads.
    expected : tuple or None
        The bytes of a download, and which of them are known.
    result : array or None
        The bytes that a download has returned.
    fate : Fate
        What operations that need this one have to expect.
    """

    def __init__(
        self, kind: str, node: Node[Any] | None, reads: Sequence[Part], writes: Sequence[Part], value: int
    ) -> None:
        self.kind = kind
        self.node = node
        self.reads = reads
        self.writes = writes
        self.value = value
        self.dependencies: dict[ExpectedNode, bool] = {}
        self.submitted: Operation[Any] | None = None
        self.shares = False
        self.withdrawn = self.abandoned = False
        self.raised = self.cancelled = False
        self.upload_of: ExpectedNode | None = None
        self.is_relayed = False
        self.expected: tuple[_Array, _Array] | None = None
        self.result: _Array | None = None
        self.fate: Fate = "unknown"

    @property
    def is_outside(self) -> bool:
        """True for an operation of a stream, without a node."""
        return self.node is None

    def last_operations(self) -> Iterator[Operation[Any]]:
        """Yield the operations that a dependent must come after, on the device. A skipped node has none itself."""
        if self.submitted is not None:
            yield self.submitted
        else:
            for other in self.dependencies:
                yield from other.last_operations()

    @property
    def may_be_followed(self) -> bool:
        """True if a dependent of this node may be submitted."""
        submitted = self.submitted
        if submitted is not None:
            has_event = internals.event_handle(submitted) is not None
            return has_event or internals.has_failed(submitted) or submitted.done()
        return self.node is not None and self.node.state not in ("waiting", "open")

    def __repr__(self) -> str:
        return repr(self.node if self.node is not None else self.submitted)


class Oracle:
    """Computes the dependencies of each node when it is registered, and judges all nodes when the graph has ended.

    It works cell by cell and node by node, and uses none of the data structures of the coordinator.

    Parameters
    ----------
    buffers
        The number of buffers. Their content at the beginning is unknown.
    """

    def __init__(self, buffers: int) -> None:
        self.nodes: list[ExpectedNode] = []
        self._buffers = range(buffers)
        self._writers: list[list[ExpectedNode | None]] = [[None] * CELLS for _ in self._buffers]
        self._readers: list[list[list[ExpectedNode]]] = [[[] for _ in range(CELLS)] for _ in self._buffers]

    def add(self, node: ExpectedNode, after: Iterable[ExpectedNode]) -> None:
        """Register a node. ``after`` are the dependencies that the program has named."""
        dependencies = node.dependencies
        for buffer, first, last in node.writes:
            for cell in range(first, last):
                writer = self._writers[buffer][cell]
                if writer is not None:
                    dependencies.setdefault(writer, False)
                for reader in self._readers[buffer][cell]:
                    dependencies.setdefault(reader, False)
        for buffer, first, last in node.reads:
            for cell in range(first, last):
                writer = self._writers[buffer][cell]
                if writer is not None:
                    dependencies[writer] = True
        for other in after:
            dependencies[other] = True
        for buffer, first, last in node.reads:
            for cell in range(first, last):
                self._readers[buffer][cell].append(node)
        for buffer, first, last in node.writes:
            for cell in range(first, last):
                self._writers[buffer][cell] = node
                self._readers[buffer][cell].clear()
        dependencies.pop(node, None)
        self.nodes.append(node)

    @staticmethod
    def depends_on(node: ExpectedNode, other: ExpectedNode) -> bool:
        """True if a node comes after another one, directly or through further nodes."""
        seen, left = {node}, [node]
        while left:
            for dependency in left.pop().dependencies:
                if dependency is other:
                    return True
                if dependency not in seen:
                    seen.add(dependency)
                    left.append(dependency)
        return False

    # -- at the end ----------------------------------------------------------------------------------------------

    def judge(self, upset: bool) -> Iterator[str]:
        """Yield what is wrong with the end of the graph.

        Parameters
        ----------
        upset
            True if the driver has injected a fault, so that any operation may have failed.
        """
        for node in self._in_order():
            needed = [other for other, is_needed in node.dependencies.items() if is_needed]
            failed = [other for other in needed if other.fate == "bad"]
            unknown = any(other.fate == "unknown" for other in needed)
            state = self._state(node)
            node.fate = self._fate(node, state, upset)
            if state == "skipped":
                if not (failed or unknown):
                    yield f"V9 {node!r} was skipped, and nothing that it needs had failed: {needed!r}"
                error = None if node.node is None else node.node.exception()
                if error is None or error.__cause__ is None:
                    yield f"V9 {node!r} was skipped, and its error has no cause"
            elif failed and (state == "done" or node.raised):
                yield f"V9 {node!r} ran, although it needs {failed[0]!r}, which did not succeed"
            elif state == "failed" and not (upset or node.raised or node.shares):
                yield f"V9 {node!r} failed, and nothing in it was to fail"
            elif node.raised and state not in ("failed", "abandoned"):
                yield f"V9 {node!r} is {state}, and its function or block has raised"
        yield from self._compare()

    def _in_order(self) -> list[ExpectedNode]:
        """Return each node after its dependencies. An edge that was added later may point to a later node."""
        ordered: dict[ExpectedNode, None] = {}
        left = self.nodes[::-1]
        while left:
            node = left[-1]
            missing = [other for other in node.dependencies if other not in ordered]
            left += missing
            if not missing:
                ordered[left.pop()] = None
        return list(ordered)

    @staticmethod
    def _state(node: ExpectedNode) -> str:
        if node.node is not None:
            return node.node.state
        return "done" if node.submitted is None else node.submitted.state

    @staticmethod
    def _fate(node: ExpectedNode, state: str, upset: bool) -> Fate:
        if state == "done":
            return "good"
        if node.is_outside:
            return "unknown"
        if node.withdrawn or node.raised or state == "skipped":
            return "bad"
        if state == "failed":
            # If it failed on the device, dependents may have been submitted before the host knew of that.
            failed_late = node.submitted is not None and node.node is not None and node.node.operation is node.submitted
            return "unknown" if failed_late else "bad"
        return "unknown" if upset or node.cancelled or not node.abandoned else "good"

    def _compare(self) -> Iterator[str]:
        """V2: run the nodes that succeeded one after the other, and compare the downloads."""
        values = [np.zeros(CELLS * CELL, np.uint32) for _ in self._buffers]
        known = [np.zeros(CELLS * CELL, bool) for _ in self._buffers]
        for node in self.nodes:
            if node.is_outside:
                continue
            if node.fate != "good":
                for part in node.writes:
                    _select(known, part)[:] = False
                continue
            if node.kind == "download" and node.reads:
                (part,) = node.reads
                node.expected = _select(values, part).copy(), _select(known, part).copy()
            if node.result is not None:
                for part in node.reads:
                    sure = _select(known, part)
                    if not np.array_equal(node.result[sure], _select(values, part)[sure]):
                        yield f"V2 {node!r} has other bytes than were written"
            for part in node.writes:
                self._write(node, part, values, known)

    @staticmethod
    def _write(node: ExpectedNode, target: Part, values: list[_Array], known: list[_Array]) -> None:
        if node.upload_of is not None:
            _select(known, target)[:] = False
            download = node.upload_of
            if download.expected is not None and download.result is not None:  # else the array was not written
                _select(values, target)[:], _select(known, target)[:] = download.expected
            return
        sources = [_select(values, part) for part in node.reads]
        _select(values, target)[:] = _computed(node, sources)
        _select(known, target)[:] = all(_select(known, part).all() for part in node.reads)


def _select(buffers: list[_Array], part: Part) -> _Array:
    buffer, first, last = part
    return buffers[buffer][first * CELL : last * CELL]


def _computed(node: ExpectedNode, sources: list[_Array]) -> Any:
    if node.kind == "bump":
        return sources[0] * np.uint32(5) + np.uint32(node.value)
    if node.kind == "blend":
        return sources[0] * np.uint32(3) + np.uint32(node.value)
    return np.uint32(node.value)
