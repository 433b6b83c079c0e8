"""Observing: what streams did, and when."""

from __future__ import annotations

from .timeline import Timeline, TimelineSpan

__all__ = ["Timeline", "TimelineSpan"]
