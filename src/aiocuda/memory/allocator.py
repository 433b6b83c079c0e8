"""Device memory: stream-ordered allocation, and what is known of it.

Nothing in here waits for the device. A free follows, on the device, everything that used the block; where that is not
yet possible, because something that uses it is still on the host, the block waits in limbo for the next sweep.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
import warnings
import weakref
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..completion.hub import Hub
from ..completion.lane import Lane
from ..completion.shared import takes
from ..errors import (
    AiocudaError,
    BusyError,
    CleanupWarning,
    DeviceFault,
    DeviceOutOfMemory,
    UnsupportedError,
    WrongDeviceError,
    WrongLoopError,
)
from .arrays import as_dtype, as_shape
from .block import Block, Left
from .buffer import DeviceBuffer, UnifiedBuffer

if TYPE_CHECKING:
    from ..completion.reactor import Reactor

__all__ = ["DeviceMemory", "HasLane", "MemoryStatistics"]


class HasLane(Protocol):
    """A stream, as memory sees it."""

    @property
    def _lane(self) -> Lane: ...


class Freed(NamedTuple):
    """A block that has been freed, and the lane in whose order it is to go back."""

    block: Block
    lane: Lane | None

    @property
    def address(self) -> int:
        return self.block.address


_Entry = TypeVar("_Entry", Freed, Left)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """One device's memory, in bytes.

    Attributes
    ----------
    live_bytes
        Handed out and not freed.
    peak_bytes
        The most that ``live_bytes`` has been.
    reserved_bytes
        Held by the pool, handed out or not.
    by_class
        Live bytes by size class: the power of two at or above the size.
    fragmentation
        Share of the reserved bytes that is not handed out, 0-1.
    """

    live_bytes: int
    peak_bytes: int
    reserved_bytes: int
    by_class: dict[int, int]
    fragmentation: float


class DeviceMemory:
    """The memory of one device, shared by all its loops."""

    def __init__(self, hub: Hub, device: object) -> None:
        self.hub = hub
        self.driver = hub.driver
        self.properties = hub.properties
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}  # address → bytes
        self._homes: dict[int, Lane] = {}
        self._managed: set[int] = set()
        #: What NumPy's views of managed memory stand on, as long as any of them lives.
        self._views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: Addresses whose last holder has gone, left by finalisers.
        self.garbage: deque[Left] = deque()
        self.closed = False
        self._limbo: deque[Freed] = deque()
        self._refused: set[int] = set()  # addresses that the driver did not take back when it was first asked
        self._spare: int | None = None  # a stream of our own, for memory whose stream has been closed
        self._spare_lock = threading.Lock()  # taken once, by who makes it

    # -- allocate ------------------------------------------------------------------------------------------------

    def empty(self, lane: Lane, shape: object, dtype: npt.DTypeLike, *, marked: bool = True) -> DeviceBuffer:
        """A buffer that work enqueued on the lane from now on may use.

        An event behind the allocation, for other streams to come behind, on an idle stream too: so CUDA's rules have
        it. Without ``marked`` the caller sees to that.
        """
        kind = as_dtype(dtype)
        extents = as_shape(shape, kind.itemsize)
        nbytes = math.prod(extents) * kind.itemsize
        if nbytes == 0:
            block = Block(self.driver, self.hub.device, 0, 0, lane, self)
        else:
            block = Block(self.driver, self.hub.device, self._allocate(lane, nbytes), nbytes, lane, self)
            self._count(block.address, nbytes, lane)
            block.shape, block.dtype = extents, kind
            if marked:
                block.born = lane.mark()
        return DeviceBuffer(self, block, 0, extents, kind)

    def _allocate(self, lane: Lane, nbytes: int) -> int:
        if self.garbage or self._limbo:
            self.sweep(lane.reactor)
        try:
            return self.driver.allocate(self.hub.device, nbytes, lane.handle)
        except DeviceOutOfMemory:
            # Rare, and lost anyway: trimming here may take a millisecond, but it waits for nobody's work.
            self.driver.pool_trim(self.hub.device, 0)
        try:
            return self.driver.allocate(self.hub.device, nbytes, lane.handle)
        except DeviceOutOfMemory as error:
            free, total = self.driver.memory_info(self.hub.device)
            reserved = self.driver.pool_reserved(self.hub.device)
            raise DeviceOutOfMemory(
                f"no room for {nbytes:,} bytes on device {self.hub.device}: {self.live_bytes:,} live in our buffers, "
                f"{reserved:,} reserved by the pool, {free:,} free of {total:,}. Free buffers, or ask for less",
                requested=nbytes,
                live=self.live_bytes,
                reserved=reserved,
                free=free,
                total=total,
            ) from error

    def managed(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> UnifiedBuffer:
        """A buffer over managed memory."""
        if not self.properties.managed_memory:
            raise UnsupportedError(f"{self.properties.name} has no managed memory: use stream.empty and copies")
        nbytes = math.prod(shape) * dtype.itemsize
        address = self.driver.managed_allocate(self.hub.device, nbytes) if nbytes else 0
        block = Block(self.driver, self.hub.device, address, nbytes, None, self)
        block.shape, block.dtype = shape, dtype
        if nbytes:
            self._managed.add(address)
            self._count(address, nbytes, None)
        return UnifiedBuffer(self, block, 0, shape, dtype)

    def _count(self, address: int, nbytes: int, home: Lane | None) -> None:
        self._live[address] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if home is not None:
            self._homes[address] = home
            home.live_bytes += nbytes
            home.peak_bytes = max(home.peak_bytes, home.live_bytes)

    def host_view(self, block: Block, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Managed memory as NumPy sees it. The view holds the block."""
        if block.nbytes == 0:
            return np.empty(shape, dtype)
        raw = (ctypes.c_ubyte * (block.nbytes - offset)).from_address(block.address + offset)
        raw._block = block  # type: ignore[attr-defined]  # the view's base keeps the memory alive
        self._views[id(raw)] = raw
        return np.ndarray(shape, dtype, buffer=raw)  # type: ignore[arg-type]  # ctypes arrays export a buffer

    # -- free ----------------------------------------------------------------------------------------------------

    def free(self, block: Block, lane: Lane | None) -> None:
        """Give a block back behind everything that uses it."""
        if lane is not None and lane.hub is not self.hub:
            raise WrongDeviceError(f"{lane.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if lane is not None:
            lane.check()
        else:
            lane = block.home
            if lane is not None and not lane.closed and lane.loop is not _get_running_loop():
                raise WrongLoopError(
                    f"{lane.name} belongs to another event loop: free the buffer there, or name a stream of this loop"
                )
        if block.address in self._viewed():
            raise BusyError("NumPy still looks at this managed memory: drop what `array` has returned, then free it")
        block.retire()
        try:
            if block.nbytes and not self._try_free(block, lane):
                self._limbo.append(Freed(block, lane))
        except AiocudaError:
            if self.driver.fault is None:
                block.revive()  # the driver has refused: it may be freed again
            raise

    def _viewed(self) -> set[int]:
        """Addresses of managed blocks that somebody on the host looks at."""
        return {raw._block.address for raw in self._views.values()}

    def _try_free(self, block: Block, lane: Lane | None) -> bool:
        """Free in the lane's order, if all that uses the block has reached the device."""
        if block.address in self._managed:
            return False  # it may block: the next sweep gives it to a thread
        before = [(operation, operation._lease) for operation in block.unfinished()]
        if any(lease is None for _, lease in before):
            return False  # still on the host: it would come after the free
        if lane is not None and not takes(lane):
            lane = None  # and what it has accepted must be waited for like that of others
        stream = self._spare_stream() if lane is None else lane.handle
        for operation, lease in before:
            if operation._lane is not lane and lease is not None:
                self.driver.stream_wait(stream, lease.handle)
        self._deallocate(block.address, block.nbytes, stream)
        return True

    def _deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """Give it back, once; where the driver refuses, it counts as before."""
        home = self._homes.get(address)
        if not self._forget(address, nbytes):
            return
        try:
            self.driver.deallocate(address, stream)
        except BaseException:
            self._count(address, nbytes, home)
            raise

    def _forget(self, address: int, nbytes: int) -> bool:
        """Count it as given back, once."""
        if self._live.pop(address, None) is None:
            return False
        self.live_bytes -= nbytes
        home = self._homes.pop(address, None)
        if home is not None:
            home.live_bytes -= nbytes
        return True

    def sweep(self, reactor: Reactor) -> None:
        """Give back what finalisers and host-side uses have left. Called on enqueue, wakes and ticks."""
        if self.driver.fault is not None:
            self.garbage.clear()
            return
        self._sweep(reactor, self._limbo, self._retry)
        self._sweep(reactor, self.garbage, self._collect)

    def _sweep(self, reactor: Reactor, waiting: deque[_Entry], give_back: Callable[[Reactor, _Entry], bool]) -> None:
        """Try each once; what cannot go back yet, or is refused, waits on."""
        for _ in range(len(waiting)):
            try:
                entry = waiting.popleft()
            except IndexError:
                return  # another loop was quicker
            given = False
            try:
                given = give_back(reactor, entry)
            except DeviceFault:
                return  # latched: the watchdog tells everybody, and the memory stays where it is
            except AiocudaError as error:
                if entry.address not in self._refused:
                    self._refused.add(entry.address)
                    reactor.tell(
                        f"the driver did not take the memory at {entry.address:#x} back; it is asked again", error
                    )
            finally:
                if not given:
                    waiting.append(entry)

    def _retry(self, reactor: Reactor, entry: Freed) -> bool:
        block, lane = entry
        if block.address in self._managed:
            if block.unfinished():
                return False
            self._free_managed(reactor, block.address, block.nbytes)
            return True
        if lane is not None and not lane.closed and lane.reactor is not reactor:
            return False  # its own loop's
        return self._try_free(block, lane)

    def _collect(self, reactor: Reactor, left: Left) -> bool:
        """What a finaliser has left is used by nobody; but its stream may not have come to the allocation yet."""
        address, nbytes, born = left
        if address in self._managed:
            self._free_managed(reactor, address, nbytes)
            return True
        if born is None or born._passed:
            stream = self._spare_stream()
        elif takes(born._lane):
            stream = born._lane.handle
        else:
            return False  # its stream has gone, or is somebody's graph just now: once the device has passed
        self._deallocate(address, nbytes, stream)
        return True

    def _free_managed(self, reactor: Reactor, address: int, nbytes: int) -> None:
        """On a worker thread: ``cuMemFree`` waits until all devices are idle."""
        self._managed.discard(address)
        if self._forget(address, nbytes):
            reactor.jobs.start(lambda: self.driver.managed_deallocate(address), reactor.jobs.unheard)

    def _spare_stream(self) -> int:
        if self._spare is None:
            with self._spare_lock:
                if self._spare is None:
                    self._spare = self.driver.stream_create(self.hub.device, 0)
        return self._spare

    def abandon(self) -> None:
        """The device is closed, and may still touch anything: nothing goes back, and nothing can be used any more."""
        self.closed = True
        self._limbo.clear()
        self.garbage.clear()

    def close(self) -> Callable[[], None]:
        """The device is closed and drained: everything goes back. What is left to be done may block."""
        self.abandon()
        viewed = self._viewed()
        if viewed:
            warnings.warn(
                f"{len(viewed)} arrays of managed memory outlive their device: their memory stays allocated",
                CleanupWarning,
                stacklevel=2,
            )
        managed, self._managed = self._managed - viewed, set()
        for address in viewed:
            del self._live[address]
        for address, nbytes in list(self._live.items()):
            if self._forget(address, nbytes) and address not in managed:
                self.driver.deallocate(address, self._spare_stream())
        if self._spare is not None:
            self.driver.stream_destroy(self._spare)
            self._spare = None

        def free_managed() -> None:
            for address in managed:
                self.driver.managed_deallocate(address)

        return free_managed

    # -- what is known -------------------------------------------------------------------------------------------

    def statistics(self) -> MemoryStatistics:
        """A snapshot."""
        by_class: dict[int, int] = {}
        for nbytes in list(self._live.values()):
            size_class = 1 << (nbytes - 1).bit_length()
            by_class[size_class] = by_class.get(size_class, 0) + nbytes
        gone = self.closed or self.driver.fault is not None
        reserved = 0 if gone else self.driver.pool_reserved(self.hub.device)
        return MemoryStatistics(
            live_bytes=self.live_bytes,
            peak_bytes=self.peak_bytes,
            reserved_bytes=reserved,
            by_class=dict(sorted(by_class.items())),
            fragmentation=max(0.0, 1.0 - self.live_bytes / reserved) if reserved else 0.0,
        )
