"""Streams: which stream an operation is given to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .._device import Device
from .._types import Priority, caller
from ..completion._stream_queue import StreamQueue, stream_queue
from ..errors import ClosedError
from ._node import Node

if TYPE_CHECKING:
    from ..stream import Stream

__all__ = ["Streams"]

#: The stream priority of each class of operations.
LEVELS: tuple[Priority, ...] = ("high", "high", "normal", "low", "low")

#: Dependencies looked at for one whose stream can be gone on with.
MOST_LOOKED_AT = 8


class Streams:
    """A coordinator's own streams, by what they do and their priority, made when they are first needed.

    Attributes
    ----------
    given : dict
        By queue, what was given and is not known to have passed, in order; queues of the user's own streams too.
    held : dict
        Queues on which somebody else enqueues just now.
    """

    __slots__ = ("_closing", "_device", "_groups", "_most", "given", "held")

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = {"upload": 1, "compute": most, "download": 1}
        self._groups: dict[tuple[str, Priority], dict[StreamQueue, Stream]] = {}
        self.given: dict[StreamQueue, deque[Node[Any]]] = {}
        self.held: dict[StreamQueue, int] = {}
        self._closing = False

    def refuse(self) -> None:
        """Let no verb of a stream in any more, but for those of blocks that have been entered."""
        self._closing = True
        for stream in self.everyone():
            if stream_queue(stream) not in self.held:
                stream_queue(stream).refuse(draining=True)

    @staticmethod
    def closed() -> ClosedError:
        """The error of what a coordinator is asked for that closes, or has been closed."""
        return ClosedError(
            "this coordinator has been closed, by itself or with its device: make another one by "
            "aiocuda.AsyncCoordinator(device)"
        )

    def hold(self, queue: StreamQueue) -> None:
        """A block begins, whose task enqueues on this stream."""
        self.held[queue] = self.held.get(queue, 0) + 1
        if self._closing and queue.draining and not self._device._closing:
            queue.closed = False

    def let_go(self, queue: StreamQueue) -> None:
        """The block has ended."""
        self.held[queue] -= 1
        if not self.held[queue]:
            del self.held[queue]
            if self._closing and self.owns(queue):
                queue.refuse(draining=True)

    def first(self, role: str) -> Stream:
        """The one of normal priority that there is always."""
        group = self._group(role, "normal")
        if self._closing and not group:
            raise self.closed()
        return next(iter(group.values())) if group else self._make(group, role, "normal")

    def everyone(self) -> list[Stream]:
        """All that were made."""
        return [stream for group in self._groups.values() for stream in group.values()]

    def owns(self, queue: StreamQueue) -> bool:
        """Is nothing enqueued there but by the coordinator?"""
        return any(queue in group for group in self._groups.values())

    def choose(self, node: Node[Any]) -> Stream:
        """That of a dependency if this would come right behind it; else one that is idle, or will be soonest."""
        level = LEVELS[node._rank]
        group = self._group(node._role, level)
        given, held = self.given, self.held
        most = self._most[node._role]
        if most == 1 and group and not held:
            return next(iter(group.values()))
        looked_at = 0
        for other in node._needs:
            operation = other._operation
            if operation is not None:
                queue = operation.queue
                if queue in group and queue not in held and not queue.host_queue.entries:
                    behind = given.get(queue)
                    if behind and behind[-1] is other:
                        return group[queue]
            looked_at += 1
            if looked_at == MOST_LOOKED_AT:
                break
        best: Stream | None = None
        least = 0
        for queue, stream in group.items():
            if queue in held:
                continue
            load = len(given.get(queue, ())) + (MOST_LOOKED_AT if queue.host_queue.entries else 0)
            if not load:
                return stream
            if best is None or load < least:
                best, least = stream, load
        if best is None or len(group) < most:
            return self._make(group, node._role, level)
        return best

    def _group(self, role: str, level: Priority) -> dict[StreamQueue, Stream]:
        group = self._groups.get((role, level))
        if group is None:
            group = self._groups[role, level] = {}
        return group

    def _make(self, group: dict[StreamQueue, Stream], role: str, level: Priority) -> Stream:
        device = self._device
        loop_state = device._loop_states.here() if device._closing and not device.closed else device._loop_state()
        stream = device._open_stream(loop_state, level, f"{role}-{level}-{len(group)}", caller(1))
        if self._closing:
            stream_queue(stream).refuse(draining=True)
        group[stream_queue(stream)] = stream
        return stream
