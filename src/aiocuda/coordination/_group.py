"""StreamGroup: several streams that work together."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar, overload

from .._base._checks import is_function, several
from .._base._mistakes import lacks
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import end_tasks
from .._base._tasks import start_task
from .._base._types import Priority, SourceLine
from .._base._user_code import call
from ..completion import Operation
from ..device import Device
from ..errors import DeviceFault, InvalidArgumentError, InvalidTypeError, WrongDeviceError, WrongLoopError
from ..lowlevel import Queue, join, owned, prepare_join, queue_of, resources_of
from ..stream import CheckedStream, Stream
from ._group_stream import CheckedGroupStream, GivenWork, GroupStream, PrerequisiteHook

__all__ = ["StreamGroup"]

T = TypeVar("T")

#: More streams than any device has hardware queues for: a larger number is a mistake.
MOST_STREAMS = 1024


@lacks
class StreamGroup(Owner):
    """Named streams of one device, with permanent dependencies between them and barriers over all of them.

    ::

        async with aiocuda.StreamGroup(device, ("upload", "compute")) as group:
            group.add_dependency("compute", "upload")
            group["upload"].copy(x, array)
            await group["compute"].launch(kernel, grid, block, x)   # after the copy

    ``async with`` waits for the work of the streams and closes them. If an exception or a cancellation leaves the
    block, it does not wait, as for a stream. While the group closes, its streams refuse new work with `ClosedError`.

    A group of *given* streams does not own them. Its dependencies hold for each submission through the given objects,
    which ``group[name]`` returns. The end of the group ends the dependencies; it closes no stream, and
    does not wait. A given stream may be closed, and a given lease may end, before the group: then `barrier` and the
    other methods raise its `ClosedError` or `StaleHandleError`, and dependents still wait for its earlier work.

    Parameters
    ----------
    device
        The device of the streams. The group belongs to the running loop.
    streams
        The names of the streams, or their number: then the names are ``"0"``, ``"1"`` …

        Or open streams of the device and this loop: a mapping from names, or a sequence. These may be leased from a
        `StreamPool` or imported by `Stream.from_handle`. Each is given once; two leases of one stream count as one.
    priority
        The priority of all streams. Given streams keep their own.

    Each name is another string; there is at least one.
    """

    def __init__(
        self,
        device: Device,
        streams: int | Iterable[str] | Mapping[str, Stream] | Sequence[Stream],
        *,
        priority: Priority = "normal",
    ) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(
                f"a group is made for an aiocuda.Device, StreamGroup(device, streams), not {type(device).__name__}"
            )
        given, names = _given_or_names(streams)
        self._device = device
        self._resources = resources_of(device)
        self._names = tuple(names)
        self._streams: dict[str, Stream] = {}
        self._hooks: dict[Stream, PrerequisiteHook] = {}
        self._owns = given is None
        try:
            if given is None:
                self._open(priority)
            else:
                self._take(given, priority)
        except BaseException:
            self._leave_streams()
            raise
        self._scope = Scope(
            "this group", "make a group in each loop, share the device",
            "make another one by aiocuda.StreamGroup(device, names)", loop=asyncio.get_running_loop(),
            wrong_loop=self._resources.device_state.wrong_loop,
        )  # fmt: skip
        opened = tuple(self)
        use = "`async with aiocuda.StreamGroup(device, names) as group`"
        self._scope.must_end(use, SourceLine.of_caller(), lambda: all(stream.closed for stream in opened))
        self._join: Callable[[], Operation[None]] = (
            prepare_join([queue_of(stream) for stream in opened]) if self._owns else functools.partial(_join, opened)
        )

    def _open(self, priority: Priority) -> None:
        """Open a stream for each name."""
        for name in self._names:
            stream = owned(self._device.stream(priority, name))
            made = (CheckedGroupStream if isinstance(stream, CheckedStream) else GroupStream)(stream)
            self._streams[name] = made
            self._hooks[made] = made.hook

    def _take(self, given: Sequence[Stream], priority: Priority) -> None:
        """Check the given streams, then add the hook to each."""
        if priority != "normal":
            raise InvalidArgumentError(
                f"priority={priority!r} is for streams that the group makes: given streams keep their own",
                priority=priority,
            )
        known: dict[Queue, str] = {}
        for name, stream in zip(self._names, given, strict=True):
            queue = queue_of(stream)
            queue.check()  # raises if it is closed, if its lease has ended, or if it belongs to another loop
            if stream.device is not self._device:
                raise WrongDeviceError(
                    f"{stream.name!r} is no stream of the device of the group, {self._device.name}: make a group for "
                    "each device, and let their streams wait by stream.wait(operation)"
                )
            first = known.setdefault(queue, name)
            if first != name:
                raise InvalidArgumentError(
                    f"{stream!r} is in the group as {first!r} already: give each stream once, not two leases of it",
                    stream=name,
                )
        for name, stream in zip(self._names, given, strict=True):
            self._hooks[stream] = PrerequisiteHook(stream, name, GivenWork(stream))
            self._streams[name] = stream

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams, in order."""
        return self._names

    def add_dependency(self, dependent: str | int | Stream, prerequisite: str | int | Stream) -> None:
        """Make each later submission to ``dependent`` wait for all earlier work of ``prerequisite``.

        The wait is on the device; the host does not wait. A stream is named by its name, its number or itself. The
        dependency ends with the group.

        Raise `CycleError` if the prerequisite depends on the dependent, perhaps through other streams; its ``path`` has
        their names. Raise `ClosedError` or `StaleHandleError` if the group or one of the streams has ended.
        """
        self._scope.check()
        streams = self[dependent], self[prerequisite]
        for stream in streams:
            queue_of(stream).check()
        first, second = streams
        self._hooks[first].depend_on(self._hooks[second])

    def barrier(self) -> Operation[None]:
        """Make later work of all streams wait, on the device, for all earlier work of all of them.

        The operation is done when all earlier work is done. N streams cost 2 × (N - 1) waits and one record. If an
        operation of one stream has failed and no waiter has received the failure, later work of all streams is skipped,
        as after a `wait` for that operation.
        """
        try:
            return self._join()
        except WrongLoopError:
            self._scope.check_loop()  # the same error, for the group instead of its first stream
            raise

    @overload
    async def run(self, fn: Callable[[Stream], Awaitable[T]]) -> list[T]: ...

    @overload
    async def run(self, fn: Callable[[Stream], T]) -> list[T]: ...

    async def run(self, fn: Callable[[Stream], Any]) -> list[Any]:
        """Call ``fn(stream)`` for all streams concurrently; return the results in the order of the streams.

        If a call returns an awaitable, such as a coroutine or an operation, it is awaited. All calls run to their end,
        even if one of them fails. If this await is cancelled, all calls are cancelled.

        Raises
        ------
        BaseException
            The failure of a call, with a note that names its stream. An `ExceptionGroup` of several failures. A device
            fault counts once, although many calls fail with it.
        """
        if not is_function(fn):
            raise InvalidTypeError(f"a group runs a function of a stream, not {fn!r}")
        self._scope.check()
        tasks = [start_task(_call, fn, stream) for stream in self]
        await end_tasks(tasks)
        failures: list[BaseException] = []
        for name, task in zip(self.names, tasks, strict=True):
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                continue
            error.add_note(f"in stream {name!r} of a group of {len(tasks)}")
            if not (isinstance(error, DeviceFault) and any(isinstance(other, DeviceFault) for other in failures)):
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup(f"{len(failures)} of {len(tasks)} streams of a group failed", failures)
        return [task.result() for task in tasks]

    def add_callback(self, fn: Callable[[Operation[None]], object]) -> list[Operation[None]]:
        """Call ``fn(operation)`` on the loop once for each stream, when all its earlier work has finished.

        ``operation.stream`` is the stream. For one stream, use ``group[name].add_callback(fn)``.
        """
        self._scope.check()
        return [stream.add_callback(fn) for stream in self]

    def __getitem__(self, key: str | int | Stream) -> Stream:
        if isinstance(key, Stream):
            if key not in self._hooks:
                raise InvalidArgumentError(f"{key!r} is not in {self!r}", stream=key.name)
            return key
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise InvalidTypeError(f"a stream of a group is selected by name or by number, not by {key!r}")
        try:
            return self._streams[key if isinstance(key, str) else self._names[key]]
        except (KeyError, IndexError):
            raise InvalidArgumentError(
                f"no stream of this group is called {key!r}; there are {', '.join(self._streams)}", stream=key
            ) from None

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)

    async def aclose(self) -> None:
        """Refuse new work, wait for the work of all streams, then close them. Given streams only leave the group.

        A second call waits for the same end. A cancellation closes the streams without waiting, as for a single stream.

        Raises
        ------
        WrongLoopError
            The group belongs to another event loop. The call changes nothing.
        """
        if self._owns:
            for stream in self:
                self._resources.streams.check_not_lent(queue_of(stream))
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        if self._owns:
            for stream in self:
                self._resources.streams.refuse(queue_of(stream))
        else:
            self._leave_streams()
        self._join = functools.partial(_refuse_join, self._scope)

    def _unfinished(self) -> int | None:
        return None if self._owns else 0

    async def _drain(self) -> None:
        await self._resources.streams.drain([queue_of(stream) for stream in self])

    async def _release(self, outcome: Outcome) -> None:
        if self._owns:
            self._leave_streams()

    def _leave_streams(self) -> None:
        for stream, hook in self._hooks.items():
            if self._owns:
                self._resources.streams.leave(queue_of(stream))
            else:
                hook.end(stream)

    async def __aenter__(self) -> Self:
        self._scope.enter()
        if all(stream.closed for stream in self):  # with the device
            raise self._scope.closed_error()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            await self._scope.leave(self)
            return
        await self.aclose()
        if self._owns:
            self._resources.streams.raise_unseen(map(queue_of, self))

    def __repr__(self) -> str:
        return f"<StreamGroup {', '.join(self._streams)} on {self._device.name}>"


async def _call(fn: Callable[[Stream], Any], stream: Stream) -> Any:
    result = call(fn, stream)
    return await result if inspect.isawaitable(result) else result


def _join(streams: Iterable[Stream]) -> Operation[None]:
    """Join given streams. A stream that was closed, or whose lease has ended, raises its error."""
    return join([queue_of(stream) for stream in streams])


def _refuse_join(scope: Scope) -> NoReturn:
    raise scope.closed_error()


def _given_or_names(streams: Any) -> tuple[list[Stream] | None, list[str]]:
    """Return the streams that a group is given, or None; and the names."""
    if isinstance(streams, Mapping):
        given, names = list(streams.values()), _names(list(streams))
    elif isinstance(streams, int):
        return None, _names(streams)
    else:
        items = several(streams, "a group takes streams, or names of new ones, or how many there are to be")
        if not any(isinstance(item, Stream) for item in items):
            return None, _names(items)
        given, names = items, _names(len(items))
    for each in given:
        if not isinstance(each, Stream):
            raise InvalidTypeError(
                f"a group is given aiocuda streams, and this is {each!r}: await pool.stream() for a lease, and make a "
                "raw handle a stream by Stream.from_handle(device, handle)"
            )
    return given, names


def _names(streams: int | Iterable[str]) -> list[str]:
    if isinstance(streams, int) and not isinstance(streams, bool):  # True is neither a number of streams nor iterable
        if streams > MOST_STREAMS:
            raise InvalidArgumentError(
                f"a group has at most {MOST_STREAMS} streams, and this is {streams}", limit=MOST_STREAMS
            )
        names = [str(number) for number in range(streams)]
    else:
        names = several(streams, "a group takes its streams' names, or how many there are to be")
        for name in names:
            if not isinstance(name, str):
                raise InvalidTypeError(
                    f"a stream of a group has a string as its name, not {name!r}; given streams are open ones, such as "
                    "`await pool.stream()`"
                )
    if not names:
        raise InvalidArgumentError(f"a group has at least one stream, and this is {streams!r}", streams=streams)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"two streams of a group cannot both be called {twice!r}", stream=twice)
    return names
