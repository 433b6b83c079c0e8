"""GroupStream: a stream of a group that waits for its prerequisites before each submission."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from .._event import Event
from ..completion._operation import Operation
from ..completion._stream_queue import StreamOperation, stream_queue
from ..errors import CycleError, InvalidTypeError
from ..kernels import Kernel
from ..memory._buffer import DeviceBuffer
from ..memory._unified import UnifiedBuffer
from ..stream import CheckedStream, Stream
from ..stream._view import StreamView
from ._dependencies import path_between
from ._joining import follow

__all__ = ["CheckedGroupStream", "GroupStream"]


class GroupStream(StreamView):
    """A `Stream` of a `StreamGroup`, with all methods of a stream.

    Each submission first makes the stream wait, on the device, for the newest operation of each prerequisite stream.
    That costs one check for each prerequisite, and one ``cuStreamWaitEvent`` if the prerequisite has a new operation.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._stream = stream  # the stream that `aclose` closes
        #: For each prerequisite, the operation of the last wait and, if the wait is an operation of its own, that one.
        self._prerequisites: dict[GroupStream, tuple[StreamOperation[Any] | None, StreamOperation[Any] | None]] = {}
        #: The streams that depend on this one. Weak references, so that the streams of a group form no reference cycle.
        self._dependents: weakref.WeakKeyDictionary[GroupStream, None] = weakref.WeakKeyDictionary()
        self._queue.set_stream(self)

    @property
    def prerequisites(self) -> tuple[GroupStream, ...]:
        """The streams that this one depends on."""
        return tuple(self._prerequisites)

    def depend_on(self, prerequisite: GroupStream) -> None:
        """Wait for the newest operation of ``prerequisite`` before each submission. Raise `CycleError` on a cycle."""
        if not isinstance(prerequisite, GroupStream):
            raise InvalidTypeError(f"a stream of a group depends on another one of it, not on {prerequisite!r}")
        path = path_between(prerequisite, self, lambda stream: stream.prerequisites, GroupStream._known_dependents)
        if path is not None:
            names = tuple(stream.name for stream in (self, *path))
            raise CycleError(
                f"{self.name} cannot depend on {prerequisite.name}: {' → '.join(names)}, each waiting for the next; "
                "leave one of these dependencies out",
                path=names,
            )
        self._prerequisites.setdefault(prerequisite, (None, None))
        prerequisite._dependents[self] = None

    def _known_dependents(self) -> tuple[GroupStream, ...]:
        return tuple(self._dependents)

    def _wait_for_prerequisites(self) -> None:
        """Make the stream wait for its prerequisites."""
        known = self._prerequisites
        if known:
            queue = self._queue
            queue.check()
            for prerequisite, (last, wait) in known.items():
                end = stream_queue(prerequisite).end()
                # A wait that was skipped because of an earlier failure in this stream must be repeated.
                if end is not None and (end is not last or (wait is not None and wait.failure is not None)):
                    follow(queue, end)
                    wait = queue.tail()
                    known[prerequisite] = end, wait if wait is not None and wait.kind == "wait" else None

    def upload(self, array: Any) -> Operation[DeviceBuffer]:
        self._wait_for_prerequisites()
        return super().upload(array)

    def copy(self, target: Any, source: Any) -> Operation[None]:
        self._wait_for_prerequisites()
        return super().copy(target, source)

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None) -> Operation[npt.NDArray[Any]]:
        self._wait_for_prerequisites()
        return super().download(buffer, out)

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        self._wait_for_prerequisites()
        return super().fill(buffer, value)

    def prefetch(self, buffer: UnifiedBuffer, to: Any = "device") -> Operation[None]:
        self._wait_for_prerequisites()
        return super().prefetch(buffer, to)

    def launch(
        self,
        kernel: Kernel,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        shared_bytes: int = 0,
    ) -> Operation[None]:
        self._wait_for_prerequisites()
        return super().launch(kernel, grid, block, *args, shared_bytes=shared_bytes)

    def record(self, timing: bool = False, *, event: Event | None = None) -> Event:
        self._wait_for_prerequisites()
        return super().record(timing, event=event)

    def synchronize(self) -> Operation[None]:
        self._wait_for_prerequisites()
        return super().synchronize()

    def add_callback(
        self, fn: Callable[[Operation[None]], object], *, context: contextvars.Context | None = None
    ) -> Operation[None]:
        self._wait_for_prerequisites()
        return super().add_callback(fn, context=context)

    async def aclose(self) -> None:
        """Wait for the work of the stream, then close it. Otherwise the group closes it."""
        await self._stream.aclose()


class CheckedGroupStream(GroupStream, CheckedStream):
    """A `GroupStream` with a checker: each method waits first, then the checker checks its accesses."""

    def __init__(self, stream: CheckedStream) -> None:
        super().__init__(stream)
        self._checker = stream._checker
