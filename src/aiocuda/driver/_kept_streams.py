"""`KeptStreams`: streams that other libraries may use. They are not destroyed, but used again when they are idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["MOST_TESTED", "KeptStreams"]

Kept = TypeVar("Kept")

#: The streams that one `KeptStreams.take` tests. Without a limit, opening n streams while n are busy takes n² queries.
MOST_TESTED = 8


class KeptStreams(Generic[Kept]):
    """A driver's streams that have no owner and must not be destroyed, by device and priority.

    Another library that has received a stream's handle may use it at any later time: PyTorch records an event on it
    when it frees a pinned tensor. A driver puts such a stream here instead of destroying it.

    All methods are thread-safe: each step is one operation of a deque.
    """

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], deque[Kept]] = {}

    def put(self, device: int, priority: int, stream: Kept) -> None:
        """Keep a stream for the next owner."""
        self._streams.setdefault((device, priority), deque()).append(stream)

    def take(self, device: int, priority: int, is_free: Callable[[Kept], bool]) -> Kept | None:
        """Remove and return the stream that was put first and for which ``is_free`` is true, or None."""
        streams = self._streams.get((device, priority))
        if streams is None:
            return None
        for _ in range(min(len(streams), MOST_TESTED)):
            try:
                stream = streams.popleft()
            except IndexError:
                return None  # another thread took the last one
            if is_free(stream):
                return stream
            streams.append(stream)
        return None

    def __len__(self) -> int:
        return sum(len(streams) for streams in list(self._streams.values()))
