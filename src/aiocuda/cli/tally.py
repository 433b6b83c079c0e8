"""Tally: from rows of counts, slot by slot, to one histogram for each file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .batches import Batch
from .files import File
from .histogram import entropies

__all__ = ["Counted", "Tally"]


class Counted(NamedTuple):
    """A file whose bytes have all been counted."""

    number: int
    entropy: float
    histogram: npt.NDArray[np.int64]


class Tally:
    """Adds up what the slots of one pass bring, in order.

    Attributes
    ----------
    failed : dict
        Files that could not be read, by number, and why.
    digests : dict
        A hash of each file's histogram, by number: what one pass found and another did not shows here.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self.failed: dict[int, str] = {}
        self.digests: dict[int, int] = {}
        self._open: tuple[int, npt.NDArray[np.int64]] | None = None  # a file that spans slots, and its counts so far

    def add(self, batch: Batch, rows: npt.NDArray[np.uint32]) -> list[Counted]:
        """What a slot has brought: the files that are complete now."""
        segments = batch.segments
        numbers = [segment.file for segment in segments]
        starts = [at for at, number in enumerate(numbers) if at == 0 or number != numbers[at - 1]]
        sums = rows.astype(np.int64)
        if len(starts) < len(segments):
            sums = np.add.reduceat(sums, starts, axis=0)
        present = [numbers[at] for at in starts]
        if self._open is not None and self._open[0] == present[0]:
            sums[0] += self._open[1]
        self._open = None
        last = segments[-1]
        if last.offset + last.length < sum(self._files[last.file].pieces[-1]):
            self._open = (last.file, sums[-1])
            present.pop()
        return self._complete(present, sums[: len(present)])

    def without_pieces(self) -> list[Counted]:
        """The files of which nothing was read: empty ones, and those that are one hole."""
        numbers = [number for number, file in enumerate(self._files) if not file.pieces]
        return self._complete(numbers, np.zeros((len(numbers), 256), np.int64))

    def _complete(self, numbers: list[int], counts: npt.NDArray[np.int64]) -> list[Counted]:
        for number, row in zip(numbers, counts, strict=True):
            file = self._files[number]
            row[0] += file.size - file.streamed  # a hole reads as zeros
            if number not in self.failed:
                self.digests[number] = hash(row.tobytes())
        return [
            Counted(number, float(entropy), row)
            for number, entropy, row in zip(numbers, entropies(counts), counts, strict=True)
            if number not in self.failed
        ]
