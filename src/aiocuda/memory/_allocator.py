"""Device memory: stream-ordered allocation, and what is known of it.

Nothing in here waits for the device. A free follows, on the device, everything that used the block; where that is not
yet possible, because something that uses it is still on the host, the block waits in limbo for the next sweep.
"""

from __future__ import annotations

import math
import threading
import warnings
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy.typing as npt

from .._statistics import MemoryStatistics
from .._user_code import LEAVES_LOOP
from ..completion._device_state import DeviceState
from ..completion._failure import raisable
from ..completion._stream_queue import StreamQueue
from ..errors import CleanupWarning, DeviceFault, DeviceOutOfMemory, WrongDeviceError
from ._arrays import as_bytes, as_dtype, as_shape
from ._block import Block, DroppedBlock
from ._buffer import DeviceBuffer
from ._deferred_frees import MOST_LOOKED_AT, Freed
from ._exports import Exports
from ._foreign import ForeignMemory
from ._managed import ManagedPool
from ._resource import MemoryResource
from ._supply import AnyResource, Kept, Supply, kept_behind

if TYPE_CHECKING:
    from ..completion._reactor import Reactor

__all__ = ["DeviceMemory"]


_Entry = TypeVar("_Entry", Freed, DroppedBlock)

#: What is live: bytes, the queue it was allocated through, and the resource that it goes back to.
_Record: TypeAlias = "tuple[int, StreamQueue | None, MemoryResource]"


class DeviceMemory:
    """The memory of one device, shared by all its loops."""

    def __init__(self, device_state: DeviceState, device: Any) -> None:
        self.device_state = device_state
        self.driver = device_state.driver
        self.properties = device_state.properties
        self.device = device
        self.live_bytes = self.peak_bytes = 0
        self._supply = Supply(device_state.driver, device_state.device)
        self._live: dict[int, _Record] = {}
        #: Addresses whose last holder has gone, left by finalisers.
        self.dropped: deque[DroppedBlock] = deque()
        self.closed = False
        #: What crosses the border to other libraries, in both directions.
        self.exports = Exports(device_state)
        self.foreign = ForeignMemory(device_state, device, self.exports)
        self._limbo: deque[Freed] = deque()
        self._refused: set[int] = set()  # addresses that the driver did not take back when it was first asked
        self._spare: int | None = None  # a stream of our own, for memory whose stream has been closed
        self._spare_lock = threading.Lock()  # taken once, by who makes it
        #: Memory that the host sees, too; it is counted here.
        self.managed = ManagedPool(self)

    # -- allocate ------------------------------------------------------------------------------------------------

    def empty(self, queue: StreamQueue, shape: object, dtype: npt.DTypeLike, *, marked: bool = True) -> DeviceBuffer:
        """A buffer that work enqueued on the queue from now on may use.

        An event behind the allocation, for other streams to come behind, on an idle stream too: so CUDA's rules have
        it. Without ``marked`` the caller sees to that.
        """
        kind = as_dtype(dtype)
        extents = as_shape(shape, kind.itemsize)
        nbytes = (extents[0] if len(extents) == 1 else math.prod(extents)) * kind.itemsize
        if nbytes == 0:
            return DeviceBuffer(self, Block(self.driver, self.device_state.device, 0, 0, queue, self), 0, extents, kind)
        managed = self.managed
        if self.dropped or self._limbo or managed.dropped or managed.deferred_frees or self.exports.returned:
            self.sweep(queue.reactor, MOST_LOOKED_AT)
        supply, stream = self._supply, queue.handle
        resource, counter = supply.resource, supply.counter
        commands = counter.commands
        try:
            address = resource.allocate(nbytes, stream)
        except DeviceOutOfMemory:
            self.sweep(queue.reactor)
            address = supply.allocate_trimmed(nbytes, stream, self.live_bytes)
        block = Block(self.driver, self.device_state.device, address, nbytes, queue, self, extents, kind)
        self._count(address, nbytes, queue, resource)
        kept = supply.kept.pop(address, None) if supply.kept else None
        if marked:
            if kept is not None and kept[0] == stream and counter.commands == commands:
                block.allocation_event = kept[1]  # an adaptor had it: it is what it was when it was freed
            else:
                block.allocation_event = queue.submit_marker()
                if block.allocation_event.lease is None:
                    self._give_back_unmarked(block, queue)
        return DeviceBuffer(self, block, 0, extents, kind, nbytes)

    def _give_back_unmarked(self, block: Block, queue: StreamQueue) -> None:
        """No event stands behind the allocation, to come behind it by: it goes back at once, in its own stream."""
        failure = None if block.allocation_event is None else block.allocation_event.failure
        if failure is None or self.driver.fault is not None:
            return
        failure.poison.delivered = True
        block.retire()
        self.dropped.append(
            DroppedBlock(block.address, block.nbytes, block.allocation_event)
        )  # which is offered again if it is refused
        self._sweep(queue.reactor, self.dropped, self._collect, None)
        raise raisable(failure.poison.error)

    def _count(self, address: int, nbytes: int, home: StreamQueue | None, resource: MemoryResource) -> None:
        self._live[address] = (nbytes, home, resource)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if home is not None:
            home.live_bytes += nbytes
            if home.live_bytes > home.peak_bytes:
                home.peak_bytes = home.live_bytes

    def changed(self, nbytes: int) -> None:
        """So many bytes more are live, or fewer."""
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    # -- free ----------------------------------------------------------------------------------------------------

    def free(self, block: Block, queue: StreamQueue | None) -> None:
        """Give a block back behind everything that uses it."""
        if queue is not None and queue.device_state is not self.device_state and not self.is_here(queue):
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
        block.freed, block.ready = True, False  # nothing new may use it
        try:
            if block.nbytes and not self._try_free(block, queue):
                self._limbo.append(Freed(block, queue))
        except BaseException:
            if self.driver.fault is None:
                block.revive()  # the resource has not taken it back: it may be freed again
            raise

    def is_here(self, queue: StreamQueue) -> bool:
        """Is it a stream of this device? However often the device has been opened, its streams and memory are one."""
        return queue.device_state.driver is self.driver and queue.device_state.device == self.device_state.device

    def _try_free(self, block: Block, queue: StreamQueue | None) -> bool:
        """Free in the queue's order, if all that uses the block has reached the device."""
        unfinished = block.unfinished()
        before = [(operation, operation.lease) for operation in unfinished] if unfinished else ()
        for _, lease in before:
            if lease is None:
                return False  # still on the host: it would come after the free
        if queue is not None and (queue.ended or queue.shared) and not queue.takes_frees():
            queue = None  # and what it has accepted must be waited for like that of others
        stream = self._spare_stream() if queue is None else queue.handle
        kept = None if queue is None else kept_behind(queue)
        for operation, lease in before:
            if operation.queue is not queue and lease is not None:
                self.driver.stream_wait(stream, lease.handle)
                kept = None
        self._deallocate(block.address, stream, kept)
        return True

    def _deallocate(self, address: int, stream: int, kept: Kept | None) -> None:
        """Give it back, once; where it is refused, it counts as before. ``kept``: see `Supply`."""
        record = self._forget(address)
        if record is None:
            return
        nbytes, home, resource = record
        try:
            self._supply.deallocate(resource, address, nbytes, stream, kept)
        except BaseException:
            self._count(address, nbytes, home, resource)
            raise

    def _forget(self, address: int) -> _Record | None:
        """Count it as given back, once."""
        record = self._live.pop(address, None)
        if record is not None:
            nbytes, home, _ = record
            self.live_bytes -= nbytes
            if home is not None:
                home.live_bytes -= nbytes
        return record

    def sweep(self, reactor: Reactor, most: int | None = None) -> None:
        """Give back what finalisers and host-side uses have left. Called on enqueue, wakes and ticks.

        ``most`` is the number of things to look at, of each kind, where this is called often; None for all.
        """
        self.managed.sweep(reactor, most)
        if self.driver.fault is not None:
            self.dropped.clear()
            return
        self.foreign.sweep(most)  # first: what it lets go of may have been ours
        if not self.closed:  # else what comes back stays allocated, as its warning has said
            self.exports.sweep(reactor, most)
        self._sweep(reactor, self._limbo, self._retry, most)
        self._sweep(reactor, self.dropped, self._collect, most)

    def _sweep(
        self,
        reactor: Reactor,
        waiting: deque[_Entry],
        give_back: Callable[[Reactor, _Entry], bool],
        most: int | None,
    ) -> None:
        """Try each once, or the next ``most``; what cannot go back yet, or is refused, waits on."""
        for _ in range(len(waiting) if most is None else min(most, len(waiting))):
            try:
                entry = waiting.popleft()
            except IndexError:
                return  # another loop was quicker
            given = False
            try:
                given = give_back(reactor, entry)
            except DeviceFault:
                return  # latched: the watchdog tells everybody, and the memory stays where it is
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._tell_refused(reactor, entry.address, error)
            finally:
                if not given:
                    waiting.append(entry)

    def _tell_refused(self, reactor: Reactor, address: int, error: BaseException) -> None:
        if address not in self._refused or isinstance(error, LEAVES_LOOP):
            self._refused.add(address)
            reactor.report(f"the driver did not take the memory at {address:#x} back; it is asked again", error)

    def _retry(self, reactor: Reactor, entry: Freed) -> bool:
        block, queue = entry.block, entry.queue
        if queue is not None and not queue.ended and queue.loop is not reactor.loop:
            return False  # its own loop's
        return not entry.waits() and self._try_free(block, queue)

    def _collect(self, reactor: Reactor, left: DroppedBlock) -> bool:
        """What a finaliser has left is used by nobody; but its stream may not have come to the allocation yet."""
        address, _, allocation_event = left
        record = self._live.get(address)
        if record is None or self.closed:
            return True  # it went with its device, and nobody would destroy a stream that is made now
        home = record[1]
        if allocation_event is not None and not allocation_event.is_settled:
            if not allocation_event.queue.takes_frees():
                return False  # its stream has gone, or is somebody's graph just now: once the device has passed
            self._deallocate(address, allocation_event.queue.handle, None)
        elif home is not None and home.idle and home.takes_frees() and home.loop is reactor.loop:
            self._deallocate(address, home.handle, kept_behind(home))  # where an adaptor finds it again
        else:
            self._deallocate(address, self._spare_stream(), None)  # good at once, whatever its stream is at
        return True

    def _spare_stream(self) -> int:
        if self._spare is None:
            with self._spare_lock:
                if self._spare is None:
                    self._spare = self.device_state.make_stream()
        return self._spare

    def abandon(self) -> None:
        """The device is closed, and may still touch anything: nothing goes back, and nothing can be used any more."""
        self.closed = True
        self.managed.abandon()
        self.foreign.close()
        self._limbo.clear()
        self.dropped.clear()

    def close(self, reactor: Reactor) -> Callable[[], None]:
        """The device is closed and drained: everything goes back. What is left to be done may block."""
        self.abandon()
        viewed, free_managed = self.managed.close()
        if viewed:
            text = f"{viewed} arrays of managed memory outlive their device: their memory stays allocated"
            warnings.warn(text, CleanupWarning, stacklevel=2)
        held = self.exports.addresses() & self._live.keys()
        if held:
            warnings.warn(
                f"{len(held)} buffers outlive their device in the hands of other libraries: their memory stays "
                "allocated; let go of what was made of them first",
                CleanupWarning,
                stacklevel=2,
            )
        for address in held:
            del self._live[address]
        for address in list(self._live):
            self._give_back_last(reactor, address)
        if self._spare is not None:
            self.driver.stream_destroy(self._spare)
            self._spare = None
        return free_managed

    def _give_back_last(self, reactor: Reactor, address: int) -> None:
        """What an adaptor refuses, and then the driver, is offered again; not for ever, nor keeping all others."""
        for is_last in (False, False, True):
            try:
                return self._deallocate(address, self._spare_stream(), None)
            except DeviceFault:
                raise
            except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
                self._tell_refused(reactor, address, error)
                if is_last:
                    text = f"the memory at {address:#x} was not taken back, and stays allocated: {error}"
                    warnings.warn(text, CleanupWarning, stacklevel=2)

    # -- where it comes from -------------------------------------------------------------------------------------

    @property
    def resource(self) -> MemoryResource:
        """Where device memory comes from: at first the driver's pool. `use` puts something in front of it."""
        return self._supply.resource

    def use(self, build: Callable[[MemoryResource], AnyResource]) -> AnyResource:
        """Allocate device memory from something else, from now on, on all streams of this opening of the device.

        Parameters
        ----------
        build
            Given the resource in force, it returns the one that is to take its place, such as
            ``lambda upstream: LimitResource(upstream, 1 << 30)``.

        Returns
        -------
        MemoryResource
            What ``build`` has returned. What was allocated before goes back to where it came from.
        """
        return self._supply.use(build)

    async def trim(self, keep: int = 0) -> int:
        """Give what nobody uses back to the device: what adaptors keep, and the pool. ``cuMemPoolTrimTo``.

        On a worker thread, since it may block. What is freed behind work that is under way stays.

        Parameters
        ----------
        keep
            Bytes that may stay for the next allocations.

        Returns
        -------
        int
            Bytes by which `MemoryStatistics.reserved_bytes` has shrunk meanwhile.
        """
        kept = as_bytes(keep, "keep")
        reactor = self.device._loop_state().reactor
        self.sweep(reactor)

        def work() -> int:
            self.managed.trim(kept)
            return self._supply.trim(kept)

        freed: int = await reactor.jobs.run(work)
        return freed

    def release(self, queue: StreamQueue) -> None:
        """Its stream is about to be destroyed: nothing is kept for it any more."""
        self._supply.release(queue)

    # -- what is known -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Sweep, if the running loop uses the device: while it is idle no tick does, and somebody wants to know."""
        loop = _get_running_loop()
        loop_state = None if loop is None or self.closed else self.device._loop_states.get(loop)
        if loop_state is not None:
            loop_state.reactor.guard(self.sweep, loop_state.reactor)

    def statistics(self) -> MemoryStatistics:
        """A snapshot."""
        self.look()
        by_class: dict[int, int] = {}
        for nbytes in [*(record[0] for record in list(self._live.values())), *list(self.managed.live.values())]:
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
