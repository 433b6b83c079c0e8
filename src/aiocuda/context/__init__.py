"""The managed context: a device, its streams, pool, coordinator and pipelines, as one object.

Files
    `_context`      `ManagedContext`, which makes and closes the parts, and `ContextStatistics`
    `_step`         `StepConfig` and `StepTelemetry`: the input and the result of one step
    `_step_runner`  `StepRunner`: three steps at a time, for `ManagedContext.triple_buffered_step`
"""

from __future__ import annotations

from ._context import ContextStatistics, ManagedContext, Purpose
from ._step import StepConfig, StepTelemetry

__all__ = ["ContextStatistics", "ManagedContext", "Purpose", "StepConfig", "StepTelemetry"]
