"""Profiler and timeline: how long the operations of a device take, and when they run.

Files
    `_listener`  `DeviceListener`: what `StreamProfiler` and `Timeline` share, an implementation of `Instrument`
    `_profiler`  `StreamProfiler` and its report
    `_timeline`  `Timeline`, and its trace for Perfetto
    `_drawing`   its picture as SVG
"""

from __future__ import annotations

from .._instrument import Instrument
from ._profiler import OperationProfile, ProfileReport, StreamProfile, StreamProfiler
from ._timeline import Timeline, TimelineSpan

__all__ = [
    "Instrument",
    "OperationProfile",
    "ProfileReport",
    "StreamProfile",
    "StreamProfiler",
    "Timeline",
    "TimelineSpan",
]
