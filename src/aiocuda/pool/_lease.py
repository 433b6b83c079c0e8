"""LeasedStream: a stream of a pool, for as long as its lease lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ..completion._stream_queue import stream_queue
from ..errors import AiocudaError, ClosedError, StaleHandleError
from ..stream import CheckedStream
from ..stream._view import StreamView
from ._place import Place
from ._workload import Workload, classify_use

if TYPE_CHECKING:
    from ._streams import StreamPool

__all__ = ["CheckedLease", "LeasedStream", "Leasing", "lease"]


class LeasedStream(StreamView):
    """A `Stream` on loan from a `StreamPool`.

    It has all verbs of a stream. Leaving its block, or `release`, ends the lease; what was enqueued runs on. After that
    every verb raises `StaleHandleError`, whoever has the stream by then.

    Attributes
    ----------
    generation : int
        Which of the pool's leases; never used twice.
    exclusive : bool
        Does nobody else enqueue on the stream meanwhile?
    """

    def __init__(self, pool: StreamPool, place: Place, generation: int, workload: Workload | None) -> None:
        super().__init__(place.stream)
        self.generation = generation
        self.exclusive = place.exclusive
        self._pool = pool
        self._place: Place | None = place
        self._workload = workload
        self._holder: asyncio.Task[Any] | None = None
        self._began = self._queue.driver.now()
        self._stream_name = self._queue.name

    @property
    def name(self) -> str:
        """The stream's."""
        return self._stream_name

    @property
    def workload(self) -> Workload:
        """What was said when it was leased; else found from what it has been given."""
        return self._workload or classify_use(self)

    @property
    def returned(self) -> bool:
        """Has the lease ended?"""
        return self._place is None

    @property
    def closed(self) -> bool:
        """Has the lease ended, or the stream been closed?"""
        place = self._place
        return place is None or isinstance(self._queue, _Returned) or stream_queue(place.stream).closed

    def release(self) -> None:
        """End the lease. What was enqueued runs on.

        Raises
        ------
        StaleHandleError
            It had ended.
        """
        place = self._place
        if place is None:
            raise self._stale()
        stream_queue(place.stream).check_loop()
        workload = self.workload
        self._place = None
        if self._holder is not None:
            place.left_by(self._holder)
            self._holder = None
        self._refuse(self._stale)
        self._pool.returned(place, workload, self._began)

    def _refuse(self, error: Callable[[], AiocudaError]) -> None:
        """Every verb raises this error from now on, whatever it asks the lease for first."""
        self._queue = self._launches = self._transfers = self._memory = _Returned(error)  # type: ignore[assignment]

    def hold(self) -> None:
        """It is for as long as a block of the current task lasts, which may wait for another lease meanwhile."""
        place = self._place
        if place is None:
            raise self._stale()
        if self._holder is not None:
            place.left_by(self._holder)
        self._holder = asyncio.current_task()
        if self._holder is not None:
            place.held_by(self._holder)

    def _stale(self) -> StaleHandleError:
        return StaleHandleError(
            f"lease {self.generation} of {self._stream_name} has ended: the stream may serve somebody else by now; "
            "take another one by pool.stream()"
        )

    async def aclose(self) -> None:
        """Refuse new work by this lease with `ClosedError`, wait for the stream's work, then end the lease.

        A cancellation meanwhile ends the lease at once.
        """
        place = self._place
        if place is None:
            raise self._stale()
        queue = stream_queue(place.stream)
        queue.check_loop()
        self._workload = self.workload
        self._refuse(self._closing)
        try:
            await queue.settle()
        finally:
            if not self.returned:
                self.release()

    def _closing(self) -> ClosedError:
        return ClosedError(
            f"lease {self.generation} of {self._stream_name} is being closed: take another one by pool.stream()"
        )

    async def __aenter__(self) -> Self:
        self.hold()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if not self.returned:
            self.release()

    def __repr__(self) -> str:
        state = "returned" if self._place is None else "exclusive" if self.exclusive else "shared"
        return f"<LeasedStream {self._stream_name}, lease {self.generation}: {state}>"


class CheckedLease(LeasedStream, CheckedStream):
    """The same where accesses are checked."""

    def __init__(self, pool: StreamPool, place: Place, generation: int, workload: Workload | None) -> None:
        super().__init__(pool, place, generation, workload)
        assert isinstance(place.stream, CheckedStream)
        self._checker = place.stream._checker


def lease(pool: StreamPool, place: Place, generation: int, workload: Workload | None) -> LeasedStream:
    """A lease of a stream, checked if the stream is."""
    kind = CheckedLease if isinstance(place.stream, CheckedStream) else LeasedStream
    return kind(pool, place, generation, workload)


class Leasing:
    """What `StreamPool.stream` returns: a lease to come. Enter it, or await it, once."""

    __slots__ = ("_acquire", "_begun", "_lease")

    def __init__(self, acquire: Callable[[], Coroutine[Any, Any, LeasedStream]]) -> None:
        self._acquire = acquire
        self._begun = False

    def _begin(self) -> Coroutine[Any, Any, LeasedStream]:
        if self._begun:
            raise StaleHandleError("what pool.stream() returns is good for one lease: call it again for another one")
        self._begun = True
        return self._acquire()

    def __await__(self) -> Generator[Any, None, LeasedStream]:
        return self._begin().__await__()

    async def __aenter__(self) -> LeasedStream:
        self._lease = await self._begin()
        return await self._lease.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on as it is
        await self._lease.__aexit__(*exc)

    if not TYPE_CHECKING:  # a type checker says it by itself

        def __getattr__(self, name: str) -> NoReturn:
            cure = ": use `async with pool.stream() as stream`, or `stream = await pool.stream()`"
            lacking = f"what pool.stream() returns is no stream yet and has no {name!r}"
            raise AttributeError(lacking + cure * hasattr(LeasedStream, name), name=name, obj=self)


class _Returned:
    """In the place of what a lease had that is returned, or is being closed."""

    def __init__(self, error: Callable[[], AiocudaError]) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> NoReturn:
        error: AiocudaError = self.__dict__["error"]()
        raise error
