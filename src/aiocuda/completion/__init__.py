"""Completion: operations, and how they are resolved on the event loop.

Its README.md in the repository describes the modules.
"""

from __future__ import annotations

from .._core import INTERNAL as INTERNAL
from .._core import Gathering, Operation, gather
from ._instrument import (
    BatchListener,
    EndedRequest,
    Instrument,
    Listener,
    Outcome,
    ResolveListener,
    StartedBatch,
    SubmitListener,
)
from ._methods import KINDS as KINDS
from ._methods import METHODS as METHODS
from ._wait import wait
from ._wait_rule import CompletionPolicy

__all__ = [
    "BatchListener",
    "CompletionPolicy",
    "EndedRequest",
    "Gathering",
    "Instrument",
    "Listener",
    "Operation",
    "Outcome",
    "ResolveListener",
    "StartedBatch",
    "SubmitListener",
    "gather",
    "wait",
]
