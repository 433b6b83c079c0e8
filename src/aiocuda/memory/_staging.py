"""Staging: pageable arrays to and from a device, through pinned memory.

A small array is copied on the loop, into or out of a cell. A large one is a transfer: worker threads copy its chunks
while others are on their way, and nothing of its stream overtakes it. It is faster than the driver's own pageable
copy, which blocks its caller for as long as it takes.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable
from typing import Any

from ..completion._failure import Failure, raisable
from ..completion._operation import DONE, STAGING, Operation
from ..completion._prediction import Estimate
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError
from ._pinned import Region
from ._ring import CELL_BYTES, Ring, chunk_bytes, move_small

__all__ = ["stage_down", "stage_up"]


def stage_up(
    ring: Ring, queue: StreamQueue, target: int, source: int, nbytes: int, keep: object, estimate: Estimate
) -> Operation[Any]:
    """Copy pageable host memory to the device; ``keep`` holds both ends until it is done."""
    driver = queue.device_state.driver
    cell = _cell(ring, queue, nbytes)
    if cell is not None:
        move_small(cell, source, nbytes)
        try:
            operation = queue.enqueue("upload", estimate, driver.upload, (queue.handle, target, cell, nbytes), keep)
        except BaseException:
            ring.give_cell(cell)
            raise
        _release(operation, lambda: ring.give_cell(cell))
        return operation
    return queue.enqueue_gated("upload", _Upload(ring, queue, "upload", target, source, nbytes), None, (), keep)


def stage_down(
    ring: Ring, queue: StreamQueue, target: int, source: int, nbytes: int, keep: object, estimate: Estimate
) -> Operation[Any]:
    """Copy device memory to pageable host memory; ``keep`` holds both ends until it is done."""
    driver = queue.device_state.driver
    cell = _cell(ring, queue, nbytes)
    if cell is not None:
        try:
            operation = queue.enqueue("download", estimate, driver.download, (queue.handle, cell, source, nbytes), keep)
        except BaseException:
            ring.give_cell(cell)
            raise
        if operation.status < DONE and operation.failure is None:

            def land(operation: Operation[Any]) -> bool:
                if not operation.is_unwanted:
                    move_small(target, cell, nbytes)
                return True

            operation.copy_out = land
        _release(operation, lambda: ring.give_cell(cell))
        return operation
    download = _Download(ring, queue, "download", target, source, nbytes)
    return queue.enqueue_gated("download", download, None, (), keep, copy_out=download.land)


def _cell(ring: Ring, queue: StreamQueue, nbytes: int) -> int | None:
    """Pinned memory for a copy that is small enough to go in one piece, if there is any just now."""
    queue.check()
    cell = ring.take_cell() if nbytes <= CELL_BYTES else None
    if cell is None and queue.shared:
        if nbytes <= CELL_BYTES:
            raise BusyError(
                f"others enqueue on {queue.name} too, so a copy of {nbytes:,} bytes of pageable memory goes there in "
                "one piece or not at all, and the pinned memory that it would go through is not free just now: await "
                "an earlier copy, or a `device.pinned(...)`, and try again; or copy from or to device.pinned(...)"
            )
        raise BusyError(
            f"others enqueue on {queue.name} too, and a copy of {nbytes:,} bytes of pageable memory is many steps that "
            "they would come between: copy from or to device.pinned(...), or on another stream"
        )
    return cell


def _release(operation: Operation[Any], release: Callable[[], object]) -> None:
    """Run it when the device is done with the operation, or at once if it never got there."""
    if operation.status >= DONE:
        release()
    else:
        operation.on_settled = release


class _Transfer(abc.ABC):
    """What both directions share: it is the gate of its own operation, open once all chunks are with the stream."""

    __slots__ = (
        "__weakref__",
        "_begun",
        "_keep",
        "_left",
        "_next",
        "_source",
        "_target",
        "error",
        "estimate",
        "nbytes",
        "operation",
        "queue",
        "ring",
        "steps",
    )  # fmt: skip

    operation: Operation[Any]

    def __init__(self, ring: Ring, queue: StreamQueue, kind: str, target: int, source: int, nbytes: int) -> None:
        self.ring = ring
        self.queue = queue
        self.nbytes = nbytes
        self._target = target
        self._source = source
        self._next = 0  # the first byte that no chunk has been taken for
        self._left = nbytes  # bytes that are not yet with the stream
        self._begun = False
        self.steps = 0  # chunks with the stream
        self.error: BaseException | None = None
        self.estimate = queue.device_state.predictor.estimate((kind, "step"))

    def ready(self, operation: Operation[Any]) -> bool:
        if self.error is not None:
            raise raisable(self.error)
        if not self._begun:
            self._begun = True
            self.operation = operation
            self._keep = operation.keep
            if operation.status < DONE:
                operation.status = STAGING
            self.ring.request(self)
        return self._left == 0

    def failure(self) -> Failure | None:
        return None

    def wants(self) -> bool:
        return self._next < self.nbytes and not self.dropped

    def certain(self) -> bool:
        return len(self.queue.pending) == self.steps

    @abc.abstractmethod
    def take(self, region: Region) -> None:
        """Carry the next chunk by way of this region."""

    def fail(self, error: BaseException) -> None:
        """No chunk is to be had: the operation fails with this."""
        self.error = error
        self.queue.host_queue.pump()

    @property
    def dropped(self) -> bool:
        """Its operation has left the queue before its time: skipped, withdrawn or lost to a fault."""
        return self.operation.gate is not self or self.error is not None

    def _cut(self) -> tuple[int, int]:
        offset = self._next
        nbytes = chunk_bytes(offset, self.nbytes - offset)
        self._next += nbytes
        return offset, nbytes

    def _step(self, call: Callable[..., object], arguments: tuple[Any, ...], release: Callable[[], object]) -> None:
        """Give a chunk to the stream."""

        def passed() -> None:
            self.steps -= 1
            release()

        self.steps += 1
        self.queue.submit_chunk(call, arguments, self.estimate, passed, self._keep)

    def _submitted(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left == 0:
            self.queue.host_queue.pump()
        self.queue.reactor.plan(self.queue)


class _Upload(_Transfer):
    __slots__ = ()

    def take(self, region: Region) -> None:
        offset, nbytes = self._cut()
        source = self._source + offset
        keep = self._keep  # not only the operation: if it is dropped meanwhile, the source must outlive the copy

        def fill() -> object:
            ctypes.memmove(region.address, source, nbytes)
            return keep

        self.queue.reactor.jobs.start(fill, lambda _, error: self._filled(region, offset, nbytes, error))

    def _filled(self, region: Region, offset: int, nbytes: int, error: BaseException | None) -> None:
        if error is not None:
            self.error = error
        if self.dropped:
            self.ring.give(region)
            self.queue.host_queue.pump()
            return
        self._step(
            self.queue.device_state.driver.upload,
            (self.queue.handle, self._target + offset, region.address, nbytes),
            lambda: self.ring.give(region),
        )
        self._submitted(nbytes)


class _Download(_Transfer):
    __slots__ = ("_landing", "_moving", "_unlanded")

    def __init__(self, ring: Ring, queue: StreamQueue, kind: str, target: int, source: int, nbytes: int) -> None:
        super().__init__(ring, queue, kind, target, source, nbytes)
        self._unlanded = nbytes  # bytes that are not yet where they belong
        self._moving = 0  # chunks that threads are copying there just now
        self._landing = False

    def take(self, region: Region) -> None:
        offset, nbytes = self._cut()
        self._step(
            self.queue.device_state.driver.download,
            (self.queue.handle, region.address, self._source + offset, nbytes),
            lambda: self._arrived(region, offset, nbytes),
        )
        self._submitted(nbytes)

    def _arrived(self, region: Region, offset: int, nbytes: int) -> None:
        if self.operation.is_unwanted:
            self.ring.give(region)
            return
        target = self._target + offset
        keep = self._keep
        self._moving += 1

        def empty() -> object:
            ctypes.memmove(target, region.address, nbytes)
            return keep

        self.queue.reactor.jobs.start(empty, lambda _, error: self._landed(region, nbytes, error))

    def _landed(self, region: Region, nbytes: int, error: BaseException | None) -> None:
        self.error = self.error or error
        self._unlanded -= nbytes
        self._moving -= 1
        self.ring.give(region)
        if self._landing and self._at_rest:
            self.queue.copied_out(self.operation, self.error)

    @property
    def _at_rest(self) -> bool:
        """Does no thread write the target any more?"""
        return self._moving == 0 if self.operation.is_unwanted else self._unlanded == 0

    def land(self, operation: Operation[Any]) -> bool:
        self.operation = operation  # which is not known yet if it is dropped before its turn comes
        self._landing = True
        if self._at_rest and self.error is not None and not operation.is_unwanted:
            raise raisable(self.error)
        return self._at_rest
