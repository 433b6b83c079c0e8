"""Queue: the part of a stream's queue that the packages above the core use."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from .._base._failure import Poison
    from .._core import Ring
    from ._stream_operation import StreamOperation

__all__ = ["Queue", "own_queue"]


class Queue(Protocol):
    """The unfinished operations of one stream, in order, as packages above the core see them.

    `aiocuda.lowlevel.queue_of` returns it. Its attributes are read-only.
    """

    @property
    def obstacles(self) -> int:
        """0 if a new operation takes the short way. Its bits are reasons for the long way, such as ``CLOSED``."""

    @property
    def on_host(self) -> deque[StreamOperation[Any]]:
        """The operations that the stream has not accepted yet, the oldest first."""

    @property
    def poison(self) -> Poison | None:
        """The failure because of which new operations are skipped until a caller has received it."""

    def check(self) -> None:
        """Raise unless the stream takes new operations here: its loop runs, and it is open and has not faulted."""

    def check_loop(self) -> None:
        """Raise `WrongLoopError`, or `ForkedProcessError`, unless the stream's own loop runs here."""

    def end(self) -> StreamOperation[Any] | None:
        """Return an operation that represents all work so far, device-side waits too; None if that has finished."""

    def tail(self) -> StreamOperation[Any] | None:
        """Return the newest unfinished operation."""

    def ends_with(self, operation: object) -> bool:
        """Return whether an operation represents all work so far, as that of `end` does. No call of the driver."""

    def poll(self, budget: int = ...) -> int:
        """Query the driver and resolve the finished operations, in order. Return how many were resolved."""

    def resolve_to(self, operation: StreamOperation[Any]) -> None:
        """Resolve an operation and all before it without a query: later work on the device is known to be done."""

    def mark(self, *, after_end: bool = False) -> StreamOperation[Any] | None:
        """Submit an operation without a driver call. Its event comes after all work that the stream has accepted.

        Return None if nothing waits for the stream's work any more; with ``after_end``, only if it has no work left.
        """


def own_queue(queue: Queue) -> Ring:
    """Return a queue as the core sees it."""
    return cast("Ring", queue)  # it is the only kind
