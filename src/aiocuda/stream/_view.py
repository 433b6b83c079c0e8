"""StreamView: another face of a stream, for whoever lends it or sets rules for it."""

from __future__ import annotations

from ..completion._stream_queue import stream_queue
from ._launches import Launches
from ._stream import Stream
from ._transfers import Transfers

__all__ = ["StreamView"]


class StreamView(Stream):
    """The same order of work as another stream's, with counters of its own.

    It is closed with the stream that it shows, and never by itself. What that one has bound is bound here too.
    """

    def __init__(self, stream: Stream) -> None:
        self.device = stream.device
        self.priority = stream.priority
        self._opened_at = stream._opened_at
        self._queue = stream_queue(stream)
        self._memory = stream._memory
        self._launches = Launches(stream.device, stream_queue(stream))
        self._launches.bound = stream._launches.bound
        self._transfers = Transfers(stream.device, stream_queue(stream))

    def __del__(self) -> None:
        """Nothing: the stream itself tells if it was left open."""
