"""Failure injection: allocations and frees that fail as a test requires."""

from __future__ import annotations

from collections.abc import Callable, Container

from ...errors import AiocudaError, DeviceOutOfMemory
from .._resource import MemoryResource, Reservation
from ._adaptor import Adaptor

__all__ = ["FailingResource"]


class FailingResource(Adaptor):
    """Fails the selected calls, and passes the others on.

    Parameters
    ----------
    upstream
        The wrapped resource.
    allocations
        The numbers of the `allocate` and `reserve` calls that fail, from 1; any container, such as ``{3}`` or
        ``range(3, 6)``. `reserve` is called for unified memory.
    deallocations
        The same for `deallocate`. A failed free is repeated.
    when
        ``when(nbytes, stream)`` returns True to fail an allocation that ``allocations`` does not name. ``stream``
        is 0 for unified memory.
    error
        Returns the error. After `aiocuda.DeviceOutOfMemory` the allocation is repeated once, as after the driver's
        error: name two numbers if the program is to see it.

    Attributes
    ----------
    allocated, deallocated : int
        Calls so far, including failed ones.
    """

    def __init__(
        self,
        upstream: MemoryResource,
        *,
        allocations: Container[int] = (),
        deallocations: Container[int] = (),
        when: Callable[[int, int], bool] | None = None,
        error: Callable[[], AiocudaError] | None = None,
    ) -> None:
        super().__init__(upstream)
        self.allocations = allocations
        self.deallocations = deallocations
        self.when = when
        self.error = error
        self.allocated = self.deallocated = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        self._count(nbytes, stream)
        return self.upstream.allocate(nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.deallocated += 1
        if self.deallocated in self.deallocations:
            raise self._error(nbytes)
        self.upstream.deallocate(address, nbytes, stream)

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        """See `Adaptor`."""
        self._count(nbytes, 0)
        return super().reserve(nbytes, kind)

    def _count(self, nbytes: int, stream: int) -> None:
        """Count an allocation; raise if it is one that fails."""
        self.allocated += 1
        if self.allocated in self.allocations or (self.when is not None and self.when(nbytes, stream)):
            raise self._error(nbytes)

    def _error(self, nbytes: int) -> AiocudaError:
        if self.error is not None:
            return self.error()
        return DeviceOutOfMemory(f"{nbytes:,} bytes were refused by a FailingResource", requested=nbytes)
