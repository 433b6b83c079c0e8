"""Pinned memory: page-locked host memory that a device reads and writes by itself.

Page-locking takes the driver milliseconds (64 MB: 25 ms), so it happens on a worker thread and never twice for the
same memory: what is given back is kept. A buffer is there at once; a copy that comes before its memory is locked waits
in its stream's submission queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .._types import Span
from .._wakeups import Wakes
from ..completion._device_state import DeviceState
from ..completion._failure import Failure, raisable
from ..completion._operation import Operation
from ..completion._reactor import Reactor
from ..completion._stream_queue import StreamQueue
from ..driver.protocol import Driver
from ..errors import InvalidArgumentError, InvalidTypeError, StaleHandleError
from ._arrays import address_of
from ._block import Block, DroppedBlock
from ._deferred_frees import MOST_LOOKED_AT, DeferredFrees
from ._dlpack import CUDA_HOST, redirect
from ._exports import BusyExportError

__all__ = ["PinGate", "PinnedBuffer", "PinnedPool", "Region"]


class Region:
    """A stretch of host memory, page-locked or about to be."""

    __slots__ = ("_waiting", "address", "error", "locked", "memory", "nbytes")

    def __init__(self, memory: Any, address: int, nbytes: int) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = nbytes
        self.locked = False
        self.error: BaseException | None = None  # why it could not be
        self._waiting: list[tuple[Callable[[], object], asyncio.AbstractEventLoop | None]] = []

    def pin(self, reactor: Reactor) -> None:
        """Page-lock it on a worker thread. ``cuMemHostRegister``."""
        driver = reactor.device_state.driver
        reactor.jobs.start(lambda: self.lock(driver), _told_already)

    def lock(self, driver: Driver) -> None:
        """On the worker thread. It tells all who wait by itself: the loop that asked for it may be gone by now."""
        try:
            driver.pin(self.address, self.nbytes)
        except BaseException as error:
            self.error = raisable(error)
            raise
        else:
            self.locked = True
        finally:
            self._tell()

    def when_locked(self, tell: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Call it once the memory is locked, or cannot be: on the loop, or on any thread if none is given."""
        if not self._settled:
            self._waiting.append((tell, loop))
            if self._settled:  # meanwhile: of the two threads that may look now, one finds it
                self._tell()
        else:
            tell()

    @property
    def _settled(self) -> bool:
        return self.locked or self.error is not None

    def _tell(self) -> None:
        taken = []
        while self._waiting:
            try:
                taken.append(self._waiting.pop())  # each one once, if two threads are here
            except IndexError:
                break  # another thread was quicker
        loops: dict[asyncio.AbstractEventLoop, deque[Callable[[], object]]] = {}
        for tell, loop in reversed(taken):
            if loop is None:
                tell()
            else:
                loops.setdefault(loop, deque()).append(tell)
        for loop, tells in loops.items():
            with contextlib.suppress(RuntimeError):  # it has been closed, and then nobody waits there
                loop.call_soon_threadsafe(_tell_all, loop, tells)


def _tell_all(loop: asyncio.AbstractEventLoop, tells: deque[Callable[[], object]]) -> None:
    """Call all of them on their loop, some in each iteration."""

    def tell_next() -> bool:
        tells.popleft()()
        return bool(tells)

    Wakes.of(loop).wake(tell_next)


def _told_already(result: object, error: BaseException | None) -> None:
    """Whoever waits for the region has been told by the thread."""


class PinGate:
    """One queue's wait for a region."""

    __slots__ = ("_asked", "_queue", "_region")

    def __init__(self, region: Region, queue: StreamQueue) -> None:
        self._region = region
        self._queue = queue
        self._asked = False

    def ready(self, operation: Operation[Any]) -> bool:
        region = self._region
        if not self._asked and not region.locked:
            self._asked = True
            region.when_locked(self._pump, self._queue.loop)
        if region.error is not None:
            raise raisable(region.error)
        return region.locked

    def _pump(self) -> None:
        self._queue.host_queue.pump()
        self._queue.attend()

    def failure(self) -> Failure | None:
        return None


class HostBlock(Block):
    """A pinned region on loan, or somebody's own array.

    It does not end with this object but with the last array over it, of whatever class: a plain view holds no block.
    The memory does not hold the block either: the garbage collector cannot see into arrays, and what failed with the
    device would hold itself through them for good.
    """

    __slots__ = ("finalizer",)

    def __init__(self, pool: PinnedPool, address: int, nbytes: int, memory: object = None) -> None:
        super().__init__(pool.driver, -1, address, nbytes, None, pool)
        self.finalizer: weakref.finalize[Any, Any] | None = None
        if memory is not None:
            self.finalizer = weakref.finalize(memory, pool.dropped.append, DroppedBlock(address, nbytes, None))
            self.finalizer.atexit = False

    def __del__(self) -> None:
        """Nothing: see above."""


#: Memory that a lost device may still touch. It is not given back: nothing says when it could be.
_parked: list[object] = []


class PinnedPool:
    """Pinned regions of one device, by size class: powers of two of at least a page. Nothing shrinks before close."""

    __slots__ = ("_all", "_free", "_lent", "_limbo", "closed", "device_state", "driver", "dropped")

    def __init__(self, device_state: DeviceState) -> None:
        self.device_state = device_state
        self.driver = device_state.driver
        self._free: dict[int, list[Region]] = {}
        self._lent: dict[int, Region] = {}
        #: Left by finalisers: (address, bytes), any thread.
        self.dropped: list[DroppedBlock] = []
        self.closed = False
        self._limbo: DeferredFrees[Block] = DeferredFrees()
        self._all: list[Region] = []

    def region(self, reactor: Reactor, nbytes: int) -> Region:
        """A region of at least that many bytes; a new one is locked by and by."""
        self.sweep(MOST_LOOKED_AT)
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        idle = self._free.setdefault(size, [])
        with contextlib.suppress(IndexError):  # another loop was quicker
            return idle.pop()
        memory = mmap.mmap(-1, size)
        region = Region(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)
        self._all.append(region)
        region.pin(reactor)
        region.when_locked(lambda: self._settled(region))
        return region

    def _settled(self, region: Region) -> None:
        if not region.locked and region in self._all:
            self._all.remove(region)

    def give(self, region: Region) -> None:
        """Take a region back that no device uses any more."""
        region.when_locked(lambda: self._free.setdefault(region.nbytes, []).append(region) if region.locked else None)

    def buffer(self, reactor: Reactor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PinnedBuffer:
        """A pinned array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return PinnedBuffer._over(self, np.empty(shape, dtype), HostBlock(self, 0, 0))
        region = self.region(reactor, nbytes)
        raw = (ctypes.c_ubyte * region.nbytes).from_buffer(region.memory)
        block = HostBlock(self, region.address, region.nbytes, raw)
        block.shape, block.dtype = shape, dtype
        if not region.locked:
            block.region = region
            block.ready = False
        self._lent[region.address] = region
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=raw)  # type: ignore[arg-type]  # it exports a buffer
        return PinnedBuffer._over(self, array, block)

    def borrow(self, array: npt.NDArray[Any]) -> tuple[PinnedBuffer, Region]:
        """Somebody's own array, about to be locked."""
        if not array.flags.c_contiguous or not array.nbytes:
            raise InvalidArgumentError("only a C-contiguous array of at least one byte can be pinned")
        region = Region(array, address_of(array), array.nbytes)
        block = HostBlock(self, region.address, region.nbytes)
        return PinnedBuffer._over(self, array, block), region

    def borrow_pinned(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of another library, which CUDA has page-locked, as a buffer that the device reads directly.

        On a driver without CUDA it is pageable memory, and is returned as it is.
        """
        if self.driver.name != "cuda" or not array.nbytes or not array.flags.c_contiguous:
            return array
        return self.borrow(array)[0]

    def free(self, block: Block) -> None:
        """Take a buffer's memory back once every device is done with it."""
        block.retire()
        if isinstance(block, HostBlock) and block.finalizer is not None:  # else it was borrowed: it may be ours, too
            block.finalizer.detach()
            self._limbo.add(block)
            self.sweep(MOST_LOOKED_AT)

    def park(self) -> None:
        """The device is lost, or was left at work: its memory stays for good, and nothing else is kept."""
        self.closed = True
        _parked.extend(region.memory for region in self._all)

    def sweep(self, most: int | None = None) -> None:
        """Give back what nobody uses any more. ``most`` is the number of freed buffers to look at; None for all."""
        for block in self._limbo.take(most):
            self._return(block.address)
        while self.dropped:
            try:
                left = self.dropped.pop()
            except IndexError:
                break  # another loop was quicker
            self._return(left.address)

    def _return(self, address: int) -> None:
        region = self._lent.pop(address, None)
        if region is not None:
            self.give(region)

    def close(self) -> Callable[[], None]:
        """What remains to be done when the device closes; it may block."""
        self.closed = True
        regions, self._all = self._all, []
        self._free.clear()
        self._lent.clear()
        driver = self.device_state.driver

        def unpin() -> None:
            for region in regions:
                if region.locked:
                    region.locked = False
                    driver.unpin(region.address)

        return unpin


class PinnedBuffer(np.ndarray[Any, np.dtype[Any]]):
    """Page-locked host memory as a NumPy array.

    Copies between it and a device go by DMA, without staging. A kernel may take it in place of a device buffer: one
    address serves host and device. Slices are views; what a computation returns is an ordinary array.

    It can be awaited, for itself, once its memory is locked; nothing needs that, since copies and kernels wait by
    themselves. Where it cannot be locked, awaiting it and every operation that would use it raise what the driver said:
    `DeviceOutOfMemory`, or a `DriverError`.
    """

    _block: Block | None
    _pool: PinnedPool | None

    @classmethod
    def _over(cls, pool: PinnedPool, array: npt.NDArray[Any], block: Block) -> Self:
        # Slices stand on the first view, which knows no block. Standing on one that does, they would hold it
        # where the garbage collector cannot see that, and what failed with the device would hold itself for good.
        buffer = array.view(cls).view()
        buffer._block = block
        buffer._pool = pool
        return buffer

    def __array_finalize__(self, obj: Any) -> None:
        self._address: int | None = None  # asked of NumPy once: that takes a microsecond, and a copy wants it twice
        self._block = getattr(obj, "_block", None)
        self._pool = getattr(obj, "_pool", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if isinstance(array, PinnedBuffer):
            return array  # computed in place
        return array[()] if return_scalar else np.asarray(array)

    def _pinned_block(self) -> Block | None:
        """The block that this array lies in; None if it is not pinned: a copy, or its device has been closed."""
        block = self._block
        if block is None or block.owner.closed or (block.nbytes == 0 and self.nbytes):
            return None
        if block.nbytes and not block.address <= self.address < block.address + block.nbytes:
            return None
        if block.freed:
            block.check()
        return block

    @property
    def address(self) -> int:
        """Where it begins, for the host and for every device."""
        address = self._address
        if address is None:
            address = self._address = address_of(self)
        return address

    @property
    def freed(self) -> bool:
        """Is its memory no longer its own: freed, gone with its device, or of a copy that never was pinned?"""
        block = self._block
        return block is None or block.freed or self._pinned_block() is None

    @property
    def _argument(self) -> object:
        block = self._pinned_block()
        if block is None or self._pool is None:
            raise InvalidTypeError(
                "this array is not pinned: it is a copy of a pinned one, or its device has been closed; make it by "
                "device.pinned(shape, dtype)"
            )
        return self._pool.device_state.driver.argument(Span(address_of(self), self.shape, self.dtype))

    def free(self, stream: object = None) -> None:
        """Give the memory back once every operation that uses it has passed. ``stream`` makes no difference."""
        block = self._pinned_block()
        if block is None or self._pool is None:
            raise StaleHandleError(
                "this array is not pinned: it is a copy of a pinned one, or its device has been closed; there is "
                "nothing to free"
            )
        self._pool.free(block)
        self.flags.writeable = False  # so that what is still written through it is no longer silent

    def __dlpack__(
        self,
        *,
        stream: int | Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """NumPy's own, host memory to everybody; ``dl_device=(3, 0)`` says that it is page-locked.

        `BusyError`, which is a `BufferError` too, while a device uses it: its consumer may look at once.
        """
        block = self._pinned_block()
        for operation in () if block is None else block.unfinished():
            raise BusyExportError(f"{operation!r} uses this array, and whoever takes it looks at once: await it first")
        pinned = dl_device == (CUDA_HOST, 0)
        wanted = None if pinned else dl_device
        capsule = super().__dlpack__(stream=stream, max_version=max_version, dl_device=wanted, copy=copy)
        if pinned:
            redirect(capsule, (CUDA_HOST, 0))
        return capsule

    def __await__(self) -> Generator[Any, None, Self]:
        block = self._block
        region = None if block is None else block.region
        if region is not None and not region.locked:
            loop = asyncio.get_running_loop()
            locked: asyncio.Future[None] = loop.create_future()
            region.when_locked(lambda: None if locked.done() else locked.set_result(None), loop)
            yield from locked
            if region.error is not None:
                raise raisable(region.error)
        return self

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()

    def __repr__(self) -> str:
        state = "" if self._block is None or not self._block.freed else ", freed"
        return f"<PinnedBuffer shape={self.shape} dtype={self.dtype} host, pinned{state}>"
