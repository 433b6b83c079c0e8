"""Streams: enqueue work on a device.

Files
    `stream`          `Stream`, all methods that enqueue; `StreamView`, a second object for one stream
    `launches`        kernel launches, bound once and launched often
    `transfers`       copies, fills and prefetches
    `memory_access`   checks and waits before a stream uses memory for the first time
    `hook`            code in place of a stream's methods: checks of accesses, recording into a graph
    `checker`         finds unordered accesses; its hook follows the streams of a checked device
"""

from __future__ import annotations

from ._checker import Checker, Conflict
from ._stream import CheckedStream, Stream

__all__ = ["CheckedStream", "Checker", "Conflict", "Stream"]
