"""Graphs: work that is recorded once, from the methods of streams, and launched as a whole, many times.

`README.md` of `aiocuda.device` describes the modules.
"""

from __future__ import annotations

from ._graph import Capture, Graph
from ._recorder import CapturedOperation

__all__ = ["Capture", "CapturedOperation", "Graph"]
