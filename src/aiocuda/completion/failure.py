"""A failure, and whether anybody has been told of it."""

from __future__ import annotations

import asyncio

from ..errors import AiocudaError

__all__ = ["Failure", "raisable"]


class Failure:
    """What went wrong, shared by the operation that failed and all that were skipped because of it.

    A stream stays unusable until its failure was delivered: awaited, or read by ``result()`` or ``exception()``.
    One that nobody reads is reported to the loop's exception handler when the last operation that carries it is
    collected, as asyncio does for a future.
    """

    __slots__ = ("delivered", "error", "loop", "where")

    def __init__(self, error: BaseException, loop: asyncio.AbstractEventLoop, where: str) -> None:
        self.error = error
        self.loop = loop
        self.where = where
        self.delivered = False

    def __del__(self) -> None:
        if not self.delivered:
            self.loop.call_exception_handler(
                {"message": f"aiocuda: the failure of {self.where} was never retrieved", "exception": self.error}
            )


def raisable(error: BaseException) -> BaseException:
    """An error ready to be raised once more: several waiters must not share one traceback."""
    return error.again() if isinstance(error, AiocudaError) else error
