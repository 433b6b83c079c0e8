"""Completion: operations, and how they are resolved on the event loop.

Its README.md in the repository describes the modules.
"""

from __future__ import annotations

from .._core import INTERNAL, Gathering, Operation, gather
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
from ._methods import KINDS, METHODS
from ._policy import CompletionPolicy

__all__ = [
    "INTERNAL",
    "KINDS",
    "METHODS",
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
]
