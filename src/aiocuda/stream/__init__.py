"""Streams: the verbs that a stream offers, and what each of them asks first."""

from __future__ import annotations

from ._checked import CheckedStream
from ._checker import Checker, Conflict
from ._stream import Stream

__all__ = ["CheckedStream", "Checker", "Conflict", "Stream"]
