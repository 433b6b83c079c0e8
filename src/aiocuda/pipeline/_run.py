"""Run: a source's items on their way through a pipeline, several at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from .._shutdown import all_ended, to_the_end
from .._types import Place
from .._user_code import LEAVES_LOOP, call, failure_of
from ..errors import ClosedError, DrainTimeoutWarning, InvalidTypeError
from ._iteration import Iteration

if TYPE_CHECKING:
    from ._slot import Slot
    from ._track import Track

__all__ = ["Run", "Source", "as_source", "leave"]


#: Items begun in one go: of a ring of 1 024 slots all would take 50 ms, and no turn of the loop may last 5.
MOST_AT_ONCE = 16


class Run:
    """Feeds items into slots as slots become free, and hands their iterations out in order.

    A slot becomes free when the consumer asks for the next result. Where the source need not be awaited, the next item
    is begun right there: a task that has to wake for it comes a turn of the loop later, and the device waits meanwhile.
    Else the feeder is a task of its own, so that the source is awaited while the consumer is at work.
    """

    def __init__(self, track: Track, source: Source, place: Place) -> None:
        self._track = track
        self._source = source
        self._place = place
        self._ready: deque[Iteration | None] = deque()
        self._told: asyncio.Future[None] | None = None  # when there is one, while somebody waits for it
        self._open: dict[Iteration, None] = {}  # begun, not released; in order
        self._slot: Slot | None = None  # for the item that the source is asked for
        self.source_error: BaseException | None = None
        self._closing: asyncio.Task[list[BaseException]] | None = None
        self._numbers = itertools.count()
        self._ended = False  # no item is begun any more
        self._feeder: asyncio.Task[None] | None = None

    async def next(self) -> Iteration | None:
        """The next iteration, in the order of the source; None after the last."""
        if self._feeder is None and not self._ended:
            if isinstance(self._source, AtOnce):
                self._fill(self._source)
            if not self._ready:  # it has to be awaited; or somebody else has all the slots
                self._feeder = asyncio.get_running_loop().create_task(self._feed(), name="aiocuda-pipeline-feeder")
        while not self._ready:
            self._told = asyncio.get_running_loop().create_future()
            await self._told
        iteration = self._ready.popleft()
        if self._closing is not None:
            raise ClosedError("the pipeline was closed while it ran")
        if iteration is None and self.source_error is not None:
            raise self.source_error
        return iteration

    def begun(self) -> Iteration | None:
        """The next iteration, if there is one without waiting; else, and for the end, `next` is to be awaited."""
        if self._feeder is None and not self._ended and type(self._source) is AtOnce:
            self._fill(self._source)
        ready = self._ready
        return ready.popleft() if ready and ready[0] is not None and self._closing is None else None

    def release(self, iteration: Iteration) -> None:
        """It is finished, and its consumer done with the result: the slot is free."""
        if iteration in self._open:
            del self._open[iteration]
            self._track.ring.release(iteration.slot)

    def _fill(self, source: AtOnce) -> None:
        """Begin items as long as slots are free, but let the loop turn now and then."""
        track = self._track
        ring, now = track.ring, track.now
        most = MOST_AT_ONCE
        try:
            while not self._ended and (most or ring.has_free):
                if not most:
                    asyncio.get_running_loop().call_soon(self._fill, source)
                    break
                most -= 1
                slot = self._slot = ring.take_if_free()
                if slot is None:
                    break
                asked = now()
                item = next(source)
                came = now()
                track.meter.source_seconds += came - asked
                self._begin(slot, item, came)
        except StopIteration:
            self._end()
        except BaseException as error:
            self.source_error = error  # for `next`, which comes to it in order, or for `close`
            self._end()
            if isinstance(error, LEAVES_LOOP):
                raise

    async def _feed(self) -> None:
        track = self._track
        try:
            while not self._ended:
                slot = self._slot = await track.ring.reserve()
                asked = track.now()
                item = await anext(self._source)
                came = track.now()
                track.meter.source_seconds += came - asked
                if self._closing is not None:
                    return  # the source has swallowed the cancellation
                self._begin(slot, item, came)
        except StopAsyncIteration:
            return
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.source_error = error  # for `next`, which comes to it in order, or for `close`
            if isinstance(error, LEAVES_LOOP):
                raise
        finally:
            self._end()

    def _begin(self, slot: Slot, item: Any, now: float) -> None:
        iteration = Iteration(self._track, slot, item, next(self._numbers), now, overlap=True)
        self._open[iteration] = None
        self._slot = None  # and not before: what Ctrl-C has interrupted in between gives it back, too
        self._put(iteration)
        if self._track.plan.awaits:
            iteration.task = asyncio.get_running_loop().create_task(iteration.carry())
            iteration.task.add_done_callback(self._carried)
        elif not iteration.enqueue():
            self._end()

    def _put(self, iteration: Iteration | None) -> None:
        self._ready.append(iteration)
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    def _end(self) -> None:
        """Nothing more is begun; what was begun before is still delivered."""
        if not self._ended:
            self._ended = True
            self._release_slot()
            self._put(None)

    def _release_slot(self) -> None:
        """No item comes for it any more."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._track.release(slot)

    def _carried(self, task: asyncio.Task[None]) -> None:
        """After a failure nothing new is begun."""
        if task.cancelled() or task.exception() is not None:
            if self._feeder is None:
                self._end()
            else:
                self._feeder.cancel()

    async def close(self, failures: list[BaseException] | None = None) -> None:
        """End it, wait until nothing of it runs, free its slots.

        What its items, and its source, have failed with is added to ``failures``, whoever is cancelled meanwhile.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        closing = self._closing
        try:
            await to_the_end(closing)
        finally:
            if failures is not None and closing.done() and not (closing.cancelled() or closing.exception()):
                failures += closing.result()

    async def _close(self) -> list[BaseException]:
        if self._feeder is None:
            self._end()
        else:
            self._feeder.cancel()
        ending = asyncio.get_running_loop().create_task(self._end_source(), name="aiocuda-pipeline-source")
        iterations = list(self._open)
        self._open.clear()
        timeout = self._track.device._patience.left()
        _, (_, late) = await asyncio.gather(
            leave(self._track, iterations, self._place), asyncio.wait({ending}, timeout=timeout)
        )
        self._release_slot()
        failures = [iteration.failure for iteration in iterations if iteration.failure is not None]
        if late:
            (ending if self._feeder is None or self._feeder.done() else self._feeder).cancel()
            ending.add_done_callback(self._ended_late)
            self._place.warn(
                f"the source of a pipeline did not end within {timeout:g} s of its cancellation, and nothing waits for "
                "it any longer",
                DrainTimeoutWarning,
            )
        elif self.source_error is not None:
            failures.append(self.source_error)
        return failures

    def _ended_late(self, ending: asyncio.Task[None]) -> None:
        if self.source_error is not None:
            ending.get_loop().call_exception_handler(
                {"message": "aiocuda: the source of a pipeline failed too late", "exception": self.source_error}
            )

    async def _end_source(self) -> None:
        """Whatever it is at: it has been cancelled."""
        if self._feeder is not None:
            await asyncio.wait({self._feeder})
            if not self._feeder.cancelled():
                self._feeder.exception()  # `source_error` has it: asyncio need not report it
        try:
            await self._source.aclose()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.source_error = error  # for `close`
            if isinstance(error, LEAVES_LOOP):
                raise


async def leave(track: Track, iterations: list[Iteration], place: Place) -> None:
    """Settle iterations that ended early, within the device's drain timeout, and free their slots."""
    for iteration in iterations:
        if iteration.task is not None:
            iteration.task.cancel()  # once: a second time would disturb its cleaning up
    settling = {asyncio.get_running_loop().create_task(iteration.settle()): iteration for iteration in iterations}
    if not settling:
        return
    late = await all_ended(settling, track.device._patience.left())
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


class AtOnce:
    """The items of something that need not be awaited; a note says which item its failure came instead of."""

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
        """Let go of it."""
        self._close()


#: What a pipeline takes its items from.
Source: TypeAlias = "AtOnce | AsyncGenerator[Any, None]"


def as_source(source: Iterable[Any] | AsyncIterable[Any]) -> Source:
    """Anything that can be iterated, asynchronously or not."""
    if isinstance(source, AsyncIterable):
        return _items(source)
    if isinstance(source, Iterable):
        return AtOnce(source)
    raise InvalidTypeError(f"a pipeline runs over an iterable or an asynchronous iterable, not {type(source).__name__}")


async def _items(source: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
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
            # The source's own, of a task that it awaits perhaps: the pipeline and its consumer are not cancelled.
            raise ClosedError(f"the source of the pipeline was cancelled at item {index}, counted from 0") from error
        except BaseException as error:
            _note(error, index)
            raise
        yield item


def _note(error: BaseException, index: int) -> None:
    error.add_note(f"in the source of the pipeline, at item {index}, counted from 0")
