"""Scope: the life of an object that owns work. It has one state and one end, and all its checks are here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ..errors import AiocudaError, BusyError, ClosedError
from ._end import End
from ._owner import Owner
from ._shutdown import finish_shielded
from ._types import SourceLine
from ._unclosed import Unclosed
from ._wrong_loop import WrongLoop, wrong_loop

__all__ = ["Scope"]

#: The states of an object, in their order: see the table of `Scope`.
OPEN, ENTERED, REFUSING, CLOSING, LEAVING, CLOSED, LEFT = range(7)


class Scope:
    """The life of an object that owns work: one state, one loop, one end.

    ========  ======================================  ===============================================
    state     the object                              `aclose`, and `leave`
    ========  ======================================  ===============================================
    OPEN      accepts work                            run the end
    ENTERED   accepts work; is not `entering` again   run the end
    REFUSING  refuses work: its parent ends           run the end
    CLOSING   waits for the work that it has          wait for that end; `leave` makes it LEAVING
    LEAVING   the same, with a deadline               wait for that end
    CLOSED    has given everything back               return
    LEFT      the same, and was LEAVING before        return
    ========  ======================================  ===============================================

    The end refuses new work in the object and its children, waits for the accepted work (children last to first), and
    gives everything back. Only the first call gets its failure. `leave`, and a first call that is cancelled, withdraw
    what is on the host and give the rest a deadline. If a second call is cancelled, only its own wait ends.

    The object passes itself to each call that ends it, so the scope does not refer to it. What runs per operation does
    not call a scope: the owner makes its own hot paths refuse in `Owner._refuse`.

    Parameters
    ----------
    what, cure, again
        For errors: ``"this pool"``; what to do in another loop; what to do after the end.
    drain_seconds
        Returns the seconds that the accepted work has if the object is left; infinity for no limit. None for no time:
        the work runs on under the device.
    loop
        The event loop of the object. None for any, until `bind`.
    tasks
        The tasks that run functions of the object, as the object keeps them; `inside` adds to them.
    wrong_loop
        Returns the error for another loop.
    """

    __slots__ = (
        *("_again", "_cure", "_end", "_inside", "_process", "_state", "_unclosed", "_what", "_wrong_loop"),
        *("children", "drain_seconds", "loop"),
    )

    def __init__(
        self, what: str, cure: str, again: str, *, drain_seconds: Callable[[], float] | None = None,
        loop: asyncio.AbstractEventLoop | None = None, tasks: set[asyncio.Task[Any]] | None = None,
        wrong_loop: WrongLoop = wrong_loop,
    ) -> None:  # fmt: skip
        self._what, self._cure, self._again = what, cure, again
        self._process, self.loop, self._wrong_loop = os.getpid(), loop, wrong_loop
        self.drain_seconds = drain_seconds
        self.children: tuple[tuple[Owner, Scope], ...] = ()  #: they end before this object
        self._inside, self._state = tasks, OPEN
        self._end: End | None = None  # while it runs
        self._unclosed: Unclosed | None = None

    # -- the state -----------------------------------------------------------------------------------------------

    @property
    def entered(self) -> bool:
        """True if the object is or was open, or is being opened: see `entering`."""
        return self._state >= ENTERED

    @property
    def closing(self) -> bool:
        """True if the object refuses new work: its end has begun, or its parent's end."""
        return self._state >= REFUSING

    @property
    def closed(self) -> bool:
        """True after the end."""
        return self._state >= CLOSED

    @property
    def left(self) -> bool:
        """True if the object has been left: by an exception, or by a call that was cancelled."""
        return self._state in (LEAVING, LEFT)

    @property
    def place(self) -> SourceLine:
        """The line of the program that ends the object, for warnings about the end."""
        return SourceLine.of_caller() if self._end is None else self._end.place

    # -- checks --------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """The object belongs to the running loop from now on."""
        self.check_loop()
        self.loop = _get_running_loop()

    def unbind(self) -> None:
        """The object has nothing any more that belongs to a loop. An end that a closed loop has begun begins anew."""
        self.loop = None
        if self._end is not None and self._end.loop.is_closed():
            self._end = None

    def check_loop(self) -> None:
        """Raise the error of `wrong_loop` unless the object may be used in the running loop."""
        running = _get_running_loop()  # None in a forked child, also inside of the parent's loop
        if running is None or (running is not self.loop and self.loop is not None):
            raise self.wrong_loop()

    def wrong_loop(self) -> AiocudaError:
        """Return the error: no loop runs, or another one; the object's has been closed; the process is a child."""
        find = wrong_loop if os.getpid() != self._process else self._wrong_loop
        return find(self.loop if self._end is None else self._end.loop, self._what, self._cure, self._process)

    def check(self) -> None:
        """Raise what `check_loop` raises, and `ClosedError` if the object refuses new work."""
        self.check_loop()
        if self._state >= REFUSING:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        """Return the error for use after the end, or during it."""
        return ClosedError(f"{self._what} has been closed: {self._again}")

    def enter(self) -> None:
        """Begin an ``async with`` block, or raise `ClosedError`. Bind the object to the running loop."""
        if self._state >= REFUSING:
            raise self.closed_error()
        self.bind()

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Open an object that is entered once, or raise `BusyError`. If the block fails, it may be entered again."""
        if self._state == ENTERED:
            raise BusyError(f"{self._what} is entered once: {self._again}")
        self.enter()
        self._state = ENTERED
        try:
            yield
        except BaseException:
            self.loop = None
            if self._state == ENTERED:
                self._state = OPEN
            raise

    # -- what the object has -------------------------------------------------------------------------------------

    def must_end(self, use: str, opened_at: object, is_over: Callable[[], bool]) -> None:
        """Warn if the object is collected while it is open: see `Unclosed`."""
        self._unclosed = Unclosed(self._what.removeprefix("this "), use, opened_at, is_over)

    def adopt(self, owner: Owner, scope: Scope) -> None:
        """Refuse with the child, first to last, and end it before this object, last to first. Forget closed children.

        The wait for the children has no limit here: each keeps its own.
        """
        self.children = (*(child for child in self.children if not child[1].closed), (owner, scope))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Run a function of the object in a block: the running task cannot close the object."""
        task = asyncio.current_task()
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
        """Refuse new work in the object and its children, first to last. If the object raises, it stays open."""
        if self._state < REFUSING:
            self._begin(REFUSING, owner)

    def hurry(self, owner: Owner) -> None:
        """Leave the object, if its end waits: withdraw what is on the host, and begin the deadline."""
        if self._state == CLOSING and self._end is not None:
            self._state = LEAVING
            self._end.withdraw()

    def leave(self, owner: Owner) -> Coroutine[Any, Any, None]:
        """End the object by an exception: refuse, withdraw, wait until the deadline, give everything back."""
        return self.aclose(owner, left=True)

    def exit(
        self, owner: Owner, kind: type[BaseException] | None, error: BaseException | None = None
    ) -> Coroutine[Any, Any, None]:
        """End an ``async with`` block: `aclose`, or with an exception `leave`. Children are left with ``error``."""
        return self.aclose(owner, left=kind is not None, error=error)

    async def aclose(
        self, owner: Owner, seconds: float | None = None, *, left: bool = False, error: BaseException | None = None
    ) -> None:
        """End the object: refuse, wait for the accepted work, at most so many seconds, and give everything back.

        Raise `BusyError` if a function of the object has called: it would wait for itself.
        """
        running, end = _get_running_loop(), self._end
        if self._state >= CLOSED and running is not None:
            return  # there is nothing left that belongs to a loop
        loop = self.loop if end is None else end.loop
        if running is None or (running is not loop and loop is not None):
            raise self._called_outside(owner, loop)
        if (end or self.children or self._inside) and self._waits_for(asyncio.current_task()):
            raise BusyError(
                f"{self._what} waits for its own functions when it closes, and one of them has called: close it "
                "outside of them"
            )
        if end is not None and end.task is not None:
            if left:
                self.hurry(owner)
                await finish_shielded(asyncio.wait({end.task}))
            else:
                await asyncio.wait({end.task})  # if this call is cancelled, only its own wait ends
            return
        self._begin(LEAVING if left else CLOSING, owner)
        at_once = left and self.drain_seconds is None
        if not self.children and (at_once or owner._unfinished() == 0):
            self._state = LEFT if left else CLOSED  # before, since the release does not suspend
            try:
                if left:
                    owner._withdraw()
            finally:
                await owner._release("left" if at_once else "done")
            return
        end = self._end = End(self, owner, seconds, error)
        if left:
            end.withdraw()
        await end.complete()

    def _waits_for(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether the end waits for the task, as that of a function of the object or of a child."""
        is_own = self._end is not None and self._end.task in (task, None)  # None: it withdraws
        return is_own or task in (self._inside or ()) or any(scope._waits_for(task) for _, scope in self.children)

    def _begin(self, state: int, owner: Owner) -> None:
        """Pass into a state that refuses new work. If the object raises, it stays in its state."""
        before, self._state = self._state, state  # first: tasks that the object wakes see it
        if before < REFUSING:
            try:
                owner._refuse()
            except BaseException:
                self._state = before
                raise
            if self._unclosed is not None:
                self._unclosed.dismiss()
            for child, scope in self.children:
                with contextlib.suppress(AiocudaError):  # the end of the child raises it again
                    scope.refuse(child)

    def finish(self) -> None:
        """The end has given everything back."""
        self._state = LEFT if self._state == LEAVING else CLOSED
        self._end = None

    def _called_outside(self, owner: Owner, loop: asyncio.AbstractEventLoop | None) -> AiocudaError:
        """Return the error for a call outside of the loop. If that has been closed, abandon the object."""
        error = self.wrong_loop()
        if loop is not None and loop.is_closed() and os.getpid() == self._process:
            self.abandon(owner)
        return error

    def abandon(self, owner: Owner) -> None:
        """Close without waiting: the loop is gone. Wake the waiters, and give nothing back."""
        if self._state >= CLOSED:
            return
        for child, scope in self.children:
            scope.abandon(child)
        # A closed loop can call nothing, so the object may fail there, and no task waits that it could wake.
        with contextlib.suppress(AiocudaError, RuntimeError):
            self._begin(CLOSED, owner)
        self._state, self._end = CLOSED, None
        if self._unclosed is not None:
            self._unclosed.dismiss()
        with contextlib.suppress(AiocudaError, RuntimeError):
            owner._withdraw()
