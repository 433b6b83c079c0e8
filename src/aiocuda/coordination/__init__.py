"""Coordination: graphs of operations, ordered on the device."""

from __future__ import annotations

from .bracket import Bracket
from .coordinator import AsyncCoordinator
from .node import Node
from .statistics import CoordinatorStatistics

__all__ = ["AsyncCoordinator", "Bracket", "CoordinatorStatistics", "Node"]
