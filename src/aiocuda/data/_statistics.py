"""LoaderStats: what a loader has done. LoaderMeter: its counts and times."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable

from .._base._host_use import HostUse
from .._base._mistakes import figures
from .._base._processor import processors_within_quota
from .._base._thread_times import ThreadTimes
from ..pipeline import Bottleneck
from ._advice import part_limit_of
from ._options import Executor

__all__ = ["DeviceBatchesStats", "LoaderMeter", "LoaderStats"]

#: Uploads whose device time is measured: the first ones, and then one in so many.
COPY_TIMES = 16
ONE_IN = 16

#: Seconds until the host has noticed the end of an upload.
LATE = 50e-6


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats:
    """The statistics of a loader since it was made.

    Attributes
    ----------
    batches, samples
        Delivered batches, and the samples in them.
    skipped
        Samples that failed and were skipped.
    fatal
        Of these, the indices of the samples that have ended their worker process twice.
    padded
        Delivered samples that repeat samples from the start of the epoch, so that every rank has as many batches.
    kept
        Batches that another library still held when the next one was requested. They were not freed.
    restarts
        Worker processes that were started in place of lost ones, also those that do not count against ``restarts=``.
    set_aside
        Samples that exceeded the timeout on a thread and whose function has not returned.
    nbytes
        Bytes that were copied to the device.
    workers
        Samples that are decoded at a time.
    wall_seconds
        Host time of all epochs, from the first request to the end.
    source_seconds
        Time in which a stream was read. A source with ``__getitem__`` is read by the workers.
    decode_seconds
        Time of all workers together.
    upload_seconds
        Device time of the copies, by timing events around the uploads of some batches.
    consumer_seconds
        Host time from a delivered batch to the next request, and the time in which uploads waited on the device for the
        consumer's work on earlier batches, whose memory they use.
    waited_seconds
        Host time in which the consumer waited for a batch.
    executor
        How samples are decoded.
    decode_cpu_seconds
        Of `decode_seconds`, the time for which the workers used a processor.
    process_cpu_seconds
        Processor time of all threads of this process during the epochs, of the program's others, too.
    gil_share
        The share of the time for which a thread had to wait for the GIL, 0-1: of one second of the first epoch that
        took 4 s. None if it is not measured: no epoch was so long, samples are decoded by processes, or the system is
        not Linux.
    decode_queued_seconds
        Of `decode_seconds`, the time for which the workers were queued for a processor. 0.0 outside of Linux.
    throttled_share
        The share of the periods, during the epochs, in which the control group has used up its quota of processor time.
    start_seconds
        Host time from the opening of the loader until all worker processes were ready, imports included. 0.0 for
        threads.
    """

    batches: int
    samples: int
    skipped: int
    fatal: tuple[int, ...]
    padded: int
    kept: int
    restarts: int
    set_aside: int
    nbytes: int
    workers: int
    wall_seconds: float
    source_seconds: float
    decode_seconds: float
    upload_seconds: float
    consumer_seconds: float
    waited_seconds: float
    executor: Executor = "thread"
    decode_cpu_seconds: float = 0.0
    process_cpu_seconds: float = 0.0
    gil_share: float | None = None
    decode_queued_seconds: float = 0.0
    throttled_share: float = 0.0
    start_seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Batches per second."""
        return self.batches / self.wall_seconds if self.wall_seconds else 0.0

    def bottleneck(self) -> Bottleneck:
        """Return what limits the loader: ``"source"``, ``"decode"``, ``"upload"`` or ``"consumer"``.

        It is the part that takes longest for a batch. But if threads decode in Python, the times of the source and the
        consumer contain waits for the GIL: then it is ``"decode"``. `DataLoader.advice` has the same reason.
        """
        if not self.batches or not self.wall_seconds:
            return Bottleneck("", "nothing", 0.0, "no batch has been delivered yet")
        limit = part_limit_of(self, processors_within_quota())
        kind = limit.name if limit.name in ("consumer", "source") else "stage"
        return Bottleneck(limit.name, kind, limit.share, limit.why)


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class DeviceBatchesStats:
    """The statistics of the batches of `to_device` since they were made.

    Attributes
    ----------
    batches
        Delivered batches.
    kept
        Batches that another library still held when the next one was requested. They were not freed.
    nbytes
        Bytes that were copied to the device.
    wall_seconds
        Host time of all iterations, from the first request to the end.
    source_seconds
        Time in which the source was read.
    consumer_seconds
        Host time from a delivered batch to the next request.
    waited_seconds
        Host time in which the consumer waited for a batch.
    """

    batches: int
    kept: int
    nbytes: int
    wall_seconds: float
    source_seconds: float
    consumer_seconds: float
    waited_seconds: float

    @property
    def throughput(self) -> float:
        """Batches per second."""
        return self.batches / self.wall_seconds if self.wall_seconds else 0.0


class LoaderMeter:
    """The counts and times of one loader. All methods are called on its loop."""

    def __init__(self, now: Callable[[], float], executor: Executor) -> None:
        self._now = now
        self._executor = executor
        self._host = HostUse()
        self._is_real = now is time.monotonic  # nothing of the host is measured in virtual time
        self.batches = self.samples = self.skipped = self.padded = self.set_aside = self.nbytes = 0
        self.source_seconds = self.upload_seconds = 0.0
        self._decode = ThreadTimes()
        self.consumer_seconds = self.waited_seconds = self.start_seconds = 0.0
        self.epoch_samples = self._first_sample = 0  # the most in one epoch; those before the present one
        self._fatal: dict[int, None] = {}  # indices, each once for all epochs
        self._wall = 0.0
        self._began: float | None = None  # the present epoch
        self._uploads = 0
        self._copy_seconds: deque[float] = deque(maxlen=COPY_TIMES)
        self._copy_typical = 0.0
        self._uploaded = -math.inf  # the time when the last upload was done
        self._delivered: float | None = None

    def note_start(self, seconds: float) -> None:
        """All worker processes are ready, after this time."""
        self.start_seconds += seconds

    def begin(self) -> None:
        """An epoch begins."""
        if self._began is None:
            self._began, self._first_sample = self._now(), self.samples
            if self._is_real:
                self._host.start(asyncio.get_running_loop() if self._executor == "thread" else None)

    def end(self) -> None:
        """The epoch has ended."""
        now = self._now()
        self._end_consumer_time(now)
        if self._began is not None:
            self._wall += now - self._began
            self._began = None
            self._host.stop()

    def note_request(self) -> float:
        """Note that the consumer requests a batch: its work on the last one has ended. Return the time."""
        now = self._now()
        self._end_consumer_time(now)
        return now

    def _end_consumer_time(self, now: float) -> None:
        """Add the time since the last delivery to the time that the consumer takes for its work."""
        if self._delivered is not None:
            self.consumer_seconds += now - self._delivered
            self._delivered = None

    def deliver(self, requested: float, samples: int, padded: int) -> None:
        """The consumer gets a batch that it requested at that time."""
        self._delivered = self._now()
        self.waited_seconds += self._delivered - requested
        self.batches += 1
        self.samples += samples
        self.epoch_samples = max(self.epoch_samples, self.samples - self._first_sample)
        self.padded += padded

    def take_back(self, samples: int, padded: int) -> None:
        """The newest batch did not reach the consumer: it is delivered again."""
        self._delivered = None
        self.batches -= 1
        self.samples -= samples
        self.padded -= padded

    def skip(self, index: int, *, is_fatal: bool) -> None:
        """Count a sample that is skipped."""
        self.skipped += 1
        if is_fatal:
            self._fatal[index] = None

    def add_source(self, seconds: float) -> None:
        """Count the time in which a stream was read."""
        self.source_seconds += seconds

    def add_decode(self, times: ThreadTimes) -> None:
        """Count the times of the workers for a batch."""
        self._decode = self._decode.plus(times)

    def note_set_aside(self, stuck: int) -> bool:
        """Note how many samples exceeded the timeout and still run. Return True if the number has changed."""
        before, self.set_aside = self.set_aside, stuck
        return stuck != before

    def times_upload(self) -> bool:
        """Count an upload. Return True if events are to measure its device time."""
        number, self._uploads = self._uploads, self._uploads + 1
        return number < COPY_TIMES or number % ONE_IN == 0

    def add_upload(self, nbytes: int, copied: float | None) -> None:
        """Count a batch whose upload is done; ``copied`` is its device time, if that was measured."""
        self.nbytes += nbytes
        if copied is not None:
            self._copy_seconds.append(copied)
            # Not the median: copies of several batches at the same time share the link, and each takes longer.
            self._copy_typical = min(self._copy_seconds)
        now = self._now()
        self.upload_seconds += min(self._copy_typical, now - self._uploaded)  # together no more than the time
        self._uploaded = now

    def add_upload_wait(self, seconds: float) -> None:
        """Count the time that the consumer has waited for an upload.

        The device needs less time for the copy alone. In the rest of the time the upload waits for memory that the
        consumer's work uses, and the host is late by some microseconds.
        """
        self.consumer_seconds += max(0.0, seconds - self._copy_typical - LATE)

    def statistics(self, workers: int, restarts: int, kept: int) -> LoaderStats:
        """Return a snapshot."""
        running = 0.0 if self._began is None else self._now() - self._began
        consumer = 0.0 if self._delivered is None else self._now() - self._delivered
        host = self._host.load()
        return LoaderStats(
            batches=self.batches,
            samples=self.samples,
            skipped=self.skipped,
            fatal=tuple(self._fatal),
            padded=self.padded,
            kept=kept,
            restarts=restarts,
            set_aside=self.set_aside,
            nbytes=self.nbytes,
            workers=workers,
            wall_seconds=self._wall + running,
            source_seconds=self.source_seconds,
            decode_seconds=self._decode.seconds,
            upload_seconds=self.upload_seconds,
            consumer_seconds=self.consumer_seconds + consumer,
            waited_seconds=self.waited_seconds,
            executor=self._executor,
            decode_cpu_seconds=self._decode.cpu,
            process_cpu_seconds=host.cpu,
            gil_share=host.gil_share,
            decode_queued_seconds=self._decode.queued,
            throttled_share=host.throttled,
            start_seconds=self.start_seconds,
        )
