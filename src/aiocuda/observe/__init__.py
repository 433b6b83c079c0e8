"""Observing: what streams did, when, and how long."""

from __future__ import annotations

from .._instrument import Instrument
from ._profile import OperationProfile, ProfileReport, StreamProfile
from ._profiler import StreamProfiler
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
