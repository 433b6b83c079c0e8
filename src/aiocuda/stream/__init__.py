"""Streams: the verbs that a stream offers, and what each of them asks first."""

from __future__ import annotations

from .checked import CheckedStream
from .checker import Checker, Conflict
from .stream import Stream

__all__ = ["CheckedStream", "Checker", "Conflict", "Stream"]
