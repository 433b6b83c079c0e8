"""Device memory: stream-ordered allocation and free.

Nothing here waits for the device. A free takes place, on the device, after all work that used the block. If an
operation that uses the block is still on the host, there is no event to wait for: the free is deferred to a sweep.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from asyncio import AbstractEventLoop, _get_running_loop
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_bytes, as_dtype, as_shape
from .._base._checks import check_timeout
from .._base._failure import raisable
from .._base._log import log
from .._base._mistakes import lacks
from .._base._statistics import MemoryStatistics
from .._base._user_code import LEAVES_LOOP
from .._core import SHARED, LiveBlocks, Ring
from ..completion._device_state import DeviceState
from ..completion._idle_moment import log_not_idle
from ..errors import BusyError, CleanupWarning, DeviceFault, DeviceOutOfMemory, InvalidTypeError, WrongDeviceError
from ._block import Block, DroppedBlock
from ._buffer import DeviceBuffer
from ._deferred_frees import SWEEP_LIMIT, DeferredFree
from ._managed import ManagedPool
from ._resource import ADDRESSES, MemoryResource, Reservation, as_address, reserve
from ._supply import AnyResource, Kept, Supply, T
from ._unified import UnifiedBuffer

if TYPE_CHECKING:
    from .._core import StreamOperation
    from ..completion._reactor import Reactor
    from ._allocations import HasAllocations
    from .interchange._exports import Exports
    from .interchange._foreign import ForeignMemory

__all__ = ["DeviceMemory"]


@lacks
class DeviceMemory:
    """The memory of one device, shared by all loops that use it."""

    __slots__ = ("_known_reactor", "_live", "_own_stream", "_own_stream_lock", "_reactor", "_refused", "_supply",
                 "closed", "device", "device_state", "driver", "dropped", "exports", "foreign", "managed",
                 "properties")  # fmt: skip

    def __init__(
        self,
        device_state: DeviceState,
        device: object,
        exports: Exports,
        foreign: ForeignMemory,
        *,
        reactor: Callable[[], Reactor],
        known_reactor: Callable[[AbstractEventLoop], Reactor | None],
        newest_unfinished: Callable[[], StreamOperation[Any] | None],
    ) -> None:
        """Make the memory of an opened device.

        Parameters
        ----------
        device
            The `aiocuda.Device`, for `DeviceBuffer.device`.
        reactor
            Returns the reactor of the running loop; raises if the device has been closed.
        known_reactor
            Returns the reactor of a loop if that loop has used the device, else None.
        newest_unfinished
            Returns an operation of any loop that the device has not finished; None if there is none.
        """
        self.device_state = device_state
        self.driver = driver = device_state.driver
        self._supply = supply = Supply(driver, device_state.device)
        self._live = LiveBlocks(self, driver, device_state.device, Block, supply.free_lists, supply.kept)
        self.properties = device_state.properties
        self.device = device
        #: Buffers that other libraries hold.
        self.exports = exports
        #: Memory of other libraries that buffers use.
        self.foreign = foreign
        #: Blocks that were dropped without a free, left by finalisers; and frees that could not be done at once.
        self.dropped: deque[DroppedBlock | DeferredFree] = deque()
        #: True once the device has been closed.
        self.closed = False
        self._reactor = reactor
        self._known_reactor = known_reactor
        self._refused: set[int] = set()  # addresses of live blocks whose free was refused, and reported
        self._own_stream: int | None = None  # for frees in no stream's order; made at the first use
        self._own_stream_lock = threading.Lock()  # held while it is made
        #: The pool of managed memory.
        self.managed = ManagedPool(self, reactor, newest_unfinished)

    # -- allocate ------------------------------------------------------------------------------------------------

    def empty(self, queue: Ring, shape: object, dtype: npt.DTypeLike, *, marked: bool = True) -> DeviceBuffer:
        """Return a buffer that work enqueued on the queue from now on may use.

        An event is recorded after the allocation, on an idle stream too: CUDA requires that other streams wait for it.
        With ``marked=False`` the caller calls `Block.allocated_by` instead.
        """
        kind = as_dtype(dtype)
        extents = as_shape(shape, kind.itemsize)
        nbytes = (extents[0] if len(extents) == 1 else math.prod(extents)) * kind.itemsize
        if nbytes == 0:
            return DeviceBuffer(self, Block(self.driver, self.device_state.device, 0, 0, queue, self), 0, extents, kind)
        managed = self.managed
        if self.dropped or (managed.live and (managed.dropped or managed.deferred_frees)) or self.exports.returned:
            self.sweep(queue.reactor, SWEEP_LIMIT)
        found = self._live.take(queue, nbytes, extents, kind)
        if found is not None:
            return DeviceBuffer(self, found, 0, extents, kind, nbytes)
        supply, stream = self._supply, queue.handle
        resource, counter = supply.source, supply.counter
        commands = counter.commands
        try:
            address = resource.allocate(nbytes, stream)
        except DeviceOutOfMemory:
            self.sweep(queue.reactor)
            address = self._trimmed(partial(resource.allocate, nbytes, stream), nbytes)
        if type(address) is not int or not 0 < address < ADDRESSES:
            address = as_address(address, resource)
        block = Block(self.driver, self.device_state.device, address, nbytes, queue, self, extents, kind)
        self._live.count(address, nbytes, queue, resource)
        kept = supply.kept.pop(address, None) if supply.kept else None
        if marked:
            if kept is not None and kept[0] == stream and counter.commands == commands:
                block.allocation_event = kept[1]  # from an adaptor, and the driver has received nothing since its free
            else:
                block.allocation_event = queue.submit_marker()
                if block.allocation_event.lease is None:
                    self._free_unmarked(block, queue)
        return DeviceBuffer(self, block, 0, extents, kind, nbytes)

    def unified(self, reactor: Reactor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> UnifiedBuffer:
        """Return a buffer of managed memory. ``cuMemAllocManaged``."""
        return UnifiedBuffer(self.managed, self.managed.block(reactor, shape, dtype), 0, shape, dtype)

    def reserve(self, reactor: Reactor, nbytes: int) -> tuple[MemoryResource, Reservation]:
        """Ask the resource in use for managed memory. Return it, since the reservation goes back to it."""
        resource = self._supply.resource
        try:
            return resource, reserve(resource, nbytes, "unified")
        except DeviceOutOfMemory:
            self.sweep(reactor)
            return resource, self._trimmed(partial(reserve, resource, nbytes, "unified"), nbytes)

    def _trimmed(self, allocate: Callable[[], T], nbytes: int) -> T:
        return self._supply.trimmed(allocate, nbytes, self._live.nbytes, self.device_state.properties.name)

    def _free_unmarked(self, block: Block, queue: Ring) -> None:
        """Free a new block and raise the error, if no event could be recorded after its allocation.

        Other streams could not wait for the allocation, so the block is freed in its own stream.
        """
        failure = None if block.allocation_event is None else block.allocation_event.failure
        if failure is None or self.driver.fault is not None:
            return
        failure.poison.delivered = True
        block.retire()
        self.dropped.append(
            DroppedBlock(block.address, block.nbytes, block.allocation_event)
        )  # a refused free is repeated from there
        self._sweep(queue.reactor, None)
        raise raisable(failure.poison.error)

    def count_bytes(self, nbytes: int) -> None:
        """Add to the live bytes; a negative number subtracts."""
        self._live.count_bytes(nbytes)

    # -- free ----------------------------------------------------------------------------------------------------

    def free(self, block: Block, queue: Ring | None) -> None:
        """Free a block after all work that uses it."""
        if queue is None and self._live.give(block):
            return
        if queue is not None and queue.device_state is not self.device_state and not self.owns(queue):
            raise WrongDeviceError(f"{queue.name} is a stream of another device: free on a stream of this one")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        if queue is not None:
            queue.check()
        else:
            queue = block.home
            if queue is not None and not queue.ended and queue.loop is not _get_running_loop():
                raise self.device_state.wrong_loop(
                    queue.loop, queue.name, "free the buffer there, or name a stream of this loop"
                )
        block.freed, block.ready = True, False  # no new operation may use it
        try:
            if block.nbytes and not self._try_free(block, queue):
                self.dropped.append(DeferredFree(block, queue))
        except BaseException:
            if self.driver.fault is None:
                block.revive()  # the resource has refused the free: the caller may free the block again
            raise

    def free_all(self, stream: HasAllocations) -> int:
        """Free all live buffers that the program has allocated through a stream, in the order of the stream.

        These are the buffers of `Stream.empty`, `empty_like` and `upload`; for a lease, those of this lease only. As
        `DeviceBuffer.free`, the call does not wait: each free takes place after all enqueued work that uses the buffer,
        on any stream. Slices are freed with their buffers. These stay: memory of slots, loaders and coordinators,
        adopted arrays, unified memory, and buffers that a live graph uses.

        Returns
        -------
        int
            The number of bytes that are freed.

        Raises
        ------
        BusyError
            Another library holds one of the buffers; or a buffer was exported by ``__cuda_array_interface__``, and
            that protocol does not report the end of a use; or the stream is being captured. No buffer is freed.
        ClosedError, StaleHandleError, WrongLoopError
            As for each method of the stream.
        """
        try:
            queue, allocations = stream._queue, stream._allocations
        except AttributeError:
            raise InvalidTypeError(f"free_all takes an aiocuda.Stream, not {stream!r}") from None
        queue.check()
        if queue.device_state is not self.device_state:
            raise WrongDeviceError(f"{queue.name} is a stream of another device: call stream.device.memory.free_all")
        if queue.recorded:
            raise BusyError(f"{queue.name} is being captured: leave the `async with stream.capture()` block first")
        self.sweep(queue.reactor)  # until the sweep, an array that another library has dropped holds its buffer
        blocks = [block for block in allocations.live() if not block.is_kept]
        for block in blocks:
            if block.is_exported:
                raise BusyError(
                    f"{block} is held by another library: drop its array first, or free the buffers by buffer.free()"
                )
            if block.has_interface:
                raise BusyError(
                    f"{block} was exported by __cuda_array_interface__, and may be in use: once it is not, free it by "
                    "buffer.free()"
                )
        for block in blocks:
            self.free(block, None)
        return sum(block.nbytes for block in blocks)

    def owns(self, queue: Ring) -> bool:
        """True for a stream of this device, by any opening of it: all openings share the streams and the memory."""
        return queue.device_state.driver is self.driver and queue.device_state.device == self.device_state.device

    def _try_free(self, block: Block, queue: Ring | None) -> bool:
        """Free in the queue's order, if every operation that uses the block has an event to wait for."""
        unfinished = block.unfinished()
        before = [(operation, operation.lease) for operation in unfinished] if unfinished else ()
        for _, lease in before:
            if lease is None:
                return False  # still on the host: it would reach the device after the free
        if queue is not None and (queue.ended or queue.obstacles & SHARED) and not queue.rare.takes_frees():
            queue = None  # then its own operations are waited for like those of other queues
        stream = self._stream_of_our_own() if queue is None else queue.handle
        kept = None if queue is None else queue.last_work()
        for operation, lease in before:
            if operation.queue is not queue and lease is not None:
                self.driver.stream_wait(stream, lease.handle)
                kept = None
        self._deallocate(block.address, stream, kept)
        return True

    def _deallocate(self, address: int, stream: int, kept: Kept | None) -> None:
        """Give a live block back to its resource. If that refuses, the block counts as live again. See `Kept`."""
        record = self._live.discard(address)
        if record is None:
            return
        nbytes, home, resource = record
        try:
            self._supply.deallocate(resource, address, nbytes, stream, kept)
        except BaseException:
            self._live.count(address, nbytes, home, resource)
            raise
        if self._refused:
            self._refused.discard(address)  # the next block at this address is another one

    # -- sweep ---------------------------------------------------------------------------------------------------

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Free the dropped blocks, and repeat the deferred frees.

        Called for new buffers, and when the watchdog of a loop ticks. ``most`` limits the entries to look at,
        for each kind of entry; None means all.
        """
        self.managed.sweep(reactor, most)
        if self.driver.fault is not None:
            self.dropped.clear()
            return
        self.foreign.sweep(most)  # first: an adopted array may be an exported buffer
        self.exports.sweep(reactor, most)
        self._sweep(reactor, most)

    def _sweep(self, reactor: Reactor, most: int | None) -> None:
        """Try to free each of the next ``most`` entries; append those that cannot be freed yet, or are refused."""
        waiting = self.dropped
        for _ in range(len(waiting) if most is None else min(most, len(waiting))):
            try:
                entry = waiting.popleft()
            except IndexError:
                return  # another loop has taken it
            freed = False
            try:
                if isinstance(entry, DeferredFree):
                    freed = self._retry(reactor, entry)
                else:
                    freed = self._collect(reactor, entry)
            except DeviceFault:
                return  # the watchdog reports the fault; the memory stays allocated
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._report_refusal(reactor, entry.address, error)
            finally:
                if not freed:
                    waiting.append(entry)

    def _report_refusal(self, reactor: Reactor, address: int, error: BaseException) -> None:
        """Report a refused free to the loop's exception handler, once for each address."""
        if address not in self._refused or isinstance(error, LEAVES_LOOP):
            self._refused.add(address)
            reactor.report(f"the memory at {address:#x} could not be freed; the free is repeated later", error)

    def _retry(self, reactor: Reactor, entry: DeferredFree) -> bool:
        """Try a deferred free again."""
        block, queue = entry.block, entry.queue
        if queue is not None and not queue.ended and queue.loop is not reactor.loop:
            return False  # only the queue's own loop may free in its order
        return not entry.waits() and self._try_free(block, queue)

    def _collect(self, reactor: Reactor, dropped: DroppedBlock) -> bool:
        """Free a dropped block. All its uses have passed, but possibly not its allocation in its stream."""
        address, _, allocation_event = dropped
        record = self._live.records.get(address)
        if record is None or self.closed:
            return True  # freed with its device; and no stream may be made any more
        home = record[1]
        if allocation_event is not None and not allocation_event.is_settled:
            if not allocation_event.queue.rare.takes_frees():
                return False  # closed, or being captured: free the block once the allocation has passed
            self._deallocate(address, allocation_event.queue.handle, None)
        elif home is not None and home.idle and home.rare.takes_frees() and home.loop is reactor.loop:
            self._deallocate(address, home.handle, home.last_work())  # an adaptor can allocate it again in that stream
        else:
            # Its own stream may be busy, and the memory would be available later.
            self._deallocate(address, self._stream_of_our_own(), None)
        return True

    def _stream_of_our_own(self) -> int:
        """Return the handle of the stream for frees that belong to no other stream's order."""
        if self._own_stream is None:
            with self._own_stream_lock:
                if self._own_stream is None:
                    self._own_stream = self.device_state.make_stream()
        return self._own_stream

    # -- close ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Close while the device may still access the memory: it stays allocated, and cannot be used any more."""
        self.closed = True
        self.exports.close()
        self.managed.abandon()
        self.foreign.close()
        self.dropped.clear()

    def close(self, reactor: Reactor) -> Callable[[], None]:
        """Free all memory; the device has finished all work. Return a function for the part that may block."""
        self.abandon()
        viewed, free_managed = self.managed.close(reactor)
        if viewed:
            text = (
                f"{viewed} arrays of managed memory outlive their device: their memory stays allocated; drop "
                "the arrays, such as buffer.array, before the block of the device ends (`del array`)"
            )
            warnings.warn(text, CleanupWarning, stacklevel=2)
        live = self._live.records
        held = self.exports.addresses() & live.keys()
        if held:
            warnings.warn(
                f"{len(held)} buffers outlive their device because other libraries hold them: their memory stays "
                "allocated; release them before the device is closed",
                CleanupWarning,
                stacklevel=2,
            )
        for address in held:
            del live[address]
        for address in list(live):
            self._free_at_close(reactor, address)
        if self._own_stream is not None:
            self.device_state.destroy_stream(self._own_stream)
            self._own_stream = None

        def give_back() -> None:
            free_managed()
            # The driver's pool outlives the device, and would keep the memory until the process ends. No operation
            # waits any more, so a fault that this call finds is not reported.
            with contextlib.suppress(DeviceFault):
                self._supply.pool.trim()

        return give_back

    def _free_at_close(self, reactor: Reactor, address: int) -> None:
        """Free a block, with two repetitions: an adaptor may refuse once, and the driver once."""
        for is_last in (False, False, True):
            try:
                return self._deallocate(address, self._stream_of_our_own(), None)
            except DeviceFault:
                raise
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._report_refusal(reactor, address, error)
                if is_last:
                    text = f"the memory at {address:#x} could not be freed, and stays allocated: {error}"
                    warnings.warn(text, CleanupWarning, stacklevel=2)

    # -- resource ------------------------------------------------------------------------------------------------

    @property
    def resource(self) -> MemoryResource:
        """The resource that device memory comes from: the driver's pool, unless `use` has put an adaptor before it.

        Adaptors count unified memory, too.
        """
        return self._supply.resource

    def use(self, build: Callable[[MemoryResource], AnyResource]) -> AnyResource:
        """Allocate device memory from another resource from now on, on all streams of this opening of the device.

        Parameters
        ----------
        build
            Is called with the present resource and returns the new one, for example
            ``lambda upstream: LimitResource(upstream, 1 << 30)``.

        Returns
        -------
        MemoryResource
            The result of ``build``. Memory that was allocated before goes back to the resource that it came from.
        """
        resource = self._supply.use(build)
        supply = self._supply
        self._live.use(supply.free_lists if supply.source is supply.free_lists else None)
        return resource

    async def trim(self, keep: int = 0, *, timeout: float | None = 1.0) -> int:  # noqa: ASYNC109
        """Give unused memory back to the device: that of adaptors, and of the pool. ``cuMemPoolTrimTo``.

        It runs on a worker thread, since it may block. Memory stays while its free waits for unfinished work.

        Unified memory that is kept is freed, too. ``cuMemFree`` waits for every running kernel of the process, and
        holds the launches of all threads meanwhile. So, if there is such memory, this first waits for an idle moment:
        when no operation of this process is unfinished on any device of the driver. If none comes in time, it does not
        wait any more, and logs ``no_idle_moment``. Work of other libraries is not seen.

        Parameters
        ----------
        keep
            Bytes that may stay for the next allocations.
        timeout
            The most seconds to wait for an idle moment; None for no limit.

        Returns
        -------
        int
            By how many bytes `MemoryStatistics.reserved_bytes` has shrunk.
        """
        kept = as_bytes(keep, "keep")
        limit = check_timeout(timeout)
        reactor = self._reactor()
        self.sweep(reactor)

        def work() -> int:
            self.managed.trim(kept)
            return self._supply.trim(kept)

        freed: int
        if self.managed.idle_bytes > kept:
            freed, was_idle = await reactor.idle_moments.run(work, math.inf if limit is None else limit)
            if not was_idle:
                log_not_idle(reactor.device_state, "trim")
        else:
            freed = await reactor.jobs.run(work)
        log("info", "memory_trimmed", device=reactor.device_state.properties.name, freed_bytes=freed, keep_bytes=kept)
        return freed

    def release(self, queue: Ring) -> None:
        """Free the memory that adaptors keep for a stream, which is about to be destroyed."""
        self._supply.release(queue)

    # -- statistics ----------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Bytes that are allocated and not freed, managed memory included."""
        return self._live.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most that `live_bytes` has been."""
        return self._live.peak_bytes

    def look(self) -> None:
        """Sweep, if the running loop uses the device: an idle loop has no ticks, so counts could be out of date."""
        loop = _get_running_loop()
        reactor = None if loop is None or self.closed else self._known_reactor(loop)
        if reactor is not None:
            reactor.guard(self.sweep, reactor)

    def statistics(self) -> MemoryStatistics:
        """Return a snapshot of the counts."""
        self.look()
        by_class: dict[int, int] = {}
        for nbytes, *_ in [*list(self._live.records.values()), *list(self.managed.live.values())]:
            size_class = 1 << (nbytes - 1).bit_length()
            by_class[size_class] = by_class.get(size_class, 0) + nbytes
        reserved = 0 if self.closed or self.driver.fault else self.driver.pool_reserved(self.device_state.device)
        return MemoryStatistics(
            live_bytes=self.live_bytes,
            peak_bytes=self.peak_bytes,
            reserved_bytes=reserved,
            by_class=dict(sorted(by_class.items())),
            fragmentation=max(0.0, 1.0 - self.live_bytes / reserved) if reserved else 0.0,
        )
