"""GroupStream: a stream of a group that waits for its prerequisites before each submission."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ..completion import METHODS
from ..errors import CycleError, InvalidTypeError
from ..lowlevel import Queue, StreamHook, StreamOperation, StreamView, follow, queue_of
from ..stream import CheckedStream, Stream
from ._dependencies import path_between

__all__ = ["CheckedGroupStream", "GroupStream"]

T = TypeVar("T")


class PrerequisiteHook:
    """The hook of a stream of a group: before each submission, the stream waits for its prerequisites on the device."""

    __slots__ = ("_hook", "_queue", "waits")

    def __init__(self, queue: Queue, hook: StreamHook | None) -> None:
        self._queue = queue
        self._hook = hook  # the stream's own hook, which runs after the waits
        #: For each prerequisite, the operation of the last wait and, if the wait is an operation of its own, that one.
        self.waits: dict[GroupStream, tuple[StreamOperation[Any] | None, StreamOperation[Any] | None]] = {}

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Wait for the prerequisites, if the method submits work; then do what the method does."""
        if self.waits and METHODS[method].submits:
            self._wait_for_prerequisites()
        return proceed(*args) if self._hook is None else self._hook.call(method, proceed, *args)

    def _wait_for_prerequisites(self) -> None:
        known, queue = self.waits, self._queue
        queue.check()
        for prerequisite, (last, wait) in known.items():
            end = queue_of(prerequisite).end()
            # A wait that was skipped because of an earlier failure in this stream must be repeated.
            if end is not None and (end is not last or (wait is not None and wait.failure is not None)):
                follow(queue, end)
                wait = queue.tail()
                known[prerequisite] = end, wait if wait is not None and wait.kind == "wait" else None


class GroupStream(StreamView):
    """A `Stream` of a `StreamGroup`, with all methods of a stream.

    Each submission first makes the stream wait, on the device, for the newest operation of each prerequisite stream.
    That costs one check for each prerequisite, and one ``cuStreamWaitEvent`` if the prerequisite has a new operation.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._stream = stream  # it warns if it is not closed
        self._hook = self._prerequisites = PrerequisiteHook(self._queue, self._hook)
        #: The streams that depend on this one. Weak references, so that the streams of a group form no reference cycle.
        self._dependents: weakref.WeakKeyDictionary[GroupStream, None] = weakref.WeakKeyDictionary()
        self._replace_stream()

    @property
    def prerequisites(self) -> tuple[GroupStream, ...]:
        """The streams that this one depends on."""
        return tuple(self._prerequisites.waits)

    def depend_on(self, prerequisite: GroupStream) -> None:
        """Wait for the newest operation of ``prerequisite`` before each submission. Raise `CycleError` on a cycle."""
        if not isinstance(prerequisite, GroupStream):
            raise InvalidTypeError(f"a stream of a group depends on another one of it, not on {prerequisite!r}")
        path = path_between(prerequisite, self, lambda each: each.prerequisites, lambda each: tuple(each._dependents))
        if path is not None:
            names = tuple(stream.name for stream in (self, *path))
            raise CycleError(
                f"{self.name} cannot depend on {prerequisite.name}: {' → '.join(names)}, each waiting for the next; "
                "leave one of these dependencies out",
                path=names,
            )
        self._prerequisites.waits.setdefault(prerequisite, (None, None))
        prerequisite._dependents[self] = None


class CheckedGroupStream(GroupStream, CheckedStream):
    """A `GroupStream` of a device with a checker, which checks the accesses of each method after the waits."""
