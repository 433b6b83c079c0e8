"""Bracket: an ``async with`` block that counts as one coordinated operation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .._base._failure import raisable
from .._base._label import LABEL
from .._base._mistakes import lacks, refuses
from ..completion import Operation
from ..errors import BusyError
from ..lowlevel import queue_of
from ._accesses import enqueue_end
from ._node import Node, NodePriority
from ._scheduled_node import OPEN, ScheduledNode

if TYPE_CHECKING:
    from ..memory import DeviceBuffer
    from ..stream import Stream

__all__ = ["Bracket", "scheduled"]


@lacks
@refuses(__enter__="is entered by `async with`, not `with`: `async with coordinator.operation(kind) as bracket`")
class Bracket(Node[Any]):
    """A `Node` that lasts as long as an ``async with`` block.

    `AsyncCoordinator.operation` creates and registers brackets. The block begins when a place is free and the
    dependencies have been submitted; they need not be done. Inside the block, any library can enqueue work on `stream`.
    That work runs after the dependencies, and nodes that depend on the bracket run after all of it.
    ``bracket.set_result(value)`` sets the result of awaiting the bracket.

    A bracket that is dropped before a task has entered it is withdrawn, as by `abandon`: nodes that need it are
    skipped. The same happens when the coordinator closes.
    """

    def __init__(self, node: ScheduledNode[Any]) -> None:
        #: The scheduler and other nodes refer to this node only: they must not keep the bracket.
        self._node = node
        node.bracket = weakref.ref(self)
        self.id = node.id
        self.kind = node.kind
        self.description = node.description
        self.label = node.label
        self.registered_at = node.registered_at
        self._entered = False
        self._label_before: contextvars.Token[str | None] | None = None

    def __del__(self) -> None:
        if not self._entered:
            self._node.scheduler.drop(self._node)

    def set_result(self, value: object) -> None:
        """Set the result of awaiting the bracket."""
        self._node.value = value

    # -- the node ------------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # `Node` declares attributes

        @property
        def stream(self) -> Stream | None:
            return self._node.stream

        @property
        def given_at(self) -> float:
            return self._node.given_at

    @property
    def priority(self) -> NodePriority:
        return self._node.priority

    @priority.setter
    def priority(self, priority: NodePriority) -> None:
        self._node.priority = priority

    @property
    def operation(self) -> Operation[Any] | None:
        return self._node.operation

    @property
    def dependencies(self) -> tuple[Node[Any], ...]:
        return self._node.dependencies

    @property
    def buffer(self) -> DeviceBuffer:
        return self._node.buffer

    @property
    def state(self) -> str:
        return self._node.state

    @property
    def seen_state(self) -> str:
        return self._node.seen_state

    def done(self) -> bool:
        return self._node.done()

    def _has_finished(self) -> bool:
        return self._node._has_finished()

    def result(self) -> Any:
        return self._node.result()

    def exception(self) -> BaseException | None:
        return self._node.exception()

    def add_done_callback(
        self, fn: Callable[[Node[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        self._node.add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Node[Any]], object]) -> int:
        return self._node.remove_done_callback(fn)

    def abandon(self) -> bool:
        return self._node.abandon()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._node.__await__()

    # -- the block -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        node = self._node
        scheduler = node.scheduler
        scheduler.check()
        if self._entered:
            raise BusyError(f"{self!r} has been entered before: make another one by coordinator.operation()")
        if node.error is not None:
            raise raisable(node.error)
        self._entered = True
        try:
            scheduler.enter(node)
            if node.phase < OPEN:
                await _Until(node, OPEN)
        except BaseException:
            if node.phase == OPEN:
                self._end(None, node.withdrawal_error())
            else:
                node.abandon()
            raise
        if node.phase != OPEN:
            node.deliver_failure()
            raise raisable(node.error if node.error is not None else node.withdrawal_error())
        if self.label is not None:
            self._label_before = LABEL.set(self.label)
        scheduler.open[node] = asyncio.current_task()
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
        node = self._node
        scheduler = node.scheduler
        scheduler.open.pop(node, None)
        stream = node.stream
        assert stream is not None
        queue = queue_of(stream)
        scheduler.streams.let_go(queue)
        if reason is not None:
            node.fail_by_program(reason, raised=error is not None)
            node.deliver_failure()  # the block raises it
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
                operation = enqueue_end(queue, node.kind, node.declared)
        except Exception as refusal:
            scheduler.in_flight -= 1
            failure = refusal if node.error is None else node.error
            scheduler.fail(node, failure, delivered=True, raised=failure is error)
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
            scheduler.substitute(node, operation)
        else:
            scheduler.accept(node, queue, operation)
        scheduler.advance()


class _Until:
    """Awaitable that waits until a node has reached a phase."""

    __slots__ = ("_node", "_phase")

    def __init__(self, node: ScheduledNode[Any], phase: int) -> None:
        self._node = node
        self._phase = phase

    def __await__(self) -> Generator[Any, None, None]:
        return self._node.until(self._phase)


def scheduled(node: Node[Any]) -> Node[Any]:
    """Return the node that the scheduler and other nodes know: that of a bracket; any other node is its own."""
    return node._node if isinstance(node, Bracket) else node
