"""Graph: who comes behind whom, named or inferred from what operations read and write.

An edge that brings data (read-after-write, or named) *needs* its source: if that fails, the operation is skipped. One
that keeps an order (write-after-read, and write-after-write where the bytes are not read) only orders: what comes
behind something that failed runs, behind all that the failed one came behind.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..checks import several
from ..errors import CycleError, InvalidTypeError
from ..kernel import Kernel
from ..memory.accesses import Accesses
from ..memory.arrays import address_of, check_awaited
from ..memory.block import Block
from ..memory.buffer import DeviceBuffer
from ..memory.pinned import PinnedBuffer
from .node import Node

__all__ = ["Access", "Graph", "accesses_of", "check_acyclic", "inferred", "of_launch", "path_between"]

#: The key of all host memory, which is known by its addresses.
HOST = 0


#: Bytes of one memory (None is the host's), from, to, and whether the operation reads and writes them.
Access: TypeAlias = "tuple[Block | None, int, int, bool, bool]"


class Graph:
    """The accesses of all unfinished operations, and of those whose failure nobody has been told of."""

    __slots__ = ("_records", "_watched")

    def __init__(self) -> None:
        self._records: dict[int, Accesses[Node[Any]]] = {}
        #: Memory that something failed on: its record must not outlive it, since another may get its id.
        self._watched: dict[int, weakref.ref[Block]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def note(self, node: Node[Any], accesses: Sequence[Access]) -> None:
        """Put an operation behind those that its accesses conflict with, and those that come later behind it."""
        records = self._records
        for block, start, stop, reads, writes in accesses:
            record = records.get(HOST if block is None else id(block))
            if record is None:
                continue
            if record.writers:
                for other in record.last_writers(start, stop):
                    self._edge(node, other, reads, block is None and other._lands)
            if writes and record.readers:
                for other in record.readers_since(start, stop):
                    self._edge(node, other, False, False)
        for block, start, stop, _, writes in accesses:
            if start == stop:
                continue
            key = HOST if block is None else id(block)
            record = records.get(key)
            if record is None:
                record = records[key] = Accesses()
            if writes:
                record.write(start, stop, node)
            else:
                record.read(start, stop, node)
            node._accesses.append((key, record, block))

    @staticmethod
    def _edge(node: Node[Any], other: Node[Any], needs: bool, landed: bool) -> None:
        cause = other._cause
        if needs and cause is not None and cause.is_known_here():
            needs = False  # who reads on behind a failure that he was told of means it
        node._come_behind(other, needs, landed)

    def forget(self, node: Node[Any]) -> None:
        """It has finished well: nobody need come behind it any more."""
        for key, record, _ in node._accesses:
            record.forget(node)
            self._drop_empty(key, record)
        node._accesses.clear()

    def keep(self, node: Node[Any]) -> None:
        """It has failed: who reads what it was to write is to be skipped, however late he comes."""
        for key, record, block in node._accesses:
            if block is None:
                record.forget(node)  # an address may be another array's by then
            else:
                record.readers.pop(node, None)
                if record.writers and key not in self._watched:
                    self._watched[key] = weakref.ref(block, functools.partial(self._gone, key))
            self._drop_empty(key, record)
        node._accesses.clear()

    def _drop_empty(self, key: int, record: Accesses[Node[Any]]) -> None:
        if not record.writers and not record.readers and self._records.get(key) is record:
            del self._records[key]
            self._watched.pop(key, None)

    def _gone(self, key: int, _: object) -> None:
        # A finaliser runs anywhere; both are single operations on a dict.
        self._records.pop(key, None)
        self._watched.pop(key, None)

    def clear(self) -> None:
        """Nobody comes any more."""
        self._records.clear()
        self._watched.clear()


def path_between(start: Node[Any], end: Node[Any]) -> list[Node[Any]] | None:
    """How ``start`` comes behind ``end``, from edge to edge; None if it does not."""
    came_from: dict[Node[Any], Node[Any] | None] = {start: None}
    left = [start]
    while left:
        node = left.pop()
        if node is end:
            path = [node]
            while (before := came_from[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for other in node._needs:
            if other not in came_from:
                came_from[other] = node
                left.append(other)
    return None


def check_acyclic(dependent: Node[Any], prerequisite: Node[Any]) -> None:
    """`CycleError` if the prerequisite comes behind the dependent already."""
    path = path_between(prerequisite, dependent)
    if path is not None:
        names = tuple(node.name for node in [dependent, *path])
        raise CycleError(f"these would wait for each other: {' → '.join(names)}; leave one edge out", path=names)


# -- what is read and written -------------------------------------------------------------------------------------


def _range(thing: Any, reads: bool, writes: bool, role: str) -> Access:
    """The bytes of a buffer or an array."""
    if isinstance(thing, DeviceBuffer):
        block = thing._block
        if block.freed or block.owner.closed:
            block.check()
        start = thing._offset
        return block, start, start + thing.nbytes, reads, writes
    if isinstance(thing, PinnedBuffer | np.ndarray):
        address = address_of(thing)
        return None, address, address + thing.nbytes, reads, writes
    check_awaited(thing, role)
    raise InvalidTypeError(f"{role} names buffers and arrays, as the operation is given them, not {thing!r}")


def accesses_of(reads: Iterable[Any], writes: Iterable[Any]) -> list[Access]:
    """What an operation was said to read and to write."""
    return _merged(
        [_range(thing, True, False, "reads") for thing in _several(reads, "reads")]
        + [_range(thing, False, True, "writes") for thing in _several(writes, "writes")]
    )


def _several(things: Iterable[Any], role: str) -> Iterable[Any]:
    if isinstance(things, (tuple, list)):
        return things
    return several(things, f"{role} names several buffers and arrays, as in {role}=(x,)")


def of_launch(kernel: Kernel, arguments: Sequence[Any]) -> list[Access]:
    """What a launch reads and writes by its parameters.

    A pointer that is not ``const`` counts as written, and as read: it may be updated in place.
    """
    return [_range(arguments[index], True, writes, "an argument") for index, writes in pointers_of(kernel)]


@functools.lru_cache(256)
def pointers_of(kernel: Kernel) -> tuple[tuple[int, bool], ...]:
    """The parameters that are pointers, and which of them may be written."""
    parameters = enumerate(kernel.signature.parameters)
    return tuple((index, not parameter.is_const) for index, parameter in parameters if parameter.is_pointer)


def inferred(
    kernel: Kernel, arguments: Sequence[Any], reads: Iterable[Any] | None, writes: Iterable[Any] | None
) -> list[Access]:
    """The same, where something was said: in ``writes`` alone it is only written, in ``reads`` alone only read."""
    if reads is not None and writes is not None:
        return accesses_of(reads, writes)
    found = of_launch(kernel, arguments)
    if writes is not None:
        said = accesses_of((), writes)
        ranges = {access[:3] for access in said}
        return _merged([(*access[:3], True, False) for access in found if access[:3] not in ranges] + said)
    said = accesses_of(reads or (), ())
    return _merged([(*access[:3], False, True) for access in found if access[4]] + said)


def _merged(accesses: list[Access]) -> list[Access]:
    """One access for the same bytes read and written: it needs what was there, and replaces it."""
    if len(accesses) < 2:
        return accesses
    found: dict[tuple[Block | None, int, int], tuple[bool, bool]] = {}
    for block, start, stop, reads, writes in accesses:
        known = found.get((block, start, stop), (False, False))
        found[block, start, stop] = (known[0] or reads, known[1] or writes)
    return [(*key, *how) for key, how in found.items()]
