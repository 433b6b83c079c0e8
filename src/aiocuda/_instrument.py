"""Instrument: what somebody who listens is told. Nobody listens by default, and then nothing is dispatched."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Instrument"]


class Instrument(Protocol):
    """Hooks called on the event loop. They must return at once and must not raise."""

    #: Record a timing event before and behind every operation, for `on_resolve`.
    timing: bool

    def on_submit(self, operation: Any) -> None:
        """A stream has accepted the operation."""

    def on_resolve(self, operation: Any, start: int, end: int) -> None:
        """It has finished. ``start`` and ``end`` are timing events that hold until this returns; 0 for none."""
