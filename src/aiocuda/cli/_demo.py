"""The job of ``aiocuda demo``: histogram and entropy of every file by a pipeline, checked and timed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .. import __version__
from .._base._processor import processors
from .._base._shutdown import finish_shielded
from ..completion import Operation
from ..device import Device
from ..observe import Timeline, TimelineSpan
from ..pipeline import Pipeline, Slot, Stage
from ._batches import Batch, batches, capacity_for, count_file, fill, has_changed, parts, write_table
from ._files import File, Skipped, find_files, reason_of
from ._histogram import HEADER_BYTES, MOST_SEGMENTS, THREADS, entropies, histograms
from ._report import PICTURE_BATCHES, STAGES, DemoReport, FileEntropy, Overlap, RunTimes, result_line

if TYPE_CHECKING:
    from ._screen import ProgressBar

__all__ = ["CompleteFiles", "DemoJob", "FileCounts", "search"]

T = TypeVar("T")

#: Runs of each kind, overlapped and sequential, in turn: an odd number. The report has the median.
REPEATS: Final = 3


async def search(device: Device, root: str, without: frozenset[str]) -> tuple[list[File], list[Skipped]]:
    """Run `find_files` on a worker thread. A cancellation stops it, because closing the device waits for it."""
    cancelled = threading.Event()
    try:
        return await device.offload(find_files, root, without, cancelled.is_set)
    finally:
        cancelled.set()


class DemoJob:
    """Reads all files, the result of `search`, once to check every histogram, then several times to measure."""

    def __init__(
        self, device: Device, files: Sequence[File], skipped: Sequence[Skipped], progress: ProgressBar
    ) -> None:
        self._device = device
        self._files = files
        self._progress = progress
        self._capacity = capacity_for(files)
        self._readers = max(1, min(4, processors() // 2))
        self._counts = FileCounts(files)
        functions = self._read, self._upload, self._compute, self._download
        stages = [Stage(name, function) for name, function in zip(STAGES, functions, strict=True)]
        self._pipeline = Pipeline(device, stages, depth=3)
        self._reads: list[tuple[float, float]] = []  # begin and end of each, by `time.perf_counter`
        self._results: Callable[[str], object] | None = None  # takes a line for each checked file
        describe: Callable[[], dict[str, float]] | None = getattr(device.driver, "describe", None)
        self._report = DemoReport(
            device.driver.name, device.name, __version__,
            stage_seconds=dict.fromkeys(STAGES, 0.0),
            host_bandwidth=None if describe is None else describe()["bandwidth"],
            skipped=list(skipped),
            streamed=sum(file.streamed for file in files),
            batches=sum(1 for _ in self._batches()),
            batch_bytes=self._capacity,
        )  # fmt: skip

    # -- the stages ----------------------------------------------------------------------------------------------

    async def _read(self, slot: Slot) -> None:
        """Read files into pinned memory, on worker threads."""
        batch: Batch = slot.item
        began = time.perf_counter()
        memory = np.asarray(slot.pinned("bytes", HEADER_BYTES + self._capacity, np.uint8))
        reads = [self._off_loop(fill, memory, part, self._files) for part in parts(batch, self._readers)]
        write_table(memory, batch)
        for failed in await asyncio.gather(*reads):
            self._counts.failed.update(failed)
        self._reads.append((began, time.perf_counter()))

    def _upload(self, slot: Slot) -> Operation[None]:
        used = slot.item.used
        nbytes = HEADER_BYTES + self._capacity
        target, source = slot.buffer("bytes", nbytes, np.uint8), slot.pinned("bytes", nbytes, np.uint8)
        return slot.stream.copy(target[:used], source[:used])

    def _compute(self, slot: Slot) -> Operation[None]:
        count = len(slot.item.segments)
        data = slot.buffer("bytes", HEADER_BYTES + self._capacity, np.uint8)
        rows = slot.buffer("rows", (MOST_SEGMENTS, 256), np.uint32)
        return slot.stream.launch(histograms, count, THREADS, data, count, rows)

    def _download(self, slot: Slot) -> Operation[Any]:
        count = len(slot.item.segments)
        rows = slot.buffer("rows", (MOST_SEGMENTS, 256), np.uint32)
        return slot.stream.download(rows[:count], out=slot.pinned("rows", (MOST_SEGMENTS, 256), np.uint32)[:count])

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function on a worker thread of the device. A cancellation waits for it: it writes into a slot."""
        return await finish_shielded(self._device.offload(work, *args))

    # -- one pass ------------------------------------------------------------------------------------------------

    async def _pass(self, source: Iterator[Batch], *, overlap: bool, check: bool = False) -> FileCounts:
        """Run all batches through the pipeline, and add up the counts of every file."""
        counts = self._counts = FileCounts(self._files)
        unfinished: deque[Batch] = deque()

        def remembered() -> Iterator[Batch]:
            for batch in source:
                unfinished.append(batch)
                yield batch

        async for rows in self._pipeline.run(remembered(), overlap=overlap):
            batch = unfinished.popleft()
            complete = counts.add(batch, np.asarray(rows))
            if check:
                await self._check(complete)
            self._progress.advance(batch.nbytes)
        complete = counts.without_pieces()
        if check:
            await self._check(complete)
        return counts

    def _batches(self) -> Iterator[Batch]:
        return batches(self._files, self._capacity)

    # -- the job -------------------------------------------------------------------------------------------------

    async def run(self, results: Callable[[str], object] | None = None) -> DemoReport:
        """Check, then measure. Call ``results`` with a line for each file."""
        self._results = results
        async with self._pipeline:
            reference = await self._checked()
            await self._timed(reference)
            overlap = await self._picture()
        return dataclasses.replace(self._report, overlap=overlap)

    async def _picture(self) -> Overlap:
        """Return the timelines of the first batches, without and with overlap."""
        first = list(islice(self._batches(), PICTURE_BATCHES))
        self._progress.begin("drawing", 2 * sum(batch.nbytes for batch in first))
        self._reads.clear()
        zero = time.perf_counter()  # the timeline begins a fraction of a millisecond later
        async with Timeline(self._device) as timeline:
            await self._pass(iter(first), overlap=False)
            serial = len(timeline.spans)
            await self._pass(iter(first), overlap=True)
        reads = [
            TimelineSpan("read", "read", (begin - zero) * 1e6, (end - zero) * 1e6, 0) for begin, end in self._reads
        ]
        batches = len(reads) // 2
        return Overlap.of([*reads[:batches], *timeline.spans[:serial]], [*reads[batches:], *timeline.spans[serial:]])

    async def _checked(self) -> FileCounts:
        """Run once, and compare every histogram with an independent count."""
        self._progress.begin("checking", self._report.streamed)
        reference = await self._pass(self._batches(), overlap=True, check=True)
        for number, reason in reference.failed.items():
            self._skip(number, reason)
        return reference

    async def _check(self, complete: CompleteFiles) -> None:
        """Compare the counts of files with an independent count, and add the files to the report."""
        counted = [
            (self._files[number], row) for number, row in zip(complete.numbers, complete.histograms, strict=True)
        ]
        verdicts = await self._off_loop(lambda: [_verdict(file, histogram) for file, histogram in counted])
        checked: list[FileEntropy] = []
        for at, (number, verdict) in enumerate(zip(complete.numbers, verdicts, strict=True)):
            file, entropy = self._files[number], float(complete.entropies[at])
            if verdict is not None:
                self._skip(number, verdict)
                continue
            checked.append(FileEntropy(file.path, file.size, entropy))
            if self._results is not None:
                self._results(result_line(file.path, file.size, entropy, complete.histograms[at].tolist()))
        self._report.add(checked)

    def _skip(self, number: int, reason: str) -> None:
        """Add a file to the skipped files; with an empty reason, to the mismatches."""
        path = self._files[number].path
        if reason:
            self._report.skipped.append(Skipped(path, reason))
        else:
            self._report.add_wrong([path])

    async def _timed(self, reference: FileCounts) -> None:
        """Measure overlapped and sequential runs, in turn. Each must have the counts of the first run."""
        if not self._report.streamed:
            return
        runs: dict[bool, list[RunTimes]] = {True: [], False: []}
        self._progress.begin("timing", self._report.streamed * 2 * REPEATS)
        for repeat in range(REPEATS):
            for overlap in (True, False) if repeat % 2 == 0 else (False, True):
                self._pipeline.reset_statistics()
                began = time.perf_counter()
                counts = await self._pass(self._batches(), overlap=overlap)
                took = time.perf_counter() - began
                statistics = self._pipeline.statistics()
                runs[overlap].append(RunTimes(took, statistics.stage_seconds, statistics.overlap_efficiency))
                await self._compare(reference, counts)
        for each in runs.values():
            each.sort(key=attrgetter("seconds"))
        self._report.add_times(runs[True][REPEATS // 2], runs[False][REPEATS // 2])

    async def _compare(self, reference: FileCounts, counts: FileCounts) -> None:
        differing = [number for number, digest in reference.digests.items() if counts.digests.get(number) != digest]
        changed = await self._off_loop(lambda: [number for number in differing if has_changed(self._files[number])])
        self._report.add_changed(len(changed))
        self._report.add_wrong([self._files[number].path for number in sorted({*differing} - {*changed})])


def _verdict(file: File, histogram: npt.NDArray[np.int64]) -> str | None:
    """Return None if the counts agree, ``""`` if they differ, or the reason why they cannot be compared."""
    try:
        agrees = np.array_equal(count_file(file), histogram)
    except OSError as error:
        return reason_of(error)
    if agrees:
        return None
    return "changed while it was read" if has_changed(file) else ""


#: The product of a histogram with these numbers is its digest. Histograms that differ in one count have other digests.
_WEIGHTS = np.random.default_rng(256).integers(-(2**63), 2**63 - 1, 256, np.int64)


class CompleteFiles(NamedTuple):
    """Files that are counted to their end, with a row of 256 counts and an entropy for each."""

    numbers: list[int]
    histograms: npt.NDArray[np.int64]
    entropies: npt.NDArray[np.float64]


class FileCounts:
    """Adds up the rows of the slots of one run, in order, to one histogram for each file."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self._holes = np.array([file.size - file.streamed for file in files], np.int64)
        self.failed: dict[int, str] = {}  # by number: why the file could not be read
        self.digests: dict[int, int] = {}  # by number: digest of the histogram, to compare two runs
        self._open: tuple[int, npt.NDArray[np.int64]] | None = None  # a file with more segments, and its counts

    def add(self, batch: Batch, rows: npt.NDArray[np.uint32]) -> CompleteFiles:
        """Add the rows of a slot. Return the files that are complete with it."""
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

    def without_pieces(self) -> CompleteFiles:
        """Return the files without data: empty files, and files that are one hole."""
        numbers = [number for number, file in enumerate(self._files) if not file.pieces]
        return self._complete(numbers, np.zeros((len(numbers), 256), np.int64))

    def _complete(self, numbers: list[int], counts: npt.NDArray[np.int64]) -> CompleteFiles:
        if self.failed and not self.failed.keys().isdisjoint(numbers):
            read = [at for at, number in enumerate(numbers) if number not in self.failed]
            numbers, counts = [numbers[at] for at in read], counts[read]
        counts[:, 0] += self._holes[numbers]  # a hole reads as zeros
        digests: Iterable[int] = (counts @ _WEIGHTS).tolist()
        self.digests.update(zip(numbers, digests, strict=True))
        return CompleteFiles(numbers, counts, entropies(counts))
