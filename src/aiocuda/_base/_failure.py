"""A failure, and whether a caller has received it."""

from __future__ import annotations

import asyncio
import weakref
from typing import NoReturn

from ..errors import AiocudaError, DeviceFault

__all__ = ["Failure", "Poison", "raisable"]


class Poison:
    """The reason why a stream is unusable, until its failure was delivered: awaited or read.

    Attributes
    ----------
    error : BaseException
        The error of the operation that failed.
    loop : asyncio.AbstractEventLoop
        The stream's loop.
    where : str
        The operation that failed, for messages.
    delivered : bool
        True if a caller has received the failure.
    had_waiter : bool
        True if an operation with this failure had a waiter or a callback.
    reported : bool
        True if the loop's exception handler has received it.
    """

    __slots__ = ("_failure", "delivered", "error", "had_waiter", "loop", "reported", "where")

    def __init__(self, error: BaseException, loop: asyncio.AbstractEventLoop, where: str) -> None:
        self.error = error
        self.loop = loop
        self.where = where
        self.delivered = self.had_waiter = False
        self.reported = False
        self._failure: weakref.ref[Failure] | None = None

    def failure(self) -> Failure:
        """Return the failure that the next operation carries: the existing one while an operation carries it."""
        failure = None if self._failure is None else self._failure()
        if failure is None:
            failure = Failure(self)
            self._failure = weakref.ref(failure)
        return failure

    @property
    def is_unseen(self) -> bool:
        """True if no code of the program has seen the failure. A fault has been seen if any call has raised it."""
        fault_was_raised = isinstance(self.error, DeviceFault) and self.error.was_raised
        return not (self.delivered or self.had_waiter or fault_was_raised)

    def deliver(self) -> NoReturn:
        """Raise the error at the end of a block: no code of the program has seen it."""
        self.delivered = True
        error = raisable(self.error)
        error.add_note(f"aiocuda: {self.where} failed, and no code has awaited it or read its result")
        try:
            raise error
        finally:
            del error  # otherwise the error would hold itself by this frame


class Failure:
    """An error, shared by the operation that failed and all operations that were skipped because of it.

    If no caller reads the failure, the loop's exception handler receives it once, when the last operation that carries
    it is collected, as asyncio does for a future. The stream may live longer, so it holds only the `Poison`.
    """

    __slots__ = ("__weakref__", "poison")

    def __init__(self, poison: Poison) -> None:
        self.poison = poison

    @property
    def delivered(self) -> bool:
        """True if a caller has received it."""
        return self.poison.delivered

    def unseen(self) -> Failure:
        """Return this failure, or an equal one if it was delivered: operations that depend on it deliver it again."""
        poison = self.poison
        return Poison(poison.error, poison.loop, poison.where).failure() if poison.delivered else self

    def __del__(self) -> None:
        poison = self.poison
        if not poison.delivered and not poison.reported:
            poison.reported = True
            poison.loop.call_exception_handler(
                {"message": f"aiocuda: the failure of {poison.where} was never retrieved", "exception": poison.error}
            )


def raisable(error: BaseException) -> BaseException:
    """Return an error that can be raised again: waiters must not share a traceback."""
    return error.again() if isinstance(error, AiocudaError) else error.with_traceback(None)
