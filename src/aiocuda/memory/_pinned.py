"""Pinned memory: page-locked host memory that a device reads and writes directly.

Page-locking is slow (25 ms for 64 MB). So it runs on a worker thread, and freed memory stays locked for the next
buffer. A buffer is returned immediately. A copy that is enqueued before its memory is locked waits in the stream's host
queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .._base._arrays import address_of
from .._base._failure import raisable
from .._base._mistakes import refuses
from .._base._types import Span
from ..completion._device_state import DeviceState
from ..completion._reactor import Reactor
from ..errors import DeviceOutOfMemory, InvalidArgumentError, InvalidTypeError, StaleHandleError
from ._block import Block, DroppedBlock
from ._buffer import NO_BLOCK
from ._deferred_frees import SWEEP_LIMIT, DeferredFrees
from ._region import Region

if TYPE_CHECKING:
    from .._core import StreamOperation
    from .interchange._exports import Exports

__all__ = ["PinnedBuffer", "PinnedPool", "pinned_block_of"]


class HostBlock(Block):
    """A pinned region in use, or an array of the caller.

    The memory is freed with the last array over it, of any class: a plain view holds no block. So the finaliser belongs
    to the memory, and the block has none. The memory does not hold the block: the garbage collector does not traverse
    arrays, and a failed operation of the device would hold itself through them for ever.

    Attributes
    ----------
    finalizer
        Frees the region when the last array over it is gone; None for an array of the caller.
    """

    __slots__ = ("finalizer",)

    def __init__(
        self, pool: PinnedPool, address: int, nbytes: int, memory: object = None,
        shape: tuple[int, ...] | None = None, dtype: np.dtype[Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool.driver, -1, address, nbytes, None, pool, shape, dtype)
        self.finalizer: weakref.finalize[Any, Any] | None = None
        if memory is not None:
            self.finalizer = weakref.finalize(memory, pool.dropped.append, DroppedBlock(address, nbytes, None))
            self.finalizer.atexit = False

    def __del__(self) -> None:
        """Do nothing, unlike `Block`: the finaliser of the memory frees it."""


#: Memory that a lost device may still access. It is never freed.
_leaked: list[object] = []


class PinnedPool:
    """The pinned regions of one device, by size class: powers of two of at least a page. They stay locked until close.

    Attributes
    ----------
    device_state, driver
        Of the opened device.
    exports
        Exports pinned arrays to other libraries.
    dropped
        Blocks that were dropped without a free, left by finalisers on any thread.
    lent
        The regions of live buffers, by address.
    closed
        True once the device has been closed.
    """

    __slots__ = ("_deferred_frees", "_free", "_regions", "closed", "device_state", "driver", "dropped", "exports",
                 "lent")  # fmt: skip

    def __init__(self, device_state: DeviceState, exports: Exports) -> None:
        self.device_state = device_state
        self.driver = device_state.driver
        self.exports = exports
        self.dropped: list[DroppedBlock] = []
        self.lent: dict[int, Region] = {}
        self.closed = False
        self._free: dict[int, list[Region]] = {}
        self._deferred_frees: DeferredFrees[Block] = DeferredFrees()
        self._regions: list[Region] = []  # all that are locked or being locked

    def region(self, reactor: Reactor, nbytes: int) -> Region:
        """Return a region of at least that many bytes: a free one, or a new one that a worker thread locks.

        Raises
        ------
        DeviceOutOfMemory
            The host has no room for a new one.
        """
        self.sweep(SWEEP_LIMIT)
        size = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        idle = self._free.setdefault(size, [])
        with contextlib.suppress(IndexError):  # none; or another loop has taken the last one
            return idle.pop()
        try:
            memory = mmap.mmap(-1, size)
        except OSError as error:  # ENOMEM: the memory of the machine, or a limit of the process such as RLIMIT_AS
            raise DeviceOutOfMemory(
                f"the host has no room for {nbytes:,} bytes of pinned memory ({size:,} with its rounding): {error}. "
                "Free arrays, or request less",
                requested=nbytes,
            ) from error
        region = Region(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)
        self._regions.append(region)
        region.pin(reactor)
        region.when_locked(lambda: self._remove_unlocked(region))
        return region

    def _remove_unlocked(self, region: Region) -> None:
        """Remove a region that could not be locked."""
        if not region.locked and region in self._regions:
            self._regions.remove(region)

    def return_region(self, region: Region) -> None:
        """Take back a region that no device uses."""
        region.when_locked(lambda: self._free.setdefault(region.nbytes, []).append(region) if region.locked else None)

    def buffer(self, reactor: Reactor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PinnedBuffer:
        """Return a pinned array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes == 0:
            return PinnedBuffer._over(self, np.empty(shape, dtype), HostBlock(self, 0, 0))
        region = self.region(reactor, nbytes)
        raw = (ctypes.c_ubyte * region.nbytes).from_buffer(region.memory)
        block = HostBlock(self, region.address, region.nbytes, raw, shape, dtype)
        if not region.locked:
            block.begin_locking(region)
        self.lent[region.address] = region
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=raw)  # type: ignore[arg-type]  # it exports a buffer
        return PinnedBuffer._over(self, array, block)

    def borrow(self, array: npt.NDArray[Any]) -> tuple[PinnedBuffer, Region]:
        """Return a buffer and a region over an array of the caller. The caller locks the region."""
        if not array.flags.c_contiguous or not array.nbytes:
            raise InvalidArgumentError("only a C-contiguous array of at least one byte can be pinned")
        region = Region(array, address_of(array), array.nbytes)
        block = HostBlock(self, region.address, region.nbytes)
        return PinnedBuffer._over(self, array, block), region

    def borrow_pinned(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of another library, which CUDA has page-locked, as a buffer that the device reads directly.

        On a driver without CUDA it is pageable memory, and the array itself is returned.
        """
        if self.driver.name != "cuda" or not array.nbytes or not array.flags.c_contiguous:
            return array
        return self.borrow(array)[0]

    def free(self, block: Block) -> None:
        """Free a buffer's memory once all operations that use it have passed."""
        block.retire()
        if isinstance(block, HostBlock) and block.finalizer is not None:  # not an array of the caller
            block.finalizer.detach()
            self._deferred_frees.add(block)
            self.sweep(SWEEP_LIMIT)

    def sweep(self, most: int | None = None) -> None:
        """Take back the regions that nothing uses. ``most`` limits the freed buffers to look at; None means all."""
        for block in self._deferred_frees.take(most):
            self._take_back(block.address)
        while self.dropped:
            try:
                dropped = self.dropped.pop()
            except IndexError:
                break  # another loop has taken it
            self._take_back(dropped.address)

    def _take_back(self, address: int) -> None:
        region = self.lent.pop(address, None)
        if region is not None:
            self.return_region(region)

    def abandon(self) -> None:
        """Close while the device may still access the memory: it stays locked for ever."""
        self.closed = True
        _leaked.extend(region.memory for region in self._regions)

    def close(self) -> Callable[[], None]:
        """Close; return a function that unlocks the memory, and may block."""
        self.closed = True
        regions, self._regions = self._regions, []
        self._free.clear()
        self.lent.clear()
        driver = self.device_state.driver

        def unpin() -> None:
            for region in regions:
                region.unlock(driver)

        return unpin


@refuses(__enter__=NO_BLOCK, __aenter__=NO_BLOCK)
class PinnedBuffer(np.ndarray[Any, np.dtype[Any]]):
    """Page-locked host memory as a NumPy array.

    Copies between it and a device go by DMA, without staging. A kernel accepts it in place of a device buffer: host and
    device use the same address. Slices are views. The result of a computation is an ordinary array.

    Awaiting it returns the buffer itself once its memory is locked. This is optional, since copies and kernels wait by
    themselves. asyncio's functions accept it: it is hashable, by its identity, and `wait` is a coroutine. If the memory
    cannot be locked, awaiting it and every operation that would use it raise the driver's error: `DeviceOutOfMemory`,
    or a `DriverError`.
    """

    _block: Block | None
    _pool: PinnedPool | None

    @classmethod
    def _over(cls, pool: PinnedPool, array: npt.NDArray[Any], block: Block) -> Self:
        """Return a buffer over an array that lies in the block."""
        # The base of slices is the first view, which has no block. A base with a block would hold it where the garbage
        # collector does not see that, and a failed operation of the device would hold itself for ever.
        return array.view(cls).view()._placed(pool, block)

    def _placed(self, pool: PinnedPool, block: Block) -> Self:
        self._block = block
        self._pool = pool
        return self

    def __array_finalize__(self, obj: Any) -> None:
        self._address: int | None = None  # cached: NumPy takes a microsecond, and a copy needs it twice
        self._block = getattr(obj, "_block", None)
        self._pool = getattr(obj, "_pool", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if isinstance(array, PinnedBuffer):
            return array  # computed in place
        return array[()] if return_scalar else np.asarray(array)

    def _pinned_block(self) -> Block | None:
        """Return the block that this array lies in; None if it is not pinned: a copy, or its device has been closed."""
        block = self._block
        if block is None or block.owner.closed or (block.nbytes == 0 and self.nbytes):
            return None
        if block.nbytes and not block.address <= (self._address or self.address) < block.address + block.nbytes:
            return None
        if block.freed:
            block.check()
        return block

    def _awaited(self) -> list[StreamOperation[Any]]:
        """Return what `aiocuda.wait` waits for: the unfinished uses."""
        if self._block is None:
            raise InvalidTypeError("this array is not pinned, so that no device uses it: make it by device.pinned(...)")
        return self._block.awaited()

    @property
    def address(self) -> int:
        """The address of the first byte, for the host and for every device."""
        address = self._address
        if address is None:
            address = self._address = address_of(self)
        return address

    @property
    def freed(self) -> bool:
        """True if the array has no pinned memory: freed, closed with its device, or a copy that was never pinned."""
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
        """Free the memory once every operation that uses it has passed. ``stream`` is ignored."""
        block = self._pinned_block()
        if block is None or self._pool is None:
            raise StaleHandleError(
                "this array is not pinned: it is a copy of a pinned one, or its device has been closed; there is "
                "nothing to free"
            )
        self._pool.free(block)
        self.flags.writeable = False  # so that a later write through it raises

    def __dlpack__(
        self,
        *,
        stream: int | Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return NumPy's capsule: host memory. ``dl_device=(3, 0)`` requests one for page-locked memory.

        Raises
        ------
        BusyError
            A device uses the array, and the consumer may read it immediately. It is a `BufferError`, too.
        UnsupportedError
            ``dl_device=(3, 0)`` for an array that is not pinned, or with ``copy=True``. It is a `BufferError`, too.
        """
        pool = self._pool
        if pool is None:
            return super().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        return pool.exports.host_capsule(self, self._pinned_block(), stream, max_version, dl_device, copy)

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

    async def wait(self) -> Self:
        """Wait until the memory is locked, like ``await``, but as a coroutine."""
        return await self

    def __hash__(self) -> int:  # type: ignore[override]  # `asyncio.gather` keeps its arguments in a dict
        return id(self)

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()

    def __repr__(self) -> str:
        state = "" if self._block is None or not self._block.freed else ", freed"
        return f"<PinnedBuffer shape={self.shape} dtype={self.dtype} host, pinned{state}>"


#: Return the pinned block that an array lies in, or None if the array is not pinned; raise if it has been freed.
pinned_block_of: Callable[[PinnedBuffer], Block | None] = PinnedBuffer._pinned_block
