"""What the tasks of a random program do, one action at a time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ... import gather
from ..._device import Device
from ..._event import Event
from ...completion._operation import Operation
from ...errors import ClosedError, DeviceFault, SkippedError, StaleHandleError
from ...stream import Stream
from .between import copy_between, mix_up
from .carry import carry
from .check import Checker
from .content import Tracked, Version
from .kernels import AFFINE
from .kinds import actions_of

__all__ = ["Actions", "actor"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: The actor that is at work, as callbacks see it: V13.
actor: contextvars.ContextVar[int] = contextvars.ContextVar("aiocuda_simulated_actor", default=-1)

#: Items of a buffer. The third is more than a staging cell holds, the last more than a chunk.
_SIZES = (16, 300, 20_000, 1_200_000)


class Actions:
    """Streams, buffers and operations that several actors share, and what they do with them.

    Buffers and work of two devices meet in copies between them, in waits, and where a stream is given what is the other
    device's, which is refused.

    Parameters
    ----------
    seed
        Decides.
    devices
        Whose streams: those of one driver.
    checker
        Is told of every operation.
    """

    def __init__(self, seed: int, devices: Sequence[Device], checker: Checker) -> None:
        self._random = random.Random(f"aiocuda actions {seed}")
        self.seed = seed
        self._devices = devices
        self._checker = checker
        self._streams: list[Stream] = []
        self._buffers: list[Tracked] = []
        self._operations: list[Operation[Any]] = []
        self._events: list[Event] = []
        self._expected: list[tuple[Operation[Any], Version]] = []
        self.operations = 0
        self.streams = 0
        self.done: dict[str, int] = {}
        self._all: list[Callable[[], Awaitable[None]]] = [
            self._open_stream, self._upload, self._upload, self._fill, self._launch, self._launch, self._launch,
            self._copy, self._copy, self._download, self._download, self._download, self._await_some, self._await_some,
            self._await_under_timeout, self._gather, self._cancel_an_await, self._wait_for_stream, self._event,
            self._synchronize, self._call_back, self._abandon, self._free, self._drop, self._free, self._close_stream,
            self._pinned, self._pause, self._pause, self._pause, self._pipeline, self._unified, self._burst,
            self._leave_stream,
        ]  # fmt: skip
        if len(devices) > 1:
            self._all += 3 * [partial(copy_between, self)] + [partial(mix_up, self, checker, AFFINE)]
        self._all += actions_of(seed, self)

    # -- chance --------------------------------------------------------------------------------------------------

    def below(self, limit: int) -> int:
        """An integer from 0 to ``limit`` - 1."""
        return int(self._random.random() * limit)

    def _one(self, of: list[Any]) -> Any:
        return of[self.below(len(of))]

    def _seconds(self, orders: int) -> float:
        """From a microsecond up, so many orders of magnitude."""
        return float(10 ** (-6 + orders * self._random.random()))

    def count(self, what: str) -> None:
        """It has been done once more."""
        self.done[what] = self.done.get(what, 0) + 1

    async def any(self) -> None:
        """One action."""
        await self._one(self._all)()

    def forget(self) -> None:
        """Hold nothing of the device's any more."""
        for held in (self._events, self._buffers, self._streams, self._operations, self._expected):
            held.clear()
        self._all = [self._pause]

    # -- streams and buffers -------------------------------------------------------------------------------------

    def _device(self) -> Device:
        return self._devices[self.below(len(self._devices))]

    def _new_stream(self, device: Device | None = None) -> Stream:
        stream = (device or self._device()).stream(self._one(["normal", "normal", "high", "low"]))
        self._streams.append(stream)
        self.streams += 1
        return stream

    def _stream(self, device: Device | None = None) -> Stream:
        """One of a device's; of any device's, if none is named."""
        if len(self._streams) < 3:
            return self._new_stream(device)
        streams = [stream for stream in self._streams if device is None or stream.device is device]
        return self._one(streams) if streams else self._new_stream(device)

    def _target(self) -> Tracked:
        """A buffer to be written, perhaps a new one."""
        if len(self._buffers) < 2 or self.below(6) == 0:
            size = _SIZES[(0, 0, 0, 1, 1, 1, 2, 2)[self.below(8)]] if self.below(40) else _SIZES[3]
            return self._new_buffer(self._stream(), size)
        known: Tracked = self._one(self._buffers)
        return known

    def _new_buffer(self, stream: Stream, size: int) -> Tracked:
        tracked = Tracked(stream.empty(size, np.uint32), stream)
        self._buffers.append(tracked)
        return tracked

    def _target_and_stream(self) -> tuple[Tracked, Stream]:
        """And a stream of its device."""
        target = self._target()
        return target, self._stream(target.device)

    def _keep(self, operation: Operation[Any]) -> Operation[Any]:
        self.operations += 1
        self._operations.append(operation)
        self._checker.follow(operation)
        return operation

    def _order(self, stream: Stream, *uses: tuple[Tracked, bool]) -> None:
        for tracked, writes in uses:
            for operation in tracked.before(stream, writes):
                self._checker.order(self._keep(stream.wait(operation)), operation)

    def _write(
        self, stream: Stream, target: Tracked, operation: Operation[Any], parents: tuple[Version, ...], compute: Any
    ) -> None:
        target.used(stream, self._keep(operation), writes=True)
        target.version = Version(operation, parents, compute)

    def _values(self, count: int) -> _Array:
        start = self.below(1 << 16)
        return np.arange(start, start + count, dtype=np.uint32)

    # -- actions -------------------------------------------------------------------------------------------------

    async def _open_stream(self) -> None:
        if len(self._streams) < 8:
            self._new_stream()

    async def _upload(self) -> None:
        target, stream = self._target_and_stream()
        array = self._values(target.buffer.shape[0])
        expected = array.copy()
        self._order(stream, (target, True))
        operation = stream.copy(target.buffer, array)
        self._checker.borrow(operation, weakref.ref(array))
        self._write(stream, target, operation, (), lambda: expected)

    async def _fill(self) -> None:
        (target, stream), value = self._target_and_stream(), self.below(1 << 30)
        count = target.buffer.shape[0]
        self._order(stream, (target, True))
        operation = stream.fill(target.buffer, value)
        self._write(stream, target, operation, (), lambda: np.full(count, value, np.uint32))

    async def _launch(self) -> None:
        target, stream = self._target_and_stream()
        factor, term, count = 1 + 2 * self.below(100), self.below(1000), target.buffer.shape[0]
        self._order(stream, (target, True))
        operation = stream.launch(AFFINE, 1, 32, target.buffer, count, factor, term)
        self._write(
            stream, target, operation, (target.version,),
            lambda before: before * np.uint32(factor) + np.uint32(term),
        )  # fmt: skip

    async def _copy(self) -> None:
        target, stream = self._target_and_stream()
        sources = [source for source in self._like(target) if source.device is target.device]
        if sources:
            self._bring(self._one(sources), target, stream)

    def _like(self, target: Tracked) -> list[Tracked]:
        return [each for each in self._buffers if each is not target and each.buffer.shape == target.buffer.shape]

    def _bring(self, source: Tracked, target: Tracked, stream: Stream) -> None:
        self._order(stream, (source, False), (target, True))
        operation = stream.copy(target.buffer, source.buffer)
        self._write(stream, target, operation, (source.version,), lambda before: before)
        source.used(stream, operation, writes=False)

    async def _download(self) -> None:
        source, stream = self._target_and_stream()
        self._order(stream, (source, False))
        operation = self._keep(stream.download(source.buffer))
        source.used(stream, operation, writes=False)
        version = source.version
        self._expected.append((operation, version))
        if self.below(2):
            await operation
            self._compare_one(operation, version)

    async def _pinned(self) -> None:
        source, stream = self._target_and_stream()
        if source.buffer.shape[0] > _SIZES[2]:
            return
        array = self._device().pinned(source.buffer.shape, np.uint32)
        self._order(stream, (source, False))
        operation = self._keep(stream.copy(array, source.buffer))
        source.used(stream, operation, writes=False)
        version = source.version
        await operation
        value = version.value()
        if value is not None and not np.array_equal(value, array):
            self._checker.found(f"V2 pinned memory does not hold what {operation!r} brought")

    async def _unified(self) -> None:
        """Managed memory goes to the device and back."""
        if self.below(3):
            return
        stream, value = self._stream(), self.below(1 << 30)
        buffer = stream.device.unified(_SIZES[0], np.uint32)
        self._keep(stream.fill(buffer, value))
        self._keep(stream.prefetch(buffer, self._one(["device", "host"])))
        operation = self._keep(stream.download(buffer))
        buffer.free()
        self._expected.append((operation, Version(operation, (), lambda: np.full(_SIZES[0], value, np.uint32))))

    def _some(self) -> list[Operation[Any]]:
        return [operation for operation in self._operations[-12:] if self.below(3) == 0]

    async def _await_some(self) -> None:
        for operation in self._some():
            await self._told(operation)

    async def _told(self, operation: Operation[Any]) -> None:
        try:
            await operation
        except SkippedError as error:
            if error.__cause__ is None:
                self._checker.found(f"V9 {operation!r} was skipped, and does not say why")
            raise
        if not operation.done():
            self._checker.found(f"V1 {operation!r} woke its waiter before it was done")

    async def _await_under_timeout(self) -> None:
        for operation in self._some():
            self.count("timeout")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds(4)):
                    await operation

    async def _gather(self) -> None:
        operations = self._some()
        self.count("gather")
        if self.below(2):
            await gather(*operations)
        else:
            await asyncio.gather(*operations, return_exceptions=True)

    async def _cancel_an_await(self) -> None:
        tasks = [asyncio.ensure_future(operation.wait()) for operation in self._some()]
        await asyncio.sleep(self._seconds(3))
        for task in tasks:
            self.count("cancel")
            task.cancel()
        if tasks:  # not `gather`: what it does with tasks that are done differs between versions of Python
            await asyncio.wait(tasks)

    async def _wait_for_stream(self) -> None:
        one, other = self._stream(), self._stream()
        if not one.closed and not other.closed:
            self._keep(one.wait(other))

    async def _event(self) -> None:
        stream, other = self._stream(), self._stream()
        event = stream.record(timing=bool(self.below(2)))
        self._keep(event.operation)
        self._events.append(event)
        self._checker.order(self._keep(other.wait(event)), event.operation)
        if self.below(2):
            await event
        if self.below(3) == 0:
            event.release()
        if self.below(3) == 0:
            self._events.clear()

    async def _synchronize(self) -> None:
        await self._keep(self._stream().synchronize())

    async def _call_back(self) -> None:
        mine = actor.get()

        def called(operation: Operation[Any]) -> None:
            if actor.get() != mine:
                self._checker.found(f"V13 a callback of actor {mine} saw the context of {actor.get()}")

        self._keep(self._stream().add_callback(called))

    async def _abandon(self) -> None:
        for operation in self._some():
            if operation.abandon():
                self.count("abandon")

    async def _free(self) -> None:
        if len(self._buffers) > 3:
            tracked = self._buffers.pop(self.below(len(self._buffers)))
            tracked.buffer.free(self._stream(tracked.device) if self.below(3) == 0 else None)
            if self.below(3) == 0:
                self._use_stale(tracked)

    def _use_stale(self, tracked: Tracked) -> None:
        self.count("stale")
        try:
            self._stream(tracked.device).fill(tracked.buffer, 1)
        except (StaleHandleError, ClosedError, DeviceFault):
            return
        self._checker.found("V5 a buffer that was freed could be used")

    async def _drop(self) -> None:
        """Nobody holds the buffer any more: its finaliser gives it back."""
        if len(self._buffers) > 3:
            self._buffers.pop(self.below(len(self._buffers)))

    async def _close_stream(self) -> None:
        if len(self._streams) > 3:
            stream = self._streams.pop(self.below(len(self._streams)))
            await stream.aclose()
            self.count("close")

    async def _leave_stream(self) -> None:
        """One that nobody else has is left by an exception, with copies on their way; others wait for what they use."""
        if self.below(3):
            return
        self.count("leave")
        with contextlib.suppress(InterruptedError):
            async with self._device().stream() as stream:
                buffer = stream.empty(_SIZES[2], np.uint32)
                for _ in range(1 + self.below(3)):
                    self._keep(stream.copy(buffer, self._values(_SIZES[2])))
                await self._pause()
                buffer.free(self._stream(stream.device) if self.below(2) else None)
                raise InterruptedError

    async def _burst(self) -> None:
        """More than one turn of the loop may resolve, in two streams that come to their ends together."""
        if self.below(32) == 0:
            one, other = self._stream(), self._stream()
            for stream in (one, other):
                for _ in range(350):
                    stream.synchronize()
                self._keep(other.wait(one))
                await asyncio.sleep(0)

    async def _pause(self) -> None:
        if self.below(2):
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._seconds(4))

    async def _pipeline(self) -> None:
        if self.below(3) == 0:
            self.count("pipeline")
            await carry(self, self._device(), self._checker, AFFINE)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _compare_one(self, operation: Operation[Any], version: Version) -> None:
        if operation.state != "done":
            return
        value = version.value()
        if value is not None and not np.array_equal(value, operation.result()):
            self._checker.found(f"V2 {operation!r} brought something else than what was written")

    def compare(self) -> None:
        """Every download that succeeded brought what the operations before it had written."""
        for operation, version in self._expected:
            self._compare_one(operation, version)
