"""Bracket: an ``async with`` block that counts as one coordinated operation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .._base._failure import raisable
from .._base._label import LABEL
from ..errors import BusyError
from ..lowlevel import queue_of
from ._accesses import Access, enqueue_end
from ._node import Kind
from ._scheduled_node import OPEN, WAITING, ScheduledNode
from ._scheduler import Scheduler

if TYPE_CHECKING:
    from ..stream import Stream

__all__ = ["Bracket"]


class Bracket(ScheduledNode[Any]):
    """A `Node` that lasts as long as an ``async with`` block.

    `AsyncCoordinator.operation` creates brackets. The block begins when a place is free and the dependencies have been
    submitted; they need not be done. Inside the block, any library can enqueue work on `stream`. That work runs after
    the dependencies, and nodes that depend on the bracket run after all of it. ``bracket.set_result(value)`` sets the
    result of awaiting the bracket.

    The accesses of a bracket count from the moment when a task enters it. Entering raises `CycleError` if an operation
    that was registered before has conflicting accesses and depends on the bracket.
    """

    scheduler: Scheduler

    def __init__(
        self, scheduler: Scheduler, number: int, kind: Kind, rank: int, description: str, stream: Stream | None,
        registered_at: float, accesses: list[Access], after: list[ScheduledNode[Any]],
    ) -> None:  # fmt: skip
        super().__init__(scheduler, number, kind, "bracket", rank, description, stream, registered_at)
        self._dependencies: tuple[list[Access], list[ScheduledNode[Any]]] | None = (accesses, after)  # until entered
        self._label_before: contextvars.Token[str | None] | None = None
        scheduler.unentered[self] = None

    def set_result(self, value: object) -> None:
        """Set the result of awaiting the bracket."""
        self.value = value

    async def __aenter__(self) -> Self:
        scheduler = self.scheduler
        scheduler.check()
        dependencies, self._dependencies = self._dependencies, None
        if dependencies is None:
            raise BusyError(f"{self!r} has been entered before: make another one by coordinator.operation()")
        if self.phase != WAITING:
            raise raisable(self.withdrawal_error())
        scheduler.unentered.pop(self, None)
        self.role = "compute"
        accesses, after = dependencies
        for other in after:
            self.depend_on(other, True)
        scheduler.register(self, accesses)
        if self.unmet and self.dependents:
            scheduler.check_entered(self)
        try:
            if self.phase < OPEN:
                await _Until(self, OPEN)
        except BaseException:
            if self.phase == OPEN:
                self._end(None, self.withdrawal_error())
            else:
                self.abandon()
            raise
        if self.phase != OPEN:
            self.deliver_failure()
            raise raisable(self.error if self.error is not None else self.withdrawal_error())
        if self.label is not None:
            self._label_before = LABEL.set(self.label)
        scheduler.open[self] = asyncio.current_task()
        scheduler.detector.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end(error, error)
        finally:
            before, self._label_before = self._label_before, None
            if before is not None:
                with contextlib.suppress(ValueError):  # another task leaves the block, and has its own variables
                    LABEL.reset(before)

    def _end(self, error: BaseException | None, reason: BaseException | None) -> None:
        """Mark the end of the enqueued work in the stream. With a ``reason``, the bracket fails.

        ``error`` is the exception that leaves the block.
        """
        scheduler = self.scheduler
        scheduler.open.pop(self, None)
        stream = self.stream
        assert stream is not None
        queue = queue_of(stream)
        scheduler.streams.let_go(queue)
        if reason is not None:
            self.fail_by_program(reason, raised=error is not None)
            self.deliver_failure()  # the block raises it
        late = False
        try:
            late = scheduler.resources.streams.let_in(queue)  # raises if the program has closed the stream
            if scheduler.driver.fault is not None:
                queue.check()
            if reason is not None and not queue.on_host:
                mark = queue.mark()  # is never skipped, but would overtake operations in the host queue
                assert mark is not None  # the stream takes new work
                operation = mark
            else:
                operation = enqueue_end(queue, self.kind, self.declared)
        except Exception as refusal:
            scheduler.in_flight -= 1
            failure = refusal if self.error is None else self.error
            scheduler.fail(self, failure, delivered=True, raised=failure is error)
            scheduler.advance()
            if error is None:
                raise
            return
        finally:
            if late:
                scheduler.resources.streams.refuse_but_accepted(queue)
        spoiled = queue.poison
        if reason is not None and spoiled is not None:
            # The stream has skipped work, perhaps the waits for prerequisites: substitutes include the prerequisites.
            scheduler.take_over(spoiled)
            scheduler.in_flight -= 1
            scheduler.substitute(self, operation)
        else:
            scheduler.accept(self, queue, operation)
        scheduler.advance()


class _Until:
    """Awaitable that waits until a node has reached a phase."""

    __slots__ = ("_node", "_phase")

    def __init__(self, node: ScheduledNode[Any], phase: int) -> None:
        self._node = node
        self._phase = phase

    def __await__(self) -> Generator[Any, None, None]:
        return self._node.until(self._phase)
