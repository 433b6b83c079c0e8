"""Node: one coordinated operation, as an awaitable."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar, cast

from .._checks import check_callback
from .._types import ProcessLocal
from .._wakeups import Callback, Waiters, wake_future
from ..completion._failure import Failure, raisable
from ..completion._operation import ABANDONED as OPERATION_ABANDONED
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import Operation
from ..errors import BusyError, ClosedError, InvalidTypeError, SkippedError

if TYPE_CHECKING:
    from ..memory._buffer import DeviceBuffer
    from ..stream import Stream
    from ._checking import Said
    from ._dependencies import Record
    from ._scheduler import Scheduler

__all__ = ["KINDS", "PRIORITIES", "Cause", "Kind", "Node", "NodePriority"]

T_co = TypeVar("T_co", covariant=True)

#: What a coordinated operation is; collectives are named here and enqueued by others.
Kind: TypeAlias = Literal[
    "kernel", "transfer", "synchronization", "reduction", "broadcast", "all-reduce", "barrier", "host"
]
KINDS: tuple[Kind, ...] = (
    "kernel", "transfer", "synchronization", "reduction", "broadcast", "all-reduce", "barrier", "host",
)  # fmt: skip

NodePriority: TypeAlias = Literal["critical", "high", "normal", "low", "cleanup"]
#: From the first to be given a place to the last.
PRIORITIES: tuple[NodePriority, ...] = ("critical", "high", "normal", "low", "cleanup")

# Where a node stands. From DONE on it is finished; a given one is when its operation is.
WAITING, OPEN, GIVEN, DONE, FAILED, SKIPPED, ABANDONED = range(7)


class Cause:
    """What went wrong first: with a node, and so with all that are skipped because of it.

    ``failure`` is that of an operation of another stream: a task that is told of this one need not be told of that.
    ``raised``: a function of the program raised the error.
    """

    __slots__ = ("_failure", "_raised", "_trace", "delivered", "error", "name")

    def __init__(
        self, error: BaseException, name: str, failure: Failure | None = None, *, raised: bool = False
    ) -> None:
        self.error = error
        self.name = name
        self._raised = raised
        self._trace = error.__traceback__ if raised else None
        self._failure = failure
        #: Has anybody been told, by this node or by one that was skipped for it?
        self.delivered = False

    def again(self) -> BaseException:
        """The error, ready for one more waiter. What the program raised is the same object for all of them."""
        return self.error.with_traceback(self._trace) if self._raised else raisable(self.error)

    def deliver(self) -> None:
        """It has been told."""
        self.delivered = True
        if self._failure is not None:
            self._failure.poison.delivered = True


class Node(ProcessLocal, Generic[T_co]):
    """An operation with a place in a coordinator's graph. ``await`` it for its result.

    Made by the verbs of `aiocuda.AsyncCoordinator`, never directly. It is given to a stream once all that it depends on
    has been, and there is a place; its dependencies are then waits on the device. It finishes behind all of them, done
    or not. Cancelling an await changes nothing but that await.

    Attributes
    ----------
    id : int
        Rises with every operation of its coordinator.
    kind : str
        ``"kernel"``, ``"transfer"``, ``"synchronization"``, ``"reduction"``, ``"broadcast"``, ``"all-reduce"``,
        ``"barrier"`` or ``"host"``.
    description : str
    stream : Stream or None
        Where it was given; until then what was asked for.
    registered_at, given_at : float
        Seconds of the driver's clock; ``given_at`` is 0 before it is given to a stream.
    """

    # What few operations have stands here once for all: to set twenty attributes costs more than to enqueue a kernel.
    given_at = 0.0
    #: Is there something in the streams that later work can be put behind?
    _standing = False
    _state = WAITING
    _unmet = 0  # of those that it comes behind, how many do not stand yet
    _dependants: list[Node[Any]] | None = None  # who waits until this one stands
    _operation: Operation[Any] | None = None
    #: Where it never ran: what stands for it in the order, one operation per stream.
    _stands: tuple[Operation[Any], ...] = ()
    _cause: Cause | None = None
    _poison: Cause | None = None  # why bytes that it reads were never written
    _told = False  # has the program been told what this one failed with?
    _error: BaseException | None = None
    _value: Any = None
    _work: Callable[[Stream], Operation[Any]] | None = None
    _waiters: Waiters[asyncio.Future[None]] | None = None  # until it is given
    _callbacks: Waiters[Callback] | None = None
    _lands = False  # it writes the caller's array behind what the device does
    _ends = 0  # see `schedule`
    _said: Said | None = None  # for the checker, if there is one

    def __init__(
        self, scheduler: Scheduler, number: int, kind: Kind, role: str, rank: int, description: str,
        stream: Stream | None, registered_at: float,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self.id = number
        self.kind = kind
        self.description = description
        self.stream = stream
        self.registered_at = registered_at
        self._role = role
        self._class = self._rank = rank
        #: What it comes behind: True where it needs what that one brings, False where only the order counts.
        self._needs: dict[Node[Any], bool] = {}
        #: Where `graph` has noted it: record, memory, from, to.
        self._accesses: list[tuple[Record, Any, int, int]] = []

    @property
    def priority(self) -> NodePriority:
        """As it was registered; what waits long is served before its class, see `AsyncCoordinator`."""
        return PRIORITIES[self._class]

    # -- what the caller sees ------------------------------------------------------------------------------------

    @property
    def operation(self) -> Operation[Any] | None:
        """The stream's operation that does it; None before it is given, and if it never was."""
        return self._operation

    @property
    def dependencies(self) -> tuple[Node[Any], ...]:
        """What it comes behind and has not finished, named or inferred."""
        return tuple(node for node in self._needs if not node.done())

    @property
    def buffer(self) -> DeviceBuffer:
        """The buffer that an upload fills: there at once, for other operations of the coordinator.

        Raises
        ------
        DeviceOutOfMemory
            There was no room for it: then the upload has failed.
        InvalidTypeError
            It is no upload.
        """
        if self._role != "upload":
            raise InvalidTypeError(f"{self!r} fills no buffer: only an upload does")
        if self._value is None:
            self.result()
        return cast("DeviceBuffer", self._value)

    @property
    def state(self) -> str:
        """``"waiting"``, ``"open"`` (a bracket), then its operation's state; ``"skipped"`` if that was never made."""
        state = self._state
        if state == GIVEN:
            operation = self._operation
            if not self.done():
                return "submitted" if operation is None else operation.state
            if self._error is None:  # without an operation: a function of the host, which has returned
                return "done" if operation is None else operation.state
            state = self._ended_as()
        return ("waiting", "open", "given", "done", "failed", "skipped", "abandoned")[state]

    def _ended_as(self) -> int:
        """How it ends that has not done what it was to do."""
        if isinstance(self._error, SkippedError) and self._cause is not None and self._cause.error is not self._error:
            return SKIPPED
        cause = self._cause
        return ABANDONED if cause is None or isinstance(cause.error, asyncio.CancelledError) else FAILED

    def done(self) -> bool:
        """Has it finished: with a result, a failure, skipped, or abandoned? Asks nobody, and never blocks."""
        if self._state != GIVEN:
            return self._state >= DONE
        operation = self._operation
        if operation is not None:
            return operation.status >= OPERATION_DONE
        return all(operation.is_settled for operation in self._stands)

    def result(self) -> T_co:
        """Its result.

        Raises
        ------
        BusyError
            It has not finished: await it.
        ClosedError
            It was abandoned.
        SkippedError
            What it depends on has failed; ``__cause__`` is what went wrong first.
        Exception
            What it failed with.
        """
        error = self.exception()
        if error is not None:
            raise error
        value = self._value
        if value is None and self._operation is not None:
            value = self._operation.value
        return cast("T_co", value)

    def exception(self) -> BaseException | None:
        """What it failed with, or None. Raises `BusyError` while it has not finished."""
        if not self.done():
            raise BusyError(f"{self!r} has not finished: await it")
        operation = self._operation
        if self._error is None and operation is not None and operation.status > OPERATION_DONE:
            self._scheduler.broken(self)
        cause = self._cause
        if cause is not None:
            self._deliver(cause)
        error = self._error
        return cause.again() if cause is not None and cause.error is error else error and raisable(error)

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    def add_done_callback(
        self, fn: Callable[[Node[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Run ``fn(node)`` on the loop once it has finished, at the next turn if it has already.

        It runs in a copy of the caller's context: whoever submits the operation and adds it sees his own variables.
        """
        check_callback(fn, context)
        scheduler = self._scheduler
        scheduler.check_loop()
        if context is None:
            context = contextvars.copy_context()
        if self.done():
            scheduler.loop.call_soon(fn, self, context=context)
            return
        if self._callbacks is None:
            self._callbacks = Waiters()
            if self._state == GIVEN:
                scheduler.watch_end(self)
        self._callbacks.add(Callback(fn, context))

    def remove_done_callback(self, fn: Callable[[Node[Any]], object]) -> int:
        """Forget a callback; how many times it was there."""
        check_callback(fn)
        return 0 if self._callbacks is None else self._callbacks.remove(fn)

    def abandon(self) -> bool:
        """Withdraw it, if it has not been given to a stream: it never runs, and what depends on it is skipped.

        What a stream has, runs: then only its result is dropped. Whoever awaits it gets a `ClosedError`. False if it
        had finished.
        """
        return self._scheduler.abandon(self)

    async def wait(self) -> T_co:
        """The same as awaiting it, as a coroutine: for ``TaskGroup.create_task`` and its like."""
        return await self

    def __await__(self) -> Generator[Any, None, T_co]:
        scheduler = self._scheduler
        scheduler.check_loop()
        if self._state < GIVEN:
            yield from scheduler.until(self, GIVEN)
        operation = self._operation
        if operation is not None:
            if operation.status < OPERATION_DONE:
                try:
                    yield from operation.__await__()
                except Exception:
                    if operation.status < OPERATION_DONE:
                        raise  # not its own failure, which is told below
                scheduler.tidy_soon()
        elif self._state == GIVEN:
            yield from scheduler.until_passed(self._stands)
        return self.result()

    @property
    def name(self) -> str:
        """How errors name it."""
        return f"{self.kind} {self.id}" + (f" {self.description!r}" if self.description else "")

    def __repr__(self) -> str:
        return f"<Node {self.name}: {self.state}>"

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")

    # -- what the coordinator does -------------------------------------------------------------------------------

    def _come_behind(self, other: Node[Any], needs: bool, landed: bool = False) -> None:
        """An edge; where it is known, the stronger one. ``landed``: the host must know that the other is done."""
        if other is self:
            return
        known = self._needs.get(other)
        if known is None:
            self._needs[other] = needs
            if other.id > self.id:
                self._scheduler.inverted = True
            if not other._standing:
                self._unmet += 1
                if other._dependants is None:
                    other._dependants = [self]
                else:
                    other._dependants.append(self)
        elif needs and not known:
            self._needs[other] = True
        if landed:
            self._until_done(other)

    def _until_done(self, other: Node[Any]) -> None:
        """Whatever it does, the host has to know first that the other one is done."""
        if not other.done():
            self._unmet += 1
            other.add_done_callback(self._met, context=self._scheduler.context)

    def _met(self, other: Node[Any]) -> None:
        self._unmet -= 1
        if not self._unmet:
            self._scheduler.met(self)

    def _marks(self) -> tuple[Operation[Any], ...]:
        """What later work comes behind."""
        return self._stands if self._operation is None else (self._operation,)

    def _settled(self) -> bool:
        """Is the device, too, done with it?"""
        operation = self._operation
        if operation is None:
            return all(operation.is_settled for operation in self._stands)
        state = operation.status
        return state == OPERATION_DONE or (
            state > OPERATION_DONE and not (state == OPERATION_ABANDONED and operation.detached)
        )

    def _failed_with(self, error: BaseException, raised: bool = False) -> None:
        """Note its own failure. Only the cancelled task gets a `CancelledError`, other waiters get a `ClosedError`."""
        self._cause = Cause(error, self.name, raised=raised)
        if isinstance(error, asyncio.CancelledError):
            self._error = ClosedError(f"{self.name} was left by {type(error).__name__} before its end")
        else:
            self._error = error

    def _deliver(self, cause: Cause) -> None:
        """The program is told of its failure."""
        self._told = True
        cause.deliver()

    def _withdrawn(self) -> ClosedError:
        return ClosedError(f"{self.name} was abandoned before it was given to a stream: it never ran")

    def _tell_given(self) -> None:
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            self._scheduler.wakes.wake_all(waiters, wake_future)

    def _tell_done(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            self._scheduler.wakes.wake_all(callbacks, self._call_soon)

    def _call_soon(self, callback: Callback) -> None:
        self._scheduler.loop.call_soon(callback.function, self, context=callback.context)
