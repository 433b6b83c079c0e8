"""The streams of a group: the hook that makes them wait for their prerequisites before each submission."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..completion import METHODS
from ..errors import CycleError, InvalidTypeError
from ..lowlevel import Queue, StreamHook, StreamOperation, StreamView, follow, queue_of, resources_of
from ..stream import CheckedStream, Stream
from ._dependencies import path_between

__all__ = ["CheckedGroupStream", "GivenWork", "GroupStream", "PrerequisiteHook"]

T = TypeVar("T")


class GivenWork:
    """The work of a stream that a group was given. It ends with the lease, although the stream is leased again."""

    __slots__ = ("_is_over", "_last", "_queue", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = weakref.ref(stream)
        self._queue = queue_of(stream)
        self._last: StreamOperation[Any] | None = None
        self._is_over = False

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far. After the end of a lease it is always the same one."""
        if self._is_over:
            return self._last
        end, stream = self._queue.end(), self._stream()
        if stream is None or stream.closed:
            self._last, self._is_over = end, True
        return end


class PrerequisiteHook:
    """The hook of a stream of a group: before each submission, the stream waits for its prerequisites on the device.

    Hooks refer to the streams weakly, so that the streams of a group form no reference cycle.

    Parameters
    ----------
    name
        The name of the stream in its group.
    work
        Returns the end of the stream's work, for the dependents.
    """

    __slots__ = ("__weakref__", "_dependents", "_hook", "_is_over", "_queue", "_stream", "_waits", "_work", "name")

    def __init__(self, stream: Stream, name: str, work: Queue | GivenWork) -> None:
        self.name = name
        self._stream = weakref.ref(stream)
        self._queue = queue_of(stream)
        self._work = work
        #: For each prerequisite, the operation of the last wait and, if the wait is an operation of its own, that one.
        self._waits: dict[PrerequisiteHook, tuple[StreamOperation[Any] | None, StreamOperation[Any] | None]] = {}
        self._dependents: weakref.WeakSet[PrerequisiteHook] = weakref.WeakSet()
        self._is_over = False
        self._hook: StreamHook | None = None
        # The stream's own hook, which runs after the waits.
        self._hook = _without_ended(resources_of(stream.device).add_hook(stream, self))

    @property
    def prerequisites(self) -> tuple[Stream, ...]:
        """The streams that this one depends on."""
        return tuple(cast("Stream", prerequisite._stream()) for prerequisite in self._waits)

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Wait for the prerequisites, if the method submits work; then do what the method does."""
        if self._waits and METHODS[method].submits:
            self._wait_for_prerequisites()
        return proceed(*args) if self._hook is None else self._hook.call(method, proceed, *args)

    def _wait_for_prerequisites(self) -> None:
        known, queue = self._waits, self._queue
        queue.check()
        for prerequisite, (last, wait) in known.items():
            end = prerequisite._work.end()
            # A wait that was skipped because of an earlier failure in this stream must be repeated.
            if end is not None and (end is not last or (wait is not None and wait.failure is not None)):
                follow(queue, end)
                wait = queue.tail()
                known[prerequisite] = end, wait if wait is not None and wait.kind == "wait" else None

    def depend_on(self, prerequisite: PrerequisiteHook) -> None:
        """Wait for the newest operation of ``prerequisite`` before each submission. Raise `CycleError` on a cycle."""
        path = path_between(prerequisite, self, lambda hook: hook._waits, lambda hook: tuple(hook._dependents))
        if path is not None:
            names = tuple(hook.name for hook in (self, *path))
            raise CycleError(
                f"{self.name} cannot depend on {prerequisite.name}: {' → '.join(names)}, each waiting for the next; "
                "leave one of these dependencies out",
                path=names,
            )
        self._waits.setdefault(prerequisite, (None, None))
        prerequisite._dependents.add(self)

    def end(self, stream: Stream) -> None:
        """Wait for nothing any more. The stream runs its own hook again, unless another hook has been added later."""
        self._waits = {}
        self._is_over = True
        resources_of(stream.device).remove_hook(stream, self, _without_ended(self._hook))


def _without_ended(hook: StreamHook | None) -> StreamHook | None:
    """Return the hook; of a group that has ended, the hook that runs after it."""
    while isinstance(hook, PrerequisiteHook) and hook._is_over:
        hook = hook._hook
    return hook


class GroupStream(StreamView):
    """A stream that a `StreamGroup` has made, with all methods of a stream.

    Each submission first makes the stream wait, on the device, for the newest operation of each prerequisite stream.
    That costs one check for each prerequisite, and one ``cuStreamWaitEvent`` if the prerequisite has a new operation.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._stream = stream  # it warns if it is not closed
        self.hook = PrerequisiteHook(self, stream.name, queue_of(stream))
        self._replace_stream()

    @property
    def prerequisites(self) -> tuple[Stream, ...]:
        """The streams that this one depends on."""
        return self.hook.prerequisites

    def depend_on(self, prerequisite: GroupStream) -> None:
        """Wait for the newest operation of ``prerequisite`` before each submission. Raise `CycleError` on a cycle."""
        if not isinstance(prerequisite, GroupStream):
            raise InvalidTypeError(f"a stream of a group depends on another one of it, not on {prerequisite!r}")
        self.hook.depend_on(prerequisite.hook)


class CheckedGroupStream(GroupStream, CheckedStream):
    """A `GroupStream` of a device with a checker, which checks the accesses of each method after the waits."""
