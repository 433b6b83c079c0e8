"""Adaptor: a resource that passes all calls on. The base of the others."""

from __future__ import annotations

from ...errors import InvalidTypeError
from .._resource import MemoryResource, Reservation, is_resource, reserve, unreserve

__all__ = ["Adaptor"]


class Adaptor:
    """Passes every call on to ``upstream``. Derive from it, and override methods.

    Attributes
    ----------
    upstream : MemoryResource
        The wrapped resource.
    """

    __slots__ = ("upstream",)

    def __init__(self, upstream: MemoryResource) -> None:
        if not is_resource(upstream):
            raise InvalidTypeError(
                f"{type(self).__name__} wraps a MemoryResource, not {upstream!r}: "
                f"device.memory.use(lambda upstream: {type(self).__name__}(upstream, …))"
            )
        self.upstream = upstream

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        return self.upstream.allocate(nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.upstream.deallocate(address, nbytes, stream)

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        """Count ``nbytes`` > 0 bytes that come from elsewhere; ``kind`` is ``"unified"``. Return the reservation.

        Raise `aiocuda.DeviceOutOfMemory` to refuse: caches are trimmed, and the call is repeated once. This method
        asks the next resource of the chain that has `reserve` and `unreserve`; an override calls it.
        """
        return reserve(self.upstream, nbytes, kind)

    def unreserve(self, reservation: Reservation) -> None:
        """End a reservation: the memory has been freed. An error is reported, and the call is not repeated."""
        unreserve(self.upstream, reservation)

    def trim(self, keep: int = 0) -> None:
        """See `MemoryResource`. **May block.**"""
        self.upstream.trim(keep)

    def release(self, stream: int) -> None:
        """See `MemoryResource`."""
        self.upstream.release(stream)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.upstream!r}>"
