"""LoaderStats and LoaderAdvice: what a loader has done, what limits it, and what would help."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable

from ..errors import BusyError
from ..pipeline import Bottleneck

__all__ = ["LoaderAdvice", "LoaderMeter", "LoaderStats", "advise"]

#: A part that is at work for this share of the time limits the loader. Below it, waits do.
SATURATED = 0.9

#: Uploads whose device time is measured: the first ones, and then one in so many.
COPY_TIMES = 16
ONE_IN = 16

#: Seconds until the host has noticed the end of an upload.
LATE = 50e-6

#: If all loading takes less than this share of the consumer's time, overlap gains nearly nothing.
NO_GAIN = 0.05


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

    @property
    def throughput(self) -> float:
        """Batches per second."""
        return self.batches / self.wall_seconds if self.wall_seconds else 0.0

    def bottleneck(self) -> Bottleneck:
        """Return what limits the loader: ``"source"``, ``"decode"``, ``"upload"`` or ``"consumer"``."""
        if not self.batches or not self.wall_seconds:
            return Bottleneck("", "nothing", 0.0, "no batch has been delivered yet")
        busy = {
            "consumer": self.consumer_seconds,
            "source": self.source_seconds,
            "decode": self.decode_seconds / self.workers,
            "upload": self.upload_seconds,
        }
        name = max(busy, key=busy.__getitem__)
        share = min(1.0, busy[name] / self.wall_seconds)
        each = f"{busy[name] / self.batches * 1e3:.3g} ms a batch"
        cure = {
            "consumer": "it has each batch for longer than loading takes: only a quicker consumer helps",
            "source": "it is read by one thread: a source with __len__ and __getitem__ is read by all workers",
            "decode": f"{self.workers} workers decode at a time: more workers=, or a quicker decode, helps",
            "upload": "the link to the device is the limit: smaller samples help, such as uint8 instead of float32",
        }[name]
        why = f"{each}, {cure}"
        if share < SATURATED:
            why = f"{each}, and yet it is at work only {share:.0%} of the time: DataLoader.advice() looks into the rest"
        kind = "consumer" if name == "consumer" else "source" if name == "source" else "stage"
        return Bottleneck(name, kind, share, why)  # type: ignore[arg-type]  # a conditional expression is a str


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderAdvice:
    """The advice of `DataLoader.advice`.

    Attributes
    ----------
    workers, prefetch
        The arguments that suit the measured times.
    period_ms
        The time from one batch to the next with them.
    why
        The reasons, in words.
    """

    workers: int
    prefetch: int
    period_ms: float
    why: str


class LoaderMeter:
    """The counts and times of one loader. All methods are called on its loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.batches = self.samples = self.skipped = self.padded = self.set_aside = self.nbytes = 0
        self.source_seconds = self.decode_seconds = self.upload_seconds = 0.0
        self.consumer_seconds = self.waited_seconds = 0.0
        self._fatal: dict[int, None] = {}  # indices, each once for all epochs
        self._wall = 0.0
        self._began: float | None = None  # the present epoch
        self._uploads = 0
        self._copy_seconds: deque[float] = deque(maxlen=COPY_TIMES)
        self._copy_typical = 0.0
        self._uploaded = -math.inf  # the time when the last upload was done
        self._delivered: float | None = None

    def begin(self) -> None:
        """An epoch begins."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """The epoch has ended."""
        self.request()
        if self._began is not None:
            self._wall += self._now() - self._began
            self._began = None

    def request(self) -> float:
        """The consumer requests a batch. Return the time."""
        now = self._now()
        if self._delivered is not None:
            self.consumer_seconds += now - self._delivered
            self._delivered = None
        return now

    def deliver(self, requested: float, samples: int, padded: int) -> None:
        """The consumer gets a batch that it requested at that time."""
        self._delivered = self._now()
        self.waited_seconds += self._delivered - requested
        self.batches += 1
        self.samples += samples
        self.padded += padded

    def skip(self, index: int, *, is_fatal: bool) -> None:
        """Count a sample that is skipped."""
        self.skipped += 1
        if is_fatal:
            self._fatal[index] = None

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
            decode_seconds=self.decode_seconds,
            upload_seconds=self.upload_seconds,
            consumer_seconds=self.consumer_seconds + consumer,
            waited_seconds=self.waited_seconds,
        )


def advise(stats: LoaderStats, batch_size: int, prefetch: int, processors: int) -> LoaderAdvice:
    """Return the workers and the batches ahead with which loading limits the consumer as little as possible.

    Raises
    ------
    BusyError
        No batch has been delivered yet.
    """
    count = stats.batches
    if not count:
        raise BusyError("no batch has been delivered yet: load some batches first, then ask again")
    decode, source, upload, consumer = (
        seconds / count
        for seconds in (
            stats.decode_seconds,
            stats.source_seconds,
            stats.upload_seconds,
            stats.consumer_seconds,
        )
    )
    others = max(source, upload, consumer)
    most = max(processors, stats.workers)
    workers = min(most, max(1, math.ceil(decode / others))) if others else stats.workers
    period = max(others, decode / workers)
    latency = source + decode / min(workers, batch_size) + upload
    ahead = 1 + math.ceil(latency / period) if period else prefetch
    names = {
        "the source": source,
        "the upload": upload,
        "the consumer": consumer,
        f"decoding by {workers} worker{'s' * (workers > 1)}": decode / workers,
    }
    slowest = max(names, key=names.__getitem__)
    why = [
        f"decoding a batch takes {_ms(decode)} of one worker, the upload {_ms(upload)}, and the consumer has it for "
        f"{_ms(consumer)}: the limit is {slowest}, {_ms(period)} a batch",
        f"loading a batch takes {_ms(latency)} in all, so {ahead} batches ahead keep the limit busy",
    ]
    if latency < NO_GAIN * consumer:
        why.append("loading takes less than a twentieth of the consumer's time: without a loader it is nearly as quick")
    if math.ceil(decode / others) > most if others else False:
        why.append(
            f"more workers than the {processors} processors here are not advised; they help if decode waits for files "
            "or the network"
        )
    return LoaderAdvice(workers, ahead, period * 1e3, "; ".join(why))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
