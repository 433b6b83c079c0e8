"""HostSources: finds host arrays that the program writes while an operation reads them."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._base._arrays import address_of
from ..._core import ABANDONED, StreamOperation
from ...memory._host_writes import HOST_WRITES
from ._clocks import Stamp

__all__ = ["HostSources"]

#: The largest array that is compared. Its two checksums take the loop about 2 ms.
MOST_BYTES = 1 << 20


class _Source:
    """An array that an unfinished operation reads."""

    __slots__ = ("array", "changed", "checksum", "operation", "stamp", "start", "stop", "streams")

    def __init__(
        self, array: npt.NDArray[Any], operation: StreamOperation[Any], stamp: Stamp, changed: Callable[[], None]
    ) -> None:
        self.array = np.asarray(array)
        self.start = address_of(array)
        self.stop = self.start + array.nbytes
        self.operation = operation
        self.stamp = stamp
        self.changed = changed
        self.streams = {stamp.number}  # with an operation that compares the array
        self.checksum = self.sum()

    def sum(self) -> int:
        """Return the checksum of the bytes that the array has now."""
        data: Any = self.array.reshape(-1).view(np.uint8)
        return zlib.crc32(memoryview(data))


class HostSources:
    """Compares host arrays that operations read: at the call, and when the host knows that the read has ended.

    The host learns that from the operation itself, or from any operation that comes after it. Before that, the program
    may not write the array. Work of a stream may write it in its order, by DMA: then the array is not compared.
    """

    __slots__ = ("_sources", "_writes")

    def __init__(self) -> None:
        self._sources: dict[_Source, None] = {}
        #: Start, end and operation of unfinished writes by work of streams.
        self._writes: list[tuple[int, float, weakref.ref[StreamOperation[Any]]]] = []

    def watch(
        self, array: npt.NDArray[Any], operation: StreamOperation[Any], stamp: Stamp, changed: Callable[[], None]
    ) -> None:
        """Call ``changed`` if the program writes the array before the end of the operation."""
        if not 0 < array.nbytes <= MOST_BYTES or operation.is_settled:
            return
        source = _Source(array, operation, stamp, changed)
        self._forget_writes()
        in_order = any(start < source.stop and source.start < stop for start, stop, _ in self._writes)
        if not in_order and HOST_WRITES.writer(source.start, array.nbytes) is None:
            self._sources[source] = None
            self._compare_after(operation, source)

    def follow(self, operation: StreamOperation[Any], stamp: Stamp) -> None:
        """Compare the arrays of earlier operations when this one is done, if it is the first one of its stream."""
        for source in list(self._sources):
            if stamp.number not in source.streams and stamp.covers(source.stamp.number, source.stamp.tick):
                source.streams.add(stamp.number)
                self._compare_after(operation, source)

    def written(self, array: npt.NDArray[Any] | None, operation: StreamOperation[Any]) -> None:
        """Note that an operation may write the array; with None, any array."""
        start = 0 if array is None else address_of(array)
        stop = float("inf") if array is None else start + array.nbytes
        self._forget_writes()
        self._writes.append((start, stop, weakref.ref(operation)))
        for source in list(self._sources):
            if start < source.stop and source.start < stop:
                self._sources.pop(source, None)

    def _forget_writes(self) -> None:
        """Forget the writes that have ended."""
        self._writes = [each for each in self._writes if (known := each[2]()) is not None and not known.is_settled]

    def _compare_after(self, operation: StreamOperation[Any], source: _Source) -> None:
        """Compare an array when the device has finished with an operation, before the waiters of that continue."""
        former = operation.on_settled

        def settled() -> None:
            if former is not None:
                former()
            operation.queue.reactor.guard(self._compare, source)

        if not operation.is_settled:
            operation.on_settled = settled

    def _compare(self, source: _Source) -> None:
        """Compare an array: the device has finished with the operation that reads it."""
        if self._sources.pop(source, source) is source:
            return  # it was compared before, or work of a stream may have written it
        operation = source.operation
        if operation.failure is None and operation.status != ABANDONED and source.sum() != source.checksum:
            source.changed()
