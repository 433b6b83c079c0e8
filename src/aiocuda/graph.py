"""Graphs: work that is recorded once, from the methods of streams, and launched as a whole, many times."""

from __future__ import annotations

from .device.graphs import Capture, CapturedOperation, Graph

__all__ = ["Capture", "CapturedOperation", "Graph"]
