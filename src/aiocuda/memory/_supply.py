"""Supply: the memory resource that a device's memory comes from, and the resources that it came from before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .._base._log import log
from ..driver.protocol import Driver
from ..errors import DeviceFault, DeviceOutOfMemory, InvalidTypeError
from ._resource import MemoryResource, PoolResource, chain, is_resource
from .adaptors._sizes import SizeClassResource

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation

__all__ = ["AnyResource", "Kept", "Supply"]

#: Bytes of the largest block that the free lists keep, and of all blocks of one size class of one stream. A kept block
#: serves its own stream only: so large ones go back to the pool, which serves all streams.
LARGEST_KEPT = 1 << 20
MOST_KEPT = 4 << 20

AnyResource = TypeVar("AnyResource", bound=MemoryResource)
T = TypeVar("T")

#: Of memory that was freed into an adaptor and not into the driver's pool: (the stream that it was freed in, the
#: operation after which other streams may use it). None as the operation: other streams need not wait.
Kept: TypeAlias = "tuple[int, StreamOperation[Any] | None]"


class UnknownCommands:
    """Stands for `PoolResource.commands` if the resource in use does not wrap a `PoolResource`.

    The number differs at each read, so the driver may always have received a command.
    """

    _next = itertools.count(1).__next__

    @property
    def commands(self) -> int:
        """A number that was never returned before."""
        return self._next()


class Supply:
    """The driver's pool, and the adaptors that wrap it.

    An adaptor may allocate again what was freed into it, in the order of the stream of that free. Another stream that
    uses the new buffer has to wait for the work before that free. `kept` remembers, by address, the operation to wait
    for, so that no new event is needed; it is valid while the driver's pool has not received the block.

    Attributes
    ----------
    pool
        The driver's pool.
    free_lists
        The free lists in front of it.
    resource
        The resource in use, as the program sees it.
    source
        The resource that new memory comes from: free lists in front of the pool, unless `use` has put an adaptor there.
    counter
        Its ``commands`` change whenever the driver may have received a command.
    kept
        Records of memory that adaptors keep, by address.
    """

    __slots__ = ("_resources", "counter", "free_lists", "kept", "pool", "resource", "source")

    def __init__(self, driver: Driver, device: int) -> None:
        self.pool = PoolResource(driver, device)
        self.resource: MemoryResource = self.pool
        self.free_lists = SizeClassResource(self.pool, largest=LARGEST_KEPT, most_kept=MOST_KEPT)
        self.source: MemoryResource = self.free_lists
        self._resources: list[MemoryResource] = [self.pool]  # all that have been in use
        self.counter: PoolResource | UnknownCommands = self.pool
        self.kept: dict[int, Kept] = {}

    def use(self, build: Callable[[MemoryResource], AnyResource]) -> AnyResource:
        """Use another resource from now on; see `DeviceMemory.use`."""
        if not callable(build):
            raise InvalidTypeError(
                f"use takes a function that wraps the present resource, not {build!r}: lambda upstream: …"
            )
        resource = build(self.resource)
        if not is_resource(resource):
            raise InvalidTypeError(f"{build!r} has returned {resource!r}, which is no MemoryResource")
        if not any(resource is known for known in self._resources):
            self._resources.append(resource)
        self.counter = self.pool if any(each is self.pool for each in chain(resource)) else UnknownCommands()
        self.resource = resource
        self.source = self.free_lists if resource is self.pool else resource
        return resource

    def trimmed(self, allocate: Callable[[], T], nbytes: int, live: int, name: str) -> T:
        """Free unused memory and allocate once more, after an allocation that found no room."""
        # This may take a millisecond on the loop. But it is rare, the allocation would fail otherwise, and it does not
        # wait for other work.
        freed = self.trim(0)
        log("info", "memory_trimmed", device=name, freed_bytes=freed, requested_bytes=nbytes)
        try:
            return allocate()
        except DeviceOutOfMemory as error:
            driver, device = self.pool.driver, self.pool.device
            free, total = driver.memory_info(device)
            reserved = self.pool.reserved_bytes
            cure = "Free buffers, await operations that use some, or request less"
            why = f": {error}" if hasattr(error, "limit") else f". {cure}"
            facts = {"requested": nbytes, "live": live, "reserved": reserved, "free": free, "total": total}
            raise DeviceOutOfMemory(
                f"no room for {nbytes:,} bytes on device {device}: {live:,} live in our buffers, {reserved:,} reserved "
                f"by the pool, {free:,} free of {total:,}{why}",
                **{**error.__dict__, **facts},
            ) from error

    def deallocate(
        self, resource: MemoryResource, address: int, nbytes: int, stream: int, kept: Kept | None = None
    ) -> None:
        """Free memory into the resource that it came from. ``kept`` is recorded if the driver does not receive it."""
        counter = self.counter
        commands = counter.commands
        if kept is not None and resource is self.source:
            self.kept[address] = kept  # before the free: another thread may allocate the address right after it
        try:
            resource.deallocate(address, nbytes, stream)
        except BaseException:
            self.kept.pop(address, None)
            raise
        if counter.commands != commands:
            self.kept.pop(address, None)

    def trim(self, keep: int) -> int:
        """Free unused memory, except ``keep`` bytes; return by how many bytes the pool has shrunk. **May block.**"""
        before = self.pool.reserved_bytes
        left = self.free_lists.free_kept(keep)
        wrapped = {id(below) for top in self._resources for below in list(chain(top))[1:]}
        for resource in self._resources:
            if id(resource) not in wrapped:  # an adaptor trims the resource that it wraps
                resource.trim(max(0, keep - left))
        self.kept.clear()  # the pool has received these addresses
        return max(0, before - self.pool.reserved_bytes)

    def release(self, queue: Ring) -> None:
        """Free the memory that is kept for a stream, which is about to be destroyed, and forget its records."""
        stream = queue.handle
        kept = self.free_lists.tables()[0].get(stream, {})
        addresses = [*itertools.chain.from_iterable(list(kept.values()))]
        if len(self._resources) > 1:  # an adaptor does not list the addresses that it keeps
            addresses += [address for address, record in list(self.kept.items()) if record[0] == stream]
        for address in addresses:
            self.kept.pop(address, None)
        for resource in (self.free_lists, *self._resources[1:]):  # the free lists are in front of the first, the pool
            try:
                resource.release(stream)
            except DeviceFault:
                return  # every later call fails, too: the memory stays allocated
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                queue.reactor.report(f"memory that was kept for {queue.name} could not be freed", error)
