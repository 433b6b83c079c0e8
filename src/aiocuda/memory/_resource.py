"""Resource: where device memory comes from, in stream order.

A `MemoryResource` allocates and takes back on a stream. At the bottom is the driver's own pool; adaptors stand on one
another and on it, each with one job (`aiocuda.memory.adaptors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from ..completion._stream_queue import is_captured
from ..driver.protocol import Driver

__all__ = ["MemoryResource", "PoolResource", "chain", "is_resource"]


@runtime_checkable
class MemoryResource(Protocol):
    """What gives and takes back device memory. ``stream`` is the driver's handle, an integer.

    All but `trim` are called on event loops, those of several threads at once: nothing in them may wait.
    """

    def allocate(self, nbytes: int, stream: int) -> int:
        """The address of ``nbytes`` > 0 bytes, good for what is enqueued on ``stream`` from now on.

        No room: `aiocuda.DeviceOutOfMemory`, with ``requested``. What is cached is trimmed then, and the call repeated
        once.
        """

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """Take it back behind all that ``stream`` was given so far. ``nbytes`` are those that were asked for.

        An error means that it was not taken back: it is offered again.
        """

    def trim(self, keep: int = 0) -> None:
        """Let go of what nobody uses, but ``keep`` bytes. **May block.** On a worker thread, or where there is no room.

        Other threads may allocate meanwhile.
        """

    def release(self, stream: int) -> None:
        """The stream is about to be destroyed: keep nothing for it. Later memory names other streams."""


class PoolResource:
    """The driver's own pool. ``cuMemAllocFromPoolAsync`` and ``cuMemFreeAsync``.

    Attributes
    ----------
    commands : int
        What it has put into streams so far: allocations, frees and fills. While it stands still, whatever an adaptor
        hands out was there before.
    """

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
        """Give what nobody uses back to the device, but ``keep`` bytes. **May block.** ``cuMemPoolTrimTo``."""
        self.driver.pool_trim(self.device, keep)

    def release(self, stream: int) -> None:
        """Nothing: the pool keeps no memory for one stream alone."""

    def captured(self, stream: int) -> bool:
        """Does somebody capture the stream just now? ``cuStreamIsCapturing``."""
        return is_captured(self.driver, stream)

    @property
    def reserved_bytes(self) -> int:
        """What the pool holds, in use or not. ``CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT``."""
        return self.driver.pool_reserved(self.device)

    def __repr__(self) -> str:
        return f"<PoolResource {self.driver.name}:{self.device}>"


def is_resource(thing: object) -> bool:
    """Has it what a resource has? A class has that too, and is none."""
    return isinstance(thing, MemoryResource) and not isinstance(thing, type)


def chain(resource: Any) -> Iterator[Any]:
    """A resource and what it stands on, from the top down, as far as each one says so by ``upstream``."""
    while resource is not None:
        yield resource
        resource = getattr(resource, "upstream", None)
