"""DependencyGraph: which operation depends on which, named or inferred from the bytes that operations read and write.

An edge that carries data (read-after-write, or named) *needs* its source: if the source fails, the dependent is
skipped. Other edges (write-after-read, and write-after-write where the bytes are not read) only keep the order: if the
source fails, the dependent still runs, after everything that the source waited for.

**Poison.** Bytes that an operation should have written, but did not because it failed, was skipped or was withdrawn,
are *poisoned*. An operation that reads a poisoned byte is skipped. The bytes stay poisoned until an operation that
writes them without reading them is registered. Later readers depend on that operation; if it fails, the bytes are
poisoned again.

The poison of device memory is stored in its block, and so it ends with the block. The program can write host memory
without the coordinator, so the poison of host memory also ends when the program has received the failure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .._base._arrays import address_of
from ..errors import CycleError
from ..lowlevel import Accesses, Block
from ._accesses import Access, Memory
from ._node import Node
from ._scheduled_node import RootFailure, ScheduledNode

__all__ = ["DependencyGraph", "path_between", "unfinished_nodes"]

T = TypeVar("T")

#: Failed operations whose host memory stays poisoned. When there are more than twice as many, the oldest are forgotten.
MOST_UNDELIVERED = 256


class Record(Accesses[ScheduledNode[Any]]):
    """The accesses of unfinished operations to one block of device memory, or to all host memory (by address)."""

    __slots__ = ("assigned",)

    #: The block's count of assignments when the record was last used. `DependencyGraph` sets it: a record is made for
    #: nearly every operation, and an ``__init__`` is a call.
    assigned: int

    def of_range(self, start: int, stop: int) -> list[ScheduledNode[Any]]:
        """Return the last writers of these bytes, and the readers since. Any thread."""
        entries = [*self.writers]
        for reader in list(self.readers):
            entries += [(begin, last, reader) for begin, last in self.readers.get(reader, ())]
        return [node for begin, last, node in entries if begin < stop and start < last]


#: An access as the graph keeps it: record, memory (or a weak reference to it), start and end.
_Noted: TypeAlias = "tuple[Record, Any, int, int]"


class DependencyGraph:
    """The accesses of all unfinished operations, and the poisoned memory."""

    __slots__ = ("__weakref__", "_closed", "_host", "_noted", "_poisoned", "_records", "_undelivered")

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}  # by the id of a block, which `_noted` keeps alive
        self._host = Record()
        self._noted: dict[ScheduledNode[Any], list[_Noted]] = {}
        #: Failed operations that should have written host memory. The program has not received their failures yet.
        self._undelivered: list[ScheduledNode[Any]] = []
        self._poisoned: weakref.WeakSet[Block] | None = None  # made by the first failure: an empty one takes 1 KB
        self._closed = False
        _GRAPHS[self] = None

    def __len__(self) -> int:
        return len(self._records) + bool(self._host)

    def add(self, node: ScheduledNode[Any], accesses: Sequence[Access]) -> None:
        """Let a node depend on the earlier nodes with conflicting accesses; note its accesses."""
        for memory, start, stop, reads, writes in accesses:
            if isinstance(memory, Block):
                if reads and memory.poison and node.poison is None:
                    node.poison = self._poison_of(memory, start, stop)
                record = self._records.get(id(memory))
                if record is None:
                    continue
                if record.assigned != memory.assigned:
                    record.assigned = memory.assigned
                    record.outdate()
            else:
                record = self._host
            if record.writers:
                for other in record.last_writers(start, stop):
                    if record is self._host:
                        needs_data = reads and not other.failure_delivered and self._is_writing(other, start, stop)
                        node.depend_on(other, needs_data, other.copies_out)
                    else:
                        node.depend_on(other, reads)
            if writes and record.readers:
                for other in record.readers_since(start, stop):
                    node.depend_on(other, False)
        self._note(node, accesses)

    def unfinished_nodes(self, memory: Memory) -> list[ScheduledNode[Any]]:
        """Return the unfinished nodes that access a block, or a host array. Any thread."""
        if isinstance(memory, Block):
            record, start = self._records.get(id(memory)), 0
        else:
            record, start = self._host, address_of(memory)
        if not record:
            return []
        return [node for node in record.of_range(start, start + memory.nbytes) if not node._has_finished()]

    def _note(self, node: ScheduledNode[Any], accesses: Sequence[Access]) -> None:
        """Record the accesses of a node, which end the poison of the bytes that it overwrites."""
        noted: list[_Noted] = []
        for memory, start, stop, _, writes in accesses:
            if start == stop:
                continue
            if isinstance(memory, Block):
                record = self._records.get(id(memory))
                if record is None:
                    record = self._records[id(memory)] = Record()
                    record.assigned = memory.assigned
                if writes and memory.poison:
                    self._remove_poison(memory, start, stop)
            else:
                record = self._host
            if writes:
                record.write(start, stop, node)
            else:
                record.read(start, stop, node)
            noted.append((record, memory, start, stop))
        if noted:
            self._noted[node] = noted

    def _is_writing(self, node: ScheduledNode[Any], start: int, stop: int) -> bool:
        """True if the host memory that the node should write still exists; otherwise another array has its address."""
        noted = self._noted.get(node, ())
        return any(one[2] < stop and start < one[3] and _is_alive(one) for one in noted)

    def _poison_of(self, block: Block, start: int, stop: int) -> RootFailure | None:
        ranges = block.poisoned().get(self)
        return None if ranges is None else ranges.first(start, stop)

    def _put_poison(self, block: Block, unwritten: list[tuple[int, int]], failure: RootFailure) -> None:
        poison = block.poisoned()
        if self._poisoned is None:
            self._poisoned = weakref.WeakSet()
        self._poisoned.add(block)
        ranges = poison[self]
        for start, stop in unwritten:
            ranges.put(start, stop, failure)

    def _remove_poison(self, block: Block, start: int, stop: int) -> None:
        poison = block.poisoned()
        ranges = poison.get(self)
        if ranges is not None:
            ranges.remove(start, stop)
            if not ranges:
                del poison[self]
                if self._poisoned is not None:
                    self._poisoned.discard(block)

    def forget(self, node: ScheduledNode[Any]) -> None:
        """Drop a finished node, so that later nodes do not depend on it. Poison the bytes that it did not write."""
        failure = node.root_failure
        kept: list[_Noted] = []
        for record, memory, start, stop in self._noted.pop(node, ()):
            if failure is not None and not isinstance(memory, Block) and not (node.failure_delivered or self._closed):
                record.readers.pop(node, None)
                if any(writer is node for writer in record.last_writers(start, stop)):
                    kept.append((record, weakref.ref(_owner_of(memory)), start, stop))
                continue
            unwritten = record.forget(node, start, stop)
            if isinstance(memory, Block):
                if unwritten and failure is not None and record.assigned == memory.assigned and not self._closed:
                    self._put_poison(memory, unwritten, failure)
                if not record and self._records.get(id(memory)) is record:
                    del self._records[id(memory)]
        if kept:
            self._noted[node] = kept
            self._undelivered.append(node)
            if len(self._undelivered) > 2 * MOST_UNDELIVERED:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep the newest of the failed operations that poison host memory."""
        noted = self._noted
        poisoning = [
            node
            for node in self._undelivered
            if not node.failure_delivered and any(_is_alive(one) for one in noted[node])
        ]
        kept = poisoning[-MOST_UNDELIVERED:]
        for node in set(self._undelivered).difference(kept):
            for record, _, start, stop in noted.pop(node):
                record.forget(node, start, stop)
        self._undelivered = kept

    def clear(self) -> None:
        """Drop all records and all poison: no more nodes are added."""
        self._closed = True
        self._records.clear()
        self._host = Record()
        for node in self._undelivered:
            del self._noted[node]
        self._undelivered.clear()
        for block in list(self._poisoned or ()):
            block.poisoned().pop(self, None)
        self._poisoned = None

    @staticmethod
    def check_acyclic(dependent: ScheduledNode[Any], prerequisite: ScheduledNode[Any]) -> None:
        """Raise `CycleError` if the prerequisite of a new edge already depends on the dependent."""
        if prerequisite in dependent.prerequisites:
            return
        if prerequisite.id < dependent.id and not dependent.scheduler.has_back_edges:
            return
        path = path_between(
            prerequisite, dependent, lambda node: node.prerequisites, lambda node: node.dependents or ()
        )
        if path is not None:
            names = tuple(node.name for node in [dependent, *path])
            raise CycleError(f"these would wait for each other: {' → '.join(names)}; leave one edge out", path=names)


#: The graphs of all coordinators of the process.
_GRAPHS: weakref.WeakKeyDictionary[DependencyGraph, None] = weakref.WeakKeyDictionary()


def unfinished_nodes(memory: Memory) -> list[Node[Any]]:
    """Return the unfinished nodes of all coordinators that access a block, or a host array. Any thread.

    A node that is not submitted yet has no operation, and so is not among those that use the block.
    """
    graphs = [graph for known in _GRAPHS.keyrefs() if (graph := known()) is not None]
    return [node for graph in graphs for node in graph.unfinished_nodes(memory)]


def _owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_alive(noted: _Noted) -> bool:
    """True if the memory of a noted access still exists."""
    memory = noted[1]
    return not isinstance(memory, weakref.ref) or memory() is not None


#: The vertices found, each with the vertex from which it was found.
_Found = dict[T, T | None]


def path_between(
    start: T, end: T, prerequisites: Callable[[T], Iterable[T]], dependents: Callable[[T], Iterable[T]]
) -> list[T] | None:
    """Return the path by which ``start`` depends on ``end``, with both ends; None if it does not depend on it.

    The search goes from both ends, one edge at a time in turn. It ends when the two sides meet, or when one of them is
    exhausted. So a new edge between two parts of a graph costs no more than the smaller part: adding n edges of a chain
    costs n steps from either end, and n log n in any order.

    Parameters
    ----------
    start
        The dependent.
    end
        Its direct or indirect prerequisite.
    prerequisites
        Returns the direct prerequisites of a vertex.
    dependents
        Returns the direct dependents of a vertex.
    """
    if start is end:
        return [start]
    downwards: _Found[T] = {start: None}
    upwards: _Found[T] = {end: None}
    mine, others = (_walk(start, prerequisites, downwards), upwards), (_walk(end, dependents, upwards), downwards)
    while True:
        walk, theirs = mine
        try:
            met = next(walk)
        except StopIteration:
            return None
        if met in theirs:
            return [*_trail(met, downwards)[::-1], *_trail(met, upwards)[1:]]
        mine, others = others, mine


def _walk(first: T, neighbours: Callable[[T], Iterable[T]], found: _Found[T]) -> Iterator[T]:
    """Yield the far end of each edge that can be reached from ``first``; note new vertices in ``found``."""
    left = [first]
    while left:
        here = left.pop()
        for other in neighbours(here):
            if other not in found:
                found[other] = here
                left.append(other)
            yield other


def _trail(here: T, found: _Found[T]) -> list[T]:
    trail = [here]
    while (before := found[trail[-1]]) is not None:
        trail.append(before)
    return trail
