"""Pipelines: items that go through named stages, several at a time.

Files
    `slot`       one place of a ring: state, buffers
    `ring`       `TripleBuffer`: slots that go round
    `stage`      a function of a slot, with a name
    `launch`     a kernel with its configuration and buffers, as such a function
    `replay`     a stage's work for one slot, captured
    `plan`       which stage comes behind which, and which share a stream
    `ordered_gate`  keeps items in order where stages await
    `iteration`  one item's way through the stages
    `run`        a source's items, several at a time
    `results`    `PipelineRun`: the results of a run, as its consumer iterates over them
    `track`      what all iterations share
    `meter`      what is measured
    `stats`      what is told of it
    `advice`     which depth and streams it wants
    `pipeline`   all of it together
"""

from __future__ import annotations

from ._advice import PipelineAdvice
from ._launch import Launch, SlotBuffer
from ._pipeline import Pipeline
from ._results import PipelineRun
from ._ring import TripleBuffer
from ._slot import Slot
from ._stage import Stage
from ._statistics import Bottleneck, PipelineStats

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
    "TripleBuffer",
]
