"""The main job: histogram and entropy of every file, through a triple-buffered pipeline, checked and timed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .. import __version__
from .._device import Device
from .._shutdown import to_the_end
from ..completion._operation import Operation
from ..observe import Timeline
from ..pipeline import Pipeline, Slot, Stage
from ._batches import Batch, batches, capacity_for
from ._files import File, Skipped, find_files, reason_of
from ._histogram import HEADER_BYTES, MOST_SEGMENTS, THREADS, histograms
from ._reading import count_file, fill, has_changed, parts, write_table
from ._report import Extreme, Report, result_line
from ._tally import Counted, Tally

__all__ = ["Job", "Progress", "search"]

T = TypeVar("T")

#: Each way of running is timed so often, in turn, and the median counts.
REPEATS: Final = 3

#: Batches that the timeline shows: more of them cannot be told apart in a picture.
PICTURED: Final = 32


class Progress(Protocol):
    """Somebody who watches."""

    def begin(self, what: str, total: int) -> None:
        """So many bytes are to be read."""

    def advance(self, nbytes: int) -> None:
        """So many have been."""


async def search(device: Device, root: str, without: frozenset[str]) -> tuple[list[File], list[Skipped]]:
    """`find_files` on a worker thread. Cancelled, it stops there: the device's end would wait for a large tree."""
    cancelled = threading.Event()
    try:
        return await device.offload(find_files, root, without, cancelled.is_set)
    finally:
        cancelled.set()


class Job:
    """One job on one device: all files, once to check every histogram, then several times against the clock.

    Parameters
    ----------
    device
        Where the bytes go.
    files, skipped
        What was found.
    progress
        Who watches.
    """

    def __init__(self, device: Device, files: Sequence[File], skipped: Sequence[Skipped], progress: Progress) -> None:
        self._device = device
        self._files = files
        self._progress = progress
        self._capacity = capacity_for(files)
        self._readers = max(1, min(4, _cpus() // 2))
        self._tally = Tally(files)
        stages = [
            Stage("read", self._read),
            Stage("upload", self._upload),
            Stage("compute", self._compute),
            Stage("download", self._download),
        ]
        self._pipeline = Pipeline(device, stages, depth=3)
        self.report = Report(driver=device.driver.name, device=device.name, version=__version__, skipped=list(skipped))
        describe: Callable[[], dict[str, float]] | None = getattr(device.driver, "describe", None)
        if describe is not None:
            self.report.host_bandwidth = describe()["bandwidth"]

    # -- the stages ----------------------------------------------------------------------------------------------

    async def _read(self, slot: Slot) -> None:
        """Straight into pinned memory, on worker threads."""
        batch: Batch = slot.item
        memory = np.asarray(slot.pinned("bytes", HEADER_BYTES + self._capacity, np.uint8))
        reads = [self._off_loop(fill, memory, part, self._files) for part in parts(batch, self._readers)]
        write_table(memory, batch)
        for failed in await asyncio.gather(*reads):
            self._tally.failed.update(failed)

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
        """On a thread of the device's own. Whoever is cancelled waits for it: it writes into a slot."""
        return await to_the_end(self._device.offload(work, *args))

    # -- one pass ------------------------------------------------------------------------------------------------

    async def _pass(self, source: Iterator[Batch], *, overlap: bool, check: _Check | None = None) -> Tally:
        """All batches through the pipeline, every file's counts added up."""
        tally = self._tally = Tally(self._files)
        under_way: deque[Batch] = deque()

        def noted() -> Iterator[Batch]:
            for batch in source:
                under_way.append(batch)
                yield batch

        async for rows in self._pipeline.run(noted(), overlap=overlap):
            batch = under_way.popleft()
            counted = tally.add(batch, np.asarray(rows))
            if check is not None:
                await check(counted)
            self._progress.advance(batch.nbytes)
        counted = tally.without_pieces()
        if check is not None:
            await check(counted)
        return tally

    def _batches(self) -> Iterator[Batch]:
        return batches(self._files, self._capacity)

    # -- the job -------------------------------------------------------------------------------------------------

    async def run(self, results: Callable[[str], object] | None = None) -> Report:
        """Check, then measure. ``results`` is given a line for each file."""
        self.report.streamed = sum(file.streamed for file in self._files)
        async with self._pipeline:
            reference = await self._checked(results)
            await self._timed(reference)
        return self.report

    async def pictured(self) -> str:
        """A picture of the streams at work on the first batches."""
        first = list(islice(self._batches(), PICTURED))
        self._progress.begin("timeline", sum(batch.nbytes for batch in first))
        async with Pipeline(self._device, self._pipeline.stages, depth=self._pipeline.ring.depth) as pipeline:
            self._tally = Tally(self._files)
            async for _ in pipeline.run(first):
                pass  # its buffers are made, and its clocks are warm
            async with Timeline(self._device) as timeline:
                async for _ in pipeline.run(first):
                    pass
        report, depth = self.report, self._pipeline.ring.depth
        batches = f"{len(first)} batches of at most {self._capacity / 1e6:.1f} MB, {depth} at a time"
        return timeline.to_svg(f"aiocuda demo: {batches}, on {report.device} ({report.driver} driver)")

    async def _checked(self, results: Callable[[str], object] | None) -> Tally:
        """The first pass: every histogram against an independent count."""
        report = self.report
        self._progress.begin("checking", report.streamed)
        check = _Check(self._files, report, self._off_loop, results)
        reference = await self._pass(self._batches(), overlap=True, check=check)
        for number, reason in reference.failed.items():
            check.skip(number, reason)
        report.verified = not report.mismatched
        return reference

    async def _timed(self, reference: Tally) -> None:
        """The same work overlapped and step by step, in turn; each run must find what the first one found."""
        report = self.report
        if not report.streamed:
            report.stage_seconds = dict.fromkeys((stage.name for stage in self._pipeline.stages), 0.0)
            return
        seconds: dict[bool, list[float]] = {True: [], False: []}
        stages: dict[bool, dict[float, dict[str, float]]] = {True: {}, False: {}}
        efficiencies: dict[float, float] = {}
        self._progress.begin("timing", report.streamed * 2 * REPEATS)
        for repeat in range(REPEATS):
            for overlap in (True, False) if repeat % 2 == 0 else (False, True):
                self._pipeline.reset_statistics()
                began = time.perf_counter()
                tally = await self._pass(self._batches(), overlap=overlap)
                took = time.perf_counter() - began
                seconds[overlap].append(took)
                statistics = self._pipeline.statistics()
                stages[overlap][took] = statistics.stage_seconds
                if overlap:
                    efficiencies[took] = statistics.overlap_efficiency
                await self._compare(reference, tally)
        report.seconds, report.sequential_seconds = median(seconds[True]), median(seconds[False])
        report.overlap_efficiency = efficiencies[report.seconds]
        report.stage_seconds = stages[False][report.sequential_seconds]
        report.overlapped_stage_seconds = stages[True][report.seconds]
        report.speedup = report.sequential_seconds / report.seconds
        report.speedup_bound = sum(report.stage_seconds.values()) / max(report.stage_seconds.values())

    async def _compare(self, reference: Tally, tally: Tally) -> None:
        differing = [number for number, digest in reference.digests.items() if tally.digests.get(number) != digest]
        changed = await self._off_loop(lambda: [number for number in differing if has_changed(self._files[number])])
        self.report.changed += len(changed)
        wrong = [self._files[number].path for number in sorted({*differing} - {*changed})]
        self.report.mismatched = list(dict.fromkeys([*self.report.mismatched, *wrong]))
        self.report.verified = not self.report.mismatched


class _Check:
    """Compares what the pipeline counted with an independent count of the same files."""

    def __init__(
        self,
        files: Sequence[File],
        report: Report,
        off_loop: Callable[[Callable[[], Any]], Any],
        results: Callable[[str], object] | None,
    ) -> None:
        self._files = files
        self._report = report
        self._off_loop = off_loop
        self._results = results

    async def __call__(self, counted: Counted) -> None:
        """Check these files, and put them on record."""
        verdicts = await self._off_loop(
            lambda: [
                _verdict(self._files[number], histogram)
                for number, histogram in zip(counted.numbers, counted.histograms, strict=True)
            ]
        )
        report = self._report
        ranked = []
        for at, (number, verdict) in enumerate(zip(counted.numbers, verdicts, strict=True)):
            file, entropy = self._files[number], float(counted.entropies[at])
            if verdict is not None:
                self.skip(number, verdict)
                continue
            report.files += 1
            report.bytes += file.size
            if file.size:
                ranked.append(Extreme(file.path, file.size, entropy))
            if self._results is not None:
                self._results(result_line(file.path, file.size, entropy, counted.histograms[at].tolist()))
        report.rank(ranked)

    def skip(self, number: int, reason: str) -> None:
        """It is not counted, and why; an empty reason is a mismatch."""
        path = self._files[number].path
        if reason:
            self._report.skipped.append(Skipped(path, reason))
        else:
            self._report.mismatched.append(path)


def _verdict(file: File, histogram: npt.NDArray[np.int64]) -> str | None:
    """None if the counts agree, empty if they do not, else why they cannot be compared."""
    try:
        agrees = np.array_equal(count_file(file), histogram)
    except OSError as error:
        return reason_of(error)
    if agrees:
        return None
    return "changed while it was read" if has_changed(file) else ""


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
