"""Memory: buffers, where their bytes come from, and the staging between host and device.

What `aiocuda.Device.memory` can be made to stand on: `MemoryResource`, the pool at the bottom, and adaptors.
"""

from __future__ import annotations

from ._allocator import DeviceMemory
from ._resource import MemoryResource, PoolResource
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
    "DeviceMemory",
    "FailingResource",
    "LimitResource",
    "MemoryResource",
    "PoolResource",
    "ResourceStatistics",
    "ScrubbingResource",
    "SizeClassResource",
    "StatisticsResource",
    "TrackingResource",
]
