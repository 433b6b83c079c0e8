"""Size classes: memory that is freed in a stream is reused in that stream, without a driver call."""

from __future__ import annotations

import threading

from .._resource import MemoryResource, PoolResource, chain
from ._adaptor import Adaptor

__all__ = ["SizeClassResource", "size_class"]

#: The smallest difference between size classes, as a power of two: 256 bytes, CUDA's own alignment.
_LEAST_BITS = 8

#: Eight classes between two powers of two: at most 12.5 % are wasted.
_STEP_BITS = 4


#: Cached size classes: programs use few sizes, and computing a class takes 0.3 µs.
MOST_SIZES = 1024

#: More bytes than any device has.
ALL = 1 << 63


def size_class(nbytes: int) -> int:
    """Return the size class of a size: the size rounded up."""
    step = 1 << max(_LEAST_BITS, (nbytes - 1).bit_length() - _STEP_BITS)
    return (nbytes + step - 1) & -step


class SizeClassResource(Adaptor):
    """Rounds sizes up, keeps freed memory by (class, stream), and allocates it again on the same stream.

    The stream's order makes a freed block safe for later work of that stream: neither the device nor the host waits,
    and the driver is not called. Memory that is freed in a stream without allocations is passed on, since no
    allocation would reuse it. `trim` and the end of a stream free the kept memory; `trim` skips streams that are being
    captured.

    Parameters
    ----------
    largest
        Bytes. Larger blocks are not rounded and not kept.
    most_kept
        Bytes that are kept for each stream in each class, at most.
    """

    __slots__ = ("_kept", "_largest", "_lock", "_most_kept", "_pool", "_sizes")

    def __init__(self, upstream: MemoryResource, *, largest: int = ALL, most_kept: int = ALL) -> None:
        super().__init__(upstream)
        self._largest = largest
        self._most_kept = most_kept
        self._pool = next((each for each in chain(upstream) if isinstance(each, PoolResource)), None)
        self._kept: dict[int, dict[int, list[int]]] = {}  # stream → class → addresses
        self._sizes: dict[int, int] = {}  # bytes → class, a cache
        # Held for each free of kept memory: by `trim` on a thread, and by `release` on a loop. Reentrant, because
        # `upstream` may trim during that free.
        self._lock = threading.RLock()

    def tables(self) -> tuple[dict[int, dict[int, list[int]]], dict[int, int], int, int]:
        """Return the lists of kept addresses by stream and class, the classes by size, and the two limits.

        `LiveBlocks` uses them for the usual allocation and the usual free of a device's memory.
        """
        return self._kept, self._sizes, self._largest, self._most_kept

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        size = self._sizes.get(nbytes)
        if size is None:
            size = self._size(nbytes)
        kept = self._kept.get(stream)
        if kept is None:
            kept = self._kept.setdefault(stream, {})
        addresses = kept.get(size)
        if addresses:
            try:
                return addresses.pop()
            except IndexError:
                pass  # another thread has taken the last one
        return self.upstream.allocate(size, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        size = self._sizes.get(nbytes) or self._size(nbytes)
        kept = self._kept.get(stream)
        if kept is None:
            self.upstream.deallocate(address, size, stream)
            return
        addresses = kept.get(size)
        if addresses is None:
            addresses = kept.setdefault(size, [])
        if size > self._largest or (len(addresses) + 1) * size > self._most_kept:
            self.upstream.deallocate(address, size, stream)
        else:
            addresses.append(address)

    def _size(self, nbytes: int) -> int:
        """Return the bytes that are allocated for a request."""
        if len(self._sizes) >= MOST_SIZES:
            self._sizes.clear()
        size = self._sizes[nbytes] = size_class(nbytes) if nbytes <= self._largest else nbytes
        return size

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for streams."""
        return sum(size * len(kept[size]) for kept in list(self._kept.values()) for size in list(kept))

    def trim(self, keep: int = 0) -> None:
        """Free kept memory beyond ``keep`` bytes, and trim ``upstream``. **May block.**"""
        self.upstream.trim(max(0, keep - self.free_kept(keep)))

    def free_kept(self, keep: int = 0) -> int:
        """Free kept memory beyond ``keep`` bytes, each block in the order of its stream. Return the bytes that stay."""
        left = self.kept_bytes
        for stream in list(self._kept):
            if self._pool is None or not self._pool.captured(stream):  # else the free would become part of the graph
                left = self._give_back(stream, left, keep)
        return left

    def release(self, stream: int) -> None:
        """See `MemoryResource`."""
        if stream in self._kept:
            self._give_back(stream, ALL, 0)
        with self._lock:
            self._kept.pop(stream, None)
        self.upstream.release(stream)

    def _give_back(self, stream: int, left: int, keep: int) -> int:
        """Free blocks of a stream until at most ``keep`` of the ``left`` bytes are left."""
        kept = self._kept.get(stream, {})
        for size in list(kept):
            addresses = kept[size]
            while addresses and left > keep:
                with self._lock:  # so that `release` does not end the stream before this free
                    if not addresses or stream not in self._kept:
                        break
                    address = addresses.pop()
                    try:
                        self.upstream.deallocate(address, size, stream)
                    except BaseException:
                        addresses.append(address)
                        raise
                left -= size
        return left
