"""Accesses: the bytes that an operation reads and writes, inferred from its arguments or declared by its caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .._base._arrays import address_of
from .._base._checks import several
from .._base._types import SourceLine
from ..completion import Operation
from ..errors import InvalidTypeError
from ..kernels import Kernel
from ..lowlevel import Block, StreamOperation, check_awaited, enqueue_mark
from ..memory import DeviceBuffer, PinnedBuffer
from ..stream import Checker

if TYPE_CHECKING:
    from ..lowlevel import Queue
    from ..stream import Stream

__all__ = ["Access", "DeclaredAccesses", "Memory", "accesses_of", "accesses_of_launch", "enqueue_end"]

#: The memory that holds the bytes: a block of device memory, or a host array.
Memory: TypeAlias = "Block | npt.NDArray[Any]"

#: Memory, start and end of the bytes, and whether the operation reads them and writes them. Device memory counts from
#: the start of its block, host memory by address.
Access: TypeAlias = "tuple[Memory, int, int, bool, bool]"


def accesses_of(reads: Iterable[Any], writes: Iterable[Any]) -> list[Access]:
    """Return the accesses that ``reads=`` and ``writes=`` declare."""
    return _merged(
        [_access(thing, True, False, "reads") for thing in _several(reads, "reads")]
        + [_access(thing, False, True, "writes") for thing in _several(writes, "writes")]
    )


def accesses_of_launch(
    kernel: Kernel, arguments: Sequence[Any], reads: Iterable[Any] | None, writes: Iterable[Any] | None
) -> list[Access]:
    """Return the accesses of a kernel launch.

    A pointer parameter that is not ``const`` counts as written and as read, since the kernel may update it in place.
    For an argument that ``reads`` or ``writes`` names, only the declaration counts. None stands for an argument that
    does not exist.
    """
    inferred: list[Access] = []
    for index, written in _pointers_of(kernel):
        argument = arguments[index]
        if type(argument) is DeviceBuffer:  # the same as `_access`, without its call
            block, start = argument._block, argument._offset
            if block.freed or block.owner.closed:
                block.check()
            inferred.append((block, start, start + argument.nbytes, True, written))
        elif argument is not None:
            inferred.append(_access(argument, True, written, "an argument"))
    if reads is None and writes is None:
        return inferred
    declared = accesses_of(reads or (), writes or ())
    return [access for access in inferred if not _overlaps_any(declared, access)] + declared


def _access(thing: Any, reads: bool, writes: bool, role: str) -> Access:
    """Return the access to a buffer or an array."""
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


def _several(things: Iterable[Any], role: str) -> Iterable[Any]:
    if isinstance(things, (tuple, list)):
        return things
    return several(things, f"{role} names several buffers and arrays, as in {role}=(x,)")


@functools.lru_cache(256)
def _pointers_of(kernel: Kernel) -> tuple[tuple[int, bool], ...]:
    """Return the index of each pointer parameter, and whether the kernel may write through it."""
    parameters = enumerate(kernel.signature.parameters)
    return tuple((index, not parameter.is_const) for index, parameter in parameters if parameter.is_pointer)


def _overlaps_any(declared: list[Access], access: Access) -> bool:
    """True if a declared access has bytes in common with ``access``."""
    memory, start, stop, _, _ = access
    on_device = isinstance(memory, Block)
    return any(
        begin < stop and start < end and (other is memory if on_device else not isinstance(other, Block))
        for other, begin, end, _, _ in declared
    )


def _merged(accesses: list[Access]) -> list[Access]:
    """Merge a read and a write of the same bytes into one access, which needs the old content and replaces it."""
    if len(accesses) < 2:
        return accesses
    found: dict[tuple[int, int, int], Access] = {}
    for access in accesses:
        memory, start, stop, reads, writes = access
        key = (id(memory) if isinstance(memory, Block) else 0, start, stop)
        known = found.get(key)
        found[key] = access if known is None else (memory, start, stop, known[3] or reads, known[4] or writes)
    return list(found.values())


# -- for the checker ----------------------------------------------------------------------------------------------


class DeclaredAccesses(NamedTuple):
    """The device accesses of a node, and the place in the user's code that registered it, for the `Checker`."""

    checker: Checker
    place: SourceLine
    touches: Sequence[Any]

    @classmethod
    def of(cls, checker: Checker, accesses: Sequence[Access]) -> DeclaredAccesses:
        """Return the accesses of the node that the user's code registers now."""
        return cls(checker, SourceLine.of_caller(), checker.touches(accesses))

    def checked(self, work: Callable[[Stream], Operation[Any]]) -> Callable[[Stream], Operation[Any]]:
        """Return ``work`` as a function that checks these accesses instead of those of its stream method."""

        def run(stream: Stream) -> Operation[Any]:
            with self.checker.acting_for(self.place, self.touches):
                return work(stream)

        return run


def enqueue_end(queue: Queue, kind: str, declared: DeclaredAccesses | None) -> StreamOperation[Any]:
    """Enqueue an operation after everything that a bracket has enqueued; check the bracket's accesses."""
    if declared is None:
        return enqueue_mark(queue, kind)
    checker, place, touches = declared
    with checker.acting_for(place, touches), checker.access(queue, kind, touches) as enqueued:
        operation = enqueue_mark(queue, kind)
        enqueued.append(operation)
    return operation
