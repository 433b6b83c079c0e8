"""gather: one waiter for many operations."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from .._base._checks import flag
from ..errors import InvalidTypeError
from ._countdown import Countdown
from ._operation import HasOperation, Operation
from ._queued_operation import QueuedOperation
from ._state import DONE

if TYPE_CHECKING:
    from ..completion._stream_operation import StreamOperation
    from ..completion._stream_queue import StreamQueue

__all__ = ["Gathering", "gather"]

T = TypeVar("T")


def _operation(thing: object) -> Any:
    """Return the operation of an event or of another object that has one."""
    found = getattr(thing, "operation", None)
    if isinstance(found, QueuedOperation):
        return found
    raise InvalidTypeError(
        f"aiocuda.gather takes operations and events, not {type(thing).__name__}: unpack a list, gather(*operations), "
        "and use asyncio.gather for coroutines"
    )


class Gathering(Awaitable[T]):
    """The awaitable that `gather` returns."""

    __slots__ = ("_operations", "_return_exceptions")

    def __init__(self, operations: list[StreamOperation[Any]], return_exceptions: bool) -> None:
        self._operations = operations
        self._return_exceptions = return_exceptions

    def __await__(self) -> Generator[Any, None, T]:
        # The loops are in methods: there the compiled form knows the types.
        queues: dict[StreamQueue, StreamOperation[Any]] = {}
        waiting = self._unfinished(queues)
        if waiting and (self._return_exceptions or len(waiting) == len(self._operations) or self._failed() is None):
            countdown = Countdown(waiting[0].queue.loop.create_future(), len(waiting), not self._return_exceptions)
            self._wait_by(countdown, waiting)
            for queue in queues:
                queue.attend()
            try:
                yield from countdown.future
            finally:
                if countdown.left:
                    self._leave(countdown, waiting)
        elif self._has_to_yield(queues):
            yield
        return self._outcomes()  # type: ignore[return-value]  # `cast` is a call

    def _unfinished(self, queues: dict[StreamQueue, StreamOperation[Any]]) -> list[StreamOperation[Any]]:
        """Return the unfinished operations, after a query of their streams.

        Parameters
        ----------
        queues
            Gets the last operation of each queue with unfinished ones.
        """
        waiting = []
        for operation in self._operations:
            if operation.status < DONE:
                waiting.append(operation)
                queues[operation.queue] = operation
            elif operation.extra is not None:
                operation.report_await()
        if not waiting:
            return waiting
        asks = True
        for queue, last in queues.items():
            queue.check_loop()
            if asks and not queue.watch.polling:
                queue.linger(last, waiting)
                asks = last.status >= DONE  # else the reactor asks the other queues, too
        left = []
        for operation in waiting:
            if operation.status < DONE:
                left.append(operation)  # noqa: PERF401 - the compiled form knows the type of a loop's variable
        return left

    def _wait_by(self, countdown: Countdown, waiting: list[StreamOperation[Any]]) -> None:
        """Make a countdown the waiter of these operations."""
        for operation in waiting:
            if operation.waiters is None:
                operation.waiters = countdown
            else:
                countdown.left -= not operation.add_waiter(countdown)  # the operation may be given twice

    def _leave(self, countdown: Countdown, waiting: list[StreamOperation[Any]]) -> None:
        """Remove the countdown from the operations that are unfinished."""
        for operation in waiting:
            if operation.status < DONE:
                operation.remove_waiter(countdown)

    def _has_to_yield(self, queues: Mapping[StreamQueue, object]) -> bool:
        """Count a `gather` that does not suspend, as an await of one operation. ``queues`` had unfinished ones."""
        if queues:
            return next(iter(queues)).reactor.turn.is_over()
        operations = self._operations
        return bool(operations) and operations[0].queue.reactor.turn.is_over_for_task()

    def _outcomes(self) -> list[Any]:
        """Return the results, in the order of the operations; raise the first failure, or return failures, too."""
        outcomes = []
        for operation in self._operations:
            if operation.status == DONE:
                outcomes.append(operation.value)
            elif self._return_exceptions:
                outcomes.append(operation.exception())
            else:
                failed = self._failed()
                assert failed is not None
                failed.result()  # raises
        return outcomes

    def _failed(self) -> StreamOperation[Any] | None:
        """Return the operation whose failure is raised: of those that have failed, the one enqueued first."""
        failed = [operation for operation in self._operations if operation.status > DONE]
        return min(failed, key=lambda operation: operation.id) if failed else None


@overload
def gather(
    *operations: Operation[T] | HasOperation, return_exceptions: Literal[False] = False
) -> Gathering[list[T]]: ...


@overload
def gather(*operations: Operation[T] | HasOperation, return_exceptions: bool) -> Gathering[list[T | BaseException]]: ...


def gather(*operations: Any, return_exceptions: bool = False) -> Gathering[Any]:
    """Return an awaitable of the results of several operations, in the order of the arguments.

    It behaves like `asyncio.gather`, but uses one waiter for all operations; asyncio wraps each of them in a task,
    which takes about 3 µs. The first failure is raised immediately, and the other operations continue. Cancellation
    ends only this wait.

    Parameters
    ----------
    *operations
        `Operation` or `Event`, of one loop, and of any streams and devices.
    return_exceptions
        Return failures in place of results, and wait for all operations.

    Returns
    -------
    Awaitable of a list.
    """
    found: list[Any] = [thing if isinstance(thing, QueuedOperation) else _operation(thing) for thing in operations]
    return Gathering(found, flag(return_exceptions, "return_exceptions"))
