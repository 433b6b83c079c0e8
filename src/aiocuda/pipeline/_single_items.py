"""SingleItems: the items of a pipeline outside of its runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from .._base._deadlock import HOLDER
from .._base._failure import Failure
from .._base._loop_watch import LoopWatch
from .._base._shutdown import finish_shielded
from .._base._tasks import start_task
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP
from ..errors import ClosedError, SkippedError
from ._calls_in_a_row import CallsInARow
from ._failures import report_unraised, reportable
from ._item import PipelineItem, settle_items
from ._run import MAX_AT_ONCE
from ._ticket import Ticket

if TYPE_CHECKING:
    from ._resources import PipelineResources

__all__ = ["SingleItems"]


class SingleItems:
    """The items of `Pipeline.execute_iteration` and `Pipeline.submit`. Each has the streams open until its end.

    The item of a ticket is finished by a task of its own, which gives the slot back whether the ticket is awaited or
    not.

    Attributes
    ----------
    unfinished : int
        The items that have not ended, and the calls that wait for a slot.
    """

    __slots__ = (
        "__weakref__",
        "_at_once",
        "_calls",
        "_ended",
        "_has_failed",
        "_index",
        "_is_watched",
        "_items",
        "_resources",
        "_skipped",
        "_tasks",
        "unfinished",
    )  # fmt: skip

    def __init__(self, resources: PipelineResources) -> None:
        self._resources = resources
        self.unfinished = 0
        self._index = 0  # of the next item
        self._items: dict[PipelineItem, None] = {}  # that hold a slot
        self._is_watched = False  # the loop is, because items are unfinished
        self._tasks: dict[asyncio.Task[None], None] = {}  # of tickets
        self._at_once = 0  # items that `submit` has begun in this turn of the loop
        self._has_failed = False  # has an item failed by itself, since there was no unfinished item?
        self._skipped: list[Failure] = []  # of tickets, before an item has failed by itself
        self._calls = CallsInARow()
        self._ended: asyncio.Future[None] | None = None  # while the end of the pipeline waits

    async def execute(self, value: Any) -> Any:
        """Take an item through all stages, and return its result."""
        resources = self._resources
        began = resources.now()
        if self.unfinished:
            self._calls.interrupt()
        elif resources.advises and resources.ring.depth > 1 and resources.device.asynchronous:
            self._calls.begin(began)
        with self._waiting("a result") as begun:
            item = await self._begin(value)
            begun.append(item)
            try:
                result = await self._finish(item, item.run_stages())
            finally:
                self._end()
        self._calls.end(began, resources.now())
        return result

    async def submit(self, value: Any) -> Ticket[Any]:
        """Wait for a slot, begin an item in it, and return the item's ticket."""
        place = SourceLine.of_caller()
        with self._waiting("a slot"):
            item = await self._begin(value, has_ticket=True)
        awaits = self._resources.plan.awaits
        try:
            if not awaits:
                item.enqueue_stages()  # the device begins now, and not in the next turn of the loop
        finally:  # Ctrl-C, or the like, leaves a stage: the item ends as any other
            ticket: Ticket[Any] = Ticket(item.index)
            task = self._start(item, ticket, place, item.run_stages if awaits else _nothing)
        await self._turn(task)
        return ticket

    async def _turn(self, task: asyncio.Task[None]) -> None:
        """Let the loop run other callbacks after some items. If the caller is cancelled, its item ends early."""
        if not self._at_once:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._at_once += 1
        if self._at_once >= MAX_AT_ONCE:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                task.cancel()
                raise

    def _begin_turn(self) -> None:
        self._at_once = 0

    def _start(
        self, item: PipelineItem, ticket: Ticket[Any], place: SourceLine, stages: Callable[[], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """Finish the item of a ticket in a task."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            if not ticket.done():  # cancelled before its first step
                self._start(item, ticket, place, _cancelled)

        task = start_task(self._complete, item, ticket, place, stages, name="aiocuda-pipeline-item")
        self._tasks[task] = None
        task.add_done_callback(ended)
        return task

    async def _complete(
        self, item: PipelineItem, ticket: Ticket[Any], place: SourceLine, stages: Callable[[], Awaitable[None]]
    ) -> None:
        """Finish the item of a ticket, and set the ticket's outcome."""
        loop = _get_running_loop()
        try:
            result = await self._finish(item, stages(), place)
        except asyncio.CancelledError:
            ticket.fail(self._withdrawn(item), reports=False)
        except BaseException as error:
            if _get_running_loop() is not loop:
                raise
            failure = ticket.fail(error, reports=bool(reportable([error], self._resources.device)))
            if failure is not None and isinstance(error, SkippedError):
                self._skipped.append(failure)
            del failure
            if stages is not _nothing and isinstance(error, LEAVES_LOOP):  # otherwise `submit` has raised it
                raise
        else:
            ticket.succeed(result)
        finally:
            self._end()
            del ticket  # the traceback of a failure refers to this frame: else the ticket would hold itself

    def _withdrawn(self, item: PipelineItem) -> ClosedError:
        name = f"item {item.index} of the pipeline, counted from 0,"
        if self._resources.scope.left:
            return ClosedError(f"{name} was ended early: an exception, or a cancellation, has left the pipeline")
        return ClosedError(f"{name} was cancelled")

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[list[PipelineItem]]:
        """Declare a wait in a stage of this pipeline, or in another function that holds a place, in a block.

        The block appends its item to the list when it has begun.
        """
        holder, resources = HOLDER.get(), self._resources
        begun: list[PipelineItem] = []
        if holder is None:
            yield begun
            return

        def can_end(stuck: Collection[asyncio.Task[Any]]) -> bool:
            last, items = resources.blocked_by(stuck)
            if begun:
                return begun[0].number <= last
            if what != "a slot" and last < math.inf:
                return False  # it could not pass that item
            return sum(item.number > last or item in items for item in self._items) < resources.ring.depth

        text = f"{what} of the pipeline {'+'.join(resources.plan.names)}, in {holder.name}: use another pipeline for it"
        with holder.waiting(text, asyncio.get_running_loop().create_future(), can_end):
            yield begun

    # -- from the slot to the end --------------------------------------------------------------------------------

    async def _begin(self, value: Any, *, has_ticket: bool = False) -> PipelineItem:
        """Wait for a slot, and put an item into it. The streams are open until `_finish`."""
        resources = self._resources
        self.unfinished += 1
        if not self._is_watched and resources.device.driver.now is time.monotonic:
            self._is_watched = True
            LoopWatch.of(asyncio.get_running_loop()).watch_while(self._has_items)
        try:
            await resources.__aenter__()
            try:
                slot = await resources.ring.reserve()
                if has_ticket and resources.scope.left:
                    resources.release(slot)
                    raise resources.scope.closed_error()
                item = PipelineItem(resources, overlap=True, may_skip=False)
                item.begin(slot, value, self._index, resources.now())
                self._items[item] = None
            except BaseException:
                await resources.__aexit__()
                raise
        except BaseException:
            self._end()
            raise
        self._index += 1
        return item

    async def _finish(self, item: PipelineItem, stages: Awaitable[None], place: SourceLine | None = None) -> Any:
        """Wait until all stages have been called and all work of the item is done; free the slot; return the result.

        The caller then calls `_end`.
        """
        resources = self._resources
        try:
            try:
                await stages
                result = await item.finish()
            except BaseException:
                if _get_running_loop() is resources.scope.loop:  # else the coroutine is collected, and cannot await
                    await finish_shielded(settle_items([item], resources, place or SourceLine.of_caller()))
                raise
            else:
                item.end()
                resources.ring.end(item.slot)
                return result
            finally:
                self._items.pop(item, None)
                await resources.__aexit__()
        except BaseException as error:
            self._has_failed = self._has_failed or not isinstance(error, (SkippedError, asyncio.CancelledError))
            report_unraised(error, (item.failure,), resources.device)
            raise

    def _has_items(self) -> bool:
        self._is_watched = self.unfinished > 0
        return self._is_watched

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.unfinished -= 1
        if self._has_failed:  # the failures of skipped items are not reported beside the root failure
            for failure in self._skipped:
                failure.poison.delivered = True
        if not self.unfinished or self._has_failed:
            self._skipped.clear()
        if not self.unfinished:
            self._has_failed = False
            self._wake()

    def withdraw(self) -> None:
        """End the items of tickets early: their stages are cancelled, and the tickets fail with `ClosedError`."""
        self._wake()  # from now on, the end waits until the deadline
        for task in self._tasks:
            task.cancel()

    async def wait(self, seconds: Callable[[], float | None]) -> None:
        """Wait until there is no unfinished item, for at most so many seconds from the last call of `withdraw` on."""
        while self.unfinished:
            self._ended = asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait({self._ended}, timeout=seconds())
            if not done:
                break

    def _wake(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def _nothing() -> None:
    """The stages of an item that were called before."""


async def _cancelled() -> None:
    """The stages of an item that was cancelled before they were called."""
    raise asyncio.CancelledError
