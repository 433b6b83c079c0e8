"""Accesses: the last writer of each byte of a memory, and the operations that have read it since."""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

__all__ = ["Accesses", "Ranges"]

T = TypeVar("T")


class Ranges(Generic[T]):
    """Byte ranges that do not overlap, each with a value.

    A range is ``[start, stop)``. A lookup is a binary search.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, T]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def first(self, start: int, stop: int) -> T | None:
        """Return the value of the first range that overlaps these bytes."""
        first, end = _between(self._entries, start, stop)
        return self._entries[first][2] if first < end else None

    def put(self, start: int, stop: int, value: T) -> None:
        """Set the value of these bytes."""
        _replace(self._entries, start, stop, [(start, stop, value)])

    def remove(self, start: int, stop: int) -> None:
        """Remove these bytes."""
        _replace(self._entries, start, stop, [])


class Accesses(Generic[T]):
    """The last writer of each byte, and the readers since.

    Attributes
    ----------
    writers
        (start, stop, operation), sorted. The ranges never overlap, as each byte has at most one last writer.
    readers
        The ranges that each operation has read since.

    A writer waits for all recorded operations on its bytes. So these are removed: an operation that waits for the
    writer waits for them, too.
    """

    __slots__ = ("readers", "writers")

    def __init__(self) -> None:
        self.writers: list[tuple[int, int, T]] = []
        self.readers: dict[T, list[tuple[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self.writers or self.readers)

    def last_writers(self, start: int, stop: int) -> list[T]:
        """Return the last writers of these bytes."""
        writers = self.writers
        if len(writers) == 1:  # most memory is written as a whole
            begin, last, writer = writers[0]
            return [writer] if begin < stop and start < last else []
        first, end = _between(writers, start, stop)
        return [writer for _, _, writer in writers[first:end]]

    def readers_since(self, start: int, stop: int) -> list[T]:
        """Return the operations that have read any of these bytes since the last write."""
        return [
            reader
            for reader, ranges in self.readers.items()
            if any(begin < stop and start < end for begin, end in ranges)
        ]

    def read(self, start: int, stop: int, reader: T) -> None:
        """Record that an operation reads these bytes."""
        self.readers.setdefault(reader, []).append((start, stop))

    def write(self, start: int, stop: int, writer: T) -> None:
        """Record that an operation writes these bytes, after all operations that wrote or read them before."""
        writers = self.writers
        if not writers or (len(writers) == 1 and start <= writers[0][0] and writers[0][1] <= stop):
            self.writers = [(start, stop, writer)]
        else:
            _replace(writers, start, stop, [(start, stop, writer)])
        if not self.readers:
            return
        for reader, ranges in list(self.readers.items()):
            if all(stop <= begin or last <= start for begin, last in ranges):
                continue
            kept = [part for one in ranges for part in _without(one, start, stop)]
            if kept:
                self.readers[reader] = kept
            else:
                del self.readers[reader]

    def forget(self, operation: T, start: int, stop: int) -> list[tuple[int, int]]:
        """Remove an operation's accesses to these bytes; return the ranges of which it was the last writer."""
        if self.readers:
            self.readers.pop(operation, None)
        writers = self.writers
        if not writers:
            return []
        if len(writers) == 1:
            begin, last, writer = writers[0]
            if writer is not operation:
                return []
            self.writers = []
            return [(begin, last)]
        first, end = _between(writers, start, stop)
        found = writers[first:end]
        own = [(begin, last) for begin, last, writer in found if writer is operation]
        if own:
            writers[first:end] = [entry for entry in found if entry[2] is not operation]
        return own

    def outdate(self) -> None:
        """The content is now undefined. Writers count as readers from now on: they still matter for the order."""
        writers, self.writers = self.writers, []
        for start, stop, writer in writers:
            self.read(start, stop, writer)


def _between(entries: list[tuple[int, int, T]], start: int, stop: int) -> tuple[int, int]:
    """Return the entries that overlap these bytes, as a range of indices."""
    first = bisect_left(entries, (start,))  # a shorter tuple is the smaller one
    if first and entries[first - 1][1] > start:
        first -= 1
    return first, bisect_left(entries, (stop,))


def _replace(entries: list[tuple[int, int, T]], start: int, stop: int, new: list[tuple[int, int, T]]) -> None:
    """Replace the entries that overlap these bytes; keep the parts of them that lie outside."""
    first, end = _between(entries, start, stop)
    if first < end:
        begin, _, left = entries[first]
        if begin < start:
            new.insert(0, (begin, start, left))
        _, last, right = entries[end - 1]
        if last > stop:
            new.append((stop, last, right))
    entries[first:end] = new


def _without(whole: tuple[int, int], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of a range that lie outside these bytes."""
    begin, end = whole
    parts = ((begin, min(end, start)), (max(begin, stop), end))
    return [part for part in parts if part[0] < part[1]]
