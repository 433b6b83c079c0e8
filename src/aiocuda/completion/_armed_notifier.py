"""ArmedNotifier: a notifier from the moment it is armed until its tag has come."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation

__all__ = ["ArmedNotifier"]


class ArmedNotifier:
    """A notifier from the moment it is armed until its tag has come.

    A query may find the end of its operation earlier. It refers to the operation weakly: a result must not live until a
    late tag comes.

    Attributes
    ----------
    id, context, label
        Of the operation.
    found_at : float
        The time at which a query has found the end of the operation, before the tag; infinite if none has.
    """

    __slots__ = ("_operation", "context", "found_at", "id", "index", "label", "queue", "silent_ticks", "token")

    def __init__(self, index: int, token: int, queue: Ring, operation: StreamOperation[Any]) -> None:
        self.index = index
        self.token: int | None = token
        self.queue = queue
        self._operation = weakref.ref(operation)
        self.id = operation.id
        self.context = operation.context
        self.label = operation.label
        self.silent_ticks = 0
        self.found_at = math.inf

    @property
    def operation(self) -> Any:
        """The operation; None if nothing holds it any more."""
        return self._operation()

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation: until then, the queue holds it.

        Nothing holds the wait for work that no queue has, which may be given up before.
        """
        if self.queue.reactor is None:
            return self.found_at < math.inf
        operation = self._operation()
        return operation is None or operation.is_settled
