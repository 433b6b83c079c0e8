"""The managed context: a device, and what works on it, as one object.

Files
    `step`        what one step does, and what is told of it
    `steps`       three of them at a time: `ManagedContext.triple_buffered_step`
    `statistics`  what is told of all parts
    `context`     `ManagedContext`: wiring, and nothing else
"""

from __future__ import annotations

from ._context import ManagedContext, Purpose
from ._statistics import ContextStatistics
from ._step import StepConfig, StepTelemetry

__all__ = ["ContextStatistics", "ManagedContext", "Purpose", "StepConfig", "StepTelemetry"]
