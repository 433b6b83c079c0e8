"""The interfaces through which a reactor and its notifiers see stream queues and their operations."""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..errors import DeviceFault
    from ._event_leases import Lease

__all__ = ["ArmedNotifier", "WatchedOperation", "WatchedQueue"]


class NotedOperation(Protocol):
    """An operation, as a notifier sees it."""

    @property
    def id(self) -> int:
        """The operation's number."""

    @property
    def context(self) -> Context:
        """The context of the task that submitted it."""

    @property
    def label(self) -> str | None:
        """The label of the operation, for log events."""

    @property
    def is_settled(self) -> bool:
        """True if the device has finished with the operation."""


class WatchedOperation(NotedOperation, Protocol):
    """An operation, as the reactor sees it."""

    status: int
    lease: Lease | None


class WatchedQueue(Protocol):
    """A stream queue, as the reactor sees it.

    Attributes
    ----------
    active : bool
        True while the queue has unfinished operations and the watchdog looks at it.
    attended : bool
        True while an operation of the queue has a waiter, and the reactor has a plan for it.
    polling : bool
        True while the reactor queries it in each turn of the loop.
    poll_from, poll_until : float
        The plan: sleep before, park after. In seconds by the driver's clock.
    watched_since : float
        The time at which the plan was made.
    armed : ArmedNotifier or None
        The notifier that is armed for the queue.
    name : str
        The name of the stream.
    enqueued : int
        The number of operations so far.
    """

    active: bool
    attended: bool
    polling: bool
    poll_from: float
    poll_until: float
    watched_since: float
    armed: ArmedNotifier | None
    enqueued: int
    name: str

    @property
    def reactor(self) -> object:
        """The reactor that watches the queue."""

    @property
    def idle(self) -> bool:
        """True if the queue has no unfinished operation."""

    def awaited(self) -> tuple[WatchedOperation | None, float | None, float]:
        """Return the oldest operation with a waiter, its predicted end, and how far off that may be."""

    def poll(self, budget: int, *, awaited: bool = False) -> int:
        """Query the driver, with ``awaited`` for the awaited operation first, and resolve the finished operations.

        Return how many were resolved.
        """

    def is_stuck(self) -> bool:
        """Return whether the oldest operation is known to be unfinished, by one query."""

    def pump(self) -> None:
        """Submit operations of the host queue for which the stream has room."""

    def fail_all(self, fault: DeviceFault) -> None:
        """Fail every operation."""

    def name_awaited(self) -> str:
        """Return the name of the awaited operation, for errors."""


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

    def __init__(self, index: int, token: int, queue: WatchedQueue, operation: WatchedOperation) -> None:
        self.index = index
        self.token: int | None = token
        self.queue = queue
        self.operation: NotedOperation = operation
        self.silent_ticks = 0

    def drop_result(self) -> None:
        """Hold the operation no longer if it is settled: it may have a result."""
        operation = self.operation
        if operation.is_settled and not isinstance(operation, SettledOperation):
            self.operation = SettledOperation(operation.id, operation.context, operation.label)
