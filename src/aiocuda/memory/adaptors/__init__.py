"""Adaptors: memory resources that wrap another one. Each has one task, and they compose in any order."""

from __future__ import annotations

from ._adaptor import Adaptor
from ._failing import FailingResource
from ._limit import LimitResource
from ._scrubbing import ScrubbingResource
from ._sizes import SizeClassResource
from ._statistics import ResourceStatistics, StatisticsResource
from ._tracking import Allocation, TrackingResource

__all__ = [
    "Adaptor",
    "Allocation",
    "FailingResource",
    "LimitResource",
    "ResourceStatistics",
    "ScrubbingResource",
    "SizeClassResource",
    "StatisticsResource",
    "TrackingResource",
]
