"""Pools that lend streams and events of one device. See its README.md in the repository."""

from __future__ import annotations

from ._device_watch import DeviceWatch as DeviceWatch
from ._device_watch import check_device as check_device
from ._events import EventPool, EventPoolStatistics
from ._lease import LeasedStream
from ._place import Place
from ._strategy import NewStream, Offer, Optimisation, Strategy
from ._streams import StreamPool, StreamPoolStatistics
from ._workload import Workload, WorkloadStatistics, classify

#: What users find. What is imported by ``as`` is for other packages of aiocuda.
__all__ = [
    "EventPool", "EventPoolStatistics", "LeasedStream", "NewStream", "Offer", "Optimisation", "Place", "Strategy",
    "StreamPool", "StreamPoolStatistics", "Workload", "WorkloadStatistics", "classify",
]  # fmt: skip
