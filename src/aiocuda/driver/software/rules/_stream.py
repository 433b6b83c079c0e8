"""A first-in-first-out queue of commands."""

from __future__ import annotations

from collections import deque

from ._command import Command

__all__ = ["Stream"]


class Stream:
    """Commands of one device that run one after the other.

    The head of ``queue`` is the command that is running, ready or next; a done command is not in it.
    """

    __slots__ = ("device", "exported", "handle", "is_default", "name", "priority", "queue")

    def __init__(self, handle: int, device: int, priority: int, is_default: bool = False) -> None:
        self.handle = handle
        self.device = device
        self.priority = priority  # a smaller number goes first
        self.queue: deque[Command] = deque()
        self.name: int | None = None  # under which its owner uses it; the default stream has no owner
        self.exported = False  # its handle was given out, so it is never destroyed
        self.is_default = is_default  # its device's one: several handles may name it, and nobody has made it

    @property
    def is_idle(self) -> bool:
        """Is everything that the stream accepted done?"""
        return not self.queue

    def __repr__(self) -> str:
        return f"<stream {self.handle} of device {self.device}, {len(self.queue)} queued>"
