"""Pipelines: items that go through named stages, several at a time. See its README.md in the repository."""

from __future__ import annotations

from ._advice import PipelineAdvice
from ._launch import Launch, SlotBuffer
from ._pipeline import Pipeline
from ._ring import TripleBuffer
from ._run import PipelineRun
from ._slot import Slot
from ._stage import Stage
from ._statistics import Bottleneck, PipelineStats
from ._ticket import Ticket

__all__ = [
    "Bottleneck",
    "Launch",
    "Pipeline",
    "PipelineAdvice",
    "PipelineRun",
    "PipelineStats",
    "Slot",
    "SlotBuffer",
    "Stage",
    "Ticket",
    "TripleBuffer",
]
