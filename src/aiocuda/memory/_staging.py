"""Staging: copies between pageable host memory and a device, through pinned memory.

A small copy goes through one small staging buffer, and the loop itself copies the bytes into it or out of it. A large
copy is divided into chunks: worker threads copy one chunk while the device transfers others. No later operation of the
stream is submitted before the last chunk. This is faster than the driver's own pageable copy, which blocks its caller.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

from .._base._failure import Failure, raisable
from .._core import DONE, STAGING, Estimate, Ring, StreamOperation
from ..completion._reactor import Reactor
from ..errors import BusyError
from ._copy_watch import CopyWatch
from ._pinned import PinnedPool
from ._region import Region

__all__ = ["CHUNK_BYTES", "LEAST_CHUNK_BYTES", "SMALL_BYTES", "StagingBuffers", "chunk_bytes", "stage_down",
           "stage_up"]  # fmt: skip

#: The largest chunk. Larger ones do not fit the processor's cache together; smaller ones mean more hand-overs between
#: the loop and its threads. Both are slower.
CHUNK_BYTES = 8 << 20

#: The smallest chunk, except for the last one.
LEAST_CHUNK_BYTES = 2 << 20

#: The threads that may work on one copy: `aiocuda.driver._workers` has up to eight.
SHARERS = 8

#: Two for each of 8 worker threads: one is filled while the device reads the other.
MOST_CHUNKS = 16

#: Chunk buffers for copies that are certain to return their chunk buffers.
RESERVED = 2

#: The largest copy that the loop itself stages: 64 KB take about 6 µs, handing them to a worker thread 50 µs.
SMALL_BYTES = 64 << 10

#: The region that small staging buffers are cut from.
SLAB_BYTES = 4 << 20

#: ``memmove`` that keeps the GIL. With the GIL released, getting it back beside a busy thread takes 5 ms (measured).
move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def chunk_bytes(before: int, left: int) -> int:
    """Return the size of a copy's next chunk, with ``before`` bytes before it and ``left`` bytes left.

    Chunks are smaller at both ends of the copy: there threads wait for the first chunk from the device, or the device
    for the last chunk from the threads. A GiB on an H200: 45.8 GB/s up and 45.0 down; 43.4 and 41.8 with equal chunks.
    """
    share = min(before, left) // SHARERS & -mmap.PAGESIZE
    return min(left, max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, share)))


class StagingBuffers:
    """The pinned memory that the staged copies of one loop on one device go through.

    *Small buffers* (`SMALL_BYTES`) are cut from one region, the slab. *Chunk buffers* are regions of `CHUNK_BYTES`.
    Copies that need chunk buffers get them in turn. The last `RESERVED` ones go only to a copy after all
    earlier operations of its stream have passed: it returns them whatever other copies wait for. So one copy can always
    finish.

    Attributes
    ----------
    slab
        The region that small buffers are cut from.
    small
        Addresses of the small buffers that were returned. The others are cut from the slab when they are needed.
    chunks
        All chunk buffers. A dictionary in place of a set: its order is the same in each run of a simulation.
    most_chunks
        The largest number of chunk buffers.
    copy_watch
        Counts the copies in chunks; None without `begin_advice`.
    """

    __slots__ = ("_free", "_granting", "_made", "_pool", "_reactor", "_uncut", "_waiting", "chunks", "copy_watch",
                 "most_chunks", "slab", "small")  # fmt: skip

    def __init__(self, reactor: Reactor, pool: PinnedPool, most_chunks: int | None = None) -> None:
        self._reactor = reactor
        self._pool = pool
        self.most_chunks = max(RESERVED + 1, MOST_CHUNKS if most_chunks is None else most_chunks)
        self.chunks: dict[Region, None] = {}
        self._made = 0  # chunk buffers that are made or being made
        self._free: list[Region] = []
        #: Weak references: the copy's operation holds it, and after a fault no copy would be removed from here.
        #: Made by the first copy in chunks.
        self._waiting: deque[ref[StagedCopy]] | None = None
        self._granting = False
        self.copy_watch: CopyWatch | None = None
        self.small: list[int] = []
        self._uncut: Iterator[int] = iter(())  # 64 addresses take 2.5 KB
        self.slab = pool.region(reactor, SLAB_BYTES)
        self.slab.when_locked(self._cut, reactor.loop)

    def _cut(self) -> None:
        """Cut the slab into small buffers."""
        if self.slab.locked:
            first = self.slab.address
            self._uncut = iter(range(first, first + self.slab.nbytes, SMALL_BYTES))

    def begin_advice(self) -> None:
        """Look for tasks that copy much pageable memory."""
        self.copy_watch = CopyWatch(self._reactor.device_state.driver.now)

    def take_small(self) -> int | None:
        """Return the address of a small buffer; None if all are in use."""
        return self.small.pop() if self.small else next(self._uncut, None)

    def return_small(self, address: int) -> None:
        """Take a small buffer back."""
        self.small.append(address)

    def request(self, copy: StagedCopy) -> None:
        """Give the copy its chunk buffers, in turn with other copies."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(ref(copy))
        self.grant()

    def return_chunk(self, region: Region) -> None:
        """Take a chunk buffer back."""
        self._free.append(region)
        if self._waiting:
            self.grant()

    def grant(self) -> None:
        """Give the free chunk buffers to the waiting copies, one to each in turn."""
        if self._granting:
            return
        self._granting = True
        try:
            refused = 0
            while self._waiting and refused < len(self._waiting):
                if not self._free and not self._grow():
                    break
                first = self._waiting.popleft()
                copy = first()
                if copy is None or not copy.needs_chunk():
                    continue
                if len(self._free) + self.most_chunks - self._made <= RESERVED and not copy.is_certain():
                    self._waiting.append(first)
                    refused += 1
                    continue
                refused = 0
                try:
                    copy.take(self._free.pop())
                finally:  # after Ctrl-C, too: the copy goes on
                    if copy.needs_chunk():
                        self._waiting.append(first)
        finally:
            self._granting = False
            # A copy may become certain when operations pass, without a chunk being returned.
            self._reactor.hot.on_progress = self.grant if self._waiting else None

    def _grow(self) -> bool:
        """Make one more chunk buffer, unless there are enough; True if a buffer is free now."""
        if self._made >= self.most_chunks:
            return False
        self._made += 1
        region = self._pool.region(self._reactor, CHUNK_BYTES)
        self.chunks[region] = None
        if region.locked:
            self._free.append(region)
            return True
        region.when_locked(lambda: self._take_new_chunk(region), self._reactor.loop)
        return bool(self._free)

    def _take_new_chunk(self, region: Region) -> None:
        """Use a new chunk buffer, whose memory is locked now. If it could not be locked, forget it.

        If there is no other one, the waiting copies fail.
        """
        if region.locked:
            self.return_chunk(region)
            return
        self._made -= 1
        self.chunks.pop(region, None)  # `close` may have removed it
        if self._made == 0 and region.error is not None:  # else the other buffers suffice, more slowly
            waiting, self._waiting = self._waiting or (), None
            for copy in filter(None, [first() for first in waiting]):
                copy.fail(region.error)

    def close(self) -> None:
        """Give all regions back to the pool; the loop's work has passed."""
        for region in self.chunks:
            if region.locked:
                self._pool.return_region(region)
        if self.slab.locked:
            self._pool.return_region(self.slab)
        self._waiting = None
        self._reactor.hot.on_progress = None
        self.chunks.clear()
        self._free.clear()
        self.small.clear()
        self._uncut = iter(())


def stage_up(
    buffers: StagingBuffers,
    queue: Ring,
    target: int,
    source: int,
    nbytes: int,
    keep: object,
    estimate: Estimate,
) -> StreamOperation[Any]:
    """Copy pageable host memory to the device; ``keep`` holds both sides until the copy is done."""
    driver = queue.device_state.driver
    small = _small_buffer(buffers, queue, nbytes)
    if small is not None:
        move_small(small, source, nbytes)
        try:
            operation = queue.enqueue("upload", estimate, driver.upload, (queue.handle, target, small, nbytes), keep)
        except BaseException:
            buffers.return_small(small)
            raise
        _when_passed(operation, lambda: buffers.return_small(small))
        return operation
    if buffers.copy_watch is not None:
        buffers.copy_watch.count(nbytes)
    upload = _Upload(buffers, queue, "upload", target, source, nbytes)
    staged: StreamOperation[Any] = queue.rare.enqueue_gated("upload", upload, None, (), keep)
    return staged


def stage_down(
    buffers: StagingBuffers,
    queue: Ring,
    target: int,
    source: int,
    nbytes: int,
    keep: object,
    estimate: Estimate,
) -> StreamOperation[Any]:
    """Copy device memory to pageable host memory; ``keep`` holds both sides until the copy is done."""
    driver = queue.device_state.driver
    small = _small_buffer(buffers, queue, nbytes)
    if small is not None:
        try:
            operation = queue.enqueue(
                "download", estimate, driver.download, (queue.handle, small, source, nbytes), keep
            )
        except BaseException:
            buffers.return_small(small)
            raise
        if operation.status < DONE and operation.failure is None:

            def copy_out(operation: StreamOperation[Any]) -> bool:
                if not operation.is_unwanted:
                    move_small(target, small, nbytes)
                return True

            operation.copy_out = copy_out
        _when_passed(operation, lambda: buffers.return_small(small))
        return operation
    if buffers.copy_watch is not None:
        buffers.copy_watch.count(nbytes)
    download = _Download(buffers, queue, "download", target, source, nbytes)
    staged: StreamOperation[Any] = queue.rare.enqueue_gated(
        "download", download, None, (), keep, copy_out=download.copy_out
    )
    return staged


def _small_buffer(buffers: StagingBuffers, queue: Ring, nbytes: int) -> int | None:
    """Return a small buffer if the copy fits one and one is free; raise if a shared stream would need chunks."""
    queue.check()
    small = buffers.take_small() if nbytes <= SMALL_BYTES else None
    if small is None and queue.shared:
        if nbytes <= SMALL_BYTES:
            raise BusyError(
                f"others enqueue on {queue.name} too, so a copy of {nbytes:,} bytes of pageable memory needs a small "
                "pinned buffer, and none is free now: await an earlier copy, or a `device.pinned(...)`, and try again; "
                "or copy from or to device.pinned(...)"
            )
        raise BusyError(
            f"others enqueue on {queue.name} too, so they could enqueue between the chunks of a copy of {nbytes:,} "
            "bytes of pageable memory: copy from or to device.pinned(...), or on another stream"
        )
    return small


def _when_passed(operation: StreamOperation[Any], release: Callable[[], object]) -> None:
    """Call a function when the device has finished with the operation; now if it was never submitted."""
    if operation.status >= DONE:
        release()
    else:
        operation.on_settled = release


class StagedCopy(abc.ABC):
    """A copy in chunks. It is the gate of its own operation, which is submitted after the last chunk.

    Attributes
    ----------
    buffers
        It takes chunk buffers from these, and returns them.
    queue, nbytes
        The stream queue of the copy, and its size.
    operation
        The copy's operation, once it is the first one of its host queue.
    estimate
        The predicted duration of a chunk.
    chunks
        The number of chunks that are submitted and have not passed.
    error
        The error that ends the copy; else None.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_keep",
        "_left",
        "_next",
        "_source",
        "_staged_since",
        "_target",
        "buffers",
        "chunks",
        "error",
        "estimate",
        "nbytes",
        "operation",
        "queue",
    )  # fmt: skip

    operation: StreamOperation[Any]

    def __init__(self, buffers: StagingBuffers, queue: Ring, kind: str, target: int, source: int, nbytes: int) -> None:
        self.buffers = buffers
        self.queue = queue
        self.nbytes = nbytes
        self._target = target
        self._source = source
        self._next = 0  # the first byte that belongs to no chunk yet
        self._left = nbytes  # bytes that are not submitted
        self._begun = False
        self._staged_since = 0.0  # 0.0 before, and without advice
        self.chunks = 0
        self.error: BaseException | None = None
        self.estimate = queue.device_state.predictor.estimate((kind, "step"))

    # -- the gate of the operation -------------------------------------------------------------------------------

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """True once all chunks are submitted. The first call requests chunk buffers."""
        if self.error is not None:
            raise raisable(self.error)
        if not self._begun:
            self._begun = True
            self.operation = operation
            self._keep = operation.keep
            if operation.status < DONE:
                operation.status = STAGING
            self.buffers.request(self)
        return self._left == 0

    def failure(self) -> Failure | None:
        """Return None: `ready` raises the error of a copy."""
        return None

    # -- chunks --------------------------------------------------------------------------------------------------

    def needs_chunk(self) -> bool:
        """True while bytes are left that belong to no chunk."""
        return self._next < self.nbytes and not self.dropped

    def is_certain(self) -> bool:
        """True if all operations before this one in its stream have passed."""
        return len(self.queue.pending) == self.chunks

    @abc.abstractmethod
    def take(self, region: Region) -> None:
        """Copy the next chunk through this chunk buffer, and return the buffer afterwards."""

    def fail(self, error: BaseException) -> None:
        """Fail the operation: no chunk buffer could be locked."""
        self.error = error
        self.queue.rare.host_queue.pump()

    def _begin_time(self) -> None:
        """Note that the host begins to work on the copy."""
        watch = self.buffers.copy_watch
        if watch is not None and not self._staged_since:
            self._staged_since = watch.now()

    def _end_time(self) -> None:
        """Note that the host has done its work on the copy."""
        watch = self.buffers.copy_watch
        if watch is not None and self._staged_since:
            watch.add(watch.now() - self._staged_since, self.nbytes)

    @property
    def dropped(self) -> bool:
        """True if the operation has left its host queue too early: skipped, withdrawn or lost to a fault."""
        return self.operation.gate is not self or self.error is not None

    def _next_chunk(self) -> tuple[int, int]:
        """Return (offset, bytes) of the next chunk."""
        offset = self._next
        nbytes = chunk_bytes(offset, self.nbytes - offset)
        self._next += nbytes
        return offset, nbytes

    def _submit_chunk(
        self, call: Callable[..., object], arguments: tuple[Any, ...], nbytes: int, passed: Callable[[], object]
    ) -> None:
        """Submit a chunk to the stream; ``passed`` is called when the device has finished with it."""

        def chunk_passed() -> None:
            self.chunks -= 1
            passed()

        self.chunks += 1
        try:
            self.queue.rare.submit_chunk(call, arguments, self.estimate, chunk_passed, self._keep)
        finally:  # after Ctrl-C the stream has the chunk, or the copy has failed
            self._left -= nbytes
        if self._left == 0:
            self.queue.rare.host_queue.pump()
        self.queue.reactor.plan(self.queue)


class _Upload(StagedCopy):
    """A copy to the device: a thread fills a chunk buffer, then the device reads it."""

    __slots__ = ()

    def take(self, region: Region) -> None:
        self._begin_time()
        offset, nbytes = self._next_chunk()
        source = self._source + offset
        keep = self._keep  # the thread must hold the source itself: the operation may be dropped during the copy

        def fill() -> object:
            ctypes.memmove(region.address, source, nbytes)
            return keep

        self.queue.reactor.jobs.start(fill, lambda _, error: self._filled(region, offset, nbytes, error))

    def _filled(self, region: Region, offset: int, nbytes: int, error: BaseException | None) -> None:
        """A thread has filled the chunk buffer: submit the chunk, unless the copy has ended."""
        if error is not None:
            self.error = error
        if self.dropped:
            self.buffers.return_chunk(region)
            self.queue.rare.host_queue.pump()
            return
        self._submit_chunk(
            self.queue.device_state.driver.upload,
            (self.queue.handle, self._target + offset, region.address, nbytes),
            nbytes,
            lambda: self.buffers.return_chunk(region),
        )
        if self._left == 0:
            self._end_time()


class _Download(StagedCopy):
    """A copy to the host: the device writes a chunk buffer, then a thread copies it to the target."""

    __slots__ = ("_copying", "_ending", "_missing")

    def __init__(self, buffers: StagingBuffers, queue: Ring, kind: str, target: int, source: int, nbytes: int) -> None:
        super().__init__(buffers, queue, kind, target, source, nbytes)
        self._missing = nbytes  # bytes that are not in the target
        self._copying = 0  # threads that write the target now
        self._ending = False  # True once the queue waits for the copy-out

    def take(self, region: Region) -> None:
        offset, nbytes = self._next_chunk()
        self._submit_chunk(
            self.queue.device_state.driver.download,
            (self.queue.handle, region.address, self._source + offset, nbytes),
            nbytes,
            lambda: self._arrived(region, offset, nbytes),
        )

    def _arrived(self, region: Region, offset: int, nbytes: int) -> None:
        """The device has written the chunk buffer: copy it to the target, unless the download was dropped."""
        if self.operation.is_unwanted:
            self.buffers.return_chunk(region)
            return
        self._begin_time()
        target = self._target + offset
        keep = self._keep
        self._copying += 1

        def empty() -> object:
            ctypes.memmove(target, region.address, nbytes)
            return keep

        self.queue.reactor.jobs.start(empty, lambda _, error: self._copied(region, nbytes, error))

    def _copied(self, region: Region, nbytes: int, error: BaseException | None) -> None:
        """A thread has copied a chunk to the target."""
        self.error = self.error or error
        self._missing -= nbytes
        self._copying -= 1
        self.buffers.return_chunk(region)
        if self._missing == 0:
            self._end_time()
        if self._ending and self._is_copied_out:
            self.queue.rare.copied_out(self.operation, self.error)

    @property
    def _is_copied_out(self) -> bool:
        """True if no thread writes the target any more."""
        return self._copying == 0 if self.operation.is_unwanted else self._missing == 0

    def copy_out(self, operation: StreamOperation[Any]) -> bool:
        """True if the target is complete. Else `_copied` reports to the queue later."""
        self.operation = operation  # not set before if the operation is dropped on the host
        self._ending = True
        if self._is_copied_out and self.error is not None and not operation.is_unwanted:
            raise raisable(self.error)
        return self._is_copied_out
