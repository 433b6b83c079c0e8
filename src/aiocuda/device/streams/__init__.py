"""Streams: enqueue work on a device.

README.md has the files, and the places to change for a new method.
"""

from __future__ import annotations

from ._checker import Checker, Conflict
from ._stream import CheckedStream, Stream

__all__ = ["CheckedStream", "Checker", "Conflict", "Stream"]
