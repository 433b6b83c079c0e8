"""A limit on the bytes that are allocated at the same time."""

from __future__ import annotations

from ..._base._arrays import as_bytes
from ..._base._shared import COUNTING
from ...errors import DeviceOutOfMemory, InvalidArgumentError
from .._resource import MemoryResource, Reservation
from ._adaptor import Adaptor

__all__ = ["LimitResource"]


class LimitResource(Adaptor):
    """Refuses allocations, of unified memory too, that would make more than ``limit`` bytes live.

    Parameters
    ----------
    upstream
        The wrapped resource.
    limit
        Bytes. Around a cache (`SizeClassResource`) it counts memory in use; inside one, cached memory, too.

    Attributes
    ----------
    live_bytes : int
        Allocated and not freed, device memory and unified memory together.
    """

    def __init__(self, upstream: MemoryResource, limit: int) -> None:
        super().__init__(upstream)
        self.limit = as_bytes(limit, "the limit")
        if self.limit == 0:
            raise InvalidArgumentError("a limit of 0 bytes refuses everything: give it at least 1", limit=limit)
        self.live_bytes = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`. Beyond the limit: `aiocuda.DeviceOutOfMemory`, with ``requested limit live``."""
        self._count(nbytes)  # before the test: two threads must not both find the last bytes free
        try:
            if self.live_bytes > self.limit:
                raise self._beyond(nbytes)
            return self.upstream.allocate(nbytes, stream)
        except BaseException:
            self._count(-nbytes)
            raise

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.upstream.deallocate(address, nbytes, stream)
        self._count(-nbytes)

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        """See `Adaptor`. Beyond the limit: as `allocate`."""
        self._count(nbytes)
        try:
            if self.live_bytes > self.limit:
                raise self._beyond(nbytes)
            return super().reserve(nbytes, kind)
        except BaseException:
            self._count(-nbytes)
            raise

    def unreserve(self, reservation: Reservation) -> None:
        """See `Adaptor`."""
        self._count(-reservation.nbytes)  # before the call: if that fails, it is not repeated
        super().unreserve(reservation)

    def _count(self, nbytes: int) -> None:
        with COUNTING:
            self.live_bytes += nbytes

    def _beyond(self, nbytes: int) -> DeviceOutOfMemory:
        live = self.live_bytes - nbytes
        return DeviceOutOfMemory(
            f"{nbytes:,} bytes more than the {live:,} that are live would pass the limit of {self.limit:,}: free "
            "buffers, or raise the limit",
            requested=nbytes,
            limit=self.limit,
            live=live,
        )
