"""Streams: the verbs that a stream offers, and what each of them asks first."""

from __future__ import annotations

from .stream import Stream

__all__ = ["Stream"]
