"""Coordination: graphs of operations, and several streams that work together."""

from __future__ import annotations

from .barrier import StreamBarrier
from .bracket import Bracket
from .coordinator import AsyncCoordinator
from .group import StreamGroup
from .member import GroupStream
from .node import Node
from .statistics import CoordinatorStatistics

__all__ = [
    "AsyncCoordinator",
    "Bracket",
    "CoordinatorStatistics",
    "GroupStream",
    "Node",
    "StreamBarrier",
    "StreamGroup",
]
