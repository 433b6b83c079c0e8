"""The managed context: a device, its streams, pool, coordinator and pipelines, as one object.

Files
    `_context`  `ManagedContext`, which makes and closes the parts, and `ContextStatistics`
    `_steps`    `StepConfig` and `StepTelemetry`, the input and the result of one step; `StepRunner`, which runs steps
"""

from __future__ import annotations

from ._context import ContextStatistics, ManagedContext, Purpose
from ._steps import StepConfig, StepTelemetry

__all__ = ["ContextStatistics", "ManagedContext", "Purpose", "StepConfig", "StepTelemetry"]
