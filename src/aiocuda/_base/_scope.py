"""Scope: the life of an object that owns work. It has one end, and this is the only place that knows how ends go."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import threading
import warnings
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Literal, TypeAlias

from ..errors import AiocudaError, BusyError, ClosedError, ForkedProcessError, NoEventLoopError, WrongLoopError
from ._owner import Owner
from ._shutdown import end_now, finish_shielded, must_end_now, note_cancelled, shield
from ._tasks import start_task
from ._types import SourceLine

__all__ = ["Outcome", "Scope", "unlimited", "wrong_loop"]

#: Whether the accepted work has ended. ``"left"``: nothing has waited for it. ``"late"``: the deadline has passed.
#: ``"interrupted"``: Ctrl-C has ended the wait, or the event loop has. ``"failed"``: the drain has raised an exception.
Outcome: TypeAlias = Literal["done", "left", "late", "interrupted", "failed"]

#: Held while a call decides whether it is the first one.
_CLAIM = threading.Lock()

WrongLoop: TypeAlias = Callable[[asyncio.AbstractEventLoop | None, str, str, int], AiocudaError]

#: Seconds between two looks at an end that runs in another event loop.
TICK = 0.001

#: Seconds that the loop of another call has beyond the deadline, before this call ends the object in its place.
LATE = 0.2


def unlimited() -> float:
    """Return infinity: the drain of the object has a limit of its own."""
    return math.inf


def wrong_loop(
    loop: asyncio.AbstractEventLoop | None, what: str, cure: str, process: int | None = None
) -> AiocudaError:
    """Return the error for the use of ``what`` outside of its loop, or outside of its process.

    None is no loop yet, and any process.
    """
    if process is not None and os.getpid() != process:
        return ForkedProcessError(f"{what} belongs to the parent process: make one in the child, or use spawn")
    if loop is not None and loop.is_closed():
        return ClosedError(f"the event loop of {what} has been closed: {cure}")
    if _get_running_loop() is None:
        return NoEventLoopError(
            f"{what} needs its running event loop: call from a coroutine, under asyncio.run(main()); "
            "from another thread, hand that coroutine over by asyncio.run_coroutine_threadsafe(work(), loop)"
        )
    return WrongLoopError(f"{what} belongs to another event loop: {cure}")


class Scope:
    """The life of an object that owns work: open, closing, closed; one loop, one deadline, one end.

    `aclose` refuses new work in the object and its children, waits for the accepted work (children last to first), and
    gives everything back. A second call waits for the same end; only the first call gets its failure. If the call is
    cancelled, the object is left: it withdraws what is on the host; with a deadline it still waits for the rest, until
    the deadline has passed; it gives everything back; then the cancellation is raised. `leave` does the same from the
    start, and so does the first call, if there is one. A second cancellation does not shorten it, Ctrl-C does. If a
    second call is cancelled, only its own wait ends.

    The object passes itself to each call that ends it, so the scope does not refer to it.

    What runs per operation does not call a scope: the owner makes its own hot paths refuse in `Owner._refuse`.

    Parameters
    ----------
    what, cure, again
        For errors: ``"this pool"``; what to do in another loop; what to do after the end.
    drain_seconds
        Returns the time for accepted work if the object is left; infinity if the object's drain has a limit of its own.
        None leaves at once: the work runs on under the device.
    loop
        The event loop of the object. None for any, until `bind`.
    tasks
        The tasks that run functions of the object, as the object keeps them; `inside` adds to them.
    wrong_loop
        Returns the error for another loop.
    """

    __slots__ = (
        *("_again", "_children", "_cure", "_drain", "_drain_seconds", "_end", "_entered", "_error", "_failures"),
        *("_hurry", "_inside", "_is_closed", "_left", "_loop", "_place", "_process", "_refuses", "_until", "_use"),
        *("_what", "_withdrew", "_wrong_loop"),
    )

    def __init__(
        self, what: str, cure: str, again: str, *, drain_seconds: Callable[[], float] | None = None,
        loop: asyncio.AbstractEventLoop | None = None, tasks: set[asyncio.Task[Any]] | None = None,
        wrong_loop: WrongLoop = wrong_loop,
    ) -> None:  # fmt: skip
        self._what, self._cure, self._again = what, cure, again
        self._drain_seconds = drain_seconds
        self._wrong_loop = wrong_loop
        self._process = os.getpid()
        self._loop = loop
        self._inside = tasks
        self._refuses = self._is_closed = self._entered = False
        self._left = self._withdrew = False
        self._children: tuple[tuple[Owner, Scope], ...] = ()
        self._end: asyncio.Future[None] | None = None  # for further calls; set when the end has begun
        self._drain: asyncio.Task[None] | None = None  # the wait for the children, or for the accepted work
        self._place: SourceLine | None = None
        self._error: BaseException | None = None  # with which the block was left, for the children
        self._failures: tuple[BaseException, ...] = ()  # of the withdrawal
        self._hurry: asyncio.Future[None] | None = None  # set to wake the first call, when the object is left
        self._until: float | None = None  # the time at which the wait for the accepted work is given up
        #: For the warning about an object that was left open.
        self._use: tuple[str, object, Callable[[], bool]] | None = None

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """True if the object refuses new work: its end has begun, or its parent's end."""
        return self._refuses

    @property
    def closed(self) -> bool:
        """True after the end."""
        return self._is_closed

    @property
    def entered(self) -> bool:
        """True if the object is or was open, or is being opened: see `entering`."""
        return self._entered

    @property
    def left(self) -> bool:
        """True if the object has been left: by an exception, or by a call that was cancelled."""
        return self._left

    @property
    def place(self) -> SourceLine:
        """The line of the program that ends the object, for warnings about the end."""
        return self._place or SourceLine.of_caller()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the object; None for any."""
        return self._loop

    def bind(self) -> None:
        """The object belongs to the running loop from now on."""
        self.check_loop()
        self._loop = _get_running_loop()

    def unbind(self) -> None:
        """The object has nothing any more that belongs to a loop."""
        self._loop = None

    def check_loop(self) -> None:
        """Raise unless the object may be used in the running loop.

        Raises
        ------
        ForkedProcessError, ClosedError, NoEventLoopError, WrongLoopError
            The process is a forked child; the loop of the object has been closed; no loop runs, or another one.
        """
        running = _get_running_loop()  # None in a forked child, also inside of the parent's loop
        if running is None or (running is not self._loop and self._loop is not None):
            raise self.wrong_loop()

    def wrong_loop(self) -> AiocudaError:
        """Return the error for another loop than the object's, or another process."""
        find = wrong_loop if os.getpid() != self._process else self._wrong_loop
        return find(self._loop, self._what, self._cure, self._process)

    def check(self) -> None:
        """Raise what `check_loop` raises, and `ClosedError` if the object refuses new work."""
        self.check_loop()
        if self._refuses:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        """Return the error for use after the end, or during it."""
        return ClosedError(f"{self._what} has been closed: {self._again}")

    def enter(self) -> None:
        """Begin an ``async with`` block. Bind the object to the running loop.

        Raises
        ------
        ClosedError
            The object refuses new work: it has ended, or its end has begun.
        """
        if self._refuses:
            raise self.closed_error()
        self.bind()

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Open an object that is entered once. If the block fails, it may be entered again.

        Raises
        ------
        ClosedError, BusyError
            As for `enter`; the object is open, or is being opened.
        """
        if self._entered and not self._refuses:
            raise BusyError(f"{self._what} is entered once: {self._again}")
        self.enter()
        self._entered = True
        try:
            yield
        except BaseException:
            self._entered, self._loop = False, None
            raise

    # -- what the object has -------------------------------------------------------------------------------------

    def must_end(self, use: str, opened_at: object, is_over: Callable[[], bool]) -> None:
        """Warn if the object is collected while it is open.

        Parameters
        ----------
        use
            How the object is closed, such as ``async with open_device()``.
        opened_at
            The line of the program that made the object.
        is_over
            Returns True if there is nothing to close, such as after the end of the device. It does not refer to the
            object.
        """
        self._use = (use, opened_at, is_over)

    def __del__(self) -> None:
        if self._use is None or self._refuses:
            return
        use, opened_at, is_over = self._use
        if not is_over():
            warnings.warn(
                f"unclosed {self._what.removeprefix('this ')}, opened at {opened_at}: use {use}",
                ResourceWarning, stacklevel=2, source=self,
            )  # fmt: skip

    def adopt(self, owner: Owner, scope: Scope) -> None:
        """Refuse with the child, first to last, and end it before this object, last to first. Forget closed children.

        The wait for the children has no limit here: each keeps its own.
        """
        self._children = (*(child for child in self._children if not child[1].closed), (owner, scope))

    @contextlib.contextmanager
    def inside(self, task: asyncio.Task[Any] | None = None) -> Iterator[None]:
        """Run a function of the object in a block: the task, by default the running one, cannot close the object."""
        task = task or asyncio.current_task()
        inside = self._inside = set() if self._inside is None else self._inside
        if task is None or task in inside:
            yield
            return
        inside.add(task)
        try:
            yield
        finally:
            inside.discard(task)

    # -- the end -------------------------------------------------------------------------------------------------

    def refuse(self, owner: Owner) -> None:
        """Refuse new work in the object and its children, first to last. Idempotent.

        If the object raises, it stays open.
        """
        if self._refuses:
            return
        self._refuses = True  # before: tasks that the object wakes see it
        try:
            owner._refuse()
        except BaseException:
            self._refuses = False
            raise
        for child, scope in self._children:
            with contextlib.suppress(AiocudaError):  # the end of the child raises it again
                scope.refuse(child)

    async def aclose(self, owner: Owner, seconds: float | None = None) -> None:
        """End the object: refuse, wait for the accepted work, give everything back.

        Parameters
        ----------
        seconds
            The longest wait for the accepted work. None for no limit.

        Raises
        ------
        BusyError
            A function of the object has called, and would wait for itself.
        """
        await self._finish(owner, seconds, left=False)

    async def leave(self, owner: Owner) -> None:
        """End the object by an exception: refuse, withdraw, wait until the deadline, give everything back."""
        await self._finish(owner, None, left=True)

    async def exit(self, owner: Owner, kind: type[BaseException] | None, error: BaseException | None = None) -> None:
        """End an ``async with`` block: `aclose`, or with an exception `leave`. Children are left with ``error``."""
        await self._finish(owner, None, left=kind is not None, error=error)

    def abandon(self, owner: Owner) -> None:
        """Close without waiting: the loop or the device is gone. Wake the waiters, and give nothing back."""
        if self._is_closed:
            return
        self._close()
        for child, scope in self._children:
            scope.abandon(child)
        # A closed loop can call nothing, so the object may fail there, and no task waits that it could wake.
        with contextlib.suppress(AiocudaError, RuntimeError):
            self.refuse(owner)
        with contextlib.suppress(AiocudaError, RuntimeError):
            owner._withdraw()
        self._refuses = True

    async def _finish(
        self, owner: Owner, seconds: float | None, *, left: bool, error: BaseException | None = None
    ) -> None:
        self._check_caller(owner)
        if self._drain_seconds is None and not (self._children or self._is_closed or self._end is not None):
            self._left = left
            self.refuse(owner)
            if left or owner._unfinished() == 0:
                self._is_closed = True  # before, since the release does not suspend
                if left:
                    owner._withdraw()
                await owner._release("left" if left else "done")
                return
        end = await self._claimed(owner, left=left)
        if end is None:
            return
        self._left = self._left or left
        loop = end.get_loop()
        try:
            self.refuse(owner)
        except BaseException:
            self._end = None
            raise
        self._place = SourceLine.of_caller()
        if seconds is not None:
            self._until = loop.time() + seconds
        self._error = error
        try:
            await self._run_end(owner, left=left)
        finally:
            self._drain = self._error = None
            self._close()
            if not end.done():
                end.set_result(None)
            del error

    def _close(self) -> None:
        self._is_closed = True
        self._use = None
        end = self._end
        if end is not None and not end.done() and end.get_loop() is _get_running_loop():
            end.set_result(None)

    def _check_caller(self, owner: Owner) -> None:
        is_own = os.getpid() == self._process
        if self._loop is not None and self._loop.is_closed() and not self._is_closed and is_own:
            error = self.wrong_loop()
            self.abandon(owner)
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        if self._is_closed and _get_running_loop() is not None:
            return  # there is nothing left that belongs to a loop
        self.check_loop()
        task = asyncio.current_task()
        if task is not None and self._waits_for(task):
            raise BusyError(
                f"{self._what} waits for its own functions when it closes, and one of them has called: close it "
                "outside of them"
            )

    def _waits_for(self, task: asyncio.Task[Any]) -> bool:
        """Return whether the end waits for the task, as that of a function of the object or of a child."""
        is_inside = self._inside is not None and task in self._inside
        return is_inside or task is self._drain or any(scope._waits_for(task) for _, scope in self._children)

    async def _claimed(self, owner: Owner, *, left: bool) -> asyncio.Future[None] | None:
        """Return the future of the end if this call runs it; otherwise wait for the end, and return None."""
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            known = self._end
            if known is not None and await self._joined(known, owner, left=left):
                return None
            with _CLAIM:  # two loops may end a device at once
                if self._end is known:
                    self._end, self._hurry = loop.create_future(), loop.create_future()
                    return self._end
        return None

    async def _joined(self, end: asyncio.Future[None], owner: Owner, *, left: bool) -> bool:
        """Wait for the end that another call has begun. If the object is left, that one leaves it, too.

        Return False if that call runs in a loop that has stopped, or does not end in time: this call runs the end.
        """
        loop = asyncio.get_running_loop()
        if end.get_loop() is loop:
            if left:
                self._begin_leaving(owner)
                await finish_shielded(asyncio.wait({end}))
            else:
                await asyncio.wait({end})  # if this call is cancelled, only its own wait ends
            return True
        until = math.inf
        if left:
            with contextlib.suppress(RuntimeError):  # it has been closed
                end.get_loop().call_soon_threadsafe(self._begin_leaving, owner)
            until = loop.time() + LATE + (0.0 if self._drain_seconds is None else self._drain_seconds())
        while not self._is_closed and end.get_loop().is_running() and loop.time() < until:  # noqa: ASYNC110 - of a loop
            await asyncio.sleep(TICK)
        return self._is_closed

    async def _run_end(self, owner: Owner, *, left: bool) -> None:
        if left:
            self._begin_leaving(owner)
        outcome: Outcome = "left" if self._left and self._drain_seconds is None else "done"
        failures: list[BaseException] = []
        cancelled: list[asyncio.CancelledError] = []
        if self._children:
            await self._watch(self._end_children, owner, failures, cancelled, is_limited=False)
        if outcome == "done" and owner._unfinished() != 0:
            outcome = await self._watch(owner._drain, owner, failures, cancelled, is_limited=True)
        try:
            if self._drain_seconds is None:
                await owner._release(outcome)
            else:
                await finish_shielded(owner._release(outcome))
        except asyncio.CancelledError as error:
            cancelled.append(error)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        failures += self._failures
        for failure in failures if cancelled else failures[1:]:
            message = "aiocuda: an end failed while it was cancelled, or had failed before"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": failure})
        raised = next(iter((*cancelled, *failures)), None)
        try:
            if raised is not None:
                raise raised
        finally:
            self._failures = ()
            cancelled.clear()  # the traceback of what is raised refers to this frame and to that of `_watch`
            failures.clear()
            del raised

    async def _end_children(self) -> None:
        stack = contextlib.AsyncExitStack()
        for child, _ in self._children:
            stack.push_async_exit(functools.partial(self._end_child, child))
        error = self._error
        await stack.__aexit__(None if error is None else type(error), error, None)

    async def _end_child(
        self, child: Any, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._left:
            kind, error = asyncio.CancelledError, asyncio.CancelledError()
        await child.__aexit__(kind, error, traceback)

    async def _watch(
        self, work: Callable[[], Coroutine[Any, Any, None]], owner: Owner, failures: list[BaseException],
        cancelled: list[asyncio.CancelledError], *, is_limited: bool,
    ) -> Outcome:  # fmt: skip
        """Wait for the work, until its time is over if it ``is_limited``. A cancellation leaves the object."""
        loop = asyncio.get_running_loop()
        task = self._drain = start_task(work)
        if must_end_now():
            end_now(task)
            self._until = loop.time()
        while not task.done():
            seconds = None if self._until is None or not is_limited else self._until - loop.time()
            if seconds is not None and seconds <= 0:
                break
            try:
                await self._wait(task, seconds, shielded=bool(cancelled))
            except asyncio.CancelledError as error:
                cancelled.append(error)
                self._begin_leaving(owner)
        note_cancelled(task)
        if task.done() and not (task.cancelled() and must_end_now()):
            # Code of the program may have cancelled it from inside.
            failure = asyncio.CancelledError() if task.cancelled() else task.exception()
            failures += () if failure is None else (failure,)
            return "done" if failure is None else "failed"
        task.cancel()
        if self._left and self._drain_seconds is None:
            return "left"
        return "interrupted" if must_end_now() or task.cancelled() else "late"

    async def _wait(self, task: asyncio.Task[None], seconds: float | None, *, shielded: bool) -> None:
        assert self._hurry is not None
        wake = {task} if self._hurry.done() else {task, self._hurry}
        with shield() if shielded else contextlib.nullcontext():
            await asyncio.wait(wake, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _begin_leaving(self, owner: Owner) -> None:
        """Withdraw what is on the host, and give the accepted work its time."""
        if self._withdrew or self._is_closed:
            return
        self._left = self._withdrew = True
        seconds = 0.0
        try:
            owner._withdraw()
            if self._drain_seconds is not None and not must_end_now():
                seconds = self._drain_seconds()
        except BaseException as error:  # noqa: BLE001 - raised at the end
            self._failures += (error,)
        if seconds < math.inf:
            until = asyncio.get_running_loop().time() + seconds
            self._until = until if self._until is None else min(until, self._until)
        for child, scope in reversed(self._children):
            scope.hurry(child)
        if self._hurry is not None and not self._hurry.done():
            self._hurry.set_result(None)

    def hurry(self, owner: Owner) -> None:
        """Leave, if the end has begun: withdraw what is on the host, and begin the deadline."""
        if self._end is not None:
            self._begin_leaving(owner)
