"""Batches: how files are laid out in slots. Small files share a slot, large ones span slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ._files import File
from ._histogram import HEADER_BYTES, MOST_SEGMENTS

__all__ = ["Batch", "Segment", "batches", "capacity_for"]

#: What one block of the kernel counts, and one row of the result stands for: a row of 1 KiB is 0.8 % of it.
SEGMENT_BYTES: Final = 128 << 10

#: Segments start at such a multiple: the kernel loads 16 bytes at once.
ALIGNMENT: Final = 16

#: Bytes of a slot. Filling and emptying the pipeline takes two batches' time, so there should be many; and each costs
#: the host about half a millisecond, so they should be large. 32 of them, within these limits.
LEAST_CAPACITY: Final = 1 << 20
MOST_CAPACITY: Final = 16 << 20
MANY: Final = 32


class Segment(NamedTuple):
    """Part of a file, in a slot."""

    file: int  #: its number
    offset: int  #: in the file
    length: int
    place: int  #: in the slot


@dataclasses.dataclass(slots=True)
class Batch:
    """What one slot carries."""

    segments: list[Segment] = dataclasses.field(default_factory=list)
    used: int = HEADER_BYTES  #: bytes of the slot, table included

    @property
    def nbytes(self) -> int:
        """Bytes of files."""
        return sum(segment.length for segment in self.segments)


def capacity_for(files: Sequence[File]) -> int:
    """Bytes of files that a slot should hold, for so much to read."""
    total = sum(file.streamed for file in files)
    return min(MOST_CAPACITY, max(LEAST_CAPACITY, 1 << max(0, (total // MANY - 1).bit_length())))


def batches(files: Sequence[File], capacity: int) -> Iterator[Batch]:
    """All files, in order, cut into segments and packed into slots."""
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
                batch.segments.append(Segment(number, offset, part, batch.used))
                batch.used += -(-part // ALIGNMENT) * ALIGNMENT
                offset += part
    if batch.segments:
        yield batch
