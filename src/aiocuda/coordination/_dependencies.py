"""Graph: which operation comes behind which, named or inferred from what operations read and write.

An edge that brings data (read-after-write, or named) *needs* its source: if that fails, the operation is skipped. An
edge that keeps an order (write-after-read, and write-after-write where the bytes are not read) only orders: what comes
behind something that failed runs, behind all that the failed operation came behind.

**Poison.** Bytes that an operation should have written and did not, since it failed, was skipped or was withdrawn, are
poisoned. An operation that reads one of them is skipped. They stay poisoned until an operation is registered that
writes them without reading them; later operations need that one, and if it fails they are poisoned again.

Poison of device memory is kept by its block, and so ends with it. Host memory is not the coordinator's alone: the
program writes it as it likes. There the poison ends, too, when the program has been told that the operation failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._checks import several
from ..errors import CycleError, InvalidTypeError
from ..kernels import Kernel
from ..memory._accesses import Accesses, Ranges
from ..memory._arrays import address_of, check_awaited
from ..memory._block import Block
from ..memory._buffer import DeviceBuffer
from ..memory._pinned import PinnedBuffer
from ._node import Cause, Node
from ._paths import path_between

__all__ = ["Access", "Graph", "Record", "accesses_of", "check_acyclic", "inferred", "of_launch"]

#: Failed operations whose host memory stays poisoned; before more of them, the oldest ones are forgotten.
MOST_UNTOLD = 256

#: Where bytes are: in a block of device memory, or in a host array.
Memory: TypeAlias = "Block | npt.NDArray[Any]"

#: Bytes of one memory, from, to, and whether the operation reads and writes them.
Access: TypeAlias = "tuple[Memory, int, int, bool, bool]"


class Record(Accesses[Node[Any]]):
    """Accesses of unfinished operations to one block, or to all host memory, which is known by its addresses."""

    __slots__ = ("assigned",)

    def __init__(self, assigned: int = 0) -> None:
        super().__init__()
        #: The block's count when it was last looked at.
        self.assigned = assigned


class Graph:
    """The accesses of all unfinished operations, and the memory that is poisoned."""

    __slots__ = ("__weakref__", "_closed", "_host", "_poisoned", "_records", "_untold")

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}  # by the id of a block, which unfinished operations hold
        self._host = Record()
        #: Failed operations that were to write host memory.
        self._untold: list[Node[Any]] = []
        self._poisoned: weakref.WeakSet[Block] = weakref.WeakSet()
        self._closed = False

    def __len__(self) -> int:
        return len(self._records) + bool(self._host)

    def note(self, node: Node[Any], accesses: Sequence[Access]) -> None:
        """Put an operation behind those that its accesses conflict with, and those that come later behind it."""
        for memory, start, stop, reads, writes in accesses:
            if isinstance(memory, Block):
                if reads and memory.poison and node._poison is None:
                    node._poison = self._poison_of(memory, start, stop)
                record = self._record_of(memory)
                if record is None:
                    continue
            else:
                record = self._host
            if record.writers:
                for other in record.last_writers(start, stop):
                    if record is self._host:
                        needs = reads and not other._told and _is_there(other, start, stop)
                        node._come_behind(other, needs, other._lands)
                    else:
                        node._come_behind(other, reads)
            if writes and record.readers:
                for other in record.readers_since(start, stop):
                    node._come_behind(other, False)
        for memory, start, stop, _, writes in accesses:
            if start == stop:
                continue
            if isinstance(memory, Block):
                record = self._records.get(id(memory))
                if record is None:
                    record = self._records[id(memory)] = Record(memory.assigned)
                if writes and memory.poison:
                    self._heal(memory, start, stop)
            else:
                record = self._host
            if writes:
                record.write(start, stop, node)
            else:
                record.read(start, stop, node)
            node._accesses.append((record, memory, start, stop))

    def _record_of(self, block: Block) -> Record | None:
        record = self._records.get(id(block))
        if record is not None and record.assigned != block.assigned:
            record.assigned = block.assigned
            record.outdate()
        return record

    def _poison_of(self, block: Block, start: int, stop: int) -> Cause | None:
        ranges: Ranges[Cause] | None = block.poison.get(self)
        return None if ranges is None else ranges.first(start, stop)

    def _heal(self, block: Block, start: int, stop: int) -> None:
        ranges: Ranges[Cause] | None = block.poison.get(self)
        if ranges is not None:
            ranges.remove(start, stop)
            if not ranges:
                del block.poison[self]
                self._poisoned.discard(block)

    def forget(self, node: Node[Any]) -> None:
        """The operation has finished: none need come behind it any more. What it should have written is poisoned."""
        cause = node._cause
        kept: list[tuple[Record, Any, int, int]] = []
        for record, memory, start, stop in node._accesses:
            if cause is not None and not isinstance(memory, Block) and not (node._told or self._closed):
                record.readers.pop(node, None)
                if any(writer is node for writer in record.last_writers(start, stop)):
                    kept.append((record, weakref.ref(_owner_of(memory)), start, stop))
                continue
            unwritten = record.forget(node, start, stop)
            if isinstance(memory, Block):
                if unwritten and cause is not None and record.assigned == memory.assigned and not self._closed:
                    self._put_poison(memory, unwritten, cause)
                if not record and self._records.get(id(memory)) is record:
                    del self._records[id(memory)]
        node._accesses = kept
        if kept:
            self._untold.append(node)
            if len(self._untold) > 2 * MOST_UNTOLD:
                self._forget_oldest()

    def _put_poison(self, block: Block, unwritten: list[tuple[int, int]], cause: Cause) -> None:
        ranges = block.poison.get(self)
        if ranges is None:
            ranges = block.poison[self] = Ranges()
            self._poisoned.add(block)
        for start, stop in unwritten:
            ranges.put(start, stop, cause)

    def _forget_oldest(self) -> None:
        """Of the failed operations that poison host memory, keep the newest ones."""
        poisoning = [node for node in self._untold if not node._told and any(_is_held(one) for one in node._accesses)]
        kept = poisoning[-MOST_UNTOLD:]
        for node in set(self._untold).difference(kept):
            for record, _, start, stop in node._accesses:
                record.forget(node, start, stop)
            node._accesses.clear()
        self._untold = kept

    def clear(self) -> None:
        """No operation comes any more."""
        self._closed = True
        self._records.clear()
        self._host = Record()
        self._untold.clear()
        for block in list(self._poisoned):
            block.poison.pop(self, None)
        self._poisoned.clear()


def _owner_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_held(access: tuple[Record, Any, int, int]) -> bool:
    """Is its host memory still there?"""
    memory = access[1]
    return not isinstance(memory, weakref.ref) or memory() is not None


def _is_there(node: Node[Any], start: int, stop: int) -> bool:
    """Is the host memory that an operation was to write still there, or do its addresses belong to another array?"""
    return any(one[2] < stop and start < one[3] and _is_held(one) for one in node._accesses)


def check_acyclic(dependent: Node[Any], prerequisite: Node[Any]) -> None:
    """`CycleError` if the prerequisite comes behind the dependent already."""
    if prerequisite in dependent._needs or (prerequisite.id < dependent.id and not dependent._scheduler.inverted):
        return
    path = path_between(prerequisite, dependent, lambda node: node._needs, lambda node: node._dependants or ())
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
        return thing, address, address + thing.nbytes, reads, writes
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

    A pointer that is not ``const`` counts as written, and as read: it may be updated in place. None stands for an
    argument that there is not.
    """
    return [
        _range(arguments[index], True, writes, "an argument")
        for index, writes in pointers_of(kernel)
        if arguments[index] is not None
    ]


@functools.lru_cache(256)
def pointers_of(kernel: Kernel) -> tuple[tuple[int, bool], ...]:
    """The parameters that are pointers, and which of them may be written."""
    parameters = enumerate(kernel.signature.parameters)
    return tuple((index, not parameter.is_const) for index, parameter in parameters if parameter.is_pointer)


def inferred(
    kernel: Kernel, arguments: Sequence[Any], reads: Iterable[Any] | None, writes: Iterable[Any] | None
) -> list[Access]:
    """The same, where something was said: of an argument that ``reads`` or ``writes`` names, only that holds."""
    said = accesses_of(reads or (), writes or ())
    return [access for access in of_launch(kernel, arguments) if not _names(said, access)] + said


def _names(said: list[Access], access: Access) -> bool:
    """Does one of these name bytes of that access?"""
    memory, start, stop, _, _ = access
    on_device = isinstance(memory, Block)
    return any(
        begin < stop and start < end and (other is memory if on_device else not isinstance(other, Block))
        for other, begin, end, _, _ in said
    )


def _merged(accesses: list[Access]) -> list[Access]:
    """One access for the same bytes read and written: it needs what was there, and replaces it."""
    if len(accesses) < 2:
        return accesses
    found: dict[tuple[int, int, int], Access] = {}
    for access in accesses:
        memory, start, stop, reads, writes = access
        key = (id(memory) if isinstance(memory, Block) else 0, start, stop)
        known = found.get(key)
        found[key] = access if known is None else (memory, start, stop, known[3] or reads, known[4] or writes)
    return list(found.values())
