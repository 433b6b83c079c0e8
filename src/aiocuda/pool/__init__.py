"""Pools: what is lent out and comes back."""

from __future__ import annotations

from ._advice import Optimisation
from ._events import EventPool, EventPoolStatistics
from ._lease import LeasedStream
from ._place import Place
from ._statistics import StreamPoolStatistics
from ._strategy import NewStream, Offer, Strategy
from ._streams import StreamPool
from ._workload import Workload, WorkloadStatistics, classify

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
