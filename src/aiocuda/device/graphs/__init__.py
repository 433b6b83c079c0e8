"""Graphs: work that is recorded once, from the methods of streams, and launched as a whole, many times.

Files
    `recorder`     the dependencies between all streams of one capture; the hook of a stream that records
    `nodes`        what one method records, with the checks of that method
    `graph`        a capture, and its result: launches, and updates between them
    `executable`   a graph as the driver has it

A stream that records has a hook for that time, see `aiocuda.device.streams._hook`: a launch on any other stream costs
what it costs without graphs.
"""

from __future__ import annotations

from ._graph import Capture, Graph
from ._recorder import CapturedOperation

__all__ = ["Capture", "CapturedOperation", "Graph"]
