"""ArmedNotifier: a notifier from the moment it is armed until its tag has come."""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ._stream_operation import StreamOperation
    from ._stream_queue import StreamQueue

__all__ = ["ArmedNotifier", "SettledOperation"]


class SettledOperation(NamedTuple):
    """The id, context and label of an operation that the device has finished. Holds no result."""

    id: int
    context: Context
    label: str | None
    is_settled: bool = True


class ArmedNotifier:
    """A notifier from the moment it is armed until its tag has come.

    A query may find the end of its operation earlier.
    """

    __slots__ = ("index", "operation", "queue", "silent_ticks", "token")

    def __init__(self, index: int, token: int, queue: StreamQueue, operation: StreamOperation[Any]) -> None:
        self.index = index
        self.token: int | None = token
        self.queue = queue
        self.operation: StreamOperation[Any] | SettledOperation = operation
        self.silent_ticks = 0

    def drop_result(self) -> None:
        """Hold the operation no longer if it is settled: it may have a result."""
        operation = self.operation
        if operation.is_settled and not isinstance(operation, SettledOperation):
            self.operation = SettledOperation(operation.id, operation.context, operation.label)
