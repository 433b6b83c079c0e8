"""Accesses: who wrote which bytes of one memory last, and who has read them since."""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

__all__ = ["Accesses"]

T = TypeVar("T")


class Accesses(Generic[T]):
    """The last writer of each byte, and the readers since.

    Ranges are ``[start, stop)`` in bytes. Every byte has at most one last writer, so the writers' ranges are sorted and
    never overlap: 10 000 slices are asked as quickly as two. Who writes bytes comes behind all who are known of them
    here, so these are forgotten: whoever comes behind the writer comes behind them.
    """

    __slots__ = ("readers", "writers")

    def __init__(self) -> None:
        self.writers: list[tuple[int, int, T]] = []
        self.readers: dict[T, list[tuple[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self.writers or self.readers)

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        """Which writers overlap, as a range of indices."""
        writers = self.writers
        first = bisect_left(writers, (start,))  # a shorter tuple is the smaller one
        if first and writers[first - 1][1] > start:
            first -= 1
        return first, bisect_left(writers, (stop,))

    def last_writers(self, start: int, stop: int) -> list[T]:
        """Who wrote any of these bytes last."""
        writers = self.writers
        if len(writers) == 1:  # most memory is written as a whole
            begin, last, writer = writers[0]
            return [writer] if begin < stop and start < last else []
        first, end = self._between(start, stop)
        return [writer for _, _, writer in self.writers[first:end]]

    def readers_since(self, start: int, stop: int) -> list[T]:
        """Who has read any of these bytes since they were written last."""
        return [
            reader
            for reader, ranges in self.readers.items()
            if any(begin < stop and start < end for begin, end in ranges)
        ]

    def read(self, start: int, stop: int, who: T) -> None:
        """Somebody reads these bytes."""
        self.readers.setdefault(who, []).append((start, stop))

    def write(self, start: int, stop: int, who: T) -> None:
        """Somebody writes these bytes, behind all who wrote or read them before."""
        writers = self.writers
        if not writers or (len(writers) == 1 and start <= writers[0][0] and writers[0][1] <= stop):
            self.writers = [(start, stop, who)]
        else:
            self._write_part(start, stop, who)
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

    def _write_part(self, start: int, stop: int, who: T) -> None:
        writers = self.writers
        first, end = self._between(start, stop)
        new = [(start, stop, who)]
        if first < end:
            begin, _, left = writers[first]
            if begin < start:
                new.insert(0, (begin, start, left))
            _, last, right = writers[end - 1]
            if last > stop:
                new.append((stop, last, right))
        writers[first:end] = new

    def forget(self, who: T) -> None:
        """Nobody need come behind him any more."""
        if self.readers:
            self.readers.pop(who, None)
        for _, _, writer in self.writers:
            if writer is who:
                self.writers = [entry for entry in self.writers if entry[2] is not who]
                return


def _without(whole: tuple[int, int], start: int, stop: int) -> list[tuple[int, int]]:
    """What is left of a range."""
    begin, end = whole
    parts = ((begin, min(end, start)), (max(begin, stop), end))
    return [part for part in parts if part[0] < part[1]]
