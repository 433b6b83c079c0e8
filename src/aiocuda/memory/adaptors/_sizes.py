"""Size classes: what is freed in a stream serves that stream again, without asking the driver."""

from __future__ import annotations

import threading

from .._resource import MemoryResource, PoolResource, chain
from ._adaptor import Adaptor

__all__ = ["SizeClassResource", "size_class"]

#: Bits of a size class's smallest step: 256 bytes, CUDA's own alignment.
_LEAST_BITS = 8

#: Eight classes between two powers of two waste 12.5 % at the most.
_STEP_BITS = 4


#: Sizes whose class is remembered: programs ask for few, and computing it takes 0.3 µs.
MOST_SIZES = 1024

#: More than any device has.
ALL = 1 << 63


def size_class(nbytes: int) -> int:
    """What so many bytes are rounded up to."""
    step = 1 << max(_LEAST_BITS, (nbytes - 1).bit_length() - _STEP_BITS)
    return (nbytes + step - 1) & -step


class SizeClassResource(Adaptor):
    """Rounds sizes up, keeps what is freed by (class, stream), and hands it out again on that same stream.

    A block freed in a stream is good for what that stream is given next: the order is the stream's, so neither the
    device nor the host waits, and the driver is not called. What is freed in a stream that has never allocated goes
    straight on, since nobody would come for it. `trim` and the stream's end give back what is kept; `trim` leaves out
    streams that somebody captures.
    """

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self._pool = next((each for each in chain(upstream) if isinstance(each, PoolResource)), None)
        self._kept: dict[int, dict[int, list[int]]] = {}  # stream → class → addresses
        self._sizes: dict[int, int] = {}  # bytes → class, of the sizes that were asked for last
        # For what gives back: `trim` on a thread and `release` on a loop. Held for one free at a time.
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, stream: int) -> int:
        """See `MemoryResource`."""
        size = self._sizes.get(nbytes)
        if size is None:
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            size = self._sizes[nbytes] = size_class(nbytes)
        kept = self._kept.get(stream)
        if kept is None:
            kept = self._kept.setdefault(stream, {})
        addresses = kept.get(size)
        if addresses:
            try:
                return addresses.pop()
            except IndexError:
                pass  # another thread was quicker
        return self.upstream.allocate(size, stream)

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        """See `MemoryResource`."""
        size = self._sizes.get(nbytes) or size_class(nbytes)
        kept = self._kept.get(stream)
        if kept is None:
            self.upstream.deallocate(address, size, stream)
            return
        addresses = kept.get(size)
        if addresses is None:
            addresses = kept.setdefault(size, [])
        addresses.append(address)

    @property
    def kept_bytes(self) -> int:
        """What is kept for streams and in nobody's use."""
        return sum(size * len(kept[size]) for kept in list(self._kept.values()) for size in list(kept))

    def trim(self, keep: int = 0) -> None:
        """Give back what is kept beyond ``keep`` bytes, each block in the order of its stream. **May block.**"""
        left = self.kept_bytes
        for stream in list(self._kept):
            if self._pool is None or not self._pool.captured(stream):  # else it would become part of somebody's graph
                left = self._give_back(stream, left, keep)
        self.upstream.trim(max(0, keep - left))

    def release(self, stream: int) -> None:
        """See `MemoryResource`."""
        self._give_back(stream, ALL, 0)
        with self._lock:
            self._kept.pop(stream, None)
        self.upstream.release(stream)

    def _give_back(self, stream: int, left: int, keep: int) -> int:
        """Free blocks of a stream until no more than ``keep`` bytes are left of ``left``."""
        kept = self._kept.get(stream, {})
        for size in list(kept):
            addresses = kept[size]
            while addresses and left > keep:
                with self._lock:  # so that the stream is still there when the block is freed in it
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
