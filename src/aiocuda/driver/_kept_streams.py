"""Streams that other libraries know: they are not destroyed, and serve again once they are idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["MOST_ASKED", "KeptStreams"]

Kept = TypeVar("Kept")

#: Streams that one `KeptStreams.take` looks at. Without a limit, opening n streams beside n busy ones takes n² queries.
MOST_ASKED = 8


class KeptStreams(Generic[Kept]):
    """A driver's streams that have no owner and must not be destroyed, by device and priority.

    Another library that has received a stream's handle may use it at any later time: PyTorch records an event on it
    when it frees a pinned tensor. A driver puts such a stream here instead of destroying it.

    Several threads may call every method: each step is one operation of a deque.
    """

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], deque[Kept]] = {}

    def put(self, device: int, priority: int, stream: Kept) -> None:
        """Keep a stream for the next owner."""
        self._streams.setdefault((device, priority), deque()).append(stream)

    def take(self, device: int, priority: int, is_free: Callable[[Kept], bool]) -> Kept | None:
        """The stream without an owner for the longest time that ``is_free``, or None."""
        streams = self._streams.get((device, priority))
        if streams is None:
            return None
        for _ in range(min(len(streams), MOST_ASKED)):
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
