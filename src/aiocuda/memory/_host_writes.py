"""Host writes: the ranges of host memory that copies are writing."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

if TYPE_CHECKING:
    from .._core import StreamOperation

__all__ = ["HOST_WRITES", "HostWrites"]

#: (start, stop, the operation's id, the operation). The ids differ, so two entries never compare by the weak reference.
_Write: TypeAlias = "tuple[int, int, int, ref[StreamOperation[Any]]]"

#: Entries above which those of passed operations are removed.
FEW = 64


class HostWrites:
    """Ranges of host memory, each with the operation that writes it. They do not overlap.

    All loops and devices share it, under a lock that is held for less than a microsecond. The ranges are sorted: with
    20 000 copies in flight a lookup is as fast as with two. Operations are held weakly: their queue holds them until
    they have passed, and their arrays must not live longer.
    """

    __slots__ = ("_limit", "_lock", "_writes")

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._limit = FEW
        # Reentrant: a finaliser that runs while the lock is held may enqueue a copy.
        self._lock = threading.RLock()

    def writer(self, start: int, nbytes: int) -> StreamOperation[Any] | None:
        """Return the operation that writes any of these bytes now; None if there is none."""
        if not self._writes:  # uploads ask too, and many programs write no host memory at that time
            return None
        with self._lock:
            writes = self._writes
            index = bisect_left(writes, (start + nbytes,))
            while index and writes[index - 1][1] > start:
                index -= 1
                operation = writes[index][3]()
                if operation is not None and not operation.is_settled:
                    return operation
                del writes[index]
        return None

    def add(self, start: int, nbytes: int, operation: StreamOperation[Any]) -> None:
        """Record that the operation writes these bytes. No other operation may be writing them."""
        with self._lock:
            if len(self._writes) >= self._limit:
                self._writes = self._unfinished()
                self._limit = max(FEW, 2 * len(self._writes))
            insort(self._writes, (start, start + nbytes, operation.id, ref(operation)))

    def _unfinished(self) -> list[_Write]:
        return [write for write in self._writes if (operation := write[3]()) is not None and not operation.is_settled]

    def __len__(self) -> int:
        with self._lock:
            return len(self._unfinished())


#: Of the whole process: host memory belongs to no device.
HOST_WRITES = HostWrites()
