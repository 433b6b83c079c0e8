"""Operation: one piece of work in the order of a stream, as an awaitable."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from asyncio import _get_running_loop
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar

from .._checks import check_callback
from .._mistakes import lacks, refuses
from .._types import ProcessLocal
from .._wakeups import Callback, Waiters
from ..errors import BusyError, ClosedError, InvalidTypeError
from ._failure import Failure, raisable
from ._state import ABANDONED, DONE, FAILED, LANDING, QUEUED, STAGING, SUBMITTED, TRANSITIONS, State

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._host_queue import Gate
    from ._prediction import Estimate
    from ._stream_queue import StreamQueue

__all__ = [
    "ABANDONED",
    "DONE",
    "FAILED",
    "INTERNAL",
    "INTERNAL_NAMES",
    "LANDING",
    "QUEUED",
    "STAGING",
    "SUBMITTED",
    "TRANSITIONS",
    "CopyOut",
    "Countdown",
    "Extra",
    "Operation",
    "State",
    "new_operation",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_NAMES = {state: state.name.lower() for state in State}

#: The kind of the library's own operations: chunks of staged copies, and markers.
INTERNAL = "step"

#: The kinds that have a size in bytes.
_SIZED = frozenset({"upload", "download", "copy", "fill", "prefetch"})

_next_id = itertools.count(1).__next__

#: The host's work after the device has finished. It returns False if it continues and will call
#: `StreamQueue.copied_out`.
CopyOut: TypeAlias = "Callable[[Operation[Any]], bool]"

#: A future of the loop, a countdown that many operations share, or a callback with its context.
Waiter: TypeAlias = "asyncio.Future[None] | Countdown | Callback"

#: Attributes and methods of an operation that belong to the library. They may change, and `dir` does not list them.
INTERNAL_NAMES = frozenset(
    {
        *("add_waiter", "arguments", "call", "copy_out", "detached", "drop_result", "estimate", "extra", "fail"),
        *("fail_in_turn", "failure", "forget_call", "gate", "is_settled", "is_unwanted", "keep", "lease", "on_settled"),
        *("part_of", "queue", "remove_waiter", "status", "submitted_at", "take_on_settled", "value", "waiters"),
        *("wake_waiters", "wake_waiters_paced"),
    }
)

_AWAIT = "await it first, and use its result"


class Countdown:
    """One waiter for many operations. It is woken when all are done, or when the first one fails."""

    __slots__ = ("fail_fast", "future", "left")

    def __init__(self, future: asyncio.Future[None], left: int, fail_fast: bool) -> None:
        self.future = future
        self.left = left
        self.fail_fast = fail_fast


class Extra:
    """The state that only some operations have.

    Each attribute that a plain operation, such as a launch, does not have makes it 60 ns faster to create and resolve.

    Attributes
    ----------
    copy_out : callable or None
        The host's work after the device has finished.
    failure : Failure or None
        The failure that the operation takes in its turn, or has taken.
    detached : bool
        True while the operation is abandoned and the device may still use its memory.
    on_settled : callable or None
        Called without arguments when the device has finished with the operation, whether it succeeded or not.
    """

    __slots__ = ("copy_out", "detached", "failure", "on_settled")

    def __init__(self) -> None:
        self.copy_out: CopyOut | None = None
        self.failure: Failure | None = None
        self.detached = False
        self.on_settled: Callable[[], object] | None = None


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
class Operation(ProcessLocal, Generic[T_co]):
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

    __slots__ = (
        "__weakref__",
        "arguments",
        "call",
        "estimate",
        "extra",
        "gate",
        "id",
        "keep",
        "kind",
        "lease",
        "queue",
        "status",
        "submitted_at",
        "value",
        "waiters",
    )

    id: int
    kind: str

    # The library's own attributes. The hot functions of `StreamQueue` write them directly.
    queue: StreamQueue
    estimate: Estimate | None  # of its duration
    keep: object  # objects that the device may use; held until the device has finished
    status: int  # a value of `State`
    lease: Lease | None  # its event, from the submission until the operation leaves the queue
    value: Any  # the result; of a failed operation the error
    submitted_at: float  # the driver's time of the submission; 0.0 before
    waiters: Waiter | Waiters[Waiter] | None  # a single waiter is stored without a `Waiters`
    extra: Extra | None

    # Set only while the operation is in the host queue.
    call: Callable[..., object] | None
    arguments: tuple[Any, ...]
    gate: Gate | None

    # -- the public interface ------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``"queued"``, ``"staging"``, ``"submitted"``, ``"landing"``, ``"done"``, ``"failed"`` or ``"abandoned"``."""
        return _NAMES[State(self.status)]

    @property
    def stream(self) -> Any:
        """The `aiocuda.Stream` of the operation; None if the program holds the stream no longer."""
        return self.queue.stream

    @property
    def stream_name(self) -> str:
        """The name of the stream. It is available even if the program holds the stream no longer."""
        return self.queue.name

    @property
    def kernel(self) -> str | None:
        """The name of the kernel of a launch; None for other operations."""
        return None if self.estimate is None else self.estimate.kernel

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves or a fill sets. 0 for other operations, and for all that have finished."""
        keep: Any = self.keep if self.kind in _SIZED else None  # a buffer, or a tuple that begins with a buffer
        return 0 if keep is None else int((keep[0] if type(keep) is tuple else keep).nbytes)

    @property
    def part_of(self) -> Operation[Any] | None:
        """The unfinished staged copy that this chunk belongs to; None if the operation is not a chunk."""
        entries = self.queue.host_queue.entries
        return entries[0] if self.kind is INTERNAL and self.copy_out is not None and entries else None

    def done(self) -> bool:
        """True if the operation has a result or a failure, or was abandoned. Makes no driver call, never blocks."""
        return self.status >= DONE

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
        state = self.status
        if state == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        error = self.exception()
        assert error is not None
        raise error

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None. Raises `BusyError` while the operation has not finished."""
        state = self.status
        if state == DONE:
            return None
        if state == FAILED:
            assert self.failure is not None
            self.failure.poison.delivered = True
            return raisable(self.value)
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
        """Call ``fn(operation)`` on the loop when the operation has finished; in the next turn if it already has."""
        check_callback(fn, context)
        if context is None:
            context = contextvars.copy_context()
        queue = self.queue
        queue.check_loop()
        if self.status >= DONE:
            if type(self.waiters) is Waiters:
                self.waiters.add(Callback(fn, context))  # the earlier waiters are being woken
            else:
                queue.loop.call_soon(fn, self, context=context)
            return
        self.add_waiter(Callback(fn, context))
        queue.attend()

    def remove_done_callback(self, fn: Callable[[Operation[Any]], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        check_callback(fn)
        waiters = self.waiters
        if type(waiters) is Waiters:
            removed = waiters.remove(fn)
            if removed and not waiters:
                self.waiters = None
            return removed
        if type(waiters) is Callback and waiters.function == fn:
            self.waiters = None
            return 1
        return 0

    def abandon(self) -> bool:
        """Drop the result, and the copy to the caller's array if there is one. The stream's order does not change.

        The device still runs the work that its stream has accepted, and the memory of that work is not reused before it
        has finished. Tasks that await the operation get a `ClosedError`. Return False if it has already finished.
        """
        self.queue.check_loop()
        if self.status >= DONE:
            return False
        self.drop_result()
        return True

    async def settle(self) -> None:
        """Wait until the device has finished with the operation. An abandoned operation is done before that.

        Until this returns, the device may use the operation's buffers and arrays. If the device has not finished, this
        also waits for later work that the stream has accepted.

        Raises
        ------
        ClosedError
            The device was closed before it had finished, so its end is unknown.
        """
        self.queue.check_loop()
        if not self.is_settled:
            await self.queue.settle()
        if not self.is_settled:
            raise ClosedError(
                f"{self!r} was still with the device when that was closed: what it may touch stays in use"
            )

    async def wait(self) -> T_co:
        """Wait for the operation and return its result, like ``await``, but as a coroutine.

        A task is made from a coroutine, not from an operation: ``group.create_task(operation.wait())``.
        """
        return await self

    def __await__(self) -> Generator[Any, None, T_co]:
        if self.status < DONE:
            queue = self.queue
            if _get_running_loop() is not queue.loop:
                queue.check_loop()
            if not queue.polling:  # otherwise the reactor queries in this turn
                queue.linger(self)
            if self.status < DONE:
                waiter: asyncio.Future[None] = queue.loop.create_future()
                self.add_waiter(waiter)
                queue.attend()
                try:
                    yield from waiter
                finally:
                    if self.status < DONE:
                        self.remove_waiter(waiter)
            elif queue.reactor.turn.is_over():
                yield
        if self.status == DONE:
            return self.value  # type: ignore[no-any-return]  # `cast` is a call
        return self.result()

    def __dir__(self) -> list[str]:
        """Return the public names: the library's own attributes and methods are not listed."""
        return [name for name in super().__dir__() if name not in INTERNAL_NAMES]

    def __repr__(self) -> str:
        return f"<Operation {self.id} {self.kind} on {self.queue.name}: {self.state}>"

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")

    def __len__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} has no length: await it first, and ask its result")

    def __array__(self, dtype: object = None, *, copy: bool | None = None) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is no array: await it first, and use its result")

    # -- for the library ------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation. An abandoned operation is done before that."""
        return self.status >= DONE and (self.extra is None or not self.extra.detached)

    @property
    def is_unwanted(self) -> bool:
        """True if the operation was abandoned or has failed, so that its result is not needed."""
        return self.status == ABANDONED or self.failure is not None

    @property
    def failure(self) -> Failure | None:
        """The failure that the operation takes in its turn, or has taken."""
        return None if self.extra is None else self.extra.failure

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self._extras().failure = failure

    @property
    def copy_out(self) -> CopyOut | None:
        """The host's work after the device has finished."""
        return None if self.extra is None else self.extra.copy_out

    @copy_out.setter
    def copy_out(self, copy_out: CopyOut | None) -> None:
        self._extras().copy_out = copy_out

    @property
    def detached(self) -> bool:
        """True while the operation is abandoned and the device may still use its memory."""
        return self.extra is not None and self.extra.detached

    @detached.setter
    def detached(self, detached: bool) -> None:
        self._extras().detached = detached

    @property
    def on_settled(self) -> Callable[[], object] | None:
        """Called when the device has finished with the operation, whether it succeeded or not."""
        return None if self.extra is None else self.extra.on_settled

    @on_settled.setter
    def on_settled(self, on_settled: Callable[[], object] | None) -> None:
        self._extras().on_settled = on_settled

    def _extras(self) -> Extra:
        extra = self.extra
        if extra is None:
            extra = self.extra = Extra()
        return extra

    def take_on_settled(self) -> Callable[[], object] | None:
        """Return the function to call when the device has finished, and forget it."""
        extra = self.extra
        if extra is None:
            return None
        on_settled, extra.on_settled = extra.on_settled, None
        return on_settled

    def forget_call(self) -> None:
        """Release the call and its arguments: the operation has left the host queue."""
        self.gate = self.call = None
        self.arguments = ()

    def fail_in_turn(self, failure: Failure, error: BaseException) -> None:
        """Set the failure that the operation takes when its turn comes."""
        self.failure = failure
        self.value = error

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Fail now, if unfinished, and wake the waiters. The device has faulted.

        A second call continues a call that Ctrl-C has interrupted.
        """
        if self.status == ABANDONED:
            self.detached = False
        elif self.status < DONE:
            self.fail_in_turn(failure, error)
            self.status = FAILED
            self.queue.reactor.failed += self.kind is not INTERNAL
        self.wake_waiters_paced()

    def drop_result(self) -> None:
        """Finish as abandoned and wake the waiters.

        The operation keeps its place in the queue, its event and its memory until its turn comes.
        """
        extra = self._extras()
        # These lines make no call: Ctrl-C leaves the operation abandoned or unchanged. If Ctrl-C prevents the wake-up,
        # the waiters are woken in the operation's turn.
        extra.detached = True
        self.status = ABANDONED
        self.value = None
        self.queue.reactor.abandoned += self.kind is not INTERNAL
        self.wake_waiters_paced()

    # -- waiters --------------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> bool:
        """Wake the waiter when the operation finishes. Return False if it is already registered: it is woken once."""
        waiters = self.waiters
        if waiters is None:
            self.waiters = waiter
        elif waiters is waiter:
            return False
        elif type(waiters) is not Waiters:
            self.waiters = Waiters(waiters, waiter)  # type: ignore[arg-type]  # mypy does not narrow by type()
        elif waiter in waiters:
            return False
        else:
            waiters.add(waiter)
        return True

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a waiter that no longer waits. Does nothing if it is not registered."""
        waiters = self.waiters
        if waiters is waiter:
            self.waiters = None
        elif type(waiters) is Waiters and waiters.discard(waiter) and not waiters:
            self.waiters = None

    def wake_waiters(self) -> None:
        """Wake the waiters of an operation that finishes in its turn: one at once, several through `Wakes`.

        One pass resolves at most 256 operations, so it wakes at most 256 waiters at once.
        """
        waiters = self.waiters
        if type(waiters) is Waiters:
            self.queue.reactor.wakes.wake(self._wake_next)
        elif waiters is not None:
            self.waiters = None
            self._wake(waiters)  # type: ignore[arg-type]  # mypy does not narrow by type()

    def wake_waiters_paced(self) -> None:
        """Wake the waiters through `Wakes`: any number of operations may finish at the same moment."""
        if self.waiters is not None:
            self.queue.reactor.wakes.wake(self._wake_next)

    def _wake_next(self) -> bool:
        """Wake one waiter. Return True if more are left."""
        waiters = self.waiters
        if type(waiters) is not Waiters:
            self.waiters = None
            if waiters is not None:
                self._wake(waiters)  # type: ignore[arg-type]
            return False
        if waiters:
            self._wake(waiters.pop())
        if waiters:
            return True
        self.waiters = None
        return False

    def _wake(self, waiter: Waiter) -> None:
        if type(waiter) is Callback:
            self.queue.loop.call_soon(waiter.function, self, context=waiter.context)
            return
        if type(waiter) is Countdown:
            waiter.left -= 1
            if waiter.left and (self.status == DONE or not waiter.fail_fast):
                return
            waiter = waiter.future
        if not waiter.done():  # type: ignore[union-attr]  # mypy does not narrow by type()
            waiter.set_result(None)  # type: ignore[union-attr]


def new_operation(
    queue: StreamQueue, kind: str, estimate: Estimate | None, keep: object, made: type[Operation[Any]] = Operation
) -> Any:
    """Return a new operation that is about to be submitted.

    An ``__init__`` would take 60 ns longer; a launch takes 1.3 µs beside the driver call.
    """
    operation = made()
    operation.id = _next_id()
    operation.kind = kind
    operation.queue = queue
    operation.estimate = estimate
    operation.keep = keep
    operation.status = SUBMITTED
    operation.lease = operation.waiters = operation.value = operation.extra = None
    operation.submitted_at = 0.0
    return operation
