"""Reading: from files into slots, and into an independent count. All of it blocks: it runs on worker threads."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from ._batches import Batch, Segment
from ._files import File, open_file, pieces, reason_of
from ._histogram import HEADER_BYTES, Counter

__all__ = ["count_file", "fill", "has_changed", "parts", "write_table"]

_CHUNK = 1 << 20


def parts(batch: Batch, count: int) -> Iterator[list[Segment]]:
    """The segments, cut into at most so many parts of about as many bytes."""
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
    """Read segments into their places. What could not be read, by the file's number."""
    view = memoryview(slot)  # type: ignore[arg-type]  # an ndarray exports a buffer
    failed: dict[int, str] = {}
    for number, group in groupby(segments, attrgetter("file")):
        try:
            descriptor = open_file(files[number].path)
            try:
                for _, offset, length, place in group:
                    _read(descriptor, view[place : place + length], offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            failed[number] = reason_of(error)
    return failed


def write_table(slot: npt.NDArray[np.uint8], batch: Batch) -> None:
    """Tell the kernel where each segment is."""
    table = slot[:HEADER_BYTES].view(np.int64).reshape(-1, 2)
    table[: len(batch.segments)] = [(segment.place, segment.length) for segment in batch.segments]


def count_file(file: File) -> npt.NDArray[np.int64]:
    """Count a whole file by another way than the kernel's. What are holes by now is not read. May raise OSError."""
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
    """Is it another one than was found, or gone?"""
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
