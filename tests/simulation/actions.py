"""The actions of a random program: what its tasks do to streams, buffers and operations, one action at a time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from aiocuda import Device, Event, Operation, Stream, gather
from aiocuda.errors import ClosedError, DeviceFault, SkippedError, StaleHandleError
from tests.simulation.buffers import TrackedBuffer, Version
from tests.simulation.checker import Checker
from tests.simulation.features import feature_actions
from tests.simulation.kernels import AFFINE
from tests.simulation.pipelines import run_pipeline
from tests.simulation.two_devices import copy_between_devices, use_on_wrong_device

__all__ = ["Actions", "current_task"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_T = TypeVar("_T")

#: The number of the program's task that runs, as a context variable: V13 compares it in callbacks.
current_task: contextvars.ContextVar[int] = contextvars.ContextVar("aiocuda_simulated_task", default=-1)

#: Items of a buffer. The third size does not fit into a staging buffer, and the last does not fit into one chunk.
_SIZES = (16, 300, 20_000, 1_200_000)

_MOST_STREAMS = 8


class Actions:
    """Streams, buffers and operations that the tasks of a program share, and the actions that use them.

    `run_one` performs one action. The methods without an underscore are also for the modules that add actions, see
    `tests.simulation.features`. The order in which random numbers are drawn decides the program: a change of it changes
    what every seed does.

    Parameters
    ----------
    seed
        Decides every choice.
    devices
        The devices of the program, of one driver.
    checker
        Is given every operation, and every expectation.

    Attributes
    ----------
    buffers : list of TrackedBuffer
        The buffers in use.
    operations : list of Operation
        All operations so far.
    operation_count, stream_count : int
        Counted for the report; a pipeline's operations count, too.
    counts : dict
        How often each counted action was performed.
    """

    def __init__(self, seed: int, devices: Sequence[Device], checker: Checker) -> None:
        self._random = random.Random(f"aiocuda actions {seed}")
        self.seed = seed
        self.devices = devices
        self.checker = checker
        self.buffers: list[TrackedBuffer] = []
        self.operations: list[Operation[Any]] = []
        self.operation_count = 0
        self.stream_count = 0
        self.counts: dict[str, int] = {}
        self._streams: list[Stream] = []
        self._events: list[Event] = []
        self._downloads: list[tuple[Operation[Any], Version]] = []
        self._choices: list[Callable[[], Awaitable[None]]] = [
            self._open_stream, self._upload, self._upload, self._fill, self._launch, self._launch, self._launch,
            self._copy, self._copy, self._download, self._download, self._download, self._await_some, self._await_some,
            self._await_under_timeout, self._gather, self._cancel_an_await, self._wait_for_stream, self._event,
            self._synchronize, self._add_callback, self._abandon, self._free, self._drop, self._free,
            self._close_stream, self._download_pinned, self.pause, self.pause, self.pause, self._pipeline,
            self._unified, self._burst, self._leave_stream,
        ]  # fmt: skip
        if len(devices) > 1:
            self._choices += 3 * [partial(copy_between_devices, self)] + [partial(use_on_wrong_device, self)]
        self._choices += feature_actions(seed, self)

    async def run_one(self) -> None:
        """Perform one action, chosen by chance."""
        await self.choose(self._choices)()

    def drop_all(self) -> None:
        """Drop all streams, buffers, events and operations. From now on the only action is a pause."""
        for held in (self._events, self.buffers, self._streams, self.operations, self._downloads):
            held.clear()
        self._choices = [self.pause]

    # -- chance --------------------------------------------------------------------------------------------------

    def below(self, limit: int) -> int:
        """Return an integer from 0 to ``limit`` - 1."""
        return int(self._random.random() * limit)

    def choose(self, choices: Sequence[_T]) -> _T:
        """Return one of ``choices``."""
        return choices[self.below(len(choices))]

    def seconds(self, orders: int) -> float:
        """Return a duration from 1 µs up to ``orders`` orders of magnitude more; every order is equally likely."""
        return float(10 ** (-6 + orders * self._random.random()))

    def task(self) -> int:
        """Return the number of the task whose context this code has."""
        return current_task.get()

    def values(self, count: int) -> _Array:
        """Return an array of ``count`` items."""
        start = self.below(1 << 16)
        return np.arange(start, start + count, dtype=np.uint32)

    async def pause(self) -> None:
        """Let other tasks run: for one turn of the loop, or for up to 10 ms."""
        if self.below(2):
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.seconds(4))

    # -- streams and buffers -------------------------------------------------------------------------------------

    def device(self) -> Device:
        """Return one of the devices."""
        return self.devices[self.below(len(self.devices))]

    def stream(self, device: Device | None = None) -> Stream:
        """Return a stream of this device, perhaps a new one; without a device, a stream of any device."""
        if len(self._streams) < 3:
            return self._new_stream(device)
        streams = [stream for stream in self._streams if device is None or stream.device is device]
        return self.choose(streams) if streams else self._new_stream(device)

    def _new_stream(self, device: Device | None = None) -> Stream:
        stream = (device or self.device()).stream(self.choose(["normal", "normal", "high", "low"]))
        self._streams.append(stream)
        self.stream_count += 1
        return stream

    def target(self) -> TrackedBuffer:
        """Return a buffer, perhaps a new one."""
        if len(self.buffers) < 2 or self.below(6) == 0:
            size = _SIZES[(0, 0, 0, 1, 1, 1, 2, 2)[self.below(8)]] if self.below(40) else _SIZES[3]
            return self.new_buffer(self.stream(), size)
        return self.choose(self.buffers)

    def new_buffer(self, stream: Stream, size: int) -> TrackedBuffer:
        """Allocate a buffer of ``size`` items in a stream."""
        tracked = TrackedBuffer(stream.empty(size, np.uint32), stream)
        self.buffers.append(tracked)
        return tracked

    def _target_and_stream(self) -> tuple[TrackedBuffer, Stream]:
        target = self.target()
        return target, self.stream(target.device)

    def same_shape(self, target: TrackedBuffer) -> list[TrackedBuffer]:
        """Return the other buffers of the same shape."""
        return [each for each in self.buffers if each is not target and each.buffer.shape == target.buffer.shape]

    # -- operations ----------------------------------------------------------------------------------------------

    def count(self, action: str) -> None:
        """Count an action for the report."""
        self.counts[action] = self.counts.get(action, 0) + 1

    def follow(self, operation: Operation[Any]) -> Operation[Any]:
        """Let the checker follow an operation, and later actions use it."""
        self.operation_count += 1
        self.operations.append(operation)
        self.checker.follow(operation)
        return operation

    def wait_for_users(self, stream: Stream, *uses: tuple[TrackedBuffer, bool]) -> None:
        """Let a stream wait for the earlier users of buffers. A use is a buffer, and whether it will be written."""
        for tracked, writes in uses:
            for operation in tracked.operations_before(stream, writes):
                self.checker.expect_wait(self.follow(stream.wait(operation)), operation)

    def note_write(
        self,
        stream: Stream,
        target: TrackedBuffer,
        operation: Operation[Any],
        parents: tuple[Version, ...],
        compute: Callable[..., _Array],
    ) -> None:
        """Follow an operation that writes a buffer, and note the new content, see `Version`."""
        target.note_use(stream, self.follow(operation), writes=True)
        target.version = Version(operation, parents, compute)

    def copy_buffer(self, source: TrackedBuffer, target: TrackedBuffer, stream: Stream) -> None:
        """Copy one buffer into another."""
        self.wait_for_users(stream, (source, False), (target, True))
        operation = stream.copy(target.buffer, source.buffer)
        self.note_write(stream, target, operation, (source.version,), lambda before: before)
        source.note_use(stream, operation, writes=False)

    def compare_downloads(self) -> None:
        """V2: check that every download that succeeded has the content that the operations before it wrote."""
        for operation, version in self._downloads:
            self._compare(operation, version)

    def _compare(self, operation: Operation[Any], version: Version) -> None:
        if operation.state != "done":
            return
        value = version.value()
        if value is not None and not np.array_equal(value, operation.result()):
            self.checker.report(f"V2 {operation!r} has other bytes than were written")

    def _recent_operations(self) -> list[Operation[Any]]:
        """Return some of the last twelve operations."""
        return [operation for operation in self.operations[-12:] if self.below(3) == 0]

    # -- actions -------------------------------------------------------------------------------------------------

    async def _open_stream(self) -> None:
        if len(self._streams) < _MOST_STREAMS:
            self._new_stream()

    async def _upload(self) -> None:
        target, stream = self._target_and_stream()
        array = self.values(target.buffer.shape[0])
        expected = array.copy()
        self.wait_for_users(stream, (target, True))
        operation = stream.copy(target.buffer, array)
        self.checker.borrow(operation, weakref.ref(array))
        self.note_write(stream, target, operation, (), lambda: expected)

    async def _fill(self) -> None:
        (target, stream), value = self._target_and_stream(), self.below(1 << 30)
        count = target.buffer.shape[0]
        self.wait_for_users(stream, (target, True))
        operation = stream.fill(target.buffer, value)
        self.note_write(stream, target, operation, (), lambda: np.full(count, value, np.uint32))

    async def _launch(self) -> None:
        target, stream = self._target_and_stream()
        factor, term, count = 1 + 2 * self.below(100), self.below(1000), target.buffer.shape[0]
        self.wait_for_users(stream, (target, True))
        operation = stream.launch(AFFINE, 1, 32, target.buffer, count, factor, term)
        self.note_write(
            stream, target, operation, (target.version,),
            lambda before: before * np.uint32(factor) + np.uint32(term),
        )  # fmt: skip

    async def _copy(self) -> None:
        target, stream = self._target_and_stream()
        sources = [source for source in self.same_shape(target) if source.device is target.device]
        if sources:
            self.copy_buffer(self.choose(sources), target, stream)

    async def _download(self) -> None:
        source, stream = self._target_and_stream()
        self.wait_for_users(stream, (source, False))
        operation = self.follow(stream.download(source.buffer))
        source.note_use(stream, operation, writes=False)
        version = source.version
        self._downloads.append((operation, version))
        if self.below(2):
            await operation
            self._compare(operation, version)

    async def _download_pinned(self) -> None:
        source, stream = self._target_and_stream()
        if source.buffer.shape[0] > _SIZES[2]:
            return
        array = self.device().pinned(source.buffer.shape, np.uint32)
        self.wait_for_users(stream, (source, False))
        operation = self.follow(stream.copy(array, source.buffer))
        source.note_use(stream, operation, writes=False)
        version = source.version
        await operation
        value = version.value()
        if value is not None and not np.array_equal(value, array):
            self.checker.report(f"V2 pinned memory does not hold the bytes of {operation!r}")

    async def _unified(self) -> None:
        """Write managed memory on the device, prefetch it, and download it."""
        if self.below(3):
            return
        stream, value = self.stream(), self.below(1 << 30)
        buffer = stream.device.unified(_SIZES[0], np.uint32)
        self.follow(stream.fill(buffer, value))
        self.follow(stream.prefetch(buffer, self.choose(["device", "host"])))
        operation = self.follow(stream.download(buffer))
        buffer.free()
        self._downloads.append((operation, Version(operation, (), lambda: np.full(_SIZES[0], value, np.uint32))))

    async def _await_some(self) -> None:
        for operation in self._recent_operations():
            await self._await(operation)

    async def _await(self, operation: Operation[Any]) -> None:
        try:
            await operation
        except SkippedError as error:
            if error.__cause__ is None:
                self.checker.report(f"V9 {operation!r} was skipped, and its error has no cause")
            raise
        if not operation.done():
            self.checker.report(f"V1 {operation!r} woke its waiter before it was done")

    async def _await_under_timeout(self) -> None:
        for operation in self._recent_operations():
            self.count("timeout")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds(4)):
                    await operation

    async def _gather(self) -> None:
        operations = self._recent_operations()
        self.count("gather")
        if self.below(2):
            await gather(*operations)
        else:
            await asyncio.gather(*operations, return_exceptions=True)

    async def _cancel_an_await(self) -> None:
        tasks = [asyncio.ensure_future(operation.wait()) for operation in self._recent_operations()]
        await asyncio.sleep(self.seconds(3))
        for task in tasks:
            self.count("cancel")
            task.cancel()
        if tasks:  # not `gather`, which treats finished tasks differently in different versions of Python
            await asyncio.wait(tasks)

    async def _wait_for_stream(self) -> None:
        stream, other = self.stream(), self.stream()
        if not stream.closed and not other.closed:
            self.follow(stream.wait(other))

    async def _event(self) -> None:
        stream, other = self.stream(), self.stream()
        event = stream.record(timing=bool(self.below(2)))
        self.follow(event.operation)
        self._events.append(event)
        self.checker.expect_wait(self.follow(other.wait(event)), event.operation)
        if self.below(2):
            await event
        if self.below(3) == 0:
            event.release()
        if self.below(3) == 0:
            self._events.clear()

    async def _synchronize(self) -> None:
        await self.follow(self.stream().synchronize())

    async def _add_callback(self) -> None:
        mine = current_task.get()

        def check_context(operation: Operation[Any]) -> None:
            if current_task.get() != mine:
                self.checker.report(f"V13 a callback of task {mine} ran in the context of task {current_task.get()}")

        self.follow(self.stream().add_callback(check_context))

    async def _abandon(self) -> None:
        for operation in self._recent_operations():
            if operation.abandon():
                self.count("abandon")

    async def _free(self) -> None:
        if len(self.buffers) > 3:
            tracked = self.buffers.pop(self.below(len(self.buffers)))
            tracked.buffer.free(self.stream(tracked.device) if self.below(3) == 0 else None)
            if self.below(3) == 0:
                self._use_freed(tracked)

    def _use_freed(self, tracked: TrackedBuffer) -> None:
        self.count("stale")
        try:
            self.stream(tracked.device).fill(tracked.buffer, 1)
        except (StaleHandleError, ClosedError, DeviceFault):
            return
        self.checker.report("V5 a freed buffer could be used")

    async def _drop(self) -> None:
        """Drop the last reference to a buffer: its finaliser frees the memory."""
        if len(self.buffers) > 3:
            self.buffers.pop(self.below(len(self.buffers)))

    async def _close_stream(self) -> None:
        if len(self._streams) > 3:
            stream = self._streams.pop(self.below(len(self._streams)))
            await stream.aclose()
            self.count("close")

    async def _leave_stream(self) -> None:
        """Leave the block of a new stream by an exception while copies run; another stream may free their buffer."""
        if self.below(3):
            return
        self.count("leave")
        with contextlib.suppress(InterruptedError):
            async with self.device().stream() as stream:
                buffer = stream.empty(_SIZES[2], np.uint32)
                for _ in range(1 + self.below(3)):
                    self.follow(stream.copy(buffer, self.values(_SIZES[2])))
                await self.pause()
                buffer.free(self.stream(stream.device) if self.below(2) else None)
                raise InterruptedError

    async def _burst(self) -> None:
        """Enqueue more than one turn of the loop may resolve, in two streams that end at the same time."""
        if self.below(10) == 0:
            one, other = self.stream(), self.stream()
            for stream in (one, other):
                for _ in range(350):
                    stream.synchronize()
                self.follow(other.wait(one))
                await asyncio.sleep(0)

    async def _pipeline(self) -> None:
        if self.below(3) == 0:
            self.count("pipeline")
            await run_pipeline(self, self.device())
