"""Coordination: several streams that work together."""

from __future__ import annotations

from .barrier import StreamBarrier
from .group import StreamGroup
from .member import GroupStream

__all__ = ["GroupStream", "StreamBarrier", "StreamGroup"]
