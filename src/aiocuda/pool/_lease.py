"""LeasedStream: a stream on loan from a pool."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from .._base._mistakes import refuses
from ..errors import AiocudaError, ClosedError, StaleHandleError
from ..lowlevel import StreamView, resources_of
from ..stream import CheckedStream
from ._place import Place
from ._workload import Workload, combine

__all__ = ["CheckedLease", "LeasedStream", "PendingLease", "new_lease"]

#: Called with the place, the workload and the start time of a lease when it ends.
OnRelease: TypeAlias = Callable[[Place, Workload, float], None]


class LeasedStream(StreamView):
    """A `Stream` on loan from a `StreamPool`.

    It has all methods of a stream. The lease ends when its ``async with`` block ends, or by `release`. Operations that
    were enqueued run to their end. After that, every method raises `StaleHandleError`, even if the stream is leased
    again.
    """

    def __init__(self, place: Place, generation: int, workload: Workload | None, on_release: OnRelease) -> None:
        super().__init__(place.stream)
        self.generation = generation  #: the number of the lease in its pool; never used twice
        self.exclusive = place.exclusive  #: True if no other lease uses the stream at the same time
        self._place = place
        self._workload = workload
        self._on_release = on_release
        self._returned = False
        self._closing = False
        self._holder: asyncio.Task[Any] | None = None
        self._began = self.device.driver.now()
        self._stream_name = place.stream.name

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self._stream_name

    @property
    def workload(self) -> Workload:
        """The workload that the lease was requested for; otherwise the workload of the operations so far."""
        return self._workload or self._observed_workload()

    def _observed_workload(self) -> Workload:
        transfers = self._transfers
        kinds: set[Workload] = set()
        if self._newest.launches:
            kinds.add("compute")
        if transfers.uploads or transfers.downloads or transfers.copies or transfers.fills:
            kinds.add("memory")
        return combine(kinds)

    @property
    def returned(self) -> bool:
        """True if the lease has ended."""
        return self._returned

    @property
    def closed(self) -> bool:
        """True if the lease has ended or is being closed, or if the stream has been closed."""
        return self._returned or self._closing or self._place.stream.closed

    def release(self) -> None:
        """End the lease. Operations that were enqueued run to their end. `StaleHandleError` if it has ended before."""
        self._check()
        place = self._place
        place.queue.check_loop()
        workload = self.workload
        self._returned = True
        if self._holder is not None:
            place.remove_holder(self._holder)
            self._holder = None
        self._refuse_with(_stale)
        self._on_release(place, workload, self._began)

    def _check(self) -> None:
        if self._returned:
            raise self._stale()

    def _refuse_with(self, error: Callable[[int, str], AiocudaError]) -> None:
        """Make every method raise this error from now on, and every other use of the stream's queue.

        This costs nothing while the lease lasts.
        """
        # The error does not refer to the lease: that would be a reference cycle.
        refused = _Refused(functools.partial(error, self.generation, self._stream_name))
        self._hook = self._queue = refused  # type: ignore[assignment]

    def hold(self) -> None:
        """Record that a block of the current task holds the lease, for deadlock detection."""
        self._check()
        if self._holder is not None:
            self._place.remove_holder(self._holder)
        self._holder = asyncio.current_task()
        if self._holder is not None:
            self._place.add_holder(self._holder)

    def _stale(self) -> StaleHandleError:
        return _stale(self.generation, self._stream_name)

    async def aclose(self) -> None:
        """Refuse new operations with `ClosedError`, wait for the stream's work, then end the lease.

        If the wait is cancelled, the lease ends without it.
        """
        self._check()
        queue = self._place.queue
        queue.check_loop()
        self._closing = True
        self._refuse_with(_closing)
        try:
            await resources_of(self.device).streams.settle(queue)
        finally:
            if not self._returned:
                self.release()

    async def __aenter__(self) -> Self:
        self.hold()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if not self._returned:
            self.release()

    def __repr__(self) -> str:
        state = "returned" if self._returned else "exclusive" if self.exclusive else "shared"
        return f"<LeasedStream {self._stream_name}, lease {self.generation}: {state}>"


class CheckedLease(LeasedStream, CheckedStream):
    """A leased stream with checked memory accesses."""


def new_lease(place: Place, generation: int, workload: Workload | None, on_release: OnRelease) -> LeasedStream:
    """Return a lease of a stream; a `CheckedLease` if the stream is checked."""
    kind = CheckedLease if isinstance(place.stream, CheckedStream) else LeasedStream
    return kind(place, generation, workload, on_release)


@refuses(__enter__="is entered by `async with`, not `with`: `async with pool.stream() as stream`")
class PendingLease:
    """The return value of `StreamPool.stream`: enter it with ``async with``, or await it, once."""

    __slots__ = ("_acquire", "_begun", "_lease")

    def __init__(self, acquire: Callable[[], Coroutine[Any, Any, LeasedStream]]) -> None:
        self._acquire = acquire
        self._begun = False

    def _begin(self) -> Coroutine[Any, Any, LeasedStream]:
        if self._begun:
            raise StaleHandleError("pool.stream() returns an object for one lease: call it again for another lease")
        self._begun = True
        return self._acquire()

    def __await__(self) -> Generator[Any, None, LeasedStream]:
        return self._begin().__await__()

    async def __aenter__(self) -> LeasedStream:
        self._lease = await self._begin()
        return await self._lease.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on unchanged
        await self._lease.__aexit__(*exc)

    def __repr__(self) -> str:
        return "pool.stream()"

    if not TYPE_CHECKING:  # a type checker reports the error without it

        def __getattr__(self, name: str) -> NoReturn:
            cure = ": use `async with pool.stream() as stream`, or `stream = await pool.stream()`"
            message = f"pool.stream() returns an object that is no stream yet and has no {name!r}"
            raise AttributeError(message + cure * hasattr(LeasedStream, name), name=name, obj=self)


def _stale(generation: int, stream: str) -> StaleHandleError:
    return StaleHandleError(
        f"lease {generation} of {stream} has ended: the stream may be leased to another task; request a new lease by "
        "pool.stream()"
    )


def _closing(generation: int, stream: str) -> ClosedError:
    return ClosedError(f"lease {generation} of {stream} is being closed: request a new lease by pool.stream()")


class _Refused:
    """Replaces the hook and the queue of a lease that has ended or is being closed: each attribute raises the error."""

    def __init__(self, error: Callable[[], AiocudaError]) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> NoReturn:
        error: AiocudaError = self.__dict__["error"]()
        raise error
