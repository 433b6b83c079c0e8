"""Run: a source's items on their way through a pipeline, several at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError, DrainTimeoutWarning, InvalidTypeError
from ..finish import to_the_end
from ..types import Place
from .iteration import Iteration

if TYPE_CHECKING:
    from .slot import Slot
    from .track import Track

__all__ = ["Run", "as_source", "leave"]


class Run:
    """Feeds items into slots as slots become free, and hands their iterations out in order.

    The feeder is a task of its own, so that a free slot is filled while the consumer is at work.
    """

    def __init__(self, track: Track, source: AsyncGenerator[Any, None], place: Place) -> None:
        self._track = track
        self._source = source
        self._place = place
        self._ready: asyncio.Queue[Iteration | None] = asyncio.Queue()
        self._open: dict[Iteration, None] = {}  # begun, not released; in order
        self._slot: Slot | None = None  # for the item that the source is asked for
        self._source_error: Exception | None = None
        self._closing: asyncio.Task[list[Exception]] | None = None
        self._feeder = asyncio.get_running_loop().create_task(self._feed(), name="aiocuda-pipeline-feeder")

    async def next(self) -> Iteration | None:
        """The next iteration, in the order of the source; None after the last."""
        iteration = await self._ready.get()
        if self._closing is not None:
            raise ClosedError("the pipeline was closed while it ran")
        if iteration is None and self._source_error is not None:
            raise self._source_error
        return iteration

    def release(self, iteration: Iteration) -> None:
        """It is finished, and its consumer done with the result: the slot is free."""
        if iteration in self._open:
            del self._open[iteration]
            self._track.release(iteration.slot)

    async def _feed(self) -> None:
        try:
            for index in itertools.count():
                slot = self._slot = await self._track.ring.reserve()
                began = self._track.now()
                item = await anext(self._source)
                self._track.meter.source_seconds += self._track.now() - began
                if self._closing is not None:
                    return  # the source has swallowed the cancellation
                self._slot = None
                iteration = Iteration(self._track, slot, item, index, overlap=True)
                self._open[iteration] = None
                self._ready.put_nowait(iteration)
                if self._track.plan.awaits:
                    iteration.task = asyncio.get_running_loop().create_task(iteration.carry())
                    iteration.task.add_done_callback(self._carried)
                elif not iteration.enqueue():
                    break
        except StopAsyncIteration:
            return
        except Exception as error:  # noqa: BLE001 - kept for `next`, which comes to it in order, or for `close`
            self._source_error = error
        finally:
            self._release_slot()
            self._ready.put_nowait(None)

    def _release_slot(self) -> None:
        """No item comes for it any more."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._track.release(slot)

    def _carried(self, task: asyncio.Task[None]) -> None:
        """After a failure nothing new is begun; what was begun before it is still delivered."""
        if task.cancelled() or task.exception() is not None:
            self._feeder.cancel()

    async def close(self) -> list[Exception]:
        """End it, wait until nothing of it runs, free its slots. What its items, and its source, failed with."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return await to_the_end(self._closing)

    async def _close(self) -> list[Exception]:
        self._feeder.cancel()
        ending = asyncio.get_running_loop().create_task(self._end_source(), name="aiocuda-pipeline-source")
        iterations = list(self._open)
        self._open.clear()
        timeout = self._track.device.drain_timeout
        _, (_, late) = await asyncio.gather(
            leave(self._track, iterations, self._place), asyncio.wait({ending}, timeout=timeout)
        )
        self._release_slot()
        failures = [iteration.failure for iteration in iterations if iteration.failure is not None]
        if late:
            (ending if self._feeder.done() else self._feeder).cancel()
            ending.add_done_callback(self._ended_late)
            self._place.warn(
                f"the source of a pipeline did not end within {timeout} s of its cancellation, and nobody waits for it "
                "any longer",
                DrainTimeoutWarning,
            )
        elif self._source_error is not None:
            failures.append(self._source_error)
        return failures

    def _ended_late(self, ending: asyncio.Task[None]) -> None:
        if self._source_error is not None:
            ending.get_loop().call_exception_handler(
                {"message": "aiocuda: the source of a pipeline failed too late", "exception": self._source_error}
            )

    async def _end_source(self) -> None:
        """Whatever it is at: it has been cancelled."""
        await asyncio.wait({self._feeder})
        try:
            await self._source.aclose()
        except Exception as error:  # noqa: BLE001 - kept for `close`
            self._source_error = error


async def leave(track: Track, iterations: list[Iteration], place: Place) -> None:
    """Settle iterations that ended early, within the device's drain timeout, and free their slots."""
    for iteration in iterations:
        if iteration.task is not None:
            iteration.task.cancel()  # once: a second time would disturb its cleaning up
    settling = {asyncio.get_running_loop().create_task(iteration.settle()): iteration for iteration in iterations}
    if not settling:
        return
    _, late = await asyncio.wait(settling, timeout=track.device.drain_timeout)
    for task in late:
        task.cancel()
    await asyncio.wait(settling)
    for task, iteration in settling.items():
        # If the device was left meanwhile, nobody can tell any more when it lets go of the memory.
        track.release(iteration.slot, lost=task.cancelled() or isinstance(task.exception(), ClosedError))
    if late:
        place.warn(
            f"{len(late)} item{'s' * (len(late) != 1)} of a pipeline did not end within "
            f"{track.device.drain_timeout} s; the memory that the device may still touch stays allocated",
            DrainTimeoutWarning,
        )
    for task in settling:
        if not task.cancelled() and not isinstance(task.exception(), ClosedError):
            task.result()  # settling itself does not fail


def as_source(source: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """Anything that can be iterated, asynchronously or not; a note says which item its failure came instead of."""
    if isinstance(source, AsyncIterable):
        return _items(source)
    if isinstance(source, Iterable):
        return _items(_asynchronous(source))
    raise InvalidTypeError(f"a pipeline runs over an iterable or an asynchronous iterable, not {type(source).__name__}")


async def _items(source: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    index = 0
    try:
        async for item in source:
            yield item
            index += 1
    except Exception as error:
        error.add_note(f"in the source of the pipeline, at item {index}, counted from 0")
        raise


async def _asynchronous(source: Iterable[Any]) -> AsyncIterator[Any]:
    for item in source:
        yield item
