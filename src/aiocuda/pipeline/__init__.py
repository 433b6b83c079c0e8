"""Pipelines: items that go through named stages, several at a time.

Files
    `slot`       one place of a ring: state, buffers
    `ring`       `TripleBuffer`: slots that go round
    `stage`      a function of a slot, with a name
    `turnstile`  keeps items in order where stages await
    `iteration`  one item's way through the stages
    `run`        a source's items, several at a time
    `stats`      what is measured
    `pipeline`   all of it together
"""

from __future__ import annotations

from .pipeline import Pipeline
from .ring import TripleBuffer
from .slot import Slot
from .stage import Stage
from .stats import PipelineStats

__all__ = ["Pipeline", "PipelineStats", "Slot", "Stage", "TripleBuffer"]
