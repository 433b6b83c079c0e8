"""Completion: operations, and how they are resolved on the event loop. README.md in this directory describes it."""

from __future__ import annotations

from ._gather import gather
from ._instrument import Instrument
from ._operation import Operation
from ._policy import CompletionPolicy

__all__ = ["CompletionPolicy", "Instrument", "Operation", "gather"]
