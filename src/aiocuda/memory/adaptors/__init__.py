"""Adaptors: resources that stand on another one, each with one job. They compose in any order."""

from __future__ import annotations

from .adaptor import Adaptor
from .failing import FailingResource
from .limit import LimitResource
from .scrubbing import ScrubbingResource
from .sizes import SizeClassResource
from .statistics import ResourceStatistics, StatisticsResource
from .tracking import Allocation, TrackingResource

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
