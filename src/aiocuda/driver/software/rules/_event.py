"""The last record of an event."""

from __future__ import annotations

from ._command import Command

__all__ = ["Event"]


class Event:
    """A name for "the record command enqueued last".

    Whoever waits takes ``last`` when he enqueues his wait: an event that is recorded anew afterwards moves on without
    him.
    """

    __slots__ = ("device", "handle", "last", "timing")

    def __init__(self, handle: int, device: int, timing: bool) -> None:
        self.handle = handle
        self.device = device
        self.timing = timing
        self.last: Command | None = None

    @property
    def is_done(self) -> bool:
        """Was the last record reached? An event that was never recorded is done."""
        return self.last is None or self.last.done

    def __repr__(self) -> str:
        return f"<event {self.handle} of device {self.device}, {'done' if self.is_done else 'pending'}>"
