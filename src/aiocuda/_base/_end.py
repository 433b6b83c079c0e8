"""End: the end of an object that owns work, from its first call until everything has been given back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ._owner import Outcome, Owner
from ._shutdown import end_now, must_end_now, note_cancelled, shield
from ._tasks import start_task
from ._types import SourceLine

if TYPE_CHECKING:
    from ._scope import Scope

__all__ = ["End"]


class End:
    """The end of an object while it runs, in a task of its own. A `Scope` makes it at the first call.

    The task waits for the children, last to first, and for the accepted work; then it gives everything back.

    Parameters
    ----------
    scope, owner
        The object.
    seconds
        The longest wait for the accepted work. None for no limit.
    error
        The exception with which the block of the object was left, for the children.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
        The loop in which it runs.
    task : asyncio.Task or None
        The task that runs it.
    place : SourceLine
        The line of the program that ends the object.
    """

    __slots__ = (
        *("_at_once", "_caller", "_error", "_failures", "_limit", "_owner", "_scope", "_until"),
        *("loop", "place", "task"),
    )

    def __init__(self, scope: Scope, owner: Owner, seconds: float | None, error: BaseException | None) -> None:
        self._scope, self._owner, self._error = scope, owner, error
        self._caller = asyncio.current_task()
        self._at_once = must_end_now()
        self._failures: list[BaseException] = []
        self.loop = asyncio.get_running_loop()
        self.place = SourceLine.of_caller()
        self.task: asyncio.Task[None] | None = None
        self._until = None if seconds is None else self.loop.time() + seconds  # the wait for the work is given up
        self._limit: asyncio.Timeout | None = None  # of the drain that runs

    async def complete(self) -> None:
        """Run the end, and raise its failure.

        If this call is cancelled, the object is left; the cancellation is raised after the end, and the loop's
        exception handler gets the failure. A second cancellation changes nothing.
        """
        cancelled: asyncio.CancelledError | None = None
        task = start_task(self._run)
        if not task.done():  # an eager task may have ended
            self.task = task
        try:
            while not task.done():
                try:
                    with contextlib.nullcontext() if cancelled is None else shield():
                        await asyncio.wait({task})
                except asyncio.CancelledError as caught:
                    cancelled = caught
                    self._scope.hurry(self._owner)
            note_cancelled(task)
            if task.cancelled() and not self._scope.closed:  # before its first step, by the end of the loop
                self._at_once = must_end_now()
                await self._run()
            if cancelled is not None:
                if not task.cancelled():
                    self._report(task.exception())
                raise cancelled
            task.result()
        finally:
            del task, cancelled  # the traceback of what is raised refers to this frame

    async def _run(self) -> None:  # noqa: C901 - one story
        """End the children, wait for the accepted work, and give everything back."""
        scope, owner = self._scope, self._owner
        self.task = asyncio.current_task()
        if self._at_once:
            self._end_now()
        outcome: Outcome = "done"
        try:
            if scope.children:
                await self._end_children()
        except BaseException as failure:  # noqa: BLE001 - raised below
            self._failed(failure)
        try:
            if scope.left and scope.drain_seconds is None:
                outcome = "left"
            elif owner._unfinished() == 0:
                pass
            elif must_end_now():
                outcome = "interrupted"
            elif self._until is not None and self._until <= self.loop.time():
                outcome = "late"
            else:
                async with asyncio.timeout_at(self._until) as self._limit:
                    await owner._drain()
        except BaseException as failure:  # noqa: BLE001 - raised below
            is_late = isinstance(failure, TimeoutError) and self._limit is not None and self._limit.expired()
            self._limit = None  # first: `_failed` may set the deadline of a drain that runs
            if is_late:
                outcome = "left" if scope.drain_seconds is None else "late"
            else:
                outcome = self._failed(failure)
        self._limit = None
        try:
            await owner._release(outcome)
        except BaseException as failure:  # noqa: BLE001 - raised below
            self._failed(failure)
        scope.finish()
        self.task = self._error = None
        failures, self._failures = self._failures, []
        try:
            for later in failures[1:]:
                self._report(later)
            if failures:
                raise failures[0]
        finally:
            del failures  # the traceback of what is raised refers to this frame

    def withdraw(self) -> None:
        """Withdraw what is on the host, and begin the deadline of the rest: the object is left."""
        scope, seconds = self._scope, 0.0
        try:
            self._owner._withdraw()
            if scope.drain_seconds is not None and not must_end_now():
                seconds = scope.drain_seconds()
        except BaseException as error:  # noqa: BLE001 - raised at the end
            self._failures.append(error)
        until = self.loop.time() + seconds
        if until < math.inf and (self._until is None or until < self._until):
            self._until = until
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(until)
        for child, its_scope in reversed(scope.children):
            its_scope.hurry(child)

    async def _end_children(self) -> None:
        stack, error = contextlib.AsyncExitStack(), self._error
        for child, _ in self._scope.children:
            stack.push_async_exit(functools.partial(self._end_child, child))
        await stack.__aexit__(None if error is None else type(error), error, None)

    async def _end_child(
        self, child: Any, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._scope.left:
            kind, error = asyncio.CancelledError, asyncio.CancelledError()
        await child.__aexit__(kind, error, traceback)

    def _failed(self, failure: BaseException) -> Literal["failed", "interrupted"]:
        """Keep what a step has raised. Return whether the step has failed, or the end of the loop has cancelled it."""
        self._failures.append(failure)
        if not (isinstance(failure, asyncio.CancelledError) and self._caller and self._caller.cancelling()):
            return "failed"  # code of the program may have cancelled it from inside
        self._end_now()  # the end of a loop cancels all tasks
        self._scope.hurry(self._owner)
        return "interrupted"

    def _end_now(self) -> None:
        """Let the steps that follow take no more time."""
        if self.task is not None:
            end_now(self.task)

    def _report(self, failure: BaseException | None) -> None:
        if failure is not None:
            message = "aiocuda: an end failed while it was cancelled, or had failed before"
            self.loop.call_exception_handler({"message": message, "exception": failure})
