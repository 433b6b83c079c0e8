"""Graphs: work that is recorded once, from the verbs of streams, and launched as a whole, often.

Files
    `steps`       what one verb records, checked as the verb itself would be
    `captured`    what a verb returns meanwhile
    `recorder`    who waits for whom, over all streams of one recording
    `recording`   a stream as it is meanwhile: the same verbs, which record
    `capture`     the block in which all that happens
    `graph`       what comes of it: launches, and updates between them
    `executable`  a graph as the driver has it, and all of them on one device

A stream that records *is* another class for that time. So a stream that does not has nothing to ask, and a launch
costs what it costs without graphs.
"""

from __future__ import annotations

from ._capture import Capture
from ._captured import Captured
from ._executable import Graphs
from ._graph import Graph

__all__ = ["Capture", "Captured", "Graph", "Graphs"]
