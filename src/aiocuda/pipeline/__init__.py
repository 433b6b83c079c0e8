"""Pipelines: items that go through named stages, several at a time. See its README.md in the repository."""

from __future__ import annotations

from ._advice import PipelineAdvice
from ._failures import root_failure as root_failure
from ._launch import Launch, SlotBuffer
from ._pipeline import Pipeline
from ._result_copies import PLAIN as PLAIN
from ._result_copies import ResultCopies as ResultCopies
from ._ring import PipelineRing as PipelineRing
from ._ring import TripleBuffer
from ._run import PipelineRun
from ._slot import Slot
from ._slot import memory_of as memory_of
from ._slot_memory import SlotMemory as SlotMemory
from ._stage import OnError as OnError
from ._stage import Stage
from ._stage import check_on_error as check_on_error
from ._statistics import Bottleneck, PipelineStats
from ._ticket import Ticket

#: What users find. What is imported by ``as`` is for other packages of aiocuda.
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
