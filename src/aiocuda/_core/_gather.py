"""gather: an awaitable of the results of several operations.

A `Countdown` is the one waiter of all its operations; ``queue.attend()`` then has the reactor find out when they end.
Nodes, tickets and gatherings have no queue: if there is one among them, `MixedGathering` adds a callback to each.
"""

from __future__ import annotations

from asyncio import Future, _get_running_loop, get_running_loop, shield
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from .._base._checks import check_callback, flag
from .._base._coroutine import coroutine_of
from .._base._mistakes import lacks
from .._base._wakeups import Callback, Waiters
from ..errors import BusyError, InvalidTypeError
from ._calls import copy_context
from ._hot import Countdown
from ._state import DONE
from ._stream_operation import StreamOperation

if TYPE_CHECKING:
    from contextvars import Context

    from ._ring import Ring

    T1 = TypeVar("T1")
    T2 = TypeVar("T2")
    T3 = TypeVar("T3")
    T4 = TypeVar("T4")
    T5 = TypeVar("T5")
    T6 = TypeVar("T6")

__all__ = ["Gathering", "gather"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def _operation(thing: object) -> Any:
    """Return what `gather` awaits for an argument: the operation of an event; a node, a ticket or a gathering itself.

    `aiocuda.as_completed` takes the same. Other objects are refused; so are futures of asyncio, which have no ``wait``.
    """
    found = getattr(thing, "operation", None)
    if isinstance(found, StreamOperation):
        return found
    if isinstance(thing, Awaitable) and hasattr(thing, "remove_done_callback") and hasattr(thing, "wait"):
        return thing
    raise InvalidTypeError(
        f"aiocuda.gather takes operations, events, nodes and tickets, not {type(thing).__name__}: unpack a list, "
        "gather(*operations), and use asyncio.gather for coroutines"
    )


class _Callbacks(Waiters[Callback]):
    """The callbacks of an unfinished gathering. Its countdown has them in place of a future, and sets their result."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self._end = end

    def done(self) -> bool:
        return not self

    def set_result(self, result: None) -> None:
        self._end()


class Gathering(Awaitable[T]):
    """The results of several operations: the awaitable that `gather` returns.

    It has the methods of an `Operation` that asyncio's functions call. It has finished when all its operations have
    finished; without ``return_exceptions``, also when one of them has failed.
    """

    __slots__ = ("_callbacks", "_countdown", "_operations", "_return_exceptions")

    _callbacks: _Callbacks | None
    _countdown: Countdown  # that calls the callbacks; set with them

    def __init__(self, operations: list[StreamOperation[Any]], return_exceptions: bool) -> None:
        self._operations = operations
        self._return_exceptions = return_exceptions
        self._callbacks = None

    def done(self) -> bool:
        """True if the gathering has its results or its failure. Like `Operation.done` it queries, and never blocks."""
        for operation in self._operations:
            if operation.status < DONE:
                operation.queue.glance()
        return self._has_finished()

    def _has_finished(self) -> bool:
        """Return whether the gathering has its results or its failure, without a query."""
        unfinished = False
        for operation in self._operations:
            if operation.status < DONE:
                unfinished = True
            elif operation.status > DONE and not self._return_exceptions:  # failed or abandoned
                return True
        return not unfinished

    def result(self) -> T:
        """Return the results, or raise the failure. Raises `BusyError` until the gathering has finished."""
        self._check_done()
        return self._outcomes()  # type: ignore[return-value]  # `cast` is a call

    def exception(self) -> BaseException | None:
        """Return the failure that awaiting raises, or None. Raises `BusyError` until the gathering has finished."""
        self._check_done()
        failed = None if self._return_exceptions else self._first_failed()  # an operation
        return None if failed is None else failed.exception()

    def _check_done(self) -> None:
        if not self._has_finished():
            raise BusyError(f"{self!r} has not finished: await it")

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    def add_done_callback(self, fn: Callable[[Gathering[Any]], object], *, context: Context | None = None) -> None:
        """Call ``fn(gathering)`` on the loop when the gathering has finished; in the next turn if it already has.

        The first call makes the countdown, which calls all callbacks.
        """
        check_callback(fn, context)
        if context is None:
            context = copy_context()
        for operation in self._operations:
            operation.queue.check_loop()
        if self._has_finished():
            get_running_loop().call_soon(fn, self, context=context)
            return
        callback, callbacks = Callback(fn, context), self._callbacks
        if callbacks is not None:
            callbacks.add(callback)
        else:
            waiting = [operation for operation in self._operations if operation.status < DONE]
            callbacks = self._callbacks = _Callbacks(self._call_callbacks)
            callbacks.add(callback)  # before `attend`, which may find a fault: that ends the countdown
            self._countdown = Countdown(callbacks, len(waiting), not self._return_exceptions)  # type: ignore[arg-type]
            self._wait_by(self._countdown, waiting)
            for operation in waiting:
                operation.queue.attend()

    def remove_done_callback(self, fn: Callable[[Gathering[Any]], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        check_callback(fn)
        callbacks = self._callbacks
        removed = 0 if callbacks is None else callbacks.remove(fn)
        if removed and not callbacks:
            self._callbacks = None  # none is left: the operations need not wake the countdown
            self._leave(self._countdown, self._operations)
        return removed

    def _call_callbacks(self) -> None:
        """Schedule the callbacks, through `Wakes`, which limits them per turn. The countdown calls this at its end."""
        callbacks, self._callbacks = self._callbacks, None
        self._leave(self._countdown, self._operations)  # after a failure, others are unfinished
        if callbacks is not None:
            self._operations[0].queue.reactor.wakes.wake_all(callbacks, self._call_soon)

    def _call_soon(self, callback: Callback) -> None:
        self._operations[0].queue.loop.call_soon(callback.function, self, context=callback.context)

    def wait(self) -> Coroutine[Any, Any, T]:
        """Wait for the results, like ``await``, but as a coroutine: ``group.create_task(gathering.wait())``."""
        return coroutine_of(self)

    def __await__(self) -> Generator[Any, None, T]:
        """Query the streams of the unfinished operations; wait for those still unfinished by one countdown.

        If a finished one has failed, do not wait: raise its failure. Else return the results.
        """
        # The loops over operations are in methods: there the compiled form knows the types.
        queues: dict[Ring, StreamOperation[Any]] = {}
        waiting = self._query_unfinished(queues)
        # If none has finished, none has failed: there is no need to search.
        if waiting and (
            self._return_exceptions or len(waiting) == len(self._operations) or self._first_failed() is None
        ):
            countdown = Countdown(waiting[0].queue.loop.create_future(), len(waiting), not self._return_exceptions)
            self._wait_by(countdown, waiting)
            for queue in queues:
                queue.attend()
            try:
                yield from countdown.future
            finally:
                if countdown.left:  # cancelled, or one has failed
                    self._leave(countdown, waiting)
        elif self._has_to_yield(queues):
            yield
        return self._outcomes()  # type: ignore[return-value]  # `cast` is a call

    def _query_unfinished(self, queues: dict[Ring, StreamOperation[Any]]) -> list[StreamOperation[Any]]:
        """Query the streams of the unfinished operations. Return the operations that are still unfinished.

        Parameters
        ----------
        queues
            Filled with the queues that had unfinished operations before the query, and the last operation of each.
        """
        waiting = []
        for operation in self._operations:
            if operation.status < DONE:
                waiting.append(operation)
                queues[operation.queue] = operation
            elif operation.extra is not None:
                operation.report_await()  # to listeners
        if not waiting:
            return waiting
        asks = True
        for queue, last in queues.items():
            queue.check_loop()
            if asks and not queue.watch.polling:
                queue.linger(last, waiting)  # one query, or several within microseconds
                asks = last.status >= DONE  # else this task will suspend, and the reactor queries the other queues
        left = []
        for operation in waiting:
            if operation.status < DONE:
                left.append(operation)  # noqa: PERF401 - the compiled form knows the type of a loop's variable
        return left

    def _wait_by(self, countdown: Countdown, waiting: list[StreamOperation[Any]]) -> None:
        """Make a countdown the waiter of these operations."""
        for operation in waiting:
            if operation.waiters is None:
                operation.waiters = countdown
            else:
                countdown.left -= not operation.add_waiter(countdown)  # an operation that is passed twice counts once

    def _leave(self, countdown: Countdown, waiting: list[StreamOperation[Any]]) -> None:
        """Remove the countdown from the operations that are unfinished."""
        for operation in waiting:
            if operation.status < DONE:
                operation.remove_waiter(countdown)

    def _has_to_yield(self, queues: Mapping[Ring, object]) -> bool:
        """Return True if an ``await`` that has nothing to wait for has to yield to the loop once.

        It counts as one await. A task whose awaits never suspend would keep the loop from others: see `Turn`.
        ``queues``: as `_query_unfinished` has filled them.
        """
        if queues:  # the query has found ends, or a finished operation has failed
            return next(iter(queues)).reactor_hot.turn.is_over()
        operations = self._operations  # all had finished before the query
        return bool(operations) and operations[0].queue.reactor_hot.turn.is_over_for_task()

    def _outcomes(self) -> list[Any]:
        """Return the results, in order. Raise the first failure; with ``return_exceptions`` return failures."""
        outcomes = []
        for operation in self._operations:
            if operation.status == DONE:
                outcomes.append(operation.value)
            elif self._return_exceptions:
                outcomes.append(operation.exception())
            else:
                failed = self._first_failed()
                assert failed is not None
                failed.result()  # raises its failure
        return outcomes

    def _first_failed(self) -> StreamOperation[Any] | None:
        """Return the first one enqueued of those that failed or were abandoned: its failure is raised."""
        failed = [operation for operation in self._operations if operation.status > DONE]
        return min(failed, key=lambda operation: operation.id) if failed else None

    def __repr__(self) -> str:
        # asyncio.create_task(gathering) raises "a coroutine was expected, got <Gathering …>".
        state = "done" if self._has_finished() else "unfinished; coroutine: .wait()"
        return f"<Gathering of {len(self._operations)} operations: {state}>"


class HasCallbacks(Awaitable[T_co], Protocol[T_co]):
    """An operation, a node, a ticket or a gathering."""

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int: ...

    def wait(self) -> Coroutine[Any, Any, T_co]: ...


class MixedGathering(Gathering):  # type: ignore[type-arg]  # the compiled class has no arguments
    """The results of things that are not all operations: of nodes, tickets and gatherings, too.

    A callback of each thing *notes* its end. The future ends without a value when all have ended, or with the first
    failure; the results are then read from the things. ``thing.exception()`` marks a failure as seen, so it is called
    only if the caller gets that failure.
    """

    def __init__(self, things: list[Any], return_exceptions: bool) -> None:
        super().__init__([], return_exceptions)
        self._things = things
        self._fails_early = not return_exceptions
        self._left = {id(thing) for thing in things}  # whose end has not been noted
        self._future: Future[None] = get_running_loop().create_future()
        self._wrapped: list[tuple[Callable[[Any], object], Callable[[Any], object]]] = []  # each fn, and its callback
        context = copy_context()
        for thing in things:
            if thing.done():
                self._note(thing)
            else:
                thing.add_done_callback(self._note, context=context)

    def _note(self, thing: Any) -> None:
        """Note that a thing has ended, and end the future if it was the last one, or the first that has failed."""
        self._left.discard(id(thing))
        if self._future.done():
            return
        error = thing.exception() if self._fails_early else None
        if error is not None:
            self._future.set_exception(error)
        elif not self._left:
            self._future.set_result(None)

    def done(self) -> bool:
        if not self._has_finished() and _get_running_loop() is self._future.get_loop():  # only it may end the future
            for thing in self._things:
                if thing.done():
                    self._note(thing)  # now: its callback comes in the next turn of the loop
        return self._has_finished()

    def _has_finished(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        self._check_done()
        self._future.result()  # raises the failure, if there is one
        if self._fails_early:
            return [thing.result() for thing in self._things]
        errors = [thing.exception() for thing in self._things]
        return [thing.result() if error is None else error for thing, error in zip(self._things, errors, strict=True)]

    def exception(self) -> BaseException | None:
        self._check_done()
        return self._future.exception()

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Call ``fn(gathering)`` on the loop when the future has ended; in the next turn if it already has."""
        check_callback(fn, context)

        def wrapped(future: object) -> None:
            fn(self)

        self._wrapped.append((fn, wrapped))
        self._future.add_done_callback(wrapped, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Remove a callback. Return how many times it was registered and not called yet."""
        check_callback(fn)
        removed = [wrapped for each, wrapped in self._wrapped if each == fn]
        self._wrapped = [pair for pair in self._wrapped if pair[0] != fn]
        return sum([self._future.remove_done_callback(wrapped) for wrapped in removed])

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._future.done():
            yield from shield(self._future)  # a cancellation ends only this wait
        return self.result()

    def __repr__(self) -> str:
        state = "done" if self._has_finished() else "unfinished; coroutine: .wait()"
        return f"<Gathering of {len(self._things)} operations, nodes and tickets: {state}>"


# Not as a decorator, which a compiled class cannot have.
lacks(Gathering)


# A type parameter for each argument: mypy joins the types of several arguments of one parameter, and two classes become
# object. The overloads for lists take seven and more, because mypy infers Any for a call that fits two overloads.
# fmt: off
@overload
def gather(*, return_exceptions: bool = False) -> Gathering[list[Any]]: ...


@overload
def gather(a: HasCallbacks[T1], /, *, return_exceptions: Literal[False] = False) -> Gathering[list[T1]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], /, *, return_exceptions: Literal[False] = False
) -> Gathering[list[T1 | T2]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3], /, *, return_exceptions: Literal[False] = False
) -> Gathering[list[T1 | T2 | T3]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3],
    d: HasCallbacks[T4], /, *, return_exceptions: Literal[False] = False
) -> Gathering[list[T1 | T2 | T3 | T4]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3],
    d: HasCallbacks[T4], e: HasCallbacks[T5], /, *, return_exceptions: Literal[False] = False
) -> Gathering[list[T1 | T2 | T3 | T4 | T5]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3],
    d: HasCallbacks[T4], e: HasCallbacks[T5], f: HasCallbacks[T6], /, *, return_exceptions: Literal[False] = False
) -> Gathering[list[T1 | T2 | T3 | T4 | T5 | T6]]: ...


@overload
def gather(
    a: HasCallbacks[T], b: HasCallbacks[T], c: HasCallbacks[T], d: HasCallbacks[T], e: HasCallbacks[T],
    f: HasCallbacks[T], g: HasCallbacks[T], /, *more: HasCallbacks[T], return_exceptions: Literal[False] = False
) -> Gathering[list[T]]: ...


@overload
def gather(a: HasCallbacks[T1], /, *, return_exceptions: bool) -> Gathering[list[T1 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], /, *, return_exceptions: bool
) -> Gathering[list[T1 | T2 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3], /, *, return_exceptions: bool
) -> Gathering[list[T1 | T2 | T3 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3], d: HasCallbacks[T4], /, *, return_exceptions: bool
) -> Gathering[list[T1 | T2 | T3 | T4 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3],
    d: HasCallbacks[T4], e: HasCallbacks[T5], /, *, return_exceptions: bool
) -> Gathering[list[T1 | T2 | T3 | T4 | T5 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T1], b: HasCallbacks[T2], c: HasCallbacks[T3],
    d: HasCallbacks[T4], e: HasCallbacks[T5], f: HasCallbacks[T6], /, *, return_exceptions: bool
) -> Gathering[list[T1 | T2 | T3 | T4 | T5 | T6 | BaseException]]: ...


@overload
def gather(
    a: HasCallbacks[T], b: HasCallbacks[T], c: HasCallbacks[T], d: HasCallbacks[T], e: HasCallbacks[T],
    f: HasCallbacks[T], g: HasCallbacks[T], /, *more: HasCallbacks[T], return_exceptions: bool
) -> Gathering[list[T | BaseException]]: ...
# fmt: on


def gather(*operations: Any, return_exceptions: bool = False) -> Gathering[Any]:
    """Return an awaitable of the results of several operations, in the order of the arguments.

    It behaves like `asyncio.gather`, but uses one waiter for all operations; asyncio wraps each of them in a task,
    which takes about 3 µs. The first failure is raised immediately, and the other operations continue. Cancellation
    ends only this wait.

    Parameters
    ----------
    *operations
        `Operation`, `Event`, `Node`, `Ticket`, and what `gather` returns; of one loop, and of any streams, devices,
        coordinators and pipelines.
    return_exceptions
        Return failures in place of results, and wait for all operations.

    Returns
    -------
    Awaitable of a list. For a type checker, each element is of the union of the types of all results. After the await,
    ``operation.result()`` has the type of that operation's own result.
    """
    found: list[Any] = []
    is_mixed = False
    for thing in operations:
        each = thing if isinstance(thing, StreamOperation) else _operation(thing)
        is_mixed = is_mixed or not isinstance(each, StreamOperation)
        found.append(each)
    kind = MixedGathering if is_mixed else Gathering
    return kind(found, flag(return_exceptions, "return_exceptions"))
