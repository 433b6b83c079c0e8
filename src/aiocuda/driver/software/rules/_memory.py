"""Device memory with addresses that are never used twice."""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt

from ....errors import DeviceOutOfMemory, InvalidArgumentError, StaleHandleError

__all__ = ["MAX_DEVICES", "Block", "DeviceMemory", "IllegalAddressError"]

# Above every address that a process can have (2**56 on x86-64 with five-level paging, 2**52 on ARM), and below 2**63,
# so that an address fits a signed 64-bit integer. Each device has 2**56 bytes of it: allocating 10 GB/s lasts for 83
# days.
_FIRST = 1 << 60
_SHIFT = 56
MAX_DEVICES = 64

_ALIGNMENT = 256  # CUDA's
_GAP = 256  # between blocks, so that one byte too far is found


class IllegalAddressError(Exception):
    """A running command touched memory that is not there. The driver makes a fault of it: CUDA error 700."""


class Block:
    """One allocation."""

    __slots__ = ("address", "data", "device", "mapped", "nbytes")

    def __init__(self, device: int, address: int, data: npt.NDArray[np.uint8]) -> None:
        self.device = device
        self.address = address
        self.nbytes = data.size
        self.data: npt.NDArray[np.uint8] | None = data
        self.mapped = False  # reached by the stream that allocated it


class _Pool:
    """What one device has, uses and keeps."""

    __slots__ = ("next_address", "pending", "reserved", "used")

    def __init__(self, device: int) -> None:
        self.next_address = _FIRST + (device << _SHIFT)
        self.used = 0
        self.reserved = 0  # used, plus what was freed and has not been trimmed
        self.pending: dict[int, int] = {}  # stream → bytes whose free is enqueued and which nothing took over


class DeviceMemory:
    """The memory of all devices of one driver, backed by NumPy arrays.

    Every allocation has a call and a place in stream order. The call decides whether there is room and what the
    address is; the bytes can be touched from the place of the allocation to the place of the free, and nowhere else.
    An address is never given out twice, so that use after free is found and never aliases.

    An allocation may take over what is freed earlier in its own stream, done or not, as CUDA's pools do.
    """

    def __init__(self, devices: int, nbytes: int) -> None:
        self.total = nbytes
        self._pools = [_Pool(device) for device in range(devices)]
        self._live: dict[int, Block] = {}  # not freed yet, by the order of the calls
        self._mapped: dict[int, Block] = {}  # can be touched
        self._addresses: list[int] = []  # of ``_mapped``, sorted

    @staticmethod
    def device_of(address: int) -> int | None:
        """The device that an address belongs to; None for host memory."""
        return (address - _FIRST) >> _SHIFT if address >= _FIRST else None

    def locate(self, address: int) -> Block | None:
        """The block that an address lies in; None if it was freed, or never was one."""
        return next((block for block in self._live.values() if 0 <= address - block.address < block.nbytes), None)

    def info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes; what the pool keeps is not free."""
        return self.total - self._pools[device].reserved, self.total

    def reserved(self, device: int) -> int:
        """Bytes that the pool holds, in use or not."""
        return self._pools[device].reserved

    def trim(self, device: int, keep: int) -> None:
        """Keep at most ``keep`` bytes that nobody uses."""
        pool = self._pools[device]
        pool.reserved = min(pool.reserved, max(pool.used, keep))

    def allocate(self, device: int, nbytes: int, stream: int) -> Block:
        """Find room and an address. The block is mapped by `map`, in stream order."""
        if nbytes <= 0:
            raise InvalidArgumentError(f"cannot allocate {nbytes} bytes; at least 1 is needed", nbytes=nbytes)
        pool = self._pools[device]
        inherited = min(nbytes, pool.pending.get(stream, 0))
        if nbytes - inherited > self.total - pool.used:
            raise _out_of_memory(device, nbytes, self.total - pool.used, self.total)
        try:
            data = np.empty(nbytes, np.uint8)
        except MemoryError as error:
            raise _out_of_memory(device, nbytes, self.total - pool.used, self.total) from error
        if inherited:
            pool.pending[stream] -= inherited
        pool.used += nbytes - inherited
        pool.reserved = max(pool.reserved, pool.used)
        block = Block(device, pool.next_address, data)
        pool.next_address += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GAP
        self._live[block.address] = block
        return block

    def map(self, block: Block) -> None:
        """The stream has reached the allocation."""
        block.mapped = True
        self._mapped[block.address] = block
        insort(self._addresses, block.address)

    def deallocate(self, address: int, stream: int) -> Block:
        """Take a block out of use. It is unmapped by `unmap`, in stream order."""
        block = self._live.pop(address, None)
        if block is None:
            raise StaleHandleError(f"{address:#x} is not allocated, or was freed before", address=address)
        pending = self._pools[block.device].pending
        pending[stream] = pending.get(stream, 0) + block.nbytes
        return block

    def unmap(self, block: Block, stream: int) -> None:
        """The stream has reached the free."""
        if not block.mapped:
            raise IllegalAddressError(
                f"{block.address:#x} was freed on stream {stream}, which does not wait for the stream that allocates it"
            )
        del self._mapped[block.address]
        del self._addresses[bisect_right(self._addresses, block.address) - 1]
        block.mapped = False
        block.data = None
        pool = self._pools[block.device]
        rest = pool.pending.pop(stream, 0)  # of this free and later ones, less what allocations behind them took over
        returned = min(block.nbytes, rest)
        pool.used -= returned
        if rest > returned:
            pool.pending[stream] = rest - returned

    def view(self, device: int, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a range, for a command that runs on ``device``. `IllegalAddressError` if one is not there."""
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
        f"{nbytes} bytes at {address:#x} were touched on device {device}, and are not all allocated there at this "
        "place of the order: freed, out of bounds, or without a wait for the stream that allocates or frees them"
    )


def _out_of_memory(device: int, nbytes: int, free: int, total: int) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        f"device {device} has no room for {nbytes} bytes: {free} of {total} are free; free something, or ask for less",
        requested=nbytes,
        free=free,
    )
