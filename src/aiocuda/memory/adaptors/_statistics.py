"""Statistics: live bytes, peak and sizes at one position of the chain of resources."""

from __future__ import annotations

from typing import NamedTuple

from ..._base._mistakes import figures
from ..._base._shared import COUNTING
from .._resource import MemoryResource, Reservation
from ._adaptor import Adaptor

__all__ = ["ResourceStatistics", "StatisticsResource"]


@figures
class ResourceStatistics(NamedTuple):
    """The allocations that have passed one position of the chain, with those of unified memory.

    Attributes
    ----------
    live_bytes, peak_bytes
        Allocated and not freed; the most that it has been.
    allocations, deallocations, refusals
        Calls that succeeded; allocations that failed.
    by_class
        Live bytes by size class: the power of two at or above the size.
    """

    live_bytes: int
    peak_bytes: int
    allocations: int
    deallocations: int
    refusals: int
    by_class: dict[int, int]


class StatisticsResource(Adaptor):
    """Counts allocations and frees. Around a cache it counts those of the program, inside it those of the driver."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self._live = self._peak = self._allocations = self._deallocations = self._refusals = 0
        self._classes = [0] * 65  # live bytes by the exponent of their class, up to 2**64

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        try:
            address = self.upstream.allocate(nbytes, stream)
        except BaseException:
            self._refused()
            raise
        self._allocated(nbytes)
        return address

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.upstream.deallocate(address, nbytes, stream)
        self._deallocated(nbytes)

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        """See `Adaptor`."""
        try:
            reservation = super().reserve(nbytes, kind)
        except BaseException:
            self._refused()
            raise
        self._allocated(nbytes)
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        """See `Adaptor`."""
        self._deallocated(reservation.nbytes)
        super().unreserve(reservation)

    def _allocated(self, nbytes: int) -> None:
        with COUNTING:
            self._allocations += 1
            self._classes[(nbytes - 1).bit_length()] += nbytes
            self._live += nbytes
            if self._live > self._peak:
                self._peak = self._live

    def _deallocated(self, nbytes: int) -> None:
        with COUNTING:
            self._deallocations += 1
            self._classes[(nbytes - 1).bit_length()] -= nbytes
            self._live -= nbytes

    def _refused(self) -> None:
        with COUNTING:
            self._refusals += 1

    def statistics(self) -> ResourceStatistics:
        """Return a snapshot of the counts."""
        return ResourceStatistics(
            live_bytes=self._live,
            peak_bytes=self._peak,
            allocations=self._allocations,
            deallocations=self._deallocations,
            refusals=self._refusals,
            by_class={1 << bits: nbytes for bits, nbytes in enumerate(self._classes) if nbytes},
        )
