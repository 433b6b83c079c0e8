"""MemoryFields: the attributes of a device's memory, and the usual case of an allocation and of a free."""

from __future__ import annotations

from asyncio import _get_running_loop
from typing import TYPE_CHECKING, Any

from ._state import REFUSING

if TYPE_CHECKING:
    import numpy as np

    from ..driver.protocol import Driver
    from ._block_fields import BlockFields
    from ._ring import Ring

__all__ = ["MemoryFields"]


class MemoryFields:
    """The attributes of `aiocuda.memory._allocator.DeviceMemory` that each allocation and each free use.

    Attributes
    ----------
    driver : Driver
    device_state : DeviceState
    live : dict
        By the address of each block that is allocated and not freed: its size in bytes, the queue that it was allocated
        in, and the resource that it goes back to.
    live_bytes, peak_bytes : int
        Bytes that are allocated and not freed, managed memory included; the most that it has been.
    free_lists : SizeClassResource or None
        The free lists of the streams, while new memory comes from them.

    Parameters
    ----------
    records
        `aiocuda.memory._supply.Supply.kept`.
    """

    __slots__ = ("_block_class", "_device", "_largest", "_lists", "_most_kept", "_records", "_sizes", "device_state",
                 "driver", "free_lists", "live", "live_bytes", "peak_bytes")  # fmt: skip

    def __init__(
        self, device_state: Any, block_class: type[Any], free_lists: Any,
        records: dict[int, Any],
    ) -> None:  # fmt: skip
        self.device_state = device_state
        self.driver: Driver = device_state.driver
        self.live: dict[int, tuple[int, Ring | None, Any]] = {}
        self.live_bytes = self.peak_bytes = 0
        self.free_lists: Any = free_lists
        self._device = device_state.device
        self._block_class = block_class
        self._lists, self._sizes, self._largest, self._most_kept = free_lists.tables()
        self._records = records

    def take(self, queue: Ring, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a block that was freed in the stream, from its free list; None if there is none, or it is unusual.

        Other streams that use the block wait for the operation of its record: the last one before the free.
        """
        free_lists = self.free_lists
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
        record = self._records.pop(address, None)
        if record is None or record[0] != stream:
            if record is not None:
                self._records[address] = record
            addresses.append(address)
            return None
        block = self._block_class(self.driver, self._device, address, nbytes, queue, self, shape, dtype)
        block.allocation_event = record[1]
        self.count(address, nbytes, queue, free_lists)
        return block

    def give(self, block: BlockFields) -> bool:
        """Free a block into the free list of its own stream, in the order of that stream; False if that is unusual."""
        queue, free_lists = block.home, self.free_lists
        if (
            queue is None
            or free_lists is None
            or queue.obstacles & REFUSING
            or _get_running_loop() is not queue.loop
            or self.driver.fault is not None
        ):
            return False
        for operation in block.unfinished():
            if operation.lease is None or operation.queue is not queue:
                return False  # the free needs a wait
        address, nbytes = block.address, block.nbytes
        record = self.live.get(address)
        of_stream = self._lists.get(queue.handle)
        if record is None or record[1] is not queue or record[2] is not free_lists or of_stream is None:
            return False
        size = self._sizes.get(nbytes, 0)
        addresses = of_stream.get(size)
        if addresses is None or size > self._largest or (len(addresses) + 1) * size > self._most_kept:
            return False
        kept = queue.last_work()
        live_bytes, of_queue = self.live_bytes, queue.live_bytes
        try:
            block.freed = True  # no new operation may use it
            block.ready = False
            self.discard(address)
            if kept is not None:
                self._records[address] = kept  # before the free: another thread may allocate the address right after it
            addresses.append(address)
        except BaseException:  # Ctrl-C
            if not addresses or addresses[-1] != address:
                self._records.pop(address, None)
                block.revive()
                self.live[address] = record
                self.live_bytes, queue.live_bytes = live_bytes, of_queue
            raise
        return True

    def count(self, address: int, nbytes: int, home: Ring | None, resource: Any) -> None:
        """Count a block as live."""
        self.live[address] = (nbytes, home, resource)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if home is not None:
            home.live_bytes += nbytes
            if home.live_bytes > home.peak_bytes:
                home.peak_bytes = home.live_bytes

    def discard(self, address: int) -> tuple[int, Ring | None, Any] | None:
        """Stop counting a block as live; return its record, or None if it is not live."""
        record = self.live.pop(address, None)
        if record is not None:
            self.live_bytes -= record[0]
            home = record[1]
            if home is not None:
                home.live_bytes -= record[0]
        return record
