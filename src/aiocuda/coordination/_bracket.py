"""Bracket: what somebody else enqueues on a stream, as one coordinated operation."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..completion._failure import raisable
from ..errors import BusyError
from ._checking import end, said
from ._dependencies import Access
from ._node import OPEN, WAITING, Kind, Node

if TYPE_CHECKING:
    from ..stream import Stream
    from ._scheduler import Scheduler

__all__ = ["Bracket"]


class Bracket(Node[Any]):
    """An operation that lasts as long as an ``async with`` block.

    Made by `AsyncCoordinator.operation`. The block begins when the operation has a place and its dependencies are in
    streams; they need not be done. What is enqueued on `stream` inside, by this library or by another one, comes behind
    them, and what depends on the bracket comes behind all of it. ``bracket.set_result(value)`` says what awaiting it
    gives.
    """

    def __init__(
        self, scheduler: Scheduler, number: int, kind: Kind, rank: int, description: str, stream: Stream | None,
        registered_at: float, accesses: list[Access], after: list[Node[Any]],
    ) -> None:  # fmt: skip
        super().__init__(scheduler, number, kind, "bracket", rank, description, stream, registered_at)
        self._noted: tuple[list[Access], list[Node[Any]]] | None = (accesses, after)
        scheduler.unentered[self] = None

    def set_result(self, value: object) -> None:
        """What awaiting it gives."""
        self._value = value

    async def __aenter__(self) -> Self:
        scheduler = self._scheduler
        scheduler.check()
        noted, self._noted = self._noted, None
        if noted is None:
            raise BusyError(f"{self!r} has been entered before: make another one by coordinator.operation()")
        if self._state != WAITING:
            raise raisable(self._withdrawn())
        accesses, after = noted
        scheduler.unentered.pop(self, None)
        for other in after:
            self._come_behind(other, True)
        scheduler.graph.note(self, accesses)
        if scheduler.device.checker is not None:
            self._said = said(scheduler.device.checker, accesses)
        self._role = "compute"
        scheduler.register(self)
        try:
            if self._state < OPEN:
                await _Until(self, OPEN)
        except BaseException:
            if self._state == OPEN:
                self._end(None, self._withdrawn())
            else:
                self.abandon()
            raise
        if self._state != OPEN:
            cause = self._cause
            if cause is not None:
                self._deliver(cause)
            raise raisable(self._error if self._error is not None else self._withdrawn())
        scheduler.open[self] = asyncio.current_task()
        scheduler.watch.look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error, error)

    def _end(self, error: BaseException | None, why: BaseException | None) -> None:
        """What it enqueued is all; with an error, nobody can rely on it."""
        scheduler = self._scheduler
        scheduler.open.pop(self, None)
        stream = self.stream
        assert stream is not None
        queue = stream._queue
        scheduler.streams.let_go(queue)
        if why is not None:
            self._failed_with(why, raised=error is not None)
            assert self._cause is not None
            self._deliver(self._cause)  # it goes on through the block
        late = queue.closed
        try:
            if late:
                queue.let_in()  # unless it was left meanwhile: there is nothing to stand in
            if scheduler.driver.fault is not None:
                queue.check()
            # A mark would overtake what is still on the host; but it is never skipped.
            operation = queue.submit_marker() if why is not None and not queue.host_queue.entries else end(self, queue)
        except Exception as refusal:
            scheduler.in_flight -= 1
            self._state = WAITING
            failure = refusal if self._error is None else self._error
            scheduler.fail(self, failure, delivered=True, raised=failure is error)
            scheduler.advance()
            if error is None:
                raise
            return
        finally:
            if late:
                queue.closed = True
        spoiled = queue.poison
        if why is not None and spoiled is not None:
            # Its stream has skipped something, waits for what it comes behind perhaps: it stands for those by itself.
            scheduler.take_over(spoiled)
            scheduler.in_flight -= 1
            scheduler.stand_in(self, operation)
        else:
            scheduler.accept(self, queue, operation)
        scheduler.advance()


class _Until:
    """An awaitable: a node has come so far."""

    __slots__ = ("_least", "_node")

    def __init__(self, node: Node[Any], least: int) -> None:
        self._node = node
        self._least = least

    def __await__(self) -> Any:
        return self._node._scheduler.until(self._node, self._least)
