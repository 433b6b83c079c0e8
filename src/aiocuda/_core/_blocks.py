"""BlockFields: the attributes of a block of memory. LiveBlocks: the usual case of an allocation and of a free.

An operation has *passed* when the device no longer uses its memory: `StreamOperation.is_settled`. The *free lists* of a
stream keep the addresses of blocks that were freed in its order, and allocate them again without a driver call.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from typing import TYPE_CHECKING, Any

from .._base._shared import COUNTING, HAS_GIL
from ._state import REFUSING

if TYPE_CHECKING:
    from collections import defaultdict

    import numpy as np

    from ..driver.protocol import Driver
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["BlockFields", "LiveBlocks"]


class BlockFields:
    """The attributes of `aiocuda.memory._block.Block`: each allocation makes one, and each free reads them.

    Attributes
    ----------
    driver, device
        The driver, and the index of the device; -1 for host memory, which all devices can use.
    address, nbytes
        The first byte, and the size.
    shape, dtype
        The shape and the type of the buffer that the block was allocated for; for error messages.
    home
        The queue in whose order the block was allocated; None if no order applies.
    owner
        The object that frees the memory.
    uses
        The newest operation of each queue that uses the block. A free waits, on the device, for all of them. A queue in
        this dictionary may use the block again without a check.
    peers
        The same for queues of other devices, which only copy from or to the block, and for uses by other libraries.
        These always pass the checks again.
    dependencies
        Operations that `DeviceBuffer.add_dependency` has added; a free waits for them, too.
    allocation_event
        An operation after the allocation in its stream. The first use in another stream waits for it.
    poison
        For each coordinator's graph the ranges that a failed operation should have written; None before the first one.
        They are held here so that they end with the block: their errors hold frames, which may hold its buffers.
    assigned
        How often `assign` was called. By it a coordinator sees that the memory has got another purpose.
    region
        The host memory of the block while it is being page-locked; else None.
    freed
        True once the block has been freed.
    ready
        True if a queue in ``uses`` may use the block again without a check: it is not freed, and it is page-locked.
    """

    __slots__ = ("__weakref__", "address", "allocation_event", "assigned", "dependencies", "device", "driver", "dtype",
                 "freed", "home", "nbytes", "owner", "peers", "poison", "ready", "region", "shape", "uses")  # fmt: skip

    def __init__(
        self, driver: Driver, device: int, address: int, nbytes: int, home: Ring | None,
        owner: Any, shape: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.home = home
        self.owner = owner
        self.shape = shape
        self.dtype = dtype
        self.uses: dict[Ring, StreamOperation[Any]] = {}
        self.peers: dict[Ring, StreamOperation[Any]] | None = None
        self.dependencies: dict[StreamOperation[Any], None] | None = None
        self.allocation_event: StreamOperation[Any] | None = None
        self.poison: defaultdict[Any, Any] | None = None
        self.assigned = 0
        self.region: Any = None
        self.freed = False
        self.ready = True

    def retire(self) -> None:
        """Mark the block as freed: no new operation may use it."""
        self.freed = True
        self.ready = False

    def revive(self) -> None:
        """Undo `retire`: the memory could not be freed."""
        self.freed = False
        self.ready = self.region is None  # not while it is being page-locked

    def unfinished(self) -> list[StreamOperation[Any]]:
        """Return the operations that must pass before the memory is freed. Those that have passed are forgotten.

        Uses by other libraries (`ExternalUse`) are among them.
        """
        if self.allocation_event is not None and self.allocation_event.is_settled:
            self.allocation_event = None
        found = [] if self.allocation_event is None else [self.allocation_event]
        if not (self.uses or self.peers or self.dependencies):
            return found
        for uses in (self.uses, self.peers or {}):
            for queue, operation in list(uses.items()):
                if operation.is_settled:
                    uses.pop(queue, None)
                else:
                    found.append(operation)
        if self.dependencies:
            found += [operation for operation in tuple(self.dependencies) if not operation.is_settled]
        return found


class LiveBlocks:
    """The blocks of a device that are allocated and not freed, and the free lists of its streams. Final.

    `aiocuda.memory._allocator.DeviceMemory` holds it. It first calls `take` or `give`. Where these refuse, it does the
    work itself.

    Attributes
    ----------
    records : dict
        For each live block, by its address: its size in bytes, the queue that it was allocated in, and the resource
        that it goes back to.
    nbytes, peak_bytes : int
        Bytes that are allocated and not freed, managed memory included; the most that it has been.

    Parameters
    ----------
    owner
        The `DeviceMemory`, which the blocks go back to.
    free_lists
        `aiocuda.memory._supply.Supply.free_lists`: all free lists of the device, as one resource.
    kept
        `aiocuda.memory._supply.Supply.kept`: for addresses in the free lists, the result of `Ring.last_work` when the
        block was freed.
    """

    __slots__ = ("_block_class", "_device", "_driver", "_free_lists", "_kept", "_largest", "_lists", "_most_kept",
                 "_owner", "_sizes", "nbytes", "peak_bytes", "records")  # fmt: skip

    def __init__(
        self, owner: Any, driver: Driver, device: int, block_class: type[Any], free_lists: Any, kept: dict[int, Any]
    ) -> None:
        self.records: dict[int, tuple[int, Ring | None, Any]] = {}
        self.nbytes = self.peak_bytes = 0
        self._free_lists: Any = free_lists  # None while new memory does not come from them
        self._owner = owner
        self._driver = driver
        self._device = device
        self._block_class = block_class
        # The addresses, by stream and size class; the size class, by bytes; the most bytes of a block, and of a list.
        self._lists, self._sizes, self._largest, self._most_kept = free_lists.tables()
        self._kept = kept

    def use(self, free_lists: Any) -> None:
        """Take new blocks from the free lists again; with None, from them no more."""
        self._free_lists = free_lists

    def take(self, queue: Ring, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new block at an address from the stream's free list; None if there is none, or it is unusual.

        The last operation before the free becomes its `allocation_event`: other streams wait for it before a first use.
        """
        free_lists = self._free_lists
        if free_lists is None:
            return None
        stream = queue.handle
        of_stream = self._lists.get(stream)
        addresses = None if of_stream is None else of_stream.get(self._sizes.get(nbytes, 0))
        if not addresses:
            return None
        try:
            address = addresses.pop()
        except IndexError:
            return None  # another thread has taken the last one
        record = self._kept.pop(address, None)
        if record is None or record[0] != stream:  # it has no such operation: undo
            if record is not None:
                self._kept[address] = record
            addresses.append(address)
            return None
        block = self._block_class(self._driver, self._device, address, nbytes, queue, self._owner, shape, dtype)
        block.allocation_event = record[1]
        self.count(address, nbytes, queue, free_lists)
        return block

    def give(self, block: BlockFields) -> bool:
        """Free a block into the free list of its own stream. Return False, and do nothing, where that is unusual."""
        queue, free_lists = block.home, self._free_lists
        if (
            queue is None
            or free_lists is None
            or queue.obstacles & REFUSING
            or _get_running_loop() is not queue.loop
            or self._driver.fault is not None
        ):
            return False
        for operation in block.unfinished():
            if operation.lease is None or operation.queue is not queue:
                return False  # the free needs a wait
        address, nbytes = block.address, block.nbytes
        record = self.records.get(address)
        of_stream = self._lists.get(queue.handle)
        if record is None or record[1] is not queue or record[2] is not free_lists or of_stream is None:
            return False  # freed already, or not from a free list of this stream
        size = self._sizes.get(nbytes, 0)
        addresses = of_stream.get(size)
        if addresses is None or size > self._largest or (len(addresses) + 1) * size > self._most_kept:
            return False  # it goes back to the driver's pool
        kept = queue.last_work()
        live_bytes, of_queue = self.nbytes, queue.live_bytes
        try:
            block.freed = True  # no new operation may use it
            block.ready = False
            self.discard(address)
            if kept is not None:
                self._kept[address] = kept  # before the free: another thread may allocate the address right after it
            addresses.append(address)
        except BaseException:  # Ctrl-C: undo, unless the free list has the address already
            if not addresses or addresses[-1] != address:
                self._kept.pop(address, None)
                block.revive()
                self.records[address] = record
                self.nbytes, queue.live_bytes = live_bytes, of_queue
            raise
        return True

    def count(self, address: int, nbytes: int, home: Ring | None, resource: Any) -> None:
        """Count a block as live. With the GIL, it needs no lock: see `COUNTING`."""
        if not HAS_GIL:
            COUNTING.acquire()
        try:
            self.records[address] = (nbytes, home, resource)
            self.nbytes += nbytes
            if self.nbytes > self.peak_bytes:
                self.peak_bytes = self.nbytes
            if home is not None:
                home.live_bytes += nbytes
                if home.live_bytes > home.peak_bytes:
                    home.peak_bytes = home.live_bytes
        finally:
            if not HAS_GIL:
                COUNTING.release()

    def count_bytes(self, nbytes: int) -> None:
        """Add to the live bytes; a negative number subtracts."""
        with COUNTING:
            self.nbytes += nbytes
            if self.nbytes > self.peak_bytes:
                self.peak_bytes = self.nbytes

    def discard(self, address: int) -> tuple[int, Ring | None, Any] | None:
        """Stop counting a block as live; return its record, or None if it is not live."""
        record = self.records.pop(address, None)
        if record is not None:
            if not HAS_GIL:
                COUNTING.acquire()
            try:
                self.nbytes -= record[0]
                home = record[1]
                if home is not None:
                    home.live_bytes -= record[0]
            finally:
                if not HAS_GIL:
                    COUNTING.release()
        return record
