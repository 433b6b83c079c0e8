"""Failure injection: allocations and frees that fail when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Container

from ...errors import AiocudaError, DeviceOutOfMemory
from .._resource import MemoryResource
from ._adaptor import Adaptor

__all__ = ["FailingResource"]


class FailingResource(Adaptor):
    """Fails the calls that it is told to fail, and hands the others on.

    Parameters
    ----------
    upstream
        Where the memory comes from.
    allocations
        The numbers of the `allocate` calls that fail, from 1; any container, such as ``{3}`` or ``range(3, 6)``.
    deallocations
        The same for `deallocate`; what is refused there is offered again.
    when
        ``when(nbytes, stream)``: fail this allocation? Asked besides ``allocations``.
    error
        Makes the error. A `aiocuda.DeviceOutOfMemory` is tried again once, as one of the driver's: name two numbers to
        have it reach the program.

    Attributes
    ----------
    allocated, deallocated : int
        Calls so far, failed ones too.
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
        self.allocated += 1
        if self.allocated in self.allocations or (self.when is not None and self.when(nbytes, stream)):
            raise self._error(nbytes)
        return self.upstream.allocate(nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.deallocated += 1
        if self.deallocated in self.deallocations:
            raise self._error(nbytes)
        self.upstream.deallocate(address, nbytes, stream)

    def _error(self, nbytes: int) -> AiocudaError:
        if self.error is not None:
            return self.error()
        return DeviceOutOfMemory(f"{nbytes:,} bytes were refused by a FailingResource", requested=nbytes)
