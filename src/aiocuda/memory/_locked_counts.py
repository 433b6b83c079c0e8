"""The counts of a device's memory on free-threaded Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._base._shared import COUNTING
from .._core import MemoryFields

if TYPE_CHECKING:
    from .._core import Ring

__all__ = ["LockedCounts"]


class LockedCounts(MemoryFields):
    """`MemoryFields` for Python without the GIL: threads that count a block take turns."""

    __slots__ = ()

    def count(self, address: int, nbytes: int, home: Ring | None, resource: Any) -> None:
        """See `MemoryFields`."""
        with COUNTING:
            super().count(address, nbytes, home, resource)

    def discard(self, address: int) -> tuple[int, Ring | None, Any] | None:
        """See `MemoryFields`."""
        with COUNTING:
            return super().discard(address)
