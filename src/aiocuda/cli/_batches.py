"""Batches: lays files out in slots, and reads them. Small files share a slot, large files span several slots.

The functions that read files block: they run on worker threads.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ._files import File, open_file, pieces, reason_of
from ._histogram import HEADER_BYTES, MOST_SEGMENTS, Counter

__all__ = ["Batch", "Segment", "batches", "capacity_for", "count_file", "fill", "has_changed", "parts", "write_table"]

#: Bytes that one block of the kernel counts into one row of the result. A row of 1 KiB is 0.8 % of them.
SEGMENT_BYTES: Final = 128 << 10

#: Segments start at a multiple of this: the kernel loads 16 bytes at a time.
ALIGNMENT: Final = 16

#: Bytes that `count_file` reads at a time.
_CHUNK: Final = 1 << 20

#: Bytes of a slot. There should be many batches, because filling and emptying the pipeline takes the time of two; and
#: large ones, because each costs the host about half a millisecond. The aim is 32 batches, within these limits.
LEAST_CAPACITY: Final = 256 << 10
MOST_CAPACITY: Final = 16 << 20
MANY: Final = 32


class Segment(NamedTuple):
    """Part of a file, in a slot."""

    file: int  #: number of the file
    offset: int  #: offset in the file
    length: int
    position: int  #: offset in the slot


@dataclasses.dataclass(slots=True)
class Batch:
    """The segments in one slot."""

    segments: list[Segment] = dataclasses.field(default_factory=list)
    used: int = HEADER_BYTES  #: used bytes of the slot, with the table

    @property
    def nbytes(self) -> int:
        return sum(segment.length for segment in self.segments)

    def add(self, file: int, offset: int, length: int) -> None:
        """Add a part of a file, behind the others."""
        self.segments.append(Segment(file, offset, length, self.used))
        self.used += -(-length // ALIGNMENT) * ALIGNMENT


def capacity_for(files: Sequence[File]) -> int:
    """Return the number of bytes of files that a slot should hold."""
    total = sum(file.streamed for file in files)
    return min(MOST_CAPACITY, max(LEAST_CAPACITY, 1 << max(0, (total // MANY - 1).bit_length())))


def batches(files: Sequence[File], capacity: int) -> Iterator[Batch]:
    """Cut all files, in order, into segments, and yield the batches."""
    batch = Batch()
    end = HEADER_BYTES + capacity
    for number, file in enumerate(files):
        for start, length in file.pieces:
            offset, stop = start, start + length
            while offset < stop:
                room = end - batch.used
                if room <= 0 or len(batch.segments) == MOST_SEGMENTS:
                    yield batch
                    batch = Batch()
                    continue
                part = min(SEGMENT_BYTES, stop - offset, room)
                batch.add(number, offset, part)
                offset += part
    if batch.segments:
        yield batch


def parts(batch: Batch, count: int) -> Iterator[list[Segment]]:
    """Divide the segments of a batch into at most ``count`` parts of similar size."""
    share = batch.nbytes / count
    part: list[Segment] = []
    done = 0
    for segment in batch.segments:
        part.append(segment)
        done += segment.length
        if done >= share:
            yield part
            part, done = [], 0
    if part:
        yield part


def fill(slot: npt.NDArray[np.uint8], segments: Sequence[Segment], files: Sequence[File]) -> dict[int, str]:
    """Read segments into a slot. Return the reasons for files that could not be read, by number."""
    view = memoryview(slot)  # type: ignore[arg-type]  # an ndarray exports a buffer
    failed: dict[int, str] = {}
    for number, group in groupby(segments, attrgetter("file")):
        try:
            descriptor = open_file(files[number].path)
            try:
                for _, offset, length, position in group:
                    _read(descriptor, view[position : position + length], offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            failed[number] = reason_of(error)
    return failed


def write_table(slot: npt.NDArray[np.uint8], batch: Batch) -> None:
    """Write the table of a slot, from which the kernel reads the segments."""
    table = slot[:HEADER_BYTES].view(np.int64).reshape(-1, 2)
    table[: len(batch.segments)] = [(segment.position, segment.length) for segment in batch.segments]


def count_file(file: File) -> npt.NDArray[np.int64]:
    """Count the bytes of a whole file with a `Counter`. It does not read holes, and may raise OSError."""
    counter = Counter()
    buffer = np.empty(min(_CHUNK, max(1, file.size)), np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]  # an ndarray exports a buffer
    descriptor = open_file(file.path)
    try:
        if os.fstat(descriptor).st_size < file.size:
            raise OSError(errno.ESTALE, "shrank while it was read")
        hole = file.size
        for start, piece in pieces(descriptor, file.size):
            for offset in range(start, start + piece, _CHUNK):
                length = min(_CHUNK, start + piece - offset)
                _read(descriptor, view[:length], offset)
                counter.add(buffer[:length])
            hole -= piece
    finally:
        os.close(descriptor)
    counter.counts[0] += hole
    return counter.total()


def has_changed(file: File) -> bool:
    try:
        found = os.stat(file.path)
    except OSError:
        return True
    return (found.st_size, found.st_mtime_ns) != (file.size, file.changed_ns)


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        got = _read_at(descriptor, view, offset)
        if not got:
            raise OSError(errno.ESTALE, "shrank while it was read")
        view = view[got:]
        offset += got


if sys.platform == "win32":

    def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
        view[: len(data)] = data
        return len(data)

else:

    def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)
