"""Pools that lend streams and events of one device to the coroutines of one event loop.

Files
    `_streams`       `StreamPool` and its statistics
    `_lease`         `LeasedStream`: a stream on loan
    `_place`         `Place`: a stream of a pool, as strategies see it
    `_requests`      the queue of requests that wait for a stream
    `_strategy`      how a pool chooses a stream; `StreamPool.optimize`
    `_workload`      kinds of work, and a record of their durations
    `_events`        `EventPool`
    `_device_watch`  a timer that fails the waiting tasks after the device was closed or has faulted
"""

from __future__ import annotations

from ._events import EventPool, EventPoolStatistics
from ._lease import LeasedStream
from ._place import Place
from ._strategy import NewStream, Offer, Optimisation, Strategy
from ._streams import StreamPool, StreamPoolStatistics
from ._workload import Workload, WorkloadStatistics, classify

__all__ = [
    "EventPool", "EventPoolStatistics", "LeasedStream", "NewStream", "Offer", "Optimisation", "Place", "Strategy",
    "StreamPool", "StreamPoolStatistics", "Workload", "WorkloadStatistics", "classify",
]  # fmt: skip
