"""The pinned ring: what a pageable copy goes through, chunk by chunk.

Chunks go round among the transfers that want one. The last two go only to a transfer whose predecessors in its stream
are done: its chunks come back whatever else waits for what, so one transfer can always finish.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import Protocol
from weakref import ref

from ..completion._reactor import Reactor
from ._pinned import PinnedPool, Region

__all__ = ["CELL_BYTES", "CHUNK_BYTES", "Ring", "Transfer", "chunk_bytes", "move_small"]

#: What goes through one chunk of pinned memory at the most. Larger ones do not fit the processor's cache together, and
#: smaller ones mean more hand-overs between the loop and its threads: both are slower.
CHUNK_BYTES = 8 << 20

#: And at the least, but for the last one.
LEAST_BYTES = 2 << 20

#: Who shares a transfer: `aiocuda.driver._workers` has up to eight threads.
SHARERS = 8

#: Two for each of 8 worker threads: one being filled while the other is on its way.
MOST_CHUNKS = 16

#: Chunks kept for transfers that are certain to finish.
RESERVED = 2

#: What is copied on the loop itself: 64 KB take about 6 µs, a worker thread 50.
CELL_BYTES = 64 << 10

#: What cells are cut from.
SLAB_BYTES = 4 << 20

#: ``memmove`` that keeps the GIL. Released, it takes 5 ms to get back beside a busy thread (measured).
move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def chunk_bytes(before: int, left: int) -> int:
    """How many bytes of a transfer go through its next chunk, with so many before it and so many left.

    Fewer at both ends: there threads wait for the first chunk that the device brings, or the device for the last one
    that they fill. A GiB on an H200: 45.8 GB/s up and 45.0 down, and 43.4 and 41.8 in chunks of one size.
    """
    share = min(before, left) // SHARERS & -mmap.PAGESIZE
    return min(left, max(LEAST_BYTES, min(CHUNK_BYTES, share)))


class Transfer(Protocol):
    """A copy that wants chunks."""

    def wants(self) -> bool:
        """Is there a chunk's worth left?"""

    def certain(self) -> bool:
        """Is everything before it in its stream done?"""

    def take(self, region: Region) -> None:
        """Use this chunk, and give it back by `Ring.give`."""

    def fail(self, error: BaseException) -> None:
        """There will be no chunk."""


class Ring:
    """The chunks and cells of one loop on one device."""

    def __init__(self, reactor: Reactor, pool: PinnedPool, most_chunks: int | None = None) -> None:
        self._reactor = reactor
        self._pool = pool
        self._most = max(RESERVED + 1, MOST_CHUNKS if most_chunks is None else most_chunks)
        self._made = 0
        self._regions: dict[Region, None] = {}  # for a set: a simulation goes through them in the same order
        self._free: list[Region] = []
        #: Weakly: its operation holds a transfer that is wanted, and after a fault nobody would come to look here.
        self._waiting: deque[ref[Transfer]] = deque()
        self._granting = False
        self._cells: list[int] = []
        self._slab = pool.region(reactor, SLAB_BYTES)
        self._slab.when_locked(self._cut, reactor.loop)

    def _cut(self) -> None:
        if self._slab.locked:
            first = self._slab.address
            self._cells = list(range(first, first + self._slab.nbytes, CELL_BYTES))

    @property
    def slab(self) -> Region:
        """The region that cells are cut from."""
        return self._slab

    def take_cell(self) -> int | None:
        """The address of `CELL_BYTES` pinned bytes; None if all are in use."""
        return self._cells.pop() if self._cells else None

    def give_cell(self, address: int) -> None:
        """Take a cell back."""
        self._cells.append(address)

    def request(self, transfer: Transfer) -> None:
        """Serve the transfer, in turn, until it wants no more."""
        self._waiting.append(ref(transfer))
        self.grant()

    def give(self, region: Region) -> None:
        """Take a chunk back."""
        self._free.append(region)
        if self._waiting:
            self.grant()

    def grant(self) -> None:
        """Hand out what there is, one chunk to each in turn."""
        if self._granting:
            return
        self._granting = True
        try:
            refused = 0
            while self._waiting and refused < len(self._waiting):
                if not self._free and not self._grow():
                    break
                first = self._waiting.popleft()
                transfer = first()
                if transfer is None or not transfer.wants():
                    continue
                if len(self._free) + self._most - self._made <= RESERVED and not transfer.certain():
                    self._waiting.append(first)
                    refused += 1
                    continue
                refused = 0
                transfer.take(self._free.pop())
                if transfer.wants():
                    self._waiting.append(first)
        finally:
            self._granting = False
        # Somebody may become certain as queues resolve, without a chunk coming back.
        self._reactor.on_progress = self.grant if self._waiting else None

    def _grow(self) -> bool:
        """One more chunk, if there may be: at once if the pool has a locked one, else when it is."""
        if self._made >= self._most:
            return False
        self._made += 1
        region = self._pool.region(self._reactor, CHUNK_BYTES)
        self._regions[region] = None
        if region.locked:
            self._free.append(region)
            return True
        region.when_locked(lambda: self._grown(region), self._reactor.loop)
        return bool(self._free)

    def _grown(self, region: Region) -> None:
        if region.locked:
            self.give(region)
            return
        self._made -= 1
        self._regions.pop(region, None)  # it may be closed by now
        if self._made == 0 and region.error is not None:  # else the others serve, more slowly
            waiting, self._waiting = self._waiting, deque()
            for transfer in filter(None, [first() for first in waiting]):
                transfer.fail(region.error)

    def close(self) -> None:
        """The loop is done and drained: chunks and slab go back to the pool."""
        for region in self._regions:
            if region.locked:
                self._pool.give(region)
        if self._slab.locked:
            self._pool.give(self._slab)
        self._waiting.clear()
        self._reactor.on_progress = None
        self._regions.clear()
        self._free.clear()
        self._cells.clear()
