"""Streams: `Stream` enqueues work on a device; `Checker` finds accesses of two streams that nothing orders."""

from __future__ import annotations

from .device.streams import CheckedStream, Checker, Conflict, Stream

__all__ = ["CheckedStream", "Checker", "Conflict", "Stream"]
