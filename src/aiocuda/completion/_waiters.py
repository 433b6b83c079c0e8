"""The waiters of an operation: how they are kept, and how they are woken."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from .._wakeups import Callback, Waiters
from ._extra import HasExtra

if TYPE_CHECKING:
    from ._stream_queue import StreamQueue

__all__ = ["Countdown", "HasWaiters", "Waiter"]

#: A future of the loop, a countdown shared by many operations, or a callback in its context.
Waiter: TypeAlias = "asyncio.Future[None] | Countdown | Callback"


class Countdown:
    """One waiter for many operations: woken when all are done, or when the first one fails."""

    __slots__ = ("fail_fast", "future", "left")

    def __init__(self, future: asyncio.Future[None], left: int, fail_fast: bool) -> None:
        self.future = future
        self.left = left
        self.fail_fast = fail_fast


class HasWaiters(HasExtra):
    """The part of an operation that its waiters know."""

    __slots__ = ("_waiters",)

    _waiters: Waiter | Waiters[Waiter] | None  # one alone stands here by itself

    if TYPE_CHECKING:
        _queue: StreamQueue

        def _wake(self, waiter: Waiter) -> None: ...

    def _add_waiter(self, waiter: Waiter) -> bool:
        """Have it woken when this has finished. False if it waits already: it is woken once."""
        waiters = self._waiters
        if waiters is None:
            self._waiters = waiter
        elif waiters is waiter:
            return False
        elif type(waiters) is not Waiters:
            self._waiters = Waiters(waiters, waiter)  # type: ignore[arg-type]  # type() narrows for us, not for mypy
        elif waiter in waiters:
            return False
        else:
            waiters.add(waiter)
        return True

    def _drop_waiter(self, waiter: Waiter) -> None:
        waiters = self._waiters
        if waiters is waiter:
            self._waiters = None
        elif type(waiters) is Waiters and waiters.discard(waiter) and not waiters:
            self._waiters = None

    def _tell(self) -> None:
        """Wake the waiters: one alone at once, several as `Wakes` has it.

        An operation is told in its turn, and at most 256 operations have their turn in one go.
        """
        waiters = self._waiters
        if type(waiters) is Waiters:
            self._queue.reactor.wakes.wake(self._tell_next)
        elif waiters is not None:
            self._waiters = None
            self._wake(waiters)  # type: ignore[arg-type]  # type() narrows for us, not for mypy

    def _tell_out_of_turn(self) -> None:
        """Wake the waiters, with those of any number of other operations that finish at this moment."""
        if self._waiters is not None:
            self._queue.reactor.wakes.wake(self._tell_next)

    def _tell_next(self) -> bool:
        """Wake one waiter; are more left?"""
        waiters = self._waiters
        if type(waiters) is not Waiters:
            self._waiters = None
            if waiters is not None:
                self._wake(waiters)  # type: ignore[arg-type]
            return False
        if waiters:
            self._wake(waiters.pop())
        if waiters:
            return True
        self._waiters = None
        return False
