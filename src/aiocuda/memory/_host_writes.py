"""Claims: which bytes of host memory copies are writing."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

if TYPE_CHECKING:
    from ..completion._operation import Operation

__all__ = ["CLAIMS", "HostWrites"]

#: (first byte, behind the last, the operation's id, the operation). The id lets no two compare by what comes after it.
_Claim: TypeAlias = "tuple[int, int, int, ref[Operation[Any]]]"

#: Claims kept before those that have passed are looked for.
FEW = 64


class HostWrites:
    """Ranges of host memory, each with the operation that writes it. No two of them overlap.

    They are sorted, so that 20 000 copies in flight are asked as quickly as two. Operations are held weakly: a queue
    holds what has not passed, and nobody else need hold the array. Shared by all loops and devices, under a lock that
    is held for less than a microsecond.
    """

    __slots__ = ("_claims", "_lock", "_most")

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._most = FEW
        # A finaliser that runs in the middle of this may enqueue a copy of its own.
        self._lock = threading.RLock()

    def writer(self, start: int, nbytes: int) -> Operation[Any] | None:
        """The operation that writes any of these bytes just now."""
        if not self._claims:  # an upload asks too, and in many programs nothing is written meanwhile
            return None
        with self._lock:
            host_writes = self._claims
            index = bisect_left(host_writes, (start + nbytes,))
            while index and host_writes[index - 1][1] > start:
                index -= 1
                operation = host_writes[index][3]()
                if operation is not None and not operation.is_settled:
                    return operation
                del host_writes[index]
        return None

    def add(self, start: int, nbytes: int, operation: Operation[Any]) -> None:
        """The operation is to write these bytes, which nobody else writes."""
        with self._lock:
            if len(self._claims) >= self._most:
                self._claims = self._held()
                self._most = max(FEW, 2 * len(self._claims))
            insort(self._claims, (start, start + nbytes, operation.id, ref(operation)))

    def _held(self) -> list[_Claim]:
        return [claim for claim in self._claims if (operation := claim[3]()) is not None and not operation.is_settled]

    def __len__(self) -> int:
        with self._lock:
            return len(self._held())


#: Of the process: host memory is no device's own.
CLAIMS = HostWrites()
