"""StreamView: a second object for one stream, for a pool that leases it or a group that orders it."""

from __future__ import annotations

from ._launches import Launches
from ._stream import Stream
from ._transfers import Transfers

__all__ = ["StreamView"]


class StreamView(Stream):
    """Enqueues on another `Stream`'s queue, in the same order of work, and has counters of its own.

    It is closed with that stream, and never by itself. It shares the launches that the stream has bound, and its hook.
    """

    def __init__(self, stream: Stream) -> None:
        self.device = stream.device
        self.priority = stream.priority
        self._resources = stream._resources
        self._opened_at = stream._opened_at
        self._hook = stream._hook
        self._queue = stream._queue
        self._memory = stream._memory
        self._access = stream._access
        self._launches = Launches(stream._resources, stream._queue, stream._access, bound=stream._launches.bound)
        self._transfers = Transfers(stream._resources, stream._queue, stream._access)

    def __del__(self) -> None:
        """Do nothing: the stream itself warns if it was not closed."""
