"""GroupStream: a stream of a group, which waits for what it depends on before each submission."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from .._event import Event
from ..completion._operation import Operation
from ..completion._stream_queue import stream_queue
from ..errors import CycleError, InvalidTypeError
from ..kernels import Kernel
from ..memory._buffer import DeviceBuffer
from ..memory._unified import UnifiedBuffer
from ..stream import CheckedStream, Stream
from ..stream._view import StreamView
from ._joining import follow
from ._paths import path_between

__all__ = ["CheckedGroupStream", "GroupStream"]


class GroupStream(StreamView):
    """A `Stream` of a `StreamGroup`, with all verbs of a stream.

    Each of them first makes the stream wait, on the device, for the newest operation of every stream that it depends
    on. That costs a look at each of those, and one ``cuStreamWaitEvent`` where there is something new to wait for.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._stream = stream  # which is the one that is closed
        #: Each with what was waited for last and, where that wait had to be put into the queue, the wait.
        self._prerequisites: dict[GroupStream, tuple[Operation[Any] | None, Operation[Any] | None]] = {}
        #: The streams that depend on this one. Weakly, so that the streams of a group hold each other in no circle.
        self._dependents: weakref.WeakKeyDictionary[GroupStream, None] = weakref.WeakKeyDictionary()
        self._queue.set_stream(self)

    @property
    def prerequisites(self) -> tuple[GroupStream, ...]:
        """The streams that it depends on."""
        return tuple(self._prerequisites)

    def depend_on(self, prerequisite: GroupStream) -> None:
        """Wait for that stream's newest operation before each submission. `CycleError` if that waits for this one."""
        if not isinstance(prerequisite, GroupStream):
            raise InvalidTypeError(f"a stream of a group depends on another one of it, not on {prerequisite!r}")
        path = path_between(prerequisite, self, lambda one: one._prerequisites, lambda one: tuple(one._dependents))
        if path is not None:
            names = tuple(stream.name for stream in (self, *path))
            raise CycleError(
                f"{self.name} cannot depend on {prerequisite.name}: {' → '.join(names)}, each waiting for the next; "
                "leave one of these dependencies out",
                path=names,
            )
        self._prerequisites.setdefault(prerequisite, (None, None))
        prerequisite._dependents[self] = None

    def _meet(self) -> None:
        """Wait for what it depends on."""
        known = self._prerequisites
        if known:
            queue = self._queue
            queue.check()
            for prerequisite, (last, wait) in known.items():
                end = stream_queue(prerequisite).end()
                # A wait that was skipped, for a failure before it in this stream, is none.
                if end is not None and (end is not last or (wait is not None and wait.failure is not None)):
                    follow(queue, end)
                    wait = queue.tail()
                    known[prerequisite] = end, wait if wait is not None and wait.kind == "wait" else None

    def upload(self, array: Any) -> Operation[DeviceBuffer]:
        self._meet()
        return super().upload(array)

    def copy(self, target: Any, source: Any) -> Operation[None]:
        self._meet()
        return super().copy(target, source)

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None) -> Operation[npt.NDArray[Any]]:
        self._meet()
        return super().download(buffer, out)

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        self._meet()
        return super().fill(buffer, value)

    def prefetch(self, buffer: UnifiedBuffer, to: Any = "device") -> Operation[None]:
        self._meet()
        return super().prefetch(buffer, to)

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
    ) -> Operation[None]:
        self._meet()
        return super().launch(kernel, grid, block, *args, shared_bytes=shared_bytes)

    def record(self, timing: bool = False, *, event: Event | None = None) -> Event:
        self._meet()
        return super().record(timing, event=event)

    def synchronize(self) -> Operation[None]:
        self._meet()
        return super().synchronize()

    def add_callback(
        self, fn: Callable[[Operation[None]], object], *, context: contextvars.Context | None = None
    ) -> Operation[None]:
        self._meet()
        return super().add_callback(fn, context=context)

    async def aclose(self) -> None:
        """Wait for its work, then close it. The group closes it otherwise."""
        await self._stream.aclose()


class CheckedGroupStream(GroupStream, CheckedStream):
    """The same where accesses are checked: each verb waits first, and is looked at then."""

    def __init__(self, stream: CheckedStream) -> None:
        super().__init__(stream)
        self._checker = stream._checker
