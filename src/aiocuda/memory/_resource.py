"""Memory resources: where device memory comes from, in the order of streams.

A `MemoryResource` allocates and frees on a stream. The driver's own pool is the lowest one. Adaptors wrap it, or each
other, and each has one task (`aiocuda.memory.adaptors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .._base._checks import as_integer
from ..completion._foreign_work import is_captured
from ..completion._waiting_calls import WaitingCalls
from ..driver.protocol import Driver
from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = [
    "ADDRESSES",
    "MemoryResource",
    "PoolResource",
    "Reservation",
    "as_address",
    "chain",
    "is_resource",
    "reserve",
    "unreserve",
]


#: An address is less.
ADDRESSES = 1 << 64


@runtime_checkable
class MemoryResource(Protocol):
    """Allocates and frees device memory. ``stream`` is the driver's handle, an integer.

    All methods but `trim` are called on event loops, of several threads at the same time: they must not wait.
    """

    def allocate(self, nbytes: int, stream: int) -> int:
        """Return the address of ``nbytes`` > 0 bytes. Work enqueued on ``stream`` from now on may use them.

        The address is an int from 1 to 2**64 - 1; with any other result the call that needs the memory fails. Raise
        `aiocuda.DeviceOutOfMemory`, with ``requested``, if there is no room. Then caches are trimmed, and the call is
        repeated once.
        """

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """Free memory after all work that ``stream`` has received. ``nbytes`` is the size that was requested.

        An error means that the memory was not freed: the call is repeated later.
        """

    def trim(self, keep: int = 0) -> None:
        """Free unused memory, except ``keep`` bytes. **May block.** Called on a worker thread, or if there is no room.

        Other threads may allocate at the same time.
        """

    def release(self, stream: int) -> None:
        """Keep no memory for this stream: it is about to be destroyed. Later calls name other streams."""


@dataclass(frozen=True, eq=False, slots=True)
class Reservation:
    """Memory that counts as allocated from a resource, although it comes from elsewhere. Two are never equal.

    Attributes
    ----------
    nbytes
        The requested size.
    kind
        Of the memory: ``"unified"``.
    """

    nbytes: int
    kind: str


@runtime_checkable
class _Reserving(Protocol):
    """A resource that is asked for memory that it does not allocate; see `Adaptor`."""

    def reserve(self, nbytes: int, kind: str) -> Reservation: ...

    def unreserve(self, reservation: Reservation) -> None: ...


class PoolResource:
    """The driver's own pool. ``cuMemAllocFromPoolAsync`` and ``cuMemFreeAsync``.

    Attributes
    ----------
    commands : int
        Allocations, frees and fills that it has put into streams. If an adaptor frees and allocates
        memory and this number does not change, the memory stays allocated for the driver.
    """

    __slots__ = ("commands", "device", "driver")

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.commands = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        self.commands += 1
        return self.driver.allocate(self.device, nbytes, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        self.commands += 1
        self.driver.deallocate(address, stream)

    def fill(self, address: int, nbytes: int, byte: int, stream: int) -> None:
        """Set every byte, in the stream's order. ``cuMemsetD8Async``."""
        self.commands += 1
        self.driver.fill(stream, address, bytes((byte,)), nbytes)

    def trim(self, keep: int = 0) -> None:
        """Give unused memory back to the device, except ``keep`` bytes. **May block.** ``cuMemPoolTrimTo``."""
        WaitingCalls.of(self.driver).run("cuMemPoolTrimTo", self.driver.pool_trim, self.device, keep)

    def release(self, stream: int) -> None:
        """Do nothing: the pool keeps no memory for single streams."""

    def captured(self, stream: int) -> bool:
        """True while the stream is being captured. ``cuStreamIsCapturing``."""
        return is_captured(self.driver, stream)

    @property
    def reserved_bytes(self) -> int:
        """The pool's size in bytes, used and unused. ``CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT``."""
        return self.driver.pool_reserved(self.device)

    def __repr__(self) -> str:
        return f"<PoolResource {self.driver.name}:{self.device}>"


def as_address(address: Any, resource: object) -> int:
    """Return what a resource has allocated as an int. Raise an error that names the resource if it is no address."""
    rule = f"allocate of {resource!r} returned {address!r}"
    address = as_integer(address)
    if isinstance(address, bool) or not isinstance(address, int):
        raise InvalidTypeError(f"{rule}, which is no address: return an int, or raise DeviceOutOfMemory")
    if not 0 < address < ADDRESSES:
        raise InvalidArgumentError(
            f"{rule}, which is no address of device memory, from 1 to 2**64 - 1: raise DeviceOutOfMemory"
        )
    return int(address)


def is_resource(thing: object) -> bool:
    """True for an instance (not a class) of `MemoryResource`."""
    return isinstance(thing, MemoryResource) and not isinstance(thing, type)


def chain(resource: Any) -> Iterator[Any]:
    """Yield a resource and, from the top down, the resources that it wraps, found by the attribute ``upstream``."""
    while resource is not None:
        yield resource
        resource = getattr(resource, "upstream", None)


def reserve(resource: object, nbytes: int, kind: str) -> Reservation:
    """Ask a resource and those that it wraps for memory of another kind. Resources without `reserve` are passed over.

    If one of them refuses, its error is raised, and nothing is reserved.
    """
    for each in chain(resource):
        if isinstance(each, _Reserving):
            reservation = each.reserve(nbytes, kind)
            if not isinstance(reservation, Reservation):
                raise InvalidTypeError(
                    f"reserve of {each!r} returned {reservation!r}, which is no Reservation: return the one that "
                    "super().reserve(nbytes, kind) returns"
                )
            return reservation
    return Reservation(nbytes, kind)


def unreserve(resource: object, reservation: Reservation) -> None:
    """End a reservation that `reserve` has returned for the same resource."""
    for each in chain(resource):
        if isinstance(each, _Reserving):
            return each.unreserve(reservation)
    return None
