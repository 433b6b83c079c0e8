"""Managed memory: what is allocated of it, who still uses it, and what is kept for the next one.

``cuMemFree`` waits until all devices are idle, so memory that is given back is kept, by size, and freed only on worker
threads: what is too much to keep, what is trimmed, and all of it when the device is closed.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..driver.protocol import Advice
from ..errors import AiocudaError, BusyError, DeviceOutOfMemory, UnsupportedError, WrongDeviceError
from ._block import Block, DroppedBlock
from ._deferred_frees import MOST_LOOKED_AT, DeferredFrees
from ._exports import Export
from ._host_view import HostView
from ._migrations import PAGE, Migrations
from ._unified import UnifiedBuffer

if TYPE_CHECKING:
    from ..completion._operation import Operation
    from ..completion._reactor import Reactor
    from ..completion._stream_queue import StreamQueue
    from ._allocator import DeviceMemory
    from ._exports import Exports

__all__ = ["ManagedBlock", "ManagedPool"]

#: Views of one buffer that may have gone before they are forgotten.
MANY_VIEWS = 16

#: Bytes that are kept for the next buffers; what is given back beyond them is freed. Others use the GPU, too.
MOST_IDLE = 256 << 20


class ManagedBlock(Block):
    """Managed memory on loan, and what is known of where it is."""

    __slots__ = ("_views", "advising", "migrations")

    def __init__(self, pool: ManagedPool, address: int, nbytes: int) -> None:
        super().__init__(pool.driver, pool.device_state.device, address, nbytes, None, pool)
        self.migrations = Migrations(address, nbytes)
        #: Threads that give advice about it just now.
        self.advising: set[object] = set()
        self._views: list[weakref.ref[Any]] = []

    @property
    def ready(self) -> bool:
        """Never: each use is asked about first, and so gets into the record. Other memory pays nothing for that."""
        return False

    @ready.setter
    def ready(self, ready: bool) -> None:
        """It stays as it is."""

    def view(self, offset: int) -> Any:
        """What an array over it stands on, from that byte on. It holds the block."""
        raw = (ctypes.c_ubyte * (self.nbytes - offset)).from_address(self.address + offset)
        raw._block = self  # type: ignore[attr-defined]  # a ctypes array takes attributes
        if len(self._views) >= MANY_VIEWS:
            self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(raw))
        return raw

    @property
    def viewed(self) -> bool:
        """Does somebody on the host look at it?"""
        return any(view() is not None for view in self._views)

    @property
    def in_use(self) -> bool:
        """Does a stream or a thread still do something with it?"""
        return bool(self.advising or self.unfinished())


class ManagedPool:
    """Managed memory of one device, by size class: powers of two of at least a page. Shared by all its loops.

    No page is in two buffers, since advice is given for whole pages.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.device_state = memory.device_state
        self.driver = memory.driver
        self.properties = memory.properties
        self.device: Any = memory.device
        #: Lent and not given back: address → bytes that were asked for.
        self.live: dict[int, int] = {}
        #: Advice that was given about what is lent, as what takes it back: the next one must not inherit it.
        self.advised: dict[int, set[tuple[Advice, int]]] = {}
        #: Addresses whose last holder has gone, left by finalisers.
        self.dropped: list[DroppedBlock] = []
        self.closed = False
        self.deferred_frees: DeferredFrees[ManagedBlock] = DeferredFrees()  # freed by hand, and perhaps still in use
        self._sizes: dict[int, int] = {}  # all that there is: address → bytes
        self._idle: dict[int, list[int]] = {}  # of these, the kept ones: bytes → addresses
        self._blocks: dict[int, weakref.ref[ManagedBlock]] = {}  # by address; the live ones

    @property
    def exports(self) -> Exports:
        """What other libraries hold of the device's memory, of either kind."""
        return self._memory.exports

    # -- lend ----------------------------------------------------------------------------------------------------

    def buffer(self, reactor: Reactor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> UnifiedBuffer:
        """A buffer. What was given back before is handed out again where it fits; else there is a driver call.

        ``cuMemAllocManaged`` is called on the loop's thread: it waits for nobody's work (0.1 ms beside a held kernel,
        once per size, since it is kept), and a buffer without an address could give the host no view of it.
        """
        if not self.properties.managed_memory:
            raise UnsupportedError(f"{self.properties.name} has no managed memory: use stream.empty and copies")
        nbytes = math.prod(shape) * dtype.itemsize
        self.sweep(reactor, MOST_LOOKED_AT)
        address = self._take(reactor, nbytes) if nbytes else 0
        block = ManagedBlock(self, address, nbytes)
        block.shape, block.dtype = shape, dtype
        if nbytes:
            self.live[address] = nbytes
            self._blocks[address] = weakref.ref(block)
            self._memory.changed(nbytes)
        return UnifiedBuffer(self, block, 0, shape, dtype)

    def _take(self, reactor: Reactor, nbytes: int) -> int:
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        address = self._kept(size)
        if address is not None:
            return address
        try:
            address = self.driver.managed_allocate(self.device_state.device, size)
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
                reactor.jobs.start(self.trim, reactor.jobs.unheard)
                error.add_note(f"{self.idle_bytes:,} bytes that were kept are being given back: try again soon")
            raise
        self._sizes[address] = size
        return address

    def _kept(self, size: int) -> int | None:
        try:
            return self._idle[size].pop()
        except (KeyError, IndexError):  # another loop was quicker
            return None

    @property
    def idle_bytes(self) -> int:
        """Kept for the next buffers."""
        return sum(size * len(self._idle.get(size, ())) for size in list(self._idle))

    def host_view(self, block: ManagedBlock, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Managed memory as NumPy sees it. The view holds the block."""
        if block.nbytes == 0:
            return np.empty(shape, dtype)
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=block.view(offset))
        return array if self.properties.concurrent_managed_access else HostView.of(array, lambda: self.check(block))

    def check(self, block: ManagedBlock) -> None:
        """May the host look at it now?

        Where it may not look while the device works, that is while the device does anything: kernels that do not use
        the memory count as well.
        """
        block.check()
        if not self.properties.concurrent_managed_access:
            operation = self._at_work(block)
            if operation is not None:
                raise BusyError(
                    f"{operation!r} is under way, and {self.properties.name} does not let the host look at managed "
                    "memory meanwhile (concurrentManagedAccess is 0): await it first"
                )

    def _at_work(self, block: ManagedBlock) -> Operation[Any] | None:
        for operation in block.unfinished():
            if not isinstance(operation, Export):  # what others do with it, they answer for
                return operation
        found: Operation[Any] | None = self.device._loop_states.working()
        return found

    # -- take back -----------------------------------------------------------------------------------------------

    def free(self, block: Block, queue: StreamQueue | None) -> None:
        """Take a buffer's memory back once everything that uses it has passed. ``queue`` makes no difference."""
        if queue is not None and not self._memory.is_here(queue):
            raise WrongDeviceError(f"{queue.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if queue is not None:
            queue.check()
        assert isinstance(block, ManagedBlock)
        if block.viewed:
            raise BusyError("NumPy still looks at this managed memory: drop what `array` has returned, then free it")
        block.retire()
        if block.nbytes:
            self.deferred_frees.add(block)

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Take back what nobody uses any more. Called when there is a new buffer, on wakes and ticks.

        ``most`` is the number of freed buffers to look at; None for all.
        """
        if self.driver.fault is not None:
            self.dropped.clear()
            return
        for block in self.deferred_frees.take(most):
            self._return(reactor, block.address)
        while self.dropped:
            try:
                left = self.dropped.pop()
            except IndexError:
                break
            self._return(reactor, left.address)

    def _return(self, reactor: Reactor, address: int) -> None:
        """Nobody uses it any more: keep it, without the advice that it was given; or free it."""
        nbytes = self.live.pop(address, None)
        if nbytes is None:
            return
        self._blocks.pop(address, None)
        self._memory.changed(-nbytes)
        size = self._sizes[address]
        advised = self.advised.pop(address, None)
        if advised is not None:
            reactor.jobs.start(lambda: self._forget_advice(address, size, advised), reactor.jobs.unheard)
        elif self.idle_bytes + size > MOST_IDLE:
            reactor.jobs.start(lambda: self._free(address), reactor.jobs.unheard)
        else:
            self._keep(address, size)

    def _keep(self, address: int, size: int) -> None:
        self._idle.setdefault(size, []).append(address)

    # -- on worker threads ---------------------------------------------------------------------------------------

    def _forget_advice(self, address: int, size: int, advised: set[tuple[Advice, int]]) -> None:
        try:
            for advice, place in sorted(advised):
                self.driver.advise(address, size, advice, place)
        except AiocudaError:
            self._free(address)
            raise
        self._keep(address, size)

    def _free(self, address: int) -> None:
        if self._sizes.pop(address, None) is not None:
            self.driver.managed_deallocate(address)

    def trim(self, keep: int = 0) -> None:
        """Free what is kept beyond ``keep`` bytes, the largest first. **May block**: for a worker thread."""
        for size in sorted(self._idle, reverse=True):
            while self.idle_bytes > keep and (address := self._kept(size)) is not None:
                self._free(address)

    # -- the end -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The device is closed, and may still touch anything: nothing goes back, and nothing can be used any more."""
        self.closed = True
        self.deferred_frees.clear()
        self.dropped.clear()

    def close(self) -> tuple[int, Callable[[], None]]:
        """The device is closed and drained: (how many buffers others still look at, what remains to be done).

        That may block. What NumPy or another library looks at stays allocated, and live.
        """
        self.abandon()
        blocks = [known() for known in list(self._blocks.values())]
        viewed = {block.address for block in blocks if block is not None and block.viewed}
        viewed |= self.exports.addresses() & self.live.keys()
        for address in set(self.live) - viewed:
            self._memory.changed(-self.live.pop(address))
        going = [address for address in self._sizes if address not in viewed]
        self._idle.clear()

        def free() -> None:
            for address in going:
                self._free(address)

        return len(viewed), free
