"""Observing: what streams did, when, and how long."""

from __future__ import annotations

from .profile import OperationProfile, ProfileReport, StreamProfile
from .profiler import StreamProfiler
from .timeline import Timeline, TimelineSpan

__all__ = ["OperationProfile", "ProfileReport", "StreamProfile", "StreamProfiler", "Timeline", "TimelineSpan"]
