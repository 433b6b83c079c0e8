"""Pools: what is lent out and comes back."""

from __future__ import annotations

from .advice import Optimisation
from .events import EventPool, EventPoolStatistics
from .lease import LeasedStream
from .place import Place
from .statistics import StreamPoolStatistics
from .strategy import NewStream, Offer, Strategy
from .streams import StreamPool
from .workload import Workload, WorkloadStatistics, classify

__all__ = [
    "EventPool",
    "EventPoolStatistics",
    "LeasedStream",
    "NewStream",
    "Offer",
    "Optimisation",
    "Place",
    "Strategy",
    "StreamPool",
    "StreamPoolStatistics",
    "Workload",
    "WorkloadStatistics",
    "classify",
]
