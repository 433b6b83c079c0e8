"""Graphs of operations, and groups of streams that work together."""

from __future__ import annotations

from ._barrier import StreamBarrier
from ._bracket import Bracket
from ._coordinator import AsyncCoordinator, CoordinatorStatistics
from ._group import StreamGroup
from ._group_stream import GroupStream
from ._node import Node

__all__ = [
    "AsyncCoordinator",
    "Bracket",
    "CoordinatorStatistics",
    "GroupStream",
    "Node",
    "StreamBarrier",
    "StreamGroup",
]
