"""CheckedStream: a stream that tells a checker what it reads, writes and waits for."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from .._event import Event
from .._types import Priority
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue, stream_queue
from ..kernels import Kernel
from ..memory._buffer import DeviceBuffer
from ..memory._unified import UnifiedBuffer
from ._checker import Checker, Touch
from ._stream import Stream

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["CheckedStream"]


class CheckedStream(Stream):
    """What `aiocuda.Device.stream` makes where accesses are checked."""

    def __init__(
        self, device: Device, queue: StreamQueue, priority: Priority, opened_at: str, checker: Checker
    ) -> None:
        super().__init__(device, queue, priority, opened_at)
        self._checker = checker

    def _touching(self, kind: str, touches: list[Touch], verb: Callable[[], Operation[Any]]) -> Operation[Any]:
        with self._checker.access(self._queue, kind, touches) as enqueued:
            operation = verb()
            enqueued.append(operation)
        return operation

    def upload(self, array: Any) -> Operation[DeviceBuffer]:
        operation = super().upload(array)
        target = operation.value
        touches = [_touch(target, False, True)] if isinstance(target, DeviceBuffer) else []
        return self._touching("upload", touches, lambda: operation)

    def copy(self, target: Any, source: Any) -> Operation[None]:
        touches = [_touch(buffer, reads, not reads) for buffer, reads in ((source, True), (target, False))
                   if isinstance(buffer, DeviceBuffer)]  # fmt: skip
        return self._touching("copy", touches, lambda: super(CheckedStream, self).copy(target, source))

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None) -> Operation[npt.NDArray[Any]]:
        touches = [_touch(buffer, True, False)] if isinstance(buffer, DeviceBuffer) else []
        return self._touching("download", touches, lambda: super(CheckedStream, self).download(buffer, out))

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        touches = [_touch(buffer, False, True)] if isinstance(buffer, DeviceBuffer) else []
        return self._touching("fill", touches, lambda: super(CheckedStream, self).fill(buffer, value))

    def prefetch(self, buffer: UnifiedBuffer, to: Any = "device") -> Operation[None]:
        operation = super().prefetch(buffer, to)
        self._checker.stamp(self._queue, operation)
        return operation

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
    ) -> Operation[None]:
        touches = []
        if isinstance(kernel, Kernel):
            for parameter, argument in zip(kernel.signature.parameters, args, strict=False):
                if parameter.is_pointer and isinstance(argument, DeviceBuffer):
                    touches.append(_touch(argument, True, not parameter.is_const))
        return self._touching(
            "launch",
            touches,
            lambda: super(CheckedStream, self).launch(kernel, grid, block, *args, shared_bytes=shared_bytes),
        )

    def record(self, timing: bool = False, *, event: Event | None = None) -> Event:
        recorded = super().record(timing, event=event)
        self._checker.stamp(self._queue, recorded.operation)
        return recorded

    def wait(self, other: Operation[Any] | Event | Stream) -> Operation[None]:
        operation = super().wait(other)
        if isinstance(other, Stream):
            self._checker.wait_for_all(self._queue, stream_queue(other))
        else:
            self._checker.wait(self._queue, other.operation if isinstance(other, Event) else other)
        self._checker.stamp(self._queue, operation)
        return operation

    def synchronize(self) -> Operation[None]:
        operation = super().synchronize()
        self._checker.stamp(self._queue, operation)
        return operation

    def add_callback(
        self, fn: Callable[[Operation[None]], object], *, context: contextvars.Context | None = None
    ) -> Operation[None]:
        operation = super().add_callback(fn, context=context)
        self._checker.stamp(self._queue, operation)
        return operation


def _touch(buffer: DeviceBuffer, reads: bool, writes: bool) -> Touch:
    return Touch(buffer._block, buffer._offset, buffer._offset + buffer.nbytes, reads, writes)
