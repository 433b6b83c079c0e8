"""Managed memory: the pool that allocates it and keeps freed memory for the next buffers.

``cuMemFree`` waits until all devices are idle. So freed memory is kept, by size. The driver frees it only on worker
threads, at an idle moment if one comes: what exceeds a limit, what `trim` frees, and everything when the device is
closed.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..completion._idle_moment import IDLE_SECONDS, IdleJob, log_not_idle
from ..completion._waiting_calls import WaitingCalls
from ..driver.protocol import Advice
from ..errors import AiocudaError, BusyError, DeviceOutOfMemory, UnsupportedError, WrongDeviceError
from ._block import Block, DroppedBlock, ExternalUse
from ._deferred_frees import SWEEP_LIMIT, DeferredFrees
from ._host_view import HostView
from ._migrations import PAGE, Migrations
from ._resource import MemoryResource, Reservation, unreserve

if TYPE_CHECKING:
    from .._base._types import DeviceProperties
    from .._core import Operation, Ring
    from ..completion._reactor import Reactor
    from ._allocator import DeviceMemory
    from .interchange._exports import Exports

__all__ = ["ManagedBlock", "ManagedPool"]

#: References to views of one buffer above which the dead ones are removed.
MANY_VIEWS = 16

#: Bytes that are kept for the next buffers. Memory beyond them goes back to the driver: other programs use the GPU,
#: too.
MOST_IDLE = 256 << 20


class ManagedBlock(Block):
    """A block of managed memory, and the record of its migrations.

    Attributes
    ----------
    migrations
        When the memory moved between host and devices.
    advising
        Jobs on worker threads that call ``cuMemAdvise`` for the block.
    """

    __slots__ = ("_views", "advising", "migrations")

    def __init__(
        self, pool: ManagedPool, address: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        super().__init__(pool.driver, pool.device_state.device, address, nbytes, None, pool, shape, dtype)
        self.migrations = Migrations(address, nbytes)
        self.advising: set[object] = set()
        self._views: list[weakref.ref[Any]] = []

    @property
    def ready(self) -> bool:
        """Always False: so each use passes the check, which records it in `migrations`."""
        return False

    @ready.setter
    def ready(self, ready: bool) -> None:
        """Ignore the assignment."""

    def obstacle(self, properties: DeviceProperties) -> DeviceProperties | None:
        """Return the device that keeps streams of another device, with these properties, from using the memory.

        Both devices need concurrent managed access. Without it on either, CUDA keeps the memory where its own device
        uses it. None if both have it.
        """
        both = (properties, self.owner.device_state.properties)
        return next((each for each in both if not each.concurrent_managed_access), None)

    def check_shared(self, properties: DeviceProperties) -> None:
        """Raise `WrongDeviceError` unless streams of another device, with these properties, may use the memory."""
        obstacle = self.obstacle(properties)
        if obstacle is not None:
            raise WrongDeviceError(
                f"{self} is managed memory of device {self.device}, and {obstacle.name} has no concurrent managed "
                "access (device.properties.concurrent_managed_access), so no stream of another device can use it: "
                "bring it over by stream.copy(target, source)"
            )

    def view(self, offset: int) -> Any:
        """Return a ctypes array over the memory from that byte on. It holds a reference to the block."""
        raw = (ctypes.c_ubyte * (self.nbytes - offset)).from_address(self.address + offset)
        raw._block = self  # type: ignore[attr-defined]  # a ctypes array takes attributes
        if len(self._views) >= MANY_VIEWS:
            self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(raw))
        return raw

    @property
    def viewed(self) -> bool:
        """True while NumPy arrays over the memory exist."""
        return any(view() is not None for view in self._views)

    @property
    def in_use(self) -> bool:
        """True while an operation or a worker thread uses the memory."""
        return bool(self.advising or self.unfinished())


class ManagedPool:
    """The managed memory of one device, by size class: powers of two of at least a page. All loops share it.

    A page belongs to one buffer only, since advice applies to whole pages.

    Attributes
    ----------
    device_state, driver, properties, device
        As in `DeviceMemory`.
    reactor
        Returns the reactor of the running loop; raises if the device has been closed.
    live
        The live blocks: address → (requested bytes, the resource that they count for, its reservation).
    advised
        By address, the calls of ``cuMemAdvise`` that undo the advice given for a live block. They are made before the
        memory is used again.
    dropped
        Blocks that were dropped without a free, left by finalisers.
    deferred_frees
        Blocks that were freed and may be in use.
    closed
        True once the device has been closed.
    """

    __slots__ = ("_blocks", "_freeing", "_idle", "_memory", "_newest_unfinished", "_sizes", "advised", "closed",
                 "deferred_frees", "device", "device_state", "driver", "dropped", "live", "properties",
                 "reactor")  # fmt: skip

    def __init__(
        self,
        memory: DeviceMemory,
        reactor: Callable[[], Reactor],
        newest_unfinished: Callable[[], Operation[Any] | None],
    ) -> None:
        self._memory = memory
        self.device_state = memory.device_state
        self.driver = memory.driver
        self.properties = memory.properties
        self.device = memory.device
        self.reactor = reactor
        self._newest_unfinished = newest_unfinished
        self.live: dict[int, tuple[int, MemoryResource, Reservation]] = {}
        self.advised: dict[int, set[tuple[Advice, int]]] = {}
        self.dropped: list[DroppedBlock] = []
        self.closed = False
        self.deferred_frees: DeferredFrees[ManagedBlock] = DeferredFrees()
        self._sizes: dict[int, int] = {}  # all allocated memory: address → bytes
        self._idle: dict[int, list[int]] = {}  # the part of it that is kept for the next buffers: bytes → addresses
        self._blocks: dict[int, weakref.ref[ManagedBlock]] = {}  # the live blocks by address
        self._freeing: IdleJob | None = None  # frees what is too much to keep

    @property
    def exports(self) -> Exports:
        """The device's buffers that other libraries hold, managed or not."""
        return self._memory.exports

    # -- allocate ------------------------------------------------------------------------------------------------

    def block(self, reactor: Reactor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ManagedBlock:
        """Return a block, in memory that was freed before if the size fits; else allocate. ``cuMemAllocManaged``.

        The driver is called on the loop's thread. It does not wait for other work (0.1 ms while a kernel runs, once per
        size, since the memory is kept), and without an address there could be no NumPy view of the buffer.
        """
        if not self.properties.managed_memory:
            raise UnsupportedError(f"{self.properties.name} has no managed memory: use stream.empty and copies")
        nbytes = math.prod(shape) * dtype.itemsize
        self.sweep(reactor, SWEEP_LIMIT)
        if not nbytes:
            return ManagedBlock(self, 0, 0, shape, dtype)
        resource, reservation = self._memory.reserve(reactor, nbytes)
        try:
            address = self._allocate(reactor, nbytes)
        except BaseException:
            reactor.guard(unreserve, resource, reservation)
            raise
        block = ManagedBlock(self, address, nbytes, shape, dtype)
        self.live[address] = nbytes, resource, reservation
        self._blocks[address] = weakref.ref(block)
        self._memory.count_bytes(nbytes)
        return block

    def _allocate(self, reactor: Reactor, nbytes: int) -> int:
        """Return the address of memory of a size class, the next larger kept memory if there is no room."""
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        address = self._kept(size)
        if address is not None:
            return address
        try:
            allocate = self.driver.managed_allocate
            address = WaitingCalls.of(self.driver).run("cuMemAllocManaged", allocate, self.device_state.device, size)
        except DeviceOutOfMemory as error:
            self.sweep(reactor)
            address = self._kept(size)
            if address is not None:
                return address
            for larger in sorted(self._idle):
                address = self._kept(larger) if larger > size else None
                if address is not None:
                    return address
            if self.idle_bytes:
                reactor.jobs.start(self.trim, reactor.jobs.report_unawaited)
                error.add_note(f"{self.idle_bytes:,} bytes of kept memory are being freed: try again soon")
            raise
        self._sizes[address] = size
        return address

    def _kept(self, size: int) -> int | None:
        """Take kept memory of this size, if there is any."""
        try:
            return self._idle[size].pop()
        except (KeyError, IndexError):  # IndexError: another loop has taken it
            return None

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next buffers."""
        return sum(size * len(self._idle.get(size, ())) for size in list(self._idle))

    def host_view(self, block: ManagedBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a NumPy array over a part of the block. It holds a reference to the block."""
        if block.nbytes == 0:
            return np.empty(shape, dtype)
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=block.view(offset))
        return array if self.properties.concurrent_managed_access else HostView.of(array, lambda: self.check(block))

    def check(self, block: ManagedBlock) -> None:
        """Raise unless the host may access the block now.

        Without concurrent managed access the host may access no managed memory while the device runs anything, even
        kernels that do not use that memory.
        """
        block.check()
        if not self.properties.concurrent_managed_access:
            operation = self._unfinished(block)
            if operation is not None:
                raise BusyError(
                    f"{operation!r} is unfinished, and until then {self.properties.name} does not allow the host to "
                    "access managed memory (concurrentManagedAccess is 0): await it first"
                )

    def _unfinished(self, block: ManagedBlock) -> Operation[Any] | None:
        """Return an unfinished operation that uses the block, or else any one of the device."""
        for operation in block.unfinished():
            if not isinstance(operation, ExternalUse):  # other libraries order their own work
                return operation
        return self._newest_unfinished()

    # -- free ----------------------------------------------------------------------------------------------------

    def free(self, block: Block, queue: Ring | None) -> None:
        """Free a block once everything that uses it has passed. ``queue`` is only checked."""
        assert isinstance(block, ManagedBlock)
        if queue is not None and not self._memory.owns(queue):
            if queue.driver is not self.driver:
                raise WrongDeviceError(f"{queue.name} is a stream of another driver: free on a stream of this one")
            block.check_shared(queue.device_state.properties)
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if queue is not None:
            queue.check()
        if block.viewed:
            raise BusyError("NumPy arrays over this managed memory exist: drop what `array` has returned, then free it")
        block.retire()
        if block.nbytes:
            self.deferred_frees.add(block)

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Keep or free the memory that nothing uses. ``most`` limits the freed blocks to look at; None means all."""
        if self.driver.fault is not None:
            self.dropped.clear()
            return
        for block in self.deferred_frees.take(most):
            self._reuse(reactor, block.address)
        while self.dropped:
            try:
                dropped = self.dropped.pop()
            except IndexError:
                break
            self._reuse(reactor, dropped.address)

    def _reuse(self, reactor: Reactor, address: int) -> None:
        """Keep unused memory for the next buffer, without its advice."""
        record = self.live.pop(address, None)
        if record is None:
            return
        self._blocks.pop(address, None)
        self._memory.count_bytes(-record[0])
        size = self._sizes[address]
        advised = self.advised.pop(address, None)
        if advised is not None:
            reactor.jobs.start(lambda: self._undo_advice(address, size, advised), reactor.jobs.report_unawaited)
        else:
            self._keep(address, size)
            self._free_excess(reactor)
        reactor.guard(unreserve, *record[1:])

    def _free_excess(self, reactor: Reactor) -> None:
        """Free what is kept beyond `MOST_IDLE`, at an idle moment; after a second, or if it is twice that, at once."""
        excess = self.idle_bytes - MOST_IDLE
        if excess <= 0:
            return
        if self._freeing is None or self._freeing.is_over:

            def freed(result: None, error: BaseException | None, was_idle: bool) -> None:
                reactor.jobs.report_unawaited(result, error)
                if error is None:
                    self._free_excess(reactor)  # what came after the thread's last look
                    if not was_idle:
                        log_not_idle(self.device_state, "unified memory")

            self._freeing = reactor.idle_moments.start(lambda: self.trim(MOST_IDLE), freed, IDLE_SECONDS)
        if excess > MOST_IDLE:
            self._freeing.hurry()

    def _keep(self, address: int, size: int) -> None:
        self._idle.setdefault(size, []).append(address)

    # -- on worker threads ---------------------------------------------------------------------------------------

    def _undo_advice(self, address: int, size: int, advised: set[tuple[Advice, int]]) -> None:
        try:
            for advice, place in sorted(advised):
                self.driver.advise(address, size, advice, place)
        except AiocudaError:
            self._free(address)
            raise
        self._keep(address, size)

    def _free(self, address: int) -> None:
        if self._sizes.pop(address, None) is not None:
            WaitingCalls.of(self.driver).run("cuMemFree", self.driver.managed_deallocate, address)

    def trim(self, keep: int = 0) -> None:
        """Free kept memory beyond ``keep`` bytes, and little more. **May block**: for a worker thread."""
        sizes = sorted(self._idle)
        for least, some in ((keep, reversed(sizes)), (0, sizes)):
            for size in some:
                while self.idle_bytes > keep and self.idle_bytes - size >= least:
                    address = self._kept(size)
                    if address is None:
                        break
                    self._free(address)

    # -- close ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Close while the device may still access the memory: it stays allocated, and cannot be used any more."""
        self.closed = True
        self.deferred_frees.clear()
        self.dropped.clear()

    def close(self, reactor: Reactor) -> tuple[int, Callable[[], None]]:
        """Close; the device has finished all work. Return (number of viewed buffers, a function that frees the others).

        The function may block. Memory that NumPy arrays or other libraries use stays allocated, and live.
        """
        self.abandon()
        blocks = [known() for known in list(self._blocks.values())]
        viewed = {block.address for block in blocks if block is not None and block.viewed}
        viewed |= self.exports.addresses() & self.live.keys()
        for address in set(self.live) - viewed:
            nbytes, resource, reservation = self.live.pop(address)
            self._memory.count_bytes(-nbytes)
            reactor.guard(unreserve, resource, reservation)
        unused = [address for address in self._sizes if address not in viewed]
        self._idle.clear()

        def free() -> None:
            for address in unused:
                self._free(address)

        return len(viewed), free
