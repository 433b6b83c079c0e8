"""Memory: buffers, the resources that they are allocated from, and staged copies between host and device.

The public names are the resources that `aiocuda.Device.memory` can use: the driver's pool, and adaptors that wrap it.
Its README.md in the repository describes the modules.
"""

from __future__ import annotations

from ._allocator import DeviceMemory
from ._buffer import DeviceBuffer
from ._pinned import PinnedBuffer
from ._resource import MemoryResource, PoolResource, Reservation
from ._unified import UnifiedBuffer
from .adaptors import (
    Adaptor,
    Allocation,
    FailingResource,
    LimitResource,
    ResourceStatistics,
    ScrubbingResource,
    SizeClassResource,
    StatisticsResource,
    TrackingResource,
)

__all__ = [
    "Adaptor",
    "Allocation",
    "DeviceBuffer",
    "DeviceMemory",
    "FailingResource",
    "LimitResource",
    "MemoryResource",
    "PinnedBuffer",
    "PoolResource",
    "Reservation",
    "ResourceStatistics",
    "ScrubbingResource",
    "SizeClassResource",
    "StatisticsResource",
    "TrackingResource",
    "UnifiedBuffer",
]
