"""Operation: one piece of work in the order of a stream, as an awaitable."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from .._base._label import shown
from .._base._mistakes import lacks, refuses
from ..errors import InvalidTypeError

if TYPE_CHECKING:
    from typing import Generic
else:

    class Generic:
        """Stands for ``typing.Generic`` at run time: ``class Operation(Generic[T_co])`` then has no base class."""

        def __class_getitem__(cls, parameters: object) -> Generic:
            return cls()

        def __mro_entries__(self, bases: object) -> tuple[()]:
            return ()


__all__ = ["INTERNAL", "HasOperation", "Operation"]

T_co = TypeVar("T_co", covariant=True)

#: The kind of the library's own operations: chunks of staged copies, and markers.
INTERNAL = "step"

#: The end of errors for uses of an operation as its result.
_AWAIT = "await it first, and use its result"

#: The states before the end: see `aiocuda._core._state.State`.
_UNFINISHED = frozenset({"queued", "staging", "submitted", "landing"})


class Operation(Generic[T_co]):
    """Work that a stream will do, is doing or has done. ``await`` it for its result.

    The methods of `aiocuda.Stream` make operations. Any number of tasks of the stream's loop can await an operation,
    any number of times, and all get the same result. Cancelling an ``await`` changes only that ``await``: the stream
    runs the work that it has accepted, and the memory of that work is not reused before it has finished.

    `asyncio.gather`, `asyncio.wait` and `asyncio.timeout` accept an operation. `asyncio.TaskGroup` takes coroutines:
    ``group.create_task(operation.wait())``. ``asyncio.wait_for(operation, 0)`` raises `TimeoutError` also for a
    finished operation, because it cancels its wait before the first step: use ``operation.done()`` and
    ``operation.result()``, or ``async with asyncio.timeout(0)``.

    Attributes
    ----------
    id : int
        Rises with every operation of the process.
    kind : str
        ``"launch"``, ``"upload"``, ``"download"``, ``"copy"``, ``"fill"``, ``"wait"`` … `Stream.copy` from an array
        is an ``"upload"``, into an array a ``"download"``, from buffer to buffer a ``"copy"``.
    """

    __slots__ = ("id", "kind")

    id: int
    kind: str

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

    @property
    def state(self) -> str:
        """``"queued"``, ``"staging"``, ``"submitted"``, ``"landing"``, ``"done"``, ``"failed"`` or ``"abandoned"``.

        Like `done`, it queries the device.
        """
        raise NotImplementedError

    @property
    def seen_state(self) -> str:
        """The state as the loop has last seen it. This makes no query, so log events and ``repr`` use it."""
        return self.state

    @property
    def stream(self) -> Any:
        """The `aiocuda.Stream` of the operation; None if the program holds the stream no longer."""
        raise NotImplementedError

    @property
    def stream_name(self) -> str:
        """The name of the stream. It is available even if the program holds the stream no longer."""
        raise NotImplementedError

    @property
    def kernel(self) -> str | None:
        """The name of the kernel of a launch; None for other operations."""
        raise NotImplementedError

    @property
    def label(self) -> str | None:
        """The label that `aiocuda.label` or ``label=`` gave to the operation, or None."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves or a fill sets. 0 for other operations, and for all that have finished."""
        raise NotImplementedError

    @property
    def is_awaited(self) -> bool:
        """True if a task waits for the operation now. For the hooks of listeners."""
        raise NotImplementedError

    @property
    def waits_for(self) -> Operation[Any] | None:
        """The operation of another stream that this unfinished ``"wait"`` waits for; None for other operations."""
        raise NotImplementedError

    @property
    def part_of(self) -> Operation[Any] | None:
        """The unfinished copy that this ``"step"`` is a part of; None for other operations. For hooks of listeners."""
        raise NotImplementedError

    def done(self) -> bool:
        """True if the operation has a result or a failure, or was abandoned. Never blocks.

        On the operation's own loop it queries the device, at most once per stream in 20 µs, so
        ``while not operation.done(): …`` ends. Elsewhere it makes no query: it says what that loop has last seen.
        """
        raise NotImplementedError

    def result(self) -> T_co:
        """Return the result.

        Raises
        ------
        BusyError
            The operation has not finished: await it.
        ClosedError
            The operation was abandoned.
        Exception
            The operation failed; this is its error.
        """
        raise NotImplementedError

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None if it has succeeded. Raises `BusyError` while it has not finished."""
        raise NotImplementedError

    def cancelled(self) -> bool:
        """Return False. A cancellation ends only a wait, never the operation.

        `asyncio.wait` calls it. An abandoned operation is not cancelled: its `exception` is a `ClosedError`.
        """
        return False

    def add_done_callback(
        self, fn: Callable[[Operation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call ``fn(operation)`` on the loop when the operation has finished; in the next turn if it already has."""
        raise NotImplementedError

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        raise NotImplementedError

    def abandon(self) -> bool:
        """Drop the result, and end the waits: tasks that await the operation get a `ClosedError`. The work still runs.

        Work that is still on the host is submitted in its turn, and memory is not reused before the work has finished.
        A download does not write the caller's array any more, with two exceptions: the device still writes a pinned
        array, and a thread finishes the chunk that it is copying. Return False if the operation has already finished.
        """
        raise NotImplementedError

    async def settle(self) -> None:
        """Wait until the device has finished with the operation: with an abandoned one, that is later than `done`.

        Until this returns, the device may use the operation's buffers and arrays. If the device has not finished, this
        also waits for later work that the stream has accepted.

        Raises
        ------
        ClosedError
            The device was closed before it had finished, so its end is unknown.
        """
        raise NotImplementedError

    async def wait(self) -> T_co:
        """Wait for the operation and return its result, like ``await``, but as a coroutine.

        A task is made from a coroutine, not from an operation: ``group.create_task(operation.wait())``.
        """
        return await self

    def __await__(self) -> Generator[Any, None, T_co]:
        raise NotImplementedError

    def __repr__(self) -> str:
        # asyncio.create_task(operation) raises "a coroutine was expected, got <Operation …>", so this names the cure.
        return f"{str(self)[:-1]}; coroutine: .wait()>" if self.seen_state in _UNFINISHED else str(self)

    def __str__(self) -> str:
        label = self.label
        # By name: the compiled form reads ``self.kind`` from its struct, and a subclass may have a property instead.
        kind, number = getattr(self, "kind"), getattr(self, "id")  # noqa: B009
        name = kind if label is None else f"{kind} {shown(label)}"
        return f"<Operation {number} {name} on {self.stream_name}: {self.seen_state}>"

    def __format__(self, spec: str) -> str:
        if spec:  # as ``f"{operation:.2f}"``, which is meant for the result
            raise InvalidTypeError(f"{self!r} is an operation, and not its result: {_AWAIT}")
        return str(self)

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} belongs to this process: it cannot be pickled or copied")

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")

    def __len__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} has no length: await it first, and ask its result")

    def __array__(self, dtype: object = None, *, copy: bool | None = None) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is no array: await it first, and use its result")


# Not as decorators, which a compiled class cannot have.
refuses(f"is an operation, and not its result: {_AWAIT}", "__getitem__", "__float__", "__int__")(Operation)
lacks(Operation)


class HasOperation(Protocol):
    """An object that represents an operation: an `aiocuda.Event`, which this package cannot import."""

    @property
    def operation(self) -> Operation[Any]: ...
