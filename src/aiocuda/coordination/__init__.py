"""Graphs of operations, and groups of streams that work together."""

from __future__ import annotations

from ._barrier import StreamBarrier
from ._bracket import Bracket
from ._coordinator import AsyncCoordinator, CoordinatorStatistics
from ._dependencies import unfinished_nodes as unfinished_nodes
from ._group import StreamGroup
from ._group_stream import GroupStream
from ._node import PRIORITIES as PRIORITIES
from ._node import Node
from ._node import NodePriority as NodePriority
from ._node import check_priority as check_priority
from ._ready_queue import ReadyQueue as ReadyQueue

#: What users find. What is imported by ``as`` is for other packages of aiocuda.
__all__ = [
    "AsyncCoordinator",
    "Bracket",
    "CoordinatorStatistics",
    "GroupStream",
    "Node",
    "StreamBarrier",
    "StreamGroup",
]
