"""Supply: the resource that a device's memory comes from just now, and all that it has come from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..driver.protocol import Driver
from ..errors import DeviceFault, DeviceOutOfMemory, InvalidTypeError
from ._resource import MemoryResource, PoolResource, chain, is_resource

if TYPE_CHECKING:
    from ..completion._operation import Operation
    from ..completion._stream_queue import StreamQueue

__all__ = ["AnyResource", "Kept", "Supply", "kept_behind"]

AnyResource = TypeVar("AnyResource", bound=MemoryResource)

#: Of memory that was freed and never reached the driver: in which stream, and the operation behind which it is good for
#: every other stream as well; None if for all at once.
Kept: TypeAlias = "tuple[int, Operation[Any] | None]"


class Uncounted:
    """Stands for a pool that does not say what it does: it is always something new."""

    _next = itertools.count(1).__next__

    @property
    def commands(self) -> int:
        """Never the same twice."""
        return self._next()


class Supply:
    """The pool at the bottom, and the adaptors in front of it.

    An adaptor may hand out again what it has kept, in the order of the stream in which it was freed. Other streams
    would need an event each time; so what they have to wait for is remembered by address, and holds as long as the
    driver has not heard of the block.
    """

    __slots__ = ("_resources", "counter", "kept", "pool", "resource")

    def __init__(self, driver: Driver, device: int) -> None:
        self.pool = PoolResource(driver, device)
        self.resource: MemoryResource = self.pool
        self._resources: list[MemoryResource] = [self.pool]  # that have been in force
        #: Counts what reaches the driver; what does not stand on our pool may reach it at any time.
        self.counter: PoolResource | Uncounted = self.pool
        self.kept: dict[int, Kept] = {}

    def use(self, build: Callable[[MemoryResource], AnyResource]) -> AnyResource:
        """Put another resource in force."""
        if not callable(build):
            raise InvalidTypeError(f"use takes a function of the resource in force, not {build!r}: lambda upstream: …")
        resource = build(self.resource)
        if not is_resource(resource):
            raise InvalidTypeError(f"{build!r} has returned {resource!r}, which is no MemoryResource")
        if not any(resource is known for known in self._resources):
            self._resources.append(resource)
        self.counter = self.pool if any(each is self.pool for each in chain(resource)) else Uncounted()
        self.resource = resource
        return resource

    def allocate_trimmed(self, nbytes: int, stream: int, live: int) -> int:
        """There was no room: let go of what nobody uses, and try once more."""
        # Rare, and lost anyway: trimming here may take a millisecond, but it waits for nobody's work.
        self.trim(0)
        try:
            return self.resource.allocate(nbytes, stream)
        except DeviceOutOfMemory as error:
            driver, device = self.pool.driver, self.pool.device
            free, total = driver.memory_info(device)
            reserved = self.pool.reserved_bytes
            why = f": {error}" if hasattr(error, "limit") else ". Free buffers, await what has some, or ask for less"
            facts = {"requested": nbytes, "live": live, "reserved": reserved, "free": free, "total": total}
            raise DeviceOutOfMemory(
                f"no room for {nbytes:,} bytes on device {device}: {live:,} live in our buffers, {reserved:,} reserved "
                f"by the pool, {free:,} free of {total:,}{why}",
                **{**error.__dict__, **facts},
            ) from error

    def deallocate(
        self, resource: MemoryResource | None, address: int, nbytes: int, stream: int, kept: Kept | None = None
    ) -> None:
        """Give memory back to the resource that it came from. ``kept`` holds if the driver does not hear of it."""
        counter = self.counter
        commands = counter.commands
        if kept is not None and resource is self.resource:
            self.kept[address] = kept  # first: another thread may be given it in the next moment
        try:
            (self.pool if resource is None else resource).deallocate(address, nbytes, stream)
        except BaseException:
            self.kept.pop(address, None)
            raise
        if counter.commands != commands:
            self.kept.pop(address, None)

    def trim(self, keep: int) -> int:
        """Let go of what nobody uses, but ``keep`` bytes; by how many the pool has shrunk. **May block.**"""
        before = self.pool.reserved_bytes
        stood_on = {id(below) for top in self._resources for below in list(chain(top))[1:]}
        for resource in self._resources:
            if id(resource) not in stood_on:  # it trims what it stands on
                resource.trim(keep)
        self.kept.clear()  # of addresses that are the driver's by now
        return max(0, before - self.pool.reserved_bytes)

    def release(self, queue: StreamQueue) -> None:
        """The queue's stream is about to be destroyed: nothing is kept for it any more."""
        for resource in self._resources:
            try:
                resource.release(queue.handle)
            except DeviceFault:
                return  # latched: the memory stays where it is
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                queue.reactor.report(f"memory that was kept for {queue.name} was not taken back", error)


def kept_behind(queue: StreamQueue) -> Kept | None:
    """What is to be known of memory that is freed in the queue now, if an adaptor keeps it: see `Kept`.

    The stream's last operation stands for all that it was given. Where others enqueue, too, nothing does; and one that
    has a result to give must not live as long as the memory.
    """
    pending = queue.pending
    if not pending:
        return None if queue.shared else (queue.handle, None)
    last = pending[-1]
    if last.value is not None or last.lease is None or queue.shared:
        return None
    return (queue.handle, last)
