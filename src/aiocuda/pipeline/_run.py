"""Runs: `PipelineRun`, which the consumer iterates over, and `ActiveRun`, which feeds a source's items into slots."""

from __future__ import annotations

import asyncio
import functools
import itertools
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, cast

from .._base._generic import Result_co
from .._base._shutdown import finish_shielded
from .._base._tasks import start_task
from .._base._types import ProcessLocal, SourceLine
from .._base._user_code import LEAVES_LOOP, add_note, call, failure_of
from ..errors import ClosedError, DrainTimeoutWarning, InvalidTypeError
from ..lowlevel import resources_of
from ._item import PipelineItem, settle_items

if TYPE_CHECKING:
    from ._resources import PipelineResources
    from ._slot import Slot

__all__ = ["MAX_AT_ONCE", "ActiveRun", "PipelineRun", "as_source"]

#: Items begun without a turn of the loop: all items of a ring of 1 024 slots take 50 ms, and a turn may last 5 ms.
MAX_AT_ONCE = 16


class PipelineRun(ProcessLocal, AsyncIterator[Result_co]):
    """The results of one run of a pipeline, in the order of its source. Made by `Pipeline.run`.

    The run begins when the first result is asked for::

        async with contextlib.aclosing(pipeline.run(source)) as results:
            async for result in results:
                ...

    A loop that was left by `break` may be continued by another loop over the same run, until the pipeline begins
    another run, which closes this one.
    """

    __slots__ = ("__weakref__", "_closing", "_has_looped", "_loops", "_results")

    def __init__(self, results: AsyncGenerator[Result_co, None]) -> None:
        self._results = cast("AsyncGeneratorType[Result_co, None]", results)
        #: The iterators of `async for` loops over the run. A loop that ends or is left drops its iterator.
        self._loops: weakref.WeakSet[_LoopIterator] = weakref.WeakSet()
        self._has_looped = False
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Result_co]:  # noqa: PYI034 - each loop has an iterator of its own
        """Return an iterator for one loop. Python drops it when the loop is left, and so the run notices that."""
        iterator = _LoopIterator(self)
        self._loops.add(iterator)
        self._has_looped = True
        return iterator

    def __anext__(self) -> Coroutine[Any, Any, Result_co]:
        """Return the next result.

        Raises
        ------
        ClosedError
            The run was left by `break`; then a later run of the pipeline, or the pipeline's `aclose`, has closed it.
        """
        self._has_looped = False  # the program holds the run, and continues without a loop
        if self._closing is not None:
            raise self._closed_error()
        return self._results.__anext__()

    def _closed_error(self) -> ClosedError:
        return ClosedError(
            "this run was left by `break`, and its pipeline has closed it since, for another run or at its own end"
        )

    async def aclose(self) -> None:
        """End the run. Unfinished items have `Device.drain_timeout` seconds to end. Idempotent."""
        if self._closing is None:
            await self._results.aclose()
        else:
            await asyncio.wait({self._closing})

    def _close_if_left(self) -> bool:
        """Begin to close the run if its last loop was left. Return True if the run is being closed.

        The end of the run reports failures; the task has no result.
        """
        if self._closing is None and self._has_looped and not self._loops and not self._results.ag_running:
            self._closing = start_task(_close, self._results, name="aiocuda-pipeline-left")
        return self._closing is not None

    def __await__(self) -> NoReturn:
        raise InvalidTypeError(
            "a pipeline's run is iterated and not awaited: `async for result in pipeline.run(source)`; "
            "for one item, `await pipeline.execute_iteration(item)`"
        )

    def __iter__(self) -> NoReturn:
        raise InvalidTypeError(
            "a pipeline's run is iterated asynchronously: `async for result in pipeline.run(source)`, or "
            "`[result async for result in pipeline.run(source)]`"
        )


class _LoopIterator(AsyncIterator[Any]):
    """The iterator of one `async for` loop over a run."""

    __slots__ = ("__weakref__", "_run")

    def __init__(self, run: PipelineRun[Any]) -> None:
        self._run = run

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        run = self._run
        if run._closing is not None:
            raise run._closed_error()
        return run._results.__anext__()


async def _close(results: AsyncGenerator[Any, None]) -> None:
    await results.aclose()


class ActiveRun:
    """One run inside its pipeline: it feeds items into free slots, and gives them to the run's generator in order.

    It refers to the consumer's objects weakly: a consumer that drops them has left the run.

    A slot becomes free when the consumer asks for the next result. If the source is synchronous, the next item begins
    in that call: a task would begin it a turn of the loop later, and the device would wait. Else a task, the feeder,
    awaits the source while the consumer works.

    Attributes
    ----------
    source : Source
    source_error : BaseException or None
        The exception that the source failed with.
    loop : asyncio.AbstractEventLoop or None
        The loop of the run, once it has begun.
    place : SourceLine
        The line of the program that made the run.
    feeds : bool
        True once the run feeds items by itself. A run without overlap never does.
    ended : asyncio.Event
        Set when the pipeline is available for other runs.
    """

    def __init__(self, resources: PipelineResources, source: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._resources = resources
        self.source = as_source(source)
        self.source_error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.place = SourceLine.of_caller()
        self.feeds = False
        self.ended = asyncio.Event()
        #: The generator of the results. When it is collected, the event loop closes it.
        self._generator: Callable[[], AsyncGenerator[Any, None] | None]
        self._results: Callable[[], PipelineRun[Any] | None]
        self._ready: deque[PipelineItem | None] = deque()  # for the generator; None is the end
        self._wakeup: asyncio.Future[None] | None = None  # of the generator, while it waits for an item
        self._unreleased: dict[PipelineItem, None] = {}  # items in order
        self._idle_items: list[PipelineItem] = []  # that have passed, for later values
        self._slot: Slot | None = None  # reserved for the next item of the source
        self._indices = itertools.count()
        self._stopped = False  # no item begins any more
        self._feeder: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[list[BaseException]] | None = None

    def iterate(self, generator: AsyncGenerator[Any, None]) -> PipelineRun[Any]:
        """Return the object for the consumer, which iterates over the run's generator."""
        results = PipelineRun(generator)
        self._generator, self._results = weakref.ref(generator), weakref.ref(results)
        return results

    def close_if_abandoned(self) -> bool:
        """Return True if the consumer has left the run by `break`. Then the run is being closed."""
        if self.loop is not asyncio.get_running_loop():
            return False  # its end cannot be awaited in this loop
        if self._generator() is None:
            return True
        results = self._results()
        return results is not None and results._close_if_left()

    # -- items for the generator ---------------------------------------------------------------------------------

    async def next_item(self) -> PipelineItem | None:
        """Wait for the next item, in the order of the source, and return it; None after the last one."""
        if self._feeder is None and not self._stopped:
            if isinstance(self.source, SyncSource):
                self._feed_now(self.source)
            if not self._ready:  # the source is asynchronous, or other users have all slots
                self._feeder = start_task(self._feed, name="aiocuda-pipeline-feeder")
        while not self._ready:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        item = self._ready.popleft()
        if self._closing is not None:
            raise ClosedError("the pipeline was closed while it ran")
        if item is None and self.source_error is not None:
            raise self.source_error
        return item

    def next_item_nowait(self, passed: PipelineItem | None) -> PipelineItem | None:
        """Free the slot of the item before, and return the next item if it has begun.

        Else, and at the end, return None: then await `next_item`.

        Parameters
        ----------
        passed
            The item before, which is finished, and whose result the consumer does not use any more; None if there is
            none.
        """
        if passed in self._unreleased:
            del self._unreleased[passed]
            passed.end()
            self._resources.ring.end(passed.slot)
            self._idle_items.append(passed)
        if self._feeder is None and not self._stopped and type(self.source) is SyncSource:
            self._feed_now(self.source)
        ready = self._ready
        return ready.popleft() if ready and ready[0] is not None and self._closing is None else None

    # -- feeding -------------------------------------------------------------------------------------------------

    def _feed_now(self, source: SyncSource) -> None:
        """Begin items while slots are free; after `MAX_AT_ONCE` of them let the loop run other callbacks first."""
        resources = self._resources
        ring, now = resources.ring, resources.now
        allowed = MAX_AT_ONCE
        try:
            while ring.free and not self._stopped:
                if not allowed:
                    asyncio.get_running_loop().call_soon(self._feed_now, source)
                    break
                allowed -= 1
                slot = self._slot = ring.take()
                before = now()
                value = next(source)
                after = now()
                resources.meter.source_seconds += after - before
                self._begin(slot, value, after)
        except StopIteration:
            self._stop()
        except BaseException as error:
            self.source_error = error  # `next_item` raises it after the items before it, or `close` returns it
            self._stop()
            if isinstance(error, LEAVES_LOOP):
                raise

    async def _feed(self) -> None:
        resources = self._resources
        try:
            while not self._stopped:
                slot = self._slot = await resources.ring.reserve()
                before = resources.now()
                value = await anext(self.source)
                after = resources.now()
                resources.meter.source_seconds += after - before
                if self._closing is not None:
                    return  # the source has suppressed the cancellation
                self._begin(slot, value, after)
        except StopAsyncIteration:
            return
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.source_error = error  # `next_item` raises it after the items before it, or `close` returns it
            if isinstance(error, LEAVES_LOOP):
                raise
        finally:
            self._stop()

    def _begin(self, slot: Slot, value: Any, now: float) -> None:
        item = self._idle_items.pop() if self._idle_items else PipelineItem(self._resources, overlap=True)
        item.begin(slot, value, next(self._indices), now)
        self._unreleased[item] = None
        self._slot = None  # not before: if Ctrl-C interrupts the lines above, `_stop` releases the slot
        self._ready.append(item)
        if self._wakeup is not None:
            self._wake_generator()
        if self._resources.plan.awaits:
            item.task = start_task(item.run_stages)
            item.task.add_done_callback(self._after_stages)
        elif not item.enqueue_stages():
            self._stop()

    def _wake_generator(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _stop(self) -> None:
        """Begin no more items. The consumer still gets those that have begun."""
        if not self._stopped:
            self._stopped = True
            self._release_reserved_slot()
            self._ready.append(None)
            self._wake_generator()

    def _release_reserved_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._resources.release(slot)

    def _after_stages(self, task: asyncio.Task[None]) -> None:
        """After a failure, begin no more items."""
        if task.cancelled() or task.exception() is not None:
            if self._feeder is None:
                self._stop()
            else:
                self._feeder.cancel()

    # -- the end -------------------------------------------------------------------------------------------------

    async def close(self, failures: list[BaseException] | None = None) -> None:
        """End the run, wait until none of its work runs, and free its slots.

        The failures of its items and its source are appended to ``failures``, even if this call is cancelled.
        """
        if self._closing is None:
            self._closing = start_task(self._close)
        closing = self._closing
        try:
            await finish_shielded(closing)
        finally:
            if failures is not None and closing.done() and not (closing.cancelled() or closing.exception()):
                failures += closing.result()

    async def _close(self) -> list[BaseException]:
        if self._feeder is None:
            self._stop()
        else:
            self._feeder.cancel()
        ending = start_task(self._end_source, name="aiocuda-pipeline-source")
        items = list(self._unreleased)
        self._unreleased.clear()
        timeout = resources_of(self._resources.device).deadline.left()
        _, (_, late) = await asyncio.gather(
            start_task(settle_items, items, self._resources, self.place),
            start_task(functools.partial(asyncio.wait, {ending}, timeout=timeout)),
        )
        self._release_reserved_slot()
        failures = [item.failure for item in items if item.failure is not None]
        if late:
            (ending if self._feeder is None or self._feeder.done() else self._feeder).cancel()
            ending.add_done_callback(self._report_late_source)
            self.place.warn(
                f"the source of a pipeline did not end within {timeout:g} s of its cancellation, and nothing waits for "
                "it any longer",
                DrainTimeoutWarning,
            )
        elif self.source_error is not None:
            failures.append(self.source_error)
        return failures

    def _report_late_source(self, ending: asyncio.Task[None]) -> None:
        if self.source_error is not None:
            ending.get_loop().call_exception_handler(
                {"message": "aiocuda: the source of a pipeline failed too late", "exception": self.source_error}
            )

    async def _end_source(self) -> None:
        """Wait for the feeder, which has been cancelled, and close the source."""
        if self._feeder is not None:
            await asyncio.wait({self._feeder})
            if not self._feeder.cancelled():
                self._feeder.exception()  # it is in `source_error`: asyncio need not report it
        try:
            await self.source.aclose()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.source_error = error  # for `_close`
            if isinstance(error, LEAVES_LOOP):
                raise


class SyncSource:
    """The items of an iterable, as an iterator and an asynchronous iterator. A failure gets a note with its index."""

    __slots__ = ("_index", "_iterator", "_source")

    def __init__(self, source: Iterable[Any]) -> None:
        self._source: Iterable[Any] | None = source
        self._iterator: Iterator[Any] | None = None
        self._index = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._source is None:
            raise StopIteration
        try:
            if self._iterator is None:
                self._iterator = call(iter, self._source)
            item = next(self._iterator)
        except StopIteration:
            raise
        except BaseException as caught:
            error = failure_of(caught)
            self._close()
            _note(error, self._index)
            if error is caught:
                raise
            raise error from caught
        self._index += 1
        return item

    def _close(self) -> None:
        self._source = self._iterator = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Drop the iterable."""
        self._close()


Source: TypeAlias = "SyncSource | AsyncGenerator[Any, None]"


def as_source(source: Iterable[Any] | AsyncIterable[Any]) -> Source:
    """Return the items of an iterable or an asynchronous iterable."""
    if isinstance(source, AsyncIterable):
        return _async_items(source)
    if isinstance(source, Iterable):
        return SyncSource(source)
    raise InvalidTypeError(f"a pipeline runs over an iterable or an asynchronous iterable, not {type(source).__name__}")


async def _async_items(source: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    iterator = aiter(source)
    for index in itertools.count():
        try:
            item = await anext(iterator)
        except StopAsyncIteration:
            return
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # A task that the source awaits was cancelled. The pipeline and its consumer were not.
            raise ClosedError(f"the source of the pipeline was cancelled at item {index}, counted from 0") from error
        except BaseException as error:
            _note(error, index)
            raise
        yield item


def _note(error: BaseException, index: int) -> None:
    add_note(error, f"in the source of the pipeline, at item {index}, counted from 0")
