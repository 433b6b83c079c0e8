"""Ticket: the awaitable result of an item that `Pipeline.submit` has begun."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, NoReturn

from .._base._checks import check_callback
from .._base._failure import Failure, Poison
from .._base._generic import Generic, Result_co
from .._base._mistakes import lacks, refuses
from .._base._types import ProcessLocal
from .._base._wakeups import Callback, Waiters, Wakes, wake_future
from .._base._wrong_loop import wrong_loop
from ..errors import BusyError, InvalidTypeError

__all__ = ["Ticket"]


@lacks
@refuses("is a ticket, and not its result: await it first, and use its result", "__getitem__", "__array__", "__float__")
class Ticket(ProcessLocal, Generic[Result_co]):
    """The result of one item of a pipeline. ``await`` it. Made by `Pipeline.submit`.

    Any number of tasks of the pipeline's loop can await a ticket, in any order and any number of times. Cancelling an
    ``await`` changes only that ``await``. A ticket holds the result, and never the slot. If it is dropped with a
    failure that no caller has received, the loop's exception handler receives the failure, as that of an asyncio task.

    Attributes
    ----------
    index : int
        The item's number among those of `Pipeline.submit` and `Pipeline.execute_iteration`, from 0.
    """

    __slots__ = ("_error", "_failure", "_loop", "_process", "_result", "_state", "_traceback",
                 "_waiters", "index")  # fmt: skip

    _result: Result_co  # set when the item has ended

    def __init__(self, index: int) -> None:
        self.index = index
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._state = "begun"
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None  # of the error, where the stage raised it
        self._failure: Failure | None = None  # until a caller has received it
        self._waiters: Waiters[asyncio.Future[None] | Callback] = Waiters()

    def done(self) -> bool:
        """True if the item has ended: the ticket has a result or a failure."""
        return self._state != "begun"

    def result(self) -> Result_co:
        """Return the result of the last stage.

        Raises
        ------
        BusyError
            The item has not ended: await the ticket.
        ClosedError
            The item was ended early, for example because an exception has left the pipeline's block.
        Exception
            The failure of a stage, as in `Pipeline.run`.
        """
        error = self.exception()
        if error is None:
            return self._result
        try:
            raise error.with_traceback(self._traceback)  # the same for each caller, as of an asyncio future
        finally:
            del error  # otherwise the error would hold itself, by this frame

    def exception(self) -> BaseException | None:
        """Return the failure of the item, or None. Raises `BusyError` while the item has not ended."""
        if self._state == "begun":
            raise BusyError(f"{self!r} has not finished: await it")
        if self._failure is not None:
            self._failure.poison.delivered = True
            self._failure = None
        return self._error

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    def add_done_callback(
        self, fn: Callable[[Ticket[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call ``fn(ticket)`` on the loop when the item has ended; in the next turn if it already has."""
        check_callback(fn, context)
        self._check_loop()
        callback = Callback(fn, contextvars.copy_context() if context is None else context)
        if self._state == "begun":
            self._waiters.add(callback)
        else:
            self._wake(callback)

    def remove_done_callback(self, fn: Callable[[Ticket[Any]], object]) -> int:
        """Remove a callback. Return how many times it was registered."""
        check_callback(fn)
        return self._waiters.remove(fn)

    async def wait(self) -> Result_co:
        """Wait for the result, like ``await``, but as a coroutine: ``group.create_task(ticket.wait())``."""
        return await self

    def __await__(self) -> Generator[Any, None, Result_co]:
        if self._state == "begun":
            self._check_loop()
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                yield from waiter
            finally:
                self._waiters.discard(waiter)
        return self.result()

    # -- for the pipeline ----------------------------------------------------------------------------------------

    def succeed(self, result: Any) -> None:
        """Set the result, and wake the waiters."""
        self._result = result
        self._end("done")

    def fail(self, error: BaseException, *, reports: bool) -> Failure | None:
        """Set the failure, and wake the waiters.

        If it ``reports``, return the object that reports it to the loop if no caller receives it.
        """
        self._error, self._traceback = error, error.__traceback__
        failure = None
        if reports:
            failure = self._failure = Poison(error, self._loop, f"item {self.index} of a pipeline").failure()
        self._end("failed")
        return failure

    def _end(self, state: str) -> None:
        self._state = state
        Wakes.of(self._loop).wake_all(self._waiters, self._wake)

    def _wake(self, waiter: asyncio.Future[None] | Callback) -> None:
        if type(waiter) is Callback:
            self._loop.call_soon(waiter.function, self, context=waiter.context)
        elif isinstance(waiter, asyncio.Future):
            wake_future(waiter)

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._loop:
            cure = "await it in the loop that has submitted its item"
            raise wrong_loop(self._loop, "this ticket", cure, self._process)

    # -- mistakes ------------------------------------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")

    def __repr__(self) -> str:
        hint = "; coroutine: .wait()" if self._state == "begun" else ""  # for asyncio.create_task(ticket)
        return f"<Ticket of item {self.index}: {self._state}{hint}>"
