"""BoundJoin: a barrier that several streams repeat."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import AiocudaError
from ._calls import COMPILED
from ._obstacles import BARRED

if TYPE_CHECKING:
    from ._bound_call import BoundCall
    from ._lease import Lease
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["BoundJoin"]


class BoundJoin:
    """A barrier that several streams of one device and one loop repeat, with everything bound that does not change.

    The first stream waits for the others and records an event; then the others wait for that event.

    Parameters
    ----------
    queues
        Of the streams.
    waiting
        The waits of the first stream and the record of its event, as one call of the driver. It takes the events.
    recorded
        The record alone: for a first stream whose waits are made in C.
    wait
        ``wait(event)`` makes all other streams wait.
    unusual
        Makes the barrier for streams in any state.
    follow
        ``follow(queue, operation)`` makes one stream wait for an operation in any state.
    """

    __slots__ = ("_first", "_follow", "_others", "_recorded", "_unusual", "_wait", "_waiting")

    def __init__(
        self, queues: Sequence[Ring], waiting: BoundCall, recorded: BoundCall, wait: Callable[[int], None],
        unusual: Callable[[], StreamOperation[None]], follow: Callable[[Ring, StreamOperation[None]], None],
    ) -> None:  # fmt: skip
        self._first = queues[0]
        self._others = tuple(queues[1:])
        self._waiting = waiting
        self._recorded = recorded
        self._wait = wait
        self._unusual = unusual
        self._follow = follow

    def join(self) -> StreamOperation[None]:
        """Let later work of each stream wait for all earlier work of all of them."""
        first, others = self._first, self._others
        hot = first.device_hot
        if (
            _get_running_loop() is not first.loop
            or first.obstacles & BARRED
            or first.on_host
            or len(first.pending) >= hot.limit  # the events may be recorded again before there is room
            or hot.listeners is not None  # they see the operation, but not the waits before it
        ):
            return self._unusual()
        leases: list[Lease] = []
        for queue in others:
            if queue.obstacles & BARRED or queue.on_host or queue.unmarked_wait_at == queue.enqueued:
                return self._unusual()
            pending = queue.pending
            if pending:
                tail = pending[-1]
                lease = tail.lease
                if lease is None or tail.extra is not None:
                    return self._unusual()
                leases.append(lease)
        if leases:
            first.note_wait()  # also because the duration of the operation then includes the waits
        joined: StreamOperation[None]
        if COMPILED and self._waits_in_c(leases):
            joined = self._recorded.enqueue((), None)
        else:
            joined = self._waiting.enqueue([lease.handle for lease in leases], None)
        event = joined.lease
        if event is None:
            for queue in others:
                self._follow(queue, joined)
            return joined
        for queue in others:
            queue.after_wait = True  # the same as `note_wait`, without its call
            queue.unmarked_wait_at = queue.enqueued
        if not COMPILED or not self._others_wait_in_c(event):
            self._wait(event.handle)
        return joined

    def _waits_in_c(self, leases: list[Lease]) -> bool:
        """Make the first stream wait for these events. Return False if the driver has to do it, and report errors."""
        native = self._first._native
        if native is None:
            return False
        try:
            for lease in leases:
                if not native.wait(lease):
                    return False
        except AiocudaError:
            return False
        return True

    def _others_wait_in_c(self, event: Lease) -> bool:
        """Make the other streams wait for an event. Return False if the driver has to do it."""
        for queue in self._others:
            if queue._native is None or not queue._native.wait(event):
                return False
        return True
