"""A failure, and whether anybody has been told of it."""

from __future__ import annotations

import asyncio
import weakref

from ..errors import AiocudaError

__all__ = ["Failure", "Spoiled", "raisable"]


class Spoiled:
    """Why a stream is unusable: it is until its failure was delivered, awaited or read, to somebody."""

    __slots__ = ("_failure", "delivered", "error", "loop", "reported", "where")

    def __init__(self, error: BaseException, loop: asyncio.AbstractEventLoop, where: str) -> None:
        self.error = error
        self.loop = loop
        self.where = where
        self.delivered = False
        self.reported = False
        self._failure: weakref.ref[Failure] | None = None

    def failure(self) -> Failure:
        """What the next operation carries: the same as those before, if any of them is left."""
        failure = None if self._failure is None else self._failure()
        if failure is None:
            failure = Failure(self)
            self._failure = weakref.ref(failure)
        return failure


class Failure:
    """What went wrong, shared by the operation that failed and all that were skipped because of it.

    One that nobody reads is reported to the loop's exception handler, once, when the last operation that carries it is
    collected, as asyncio does for a future. So the stream, which may live long, does not hold it: see `Spoiled`.
    """

    __slots__ = ("__weakref__", "spoiled")

    def __init__(self, spoiled: Spoiled) -> None:
        self.spoiled = spoiled

    @property
    def delivered(self) -> bool:
        """Has anybody been told?"""
        return self.spoiled.delivered

    def untold(self) -> Failure:
        """The same for those who depend on it, if only others have been told."""
        spoiled = self.spoiled
        return Spoiled(spoiled.error, spoiled.loop, spoiled.where).failure() if spoiled.delivered else self

    def __del__(self) -> None:
        spoiled = self.spoiled
        if not spoiled.delivered and not spoiled.reported:
            spoiled.reported = True
            spoiled.loop.call_exception_handler(
                {"message": f"aiocuda: the failure of {spoiled.where} was never retrieved", "exception": spoiled.error}
            )


def raisable(error: BaseException) -> BaseException:
    """An error ready to be raised once more: several waiters must not share one traceback."""
    return error.again() if isinstance(error, AiocudaError) else error.with_traceback(None)
