"""as_completed: operations in the order of their completion."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from .._base._checks import several
from ..errors import InvalidArgumentError, InvalidTypeError
from ._event import Event

__all__ = ["Completable", "as_completed"]


class Completable(Awaitable[Any], Protocol):
    """With callbacks: an operation, an event, a node, a ticket of a pipeline, or the result of `gather`."""

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None: ...

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int: ...


C = TypeVar("C", bound=Completable)

_TAKES = "aiocuda.as_completed takes a list of operations, events, nodes, tickets and gatherings"


async def as_completed(operations: Iterable[C]) -> AsyncGenerator[C, None]:
    """Yield operations in the order of their completion.

    ::

        async for download in aiocuda.as_completed(downloads):
            print(await download)  # does not wait; raises the error of an operation that failed

    Each operation is yielded once: when it is done, has failed or was abandoned. Those that have finished before the
    iteration begins come first, in the order of the argument. They are the objects of the argument, not wrapped in
    tasks: compare them by ``is``, or use them as keys.

    An iteration that is left early abandons no operation. The loop then closes the generator in its next turn; to close
    it immediately, use ``async with contextlib.aclosing(aiocuda.as_completed(operations)) as completed``.

    Parameters
    ----------
    operations
        `Operation`, `Event`, `Node`, `Ticket`, and what `aiocuda.gather` returns; of one loop, and of any streams,
        coordinators and devices. Without any, the iteration ends immediately.

    Raises
    ------
    InvalidTypeError
        An item is something else. `asyncio.as_completed` takes coroutines, tasks and other awaitables, too.
    InvalidArgumentError
        An item was given twice; or an event has never been recorded.
    WrongLoopError
        An item belongs to another event loop.
    """
    sources = _sources(operations)
    ended: deque[C] = deque()
    any_ended = asyncio.Event()

    def note(thing: C, source: object) -> None:
        ended.append(thing)
        any_ended.set()

    unfinished: dict[C, Callable[[], object]] = {}  # with functions that remove the callbacks
    context = contextvars.copy_context()
    try:
        for thing, source in sources.items():
            callback = partial(note, thing)
            source.add_done_callback(callback, context=context)
            unfinished[thing] = partial(source.remove_done_callback, callback)
        sources.clear()  # so that an operation that was yielded lives no longer than the program holds it
        while unfinished:
            if not ended:
                any_ended.clear()
                await any_ended.wait()
            thing = ended.popleft()
            del unfinished[thing]
            yield thing
    finally:
        for remove_callback in unfinished.values():
            remove_callback()


def _sources(operations: Iterable[C]) -> dict[C, Completable]:
    """Return the checked operations, each with the object that gets its callback."""
    if hasattr(operations, "add_done_callback"):
        raise InvalidTypeError(f"{_TAKES}, not {operations!r}: put it into a list")
    sources: dict[C, Completable] = {}
    for thing in several(operations, _TAKES):
        source = _source(thing)
        if thing in sources:
            raise InvalidArgumentError(f"{thing!r} was given twice: as_completed yields each operation once")
        sources[thing] = source
    return sources


def _source(thing: Any) -> Completable:
    """Return the object that gets the callback: for an event its operation, since the event may be recorded again."""
    if isinstance(thing, Event):
        return thing.operation
    if not isinstance(thing, Awaitable) or asyncio.isfuture(thing) or not hasattr(thing, "remove_done_callback"):
        raise InvalidTypeError(
            f"{_TAKES}, not {type(thing).__name__}: asyncio.as_completed takes coroutines, tasks and other awaitables"
        )
    return thing  # type: ignore[return-value]  # narrowed to an awaitable
