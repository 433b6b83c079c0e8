"""Staging: pageable arrays to and from a device, through pinned memory.

A small array is copied on the loop, into or out of a cell. A large one is a transfer: worker threads copy its chunks
while others are on their way, and nothing of its stream overtakes it. It is faster than the driver's own pageable
copy, which blocks its caller for as long as it takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..completion.failure import Failure
from ..completion.lane import Lane
from ..completion.operation import ABANDONED, DONE, STAGING, Operation
from ..completion.predict import Estimate
from .pinned import Region
from .ring import CELL_BYTES, CHUNK_BYTES, Ring, move_small

__all__ = ["stage_down", "stage_up"]


def stage_up(
    ring: Ring, lane: Lane, target: int, source: int, nbytes: int, keep: object, estimate: Estimate
) -> Operation[Any]:
    """Copy pageable host memory to the device; ``keep`` holds both ends until it is done."""
    driver = lane.hub.driver
    cell = ring.take_cell() if nbytes <= CELL_BYTES else None
    if cell is not None:
        lane.check()
        move_small(cell, source, nbytes)
        operation = lane.enqueue("upload", estimate, driver.upload, (lane.handle, target, cell, nbytes), keep)
        _release(operation, lambda: ring.give_cell(cell))
        return operation
    return lane.enqueue_behind("upload", _Upload(ring, lane, "upload", target, source, nbytes), None, (), keep)


def stage_down(
    ring: Ring, lane: Lane, target: int, source: int, nbytes: int, keep: object, estimate: Estimate, value: object
) -> Operation[Any]:
    """Copy device memory to pageable host memory; the operation's result is ``value``."""
    driver = lane.hub.driver
    cell = ring.take_cell() if nbytes <= CELL_BYTES else None
    if cell is not None:
        operation = lane.enqueue("download", estimate, driver.download, (lane.handle, cell, source, nbytes), keep)
        if operation._state < DONE and operation._failure is None:

            def land(_: Operation[Any]) -> bool:
                move_small(target, cell, nbytes)
                return True

            operation._value = value
            operation._land = land
        _release(operation, lambda: ring.give_cell(cell))
        return operation
    download = _Download(ring, lane, "download", target, source, nbytes)
    return lane.enqueue_behind("download", download, None, (), keep, land=download.land, value=value)


def _release(operation: Operation[Any], release: Callable[[], object]) -> None:
    """Run it when the device is done with the operation, or at once if it never got there."""
    if operation._state >= DONE:
        release()
    else:
        operation._release = release


class _Transfer:
    """What both directions share: it is the gate of its own operation, open once all chunks are with the stream."""

    __slots__ = ("_begun", "_left", "_next", "_source", "_target", "error", "estimate", "lane", "nbytes", "operation",
                 "ring", "steps")  # fmt: skip

    operation: Operation[Any]

    def __init__(self, ring: Ring, lane: Lane, kind: str, target: int, source: int, nbytes: int) -> None:
        self.ring = ring
        self.lane = lane
        self.nbytes = nbytes
        self._target = target
        self._source = source
        self._next = 0  # the first byte that no chunk has been taken for
        self._left = nbytes  # bytes that are not yet with the stream
        self._begun = False
        self.steps = 0  # chunks with the stream
        self.error: BaseException | None = None
        self.estimate = lane.hub.predictor.estimate((kind, "step"))

    def ready(self, operation: Operation[Any]) -> bool:
        if self.error is not None:
            raise self.error
        if not self._begun:
            self._begun = True
            self.operation = operation
            if operation._state < DONE:
                operation._state = STAGING
            self.ring.request(self)
        return self._left == 0

    def failure(self) -> Failure | None:
        return None

    def wants(self) -> bool:
        return self._next < self.nbytes and not self.dropped

    def certain(self) -> bool:
        return len(self.lane.pending) == self.steps

    def take(self, region: Region) -> None:
        raise NotImplementedError

    @property
    def dropped(self) -> bool:
        """Its operation has left the queue before its time: skipped, withdrawn or lost to a fault."""
        return self.operation._gate is not self or self.error is not None

    def _cut(self) -> tuple[int, int]:
        offset = self._next
        nbytes = min(CHUNK_BYTES, self.nbytes - offset)
        self._next += nbytes
        return offset, nbytes

    def _step(self, call: Callable[..., object], arguments: tuple[Any, ...], release: Callable[[], object]) -> None:
        """Give a chunk to the stream."""

        def passed() -> None:
            self.steps -= 1
            release()

        self.steps += 1
        self.lane.step(call, arguments, self.estimate, passed)

    def _submitted(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left == 0:
            self.lane.queue.pump()
        self.lane.reactor.plan(self.lane)


class _Upload(_Transfer):
    __slots__ = ()

    def take(self, region: Region) -> None:
        offset, nbytes = self._cut()
        source = self._source + offset
        # Not only the operation: if it is dropped meanwhile, the source must outlive the copy.
        keep = self.operation._keep

        def fill() -> object:
            ctypes.memmove(region.address, source, nbytes)
            return keep

        self.lane.reactor.jobs.start(fill, lambda _, error: self._filled(region, offset, nbytes, error))

    def _filled(self, region: Region, offset: int, nbytes: int, error: BaseException | None) -> None:
        if error is not None:
            self.error = error
        if self.dropped:
            self.ring.give(region)
            self.lane.queue.pump()
            return
        self._step(
            self.lane.hub.driver.upload,
            (self.lane.handle, self._target + offset, region.address, nbytes),
            lambda: self.ring.give(region),
        )
        self._submitted(nbytes)


class _Download(_Transfer):
    __slots__ = ("_landing", "_unlanded")

    def __init__(self, ring: Ring, lane: Lane, kind: str, target: int, source: int, nbytes: int) -> None:
        super().__init__(ring, lane, kind, target, source, nbytes)
        self._unlanded = nbytes
        self._landing = False

    def take(self, region: Region) -> None:
        offset, nbytes = self._cut()
        self._step(
            self.lane.hub.driver.download,
            (self.lane.handle, region.address, self._source + offset, nbytes),
            lambda: self._arrived(region, offset, nbytes),
        )
        self._submitted(nbytes)

    def _arrived(self, region: Region, offset: int, nbytes: int) -> None:
        if self.operation._state == ABANDONED or self.operation._failure is not None:
            self._landed(region, nbytes, None)
            return
        target = self._target + offset
        keep = self.operation._keep

        def empty() -> object:
            ctypes.memmove(target, region.address, nbytes)
            return keep

        self.lane.reactor.jobs.start(empty, lambda _, error: self._landed(region, nbytes, error))

    def _landed(self, region: Region, nbytes: int, error: BaseException | None) -> None:
        self.error = self.error or error
        self._unlanded -= nbytes
        self.ring.give(region)
        if self._unlanded == 0 and self._landing:
            self.lane.landed(self.operation, self.error)

    def land(self, operation: Operation[Any]) -> bool:
        self._landing = True
        if self._unlanded == 0 and self.error is not None:
            raise self.error
        return self._unlanded == 0
