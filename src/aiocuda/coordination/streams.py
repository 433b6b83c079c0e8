"""Streams: which stream an operation is given to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..completion.lane import Lane
from ..device import Device
from ..errors import ClosedError
from ..types import Priority, caller
from .node import Node

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
        By lane, what was given and is not known to have passed, in order; lanes of the user's own streams too.
    held : dict
        Lanes on which somebody else enqueues just now.
    """

    __slots__ = ("_closing", "_device", "_groups", "_most", "given", "held")

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = {"upload": 1, "compute": most, "download": 1}
        self._groups: dict[tuple[str, Priority], dict[Lane, Stream]] = {}
        self.given: dict[Lane, deque[Node[Any]]] = {}
        self.held: dict[Lane, int] = {}
        self._closing = False

    def refuse(self) -> None:
        """Let no verb of a stream in any more, but for those of blocks that have been entered."""
        self._closing = True
        for stream in self.everyone():
            if stream._lane not in self.held:
                stream._lane.refuse(draining=True)

    @staticmethod
    def closed() -> ClosedError:
        """The error of what a coordinator is asked for that closes, or has been closed."""
        return ClosedError(
            "this coordinator has been closed, by itself or with its device: make another one by "
            "aiocuda.AsyncCoordinator(device)"
        )

    def hold(self, lane: Lane) -> None:
        """A block begins, whose task enqueues on this stream."""
        self.held[lane] = self.held.get(lane, 0) + 1
        if self._closing and lane.draining and not self._device._closing:
            lane.closed = False

    def let_go(self, lane: Lane) -> None:
        """The block has ended."""
        self.held[lane] -= 1
        if not self.held[lane]:
            del self.held[lane]
            if self._closing and self.owns(lane):
                lane.refuse(draining=True)

    def first(self, role: str) -> Stream:
        """The one of normal priority that there is always."""
        group = self._group(role, "normal")
        if self._closing and not group:
            raise self.closed()
        return next(iter(group.values())) if group else self._make(group, role, "normal")

    def everyone(self) -> list[Stream]:
        """All that were made."""
        return [stream for group in self._groups.values() for stream in group.values()]

    def owns(self, lane: Lane) -> bool:
        """Is nothing enqueued there but by the coordinator?"""
        return any(lane in group for group in self._groups.values())

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
                lane = operation._lane
                if lane in group and lane not in held and not lane.queue.entries:
                    behind = given.get(lane)
                    if behind and behind[-1] is other:
                        return group[lane]
            looked_at += 1
            if looked_at == MOST_LOOKED_AT:
                break
        best: Stream | None = None
        least = 0
        for lane, stream in group.items():
            if lane in held:
                continue
            load = len(given.get(lane, ())) + (MOST_LOOKED_AT if lane.queue.entries else 0)
            if not load:
                return stream
            if best is None or load < least:
                best, least = stream, load
        if best is None or len(group) < most:
            return self._make(group, node._role, level)
        return best

    def _group(self, role: str, level: Priority) -> dict[Lane, Stream]:
        group = self._groups.get((role, level))
        if group is None:
            group = self._groups[role, level] = {}
        return group

    def _make(self, group: dict[Lane, Stream], role: str, level: Priority) -> Stream:
        device = self._device
        site = device._sites.here() if device._closing and not device.closed else device._site()
        stream = device._open_stream(site, level, f"{role}-{level}-{len(group)}", caller(1))
        if self._closing:
            stream._lane.refuse(draining=True)
        group[stream._lane] = stream
        return stream
