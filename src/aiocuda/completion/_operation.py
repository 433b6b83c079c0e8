"""Operation: one piece of work in a stream's order, as an awaitable."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import itertools
from asyncio import _get_running_loop
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from .._checks import check_callback
from .._mistakes import lacks, refuses
from .._types import ProcessLocal
from .._wakeups import Callback, Waiters
from ..errors import BusyError, ClosedError, InvalidTypeError
from ._failure import raisable
from ._waiters import Countdown, HasWaiters, Waiter

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._host_queue import Gate
    from ._prediction import Estimate
    from ._stream_queue import StreamQueue

__all__ = ["TRANSITIONS", "Operation", "State", "new_operation"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class State(enum.IntEnum):
    """Where an operation stands. From DONE on it is finished."""

    QUEUED = 0  #: on the host, in front of its stream
    STAGING = 1  #: its bytes are on their way through pinned memory
    SUBMITTED = 2  #: the stream has accepted it
    LANDING = 3  #: the device is done with it; its bytes are on their way to the caller's array
    DONE = 4
    FAILED = 5
    ABANDONED = 6


#: All the steps that there are.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STAGING, State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.STAGING: frozenset({State.SUBMITTED, State.FAILED, State.ABANDONED}),
    State.SUBMITTED: frozenset({State.LANDING, State.DONE, State.FAILED, State.ABANDONED}),
    State.LANDING: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}

_NAMES = {state: state.name.lower() for state in State}

# The hot path compares plain integers: an IntEnum member costs an attribute look-up each.
QUEUED, STAGING, SUBMITTED, LANDING, DONE, FAILED, ABANDONED = map(int, State)

#: The kind of what is only a part of an operation: one chunk of a staged copy.
STEP = "step"

#: Kinds of what has a size.
_SIZED = frozenset({"upload", "download", "copy", "fill", "prefetch"})

_next_id = itertools.count(1).__next__


_AWAIT = "await it first, and use its result"


@lacks(
    cancel="a stream runs the work that it has accepted. Cancel the task that awaits it, or drop its result by "
    "operation.abandon()",
    synchronize="`await operation` waits for it",
    sync="`await operation` waits for it",
    query="operation.done() says whether it has finished",
    get="`await operation` is its result",
    **dict.fromkeys(("shape", "dtype", "numpy", "cpu", "copy_to_host", "to_host"), _AWAIT),
)
@refuses(f"is an operation, and not its result: {_AWAIT}", "__getitem__")
class Operation(HasWaiters, ProcessLocal, Generic[T_co]):
    """Work that a stream will do, is doing or has done. `await` it for its result.

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
        What it does: ``"launch"``, ``"upload"``, ``"download"``, ``"copy"``, ``"fill"``, ``"wait"`` … `Stream.copy`
        from an array is an ``"upload"``, into one a ``"download"``; a ``"copy"`` is from buffer to buffer.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_call",
        "_estimate",
        "_gate",
        "_keep",
        "_lease",
        "_queue",
        "_state",
        "_submitted",
        "_value",
        "id",
        "kind",
    )

    id: int
    kind: str
    _queue: StreamQueue
    _estimate: Estimate | None
    _keep: object
    _state: int
    _lease: Lease | None
    _value: Any
    _submitted: float

    # Only an operation that waits on the host has these.
    _call: Callable[..., object] | None
    _arguments: tuple[Any, ...]
    _gate: Gate | None

    # -- what the caller sees ------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``"queued"``, ``"staging"``, ``"submitted"``, ``"landing"``, ``"done"``, ``"failed"`` or ``"abandoned"``."""
        return _NAMES[State(self._state)]

    @property
    def stream(self) -> Any:
        """The `aiocuda.Stream` that it was given to."""
        return self._queue.stream

    @property
    def stream_name(self) -> str:
        """That stream's name, which is known even when nobody holds the stream any more."""
        return self._queue.name

    @property
    def kernel(self) -> str | None:
        """The kernel's name, of a launch; else None."""
        return None if self._estimate is None else self._estimate.kernel

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves or a fill sets, until it has finished; 0 from then on, and for anything else."""
        keep: Any = self._keep if self.kind in _SIZED else None  # a buffer, or first of all a buffer
        return 0 if keep is None else int((keep[0] if type(keep) is tuple else keep).nbytes)

    @property
    def part_of(self) -> Operation[Any] | None:
        """The staged copy that it is a chunk of, while that is under way; None for whatever is no chunk."""
        entries = self._queue.host_queue.entries
        return entries[0] if self.kind is STEP and self._land is not None and entries else None

    def done(self) -> bool:
        """Has it finished: with a result, a failure, or abandoned? Asks nobody, and never blocks."""
        return self._state >= DONE

    def result(self) -> T_co:
        """Its result.

        Raises
        ------
        BusyError
            It has not finished: await it.
        ClosedError
            It was abandoned.
        Exception
            What it failed with.
        """
        state = self._state
        if state == DONE:
            return self._value  # type: ignore[no-any-return]  # `cast` is a call
        error = self.exception()
        assert error is not None
        raise error

    def exception(self) -> BaseException | None:
        """What it failed with, or None. Raises `BusyError` while it has not finished."""
        state = self._state
        if state == DONE:
            return None
        if state == FAILED:
            assert self._failure is not None
            self._failure.spoiled.delivered = True
            return raisable(self._value)
        if state == ABANDONED:
            return ClosedError(f"{self!r} was abandoned: its result was dropped")
        raise BusyError(f"{self!r} has not finished: await it")

    def cancelled(self) -> bool:
        """Return False. A cancellation ends only a wait, never the operation.

        `asyncio.wait` calls it. An abandoned operation is not cancelled: its `exception` is a `ClosedError`.
        """
        return False

    def add_done_callback(
        self, fn: Callable[[Operation[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Run ``fn(operation)`` on the loop once it has finished, at the next turn if it has already."""
        check_callback(fn, context)
        if context is None:
            context = contextvars.copy_context()
        queue = self._queue
        queue.check_loop()
        if self._state >= DONE:
            if type(self._waiters) is Waiters:
                self._waiters.add(Callback(fn, context))  # those before it are being told
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self._add_waiter(Callback(fn, context))
        queue.attend()

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        """Forget a callback; how many times it was there."""
        check_callback(fn)
        waiters = self._waiters
        if type(waiters) is Waiters:
            removed = waiters.remove(fn)
            if removed and not waiters:
                self._waiters = None
            return removed
        if type(waiters) is Callback and waiters.function == fn:
            self._waiters = None
            return 1
        return 0

    def abandon(self) -> bool:
        """Drop the result, and the copy to the caller's array if there is one; never the order.

        The device still does what its stream has accepted, and the memory involved stays untouched until it has.
        Whoever awaits the operation gets a `ClosedError`. False if it had finished.
        """
        self._queue.check_loop()
        if self._state >= DONE:
            return False
        self._queue.abandon(self)
        return True

    async def settle(self) -> None:
        """Wait until the device, too, is done with it, whatever became of it. An abandoned one is finished before that.

        Until then the device may touch what it was given, arrays too. If there is anything to wait for, what its stream
        has been given since is waited for with it.

        Raises
        ------
        ClosedError
            The device was left before it was done: nobody can tell any more.
        """
        self._queue.check_loop()
        if not self._passed:
            await self._queue.settle()
        if not self._passed:
            raise ClosedError(
                f"{self!r} was still with the device when that was closed: what it may touch stays in use"
            )

    async def wait(self) -> T_co:
        """Wait for the operation and return its result, like ``await``, but as a coroutine.

        A task is made from a coroutine, not from an operation: ``group.create_task(operation.wait())``.
        """
        return await self

    def __await__(self) -> Generator[Any, None, T_co]:
        if self._state < DONE:
            queue = self._queue
            if _get_running_loop() is not queue.loop:
                queue.check_loop()
            if not queue.polling:  # else this very turn asks anyhow
                queue.linger(self)
            if self._state < DONE:
                waiter: asyncio.Future[None] = queue.loop.create_future()
                self._add_waiter(waiter)
                queue.attend()
                try:
                    yield from waiter
                finally:
                    if self._state < DONE:
                        self._drop_waiter(waiter)
            elif queue.reactor.turn.is_over():
                yield
        if self._state == DONE:
            return self._value  # type: ignore[no-any-return]  # `cast` is a call
        return self.result()

    def __repr__(self) -> str:
        return f"<Operation {self.id} {self.kind} on {self._queue.name}: {self.state}>"

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")

    def __len__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} has no length: await it first, and ask its result")

    def __array__(self, dtype: object = None, *, copy: bool | None = None) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is no array: await it first, and use its result")

    # -- what the queue does --------------------------------------------------------------------------------------

    @property
    def _passed(self) -> bool:
        """Is the device, too, done with it? An abandoned operation is finished before that."""
        return self._state >= DONE and (self._extra is None or not self._extra.abandoned)

    @property
    def _dropped(self) -> bool:
        """Has it been abandoned, or failed for good? Then nobody wants what it brings any more."""
        return self._state == ABANDONED or self._failure is not None

    def _wake(self, waiter: Waiter) -> None:
        if type(waiter) is Callback:
            self._queue.loop.call_soon(waiter.function, self, context=waiter.context)
            return
        if type(waiter) is Countdown:
            waiter.left -= 1
            if waiter.left and (self._state == DONE or not waiter.fail_fast):
                return
            waiter = waiter.future
        if not waiter.done():  # type: ignore[union-attr]  # type() narrows for us, not for mypy
            waiter.set_result(None)  # type: ignore[union-attr]


def new_operation(
    queue: StreamQueue, kind: str, estimate: Estimate | None, keep: object, made: type[Operation[Any]] = Operation
) -> Any:
    """An operation that is to be submitted.

    In place of an ``__init__``, which Python takes 60 ns more to call: of 1.3 µs that a launch takes beside the driver.
    """
    operation = made()
    operation.id = _next_id()
    operation.kind = kind
    operation._queue = queue
    operation._estimate = estimate
    operation._keep = keep
    operation._state = SUBMITTED
    operation._lease = operation._waiters = operation._value = operation._extra = None
    operation._submitted = 0.0
    return operation
