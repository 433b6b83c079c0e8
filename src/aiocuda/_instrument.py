"""Instrument: hooks for every operation of a device. By default a device has none, and calls none."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Instrument"]


class Instrument(Protocol):
    """Hooks that are called in the event loop. They must return at once and must not raise."""

    #: Record a timing event before and after every operation, for `on_resolve`.
    timing: bool

    def on_submit(self, operation: Any) -> None:
        """Called when a stream has accepted the operation."""

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        """Called when it has finished. ``start`` and ``end`` are timing events, valid during the call; 0 for none."""
