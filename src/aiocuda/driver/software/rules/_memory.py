"""Device memory with addresses that are never used twice."""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt

from ....errors import DeviceOutOfMemory, InvalidArgumentError, StaleHandleError

__all__ = ["MAX_DEVICES", "Block", "DeviceMemory", "IllegalAddressError"]

# Above every address of a process (2**56 on x86-64 with five-level paging, 2**52 on ARM), and below 2**63, so that an
# address fits a signed 64-bit integer. Each device has 2**56 bytes of addresses, enough for 83 days at 10 GB/s.
_FIRST = 1 << 60
_SHIFT = 56
MAX_DEVICES = 64

_ALIGNMENT = 256  # CUDA's
_GAP = 256  # between blocks, to detect an access one byte after the end


class IllegalAddressError(Exception):
    """A running command accessed memory that is not allocated. The driver latches a fault: CUDA error 700."""


class Block:
    """One allocation."""

    __slots__ = ("address", "data", "device", "mapped", "nbytes")

    def __init__(self, device: int, address: int, data: npt.NDArray[np.uint8]) -> None:
        self.device = device
        self.address = address
        self.nbytes = data.size
        self.data: npt.NDArray[np.uint8] | None = data
        self.mapped = False  # True once the stream has reached the allocation

    def map(self) -> None:
        """The stream has reached the allocation."""
        self.mapped = True

    def unmap(self) -> None:
        """The stream has reached the free."""
        self.mapped = False
        self.data = None


class _Pool:
    """The memory pool of one device."""

    __slots__ = ("_next_address", "_pending", "reserved", "used")

    def __init__(self, device: int) -> None:
        self.used = 0
        self.reserved = 0  # used, plus what was freed and has not been trimmed
        self._next_address = _FIRST + (device << _SHIFT)
        self._pending: dict[int, int] = {}  # stream → bytes of enqueued frees that no allocation has taken over

    def needed(self, nbytes: int, stream: int) -> int:
        """Return the bytes that an allocation adds to the used ones: it takes over memory that its stream frees."""
        return nbytes - min(nbytes, self._pending.get(stream, 0))

    def allocate(self, nbytes: int, stream: int) -> int:
        """Return the address of new memory."""
        added = self.needed(nbytes, stream)
        if added < nbytes:
            self._pending[stream] -= nbytes - added
        self.used += added
        self.reserved = max(self.reserved, self.used)
        address = self._next_address
        self._next_address += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GAP
        return address

    def begin_free(self, nbytes: int, stream: int) -> None:
        """A free was enqueued: later allocations of its stream may take over the memory."""
        self._pending[stream] = self._pending.get(stream, 0) + nbytes

    def end_free(self, nbytes: int, stream: int) -> None:
        """The stream has reached the free. What no allocation has taken over is not used any more."""
        rest = self._pending.pop(stream, 0)  # of this and later frees
        returned = min(nbytes, rest)
        self.used -= returned
        if rest > returned:
            self._pending[stream] = rest - returned

    def trim(self, keep: int) -> None:
        """Release unused bytes beyond ``keep``."""
        self.reserved = min(self.reserved, max(self.used, keep))


class DeviceMemory:
    """The memory of all devices of one driver, stored in NumPy arrays.

    The call of `allocate` decides whether there is enough memory, and sets the address. Commands can access the bytes
    when the stream has reached the allocation (`map`), until it reaches the free (`unmap`). An address is never used
    twice, so that use after free is always detected.

    An allocation may take over memory that is freed earlier in its own stream, done or not, as in CUDA's pools.
    """

    def __init__(self, devices: int, nbytes: int) -> None:
        self.total = nbytes
        self._pools = [_Pool(device) for device in range(devices)]
        self._live: dict[int, Block] = {}  # `deallocate` was not called yet
        self._mapped: dict[int, Block] = {}  # commands can access them
        self._addresses: list[int] = []  # of ``_mapped``, sorted

    @staticmethod
    def device_of(address: int) -> int | None:
        """Return the device that an address belongs to; None for host memory."""
        return (address - _FIRST) >> _SHIFT if address >= _FIRST else None

    def locate(self, address: int) -> Block | None:
        """Return the block that contains an address; None if it was freed or never allocated."""
        return next((block for block in self._live.values() if 0 <= address - block.address < block.nbytes), None)

    def info(self, device: int) -> tuple[int, int]:
        """Return (free, total) bytes. Unused bytes that the pool keeps are not free."""
        return self.total - self._pools[device].reserved, self.total

    def reserved(self, device: int) -> int:
        """Return the bytes that the pool holds, used and unused."""
        return self._pools[device].reserved

    def trim(self, device: int, keep: int) -> None:
        """Release unused bytes beyond ``keep``."""
        self._pools[device].trim(keep)

    def allocate(self, device: int, nbytes: int, stream: int) -> Block:
        """Return a new block. `map` makes it accessible, in stream order."""
        if nbytes <= 0:
            raise InvalidArgumentError(f"cannot allocate {nbytes} bytes; at least 1 is needed", nbytes=nbytes)
        pool = self._pools[device]
        if pool.needed(nbytes, stream) > self.total - pool.used:
            raise _out_of_memory(device, nbytes, self.total - pool.used, self.total)
        try:
            data = np.empty(nbytes, np.uint8)
        except MemoryError as error:
            raise _out_of_memory(device, nbytes, self.total - pool.used, self.total) from error
        block = Block(device, pool.allocate(nbytes, stream), data)
        self._live[block.address] = block
        return block

    def map(self, block: Block) -> None:
        """Make a block accessible: the stream has reached its allocation."""
        block.map()
        self._mapped[block.address] = block
        insort(self._addresses, block.address)

    def deallocate(self, address: int, stream: int) -> Block:
        """Remove a block from the live ones. `unmap` makes it inaccessible, in stream order."""
        block = self._live.pop(address, None)
        if block is None:
            raise StaleHandleError(f"{address:#x} is not allocated, or was freed before", address=address)
        self._pools[block.device].begin_free(block.nbytes, stream)
        return block

    def unmap(self, block: Block, stream: int) -> None:
        """Make a block inaccessible and release its bytes: the stream has reached its free."""
        if not block.mapped:
            raise IllegalAddressError(
                f"{block.address:#x} was freed on stream {stream}, which does not wait for the stream that allocates it"
            )
        del self._mapped[block.address]
        del self._addresses[bisect_right(self._addresses, block.address) - 1]
        block.unmap()
        self._pools[block.device].end_free(block.nbytes, stream)

    def view(self, device: int, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a range, for a command that runs on ``device``; or raise `IllegalAddressError`."""
        block = self._mapped.get(address)
        if block is None:
            index = bisect_right(self._addresses, address) - 1
            if index < 0:
                raise _illegal(address, nbytes, device)
            block = self._mapped[self._addresses[index]]
        offset = address - block.address
        if block.data is None or offset + nbytes > block.nbytes or block.device != device:
            raise _illegal(address, nbytes, device)
        return block.data[offset : offset + nbytes]


def _illegal(address: int, nbytes: int, device: int) -> IllegalAddressError:
    return IllegalAddressError(
        f"{nbytes} bytes at {address:#x} were touched on device {device}, and are not all allocated there at that "
        "time: freed, out of bounds, or without a wait for the stream that allocates or frees them"
    )


def _out_of_memory(device: int, nbytes: int, free: int, total: int) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        f"device {device} has no room for {nbytes} bytes: {free} of {total} are free; free a buffer, or allocate less",
        requested=nbytes,
        free=free,
    )
