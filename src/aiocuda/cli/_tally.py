"""Tally: from rows of counts, slot by slot, to one histogram for each file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._batches import Batch
from ._files import File
from ._histogram import entropies

__all__ = ["Counted", "Tally"]

#: A histogram times these is its digest: what differs in one count differs in the digest.
_WEIGHTS = np.random.default_rng(256).integers(-(2**63), 2**63 - 1, 256, np.int64)


class Counted(NamedTuple):
    """Files whose bytes have all been counted: a row of 256 counts, and an entropy, for each."""

    numbers: list[int]
    histograms: npt.NDArray[np.int64]
    entropies: npt.NDArray[np.float64]


class Tally:
    """Adds up what the slots of one pass bring, in order.

    Attributes
    ----------
    failed : dict
        Files that could not be read, by number, and why.
    digests : dict
        A digest of each file's histogram, by number: what one pass found and another did not shows here.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self._holes = np.array([file.size - file.streamed for file in files], np.int64)
        self.failed: dict[int, str] = {}
        self.digests: dict[int, int] = {}
        self._open: tuple[int, npt.NDArray[np.int64]] | None = None  # a file that spans slots, and its counts so far

    def add(self, batch: Batch, rows: npt.NDArray[np.uint32]) -> Counted:
        """What a slot has brought: the files that are complete now."""
        segments = batch.segments
        numbers = [segment.file for segment in segments]
        starts = [0, *(at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1])]
        sums = rows.astype(np.int64)
        if len(starts) < len(segments):
            sums = np.add.reduceat(sums, starts, axis=0)
            numbers = [numbers[at] for at in starts]
        if self._open is not None and self._open[0] == numbers[0]:
            sums[0] += self._open[1]
        self._open = None
        last = segments[-1]
        if last.offset + last.length < sum(self._files[last.file].pieces[-1]):
            self._open = (numbers.pop(), sums[-1])
        return self._complete(numbers, sums[: len(numbers)])

    def without_pieces(self) -> Counted:
        """The files of which nothing was read: empty ones, and those that are one hole."""
        numbers = [number for number, file in enumerate(self._files) if not file.pieces]
        return self._complete(numbers, np.zeros((len(numbers), 256), np.int64))

    def _complete(self, numbers: list[int], counts: npt.NDArray[np.int64]) -> Counted:
        if self.failed and not self.failed.keys().isdisjoint(numbers):
            read = [at for at, number in enumerate(numbers) if number not in self.failed]
            numbers, counts = [numbers[at] for at in read], counts[read]
        counts[:, 0] += self._holes[numbers]  # a hole reads as zeros
        digests: Iterable[int] = (counts @ _WEIGHTS).tolist()
        self.digests.update(zip(numbers, digests, strict=True))
        return Counted(numbers, counts, entropies(counts))
