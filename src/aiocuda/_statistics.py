"""The return values of the `statistics()` methods of a device, its streams and its memory."""

from __future__ import annotations

import dataclasses

__all__ = ["DeviceStatistics", "MemoryStatistics", "StreamStatistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Figures of one device, for all its event loops.

    Attributes
    ----------
    in_flight
        Unfinished operations, on the host and on the device.
    submitted, resolved, failed, abandoned
        Operations submitted to streams; finished; failed; abandoned.
    polls, sleeps, parks
        Queries of a stream queue; waits by a timer; waits by a notifier.
    armed
        Notifiers that are armed at present.
    notifications
        Tags read from the ports of the event loops, put there by notifiers and finished jobs.
    watchdog_wakes, lost_wakes
        Ticks of the watchdog; notifiers that did not report a finished event.
    streams
        Open streams of this device.
    streams_created, events, threads
        Counts of the driver, for all its devices. ``streams_created`` counts the CUDA streams created since this device
        was opened. The driver keeps a stream if another library has its handle, and uses it
        again; that creates no stream.
    """

    in_flight: int
    submitted: int
    resolved: int
    failed: int
    abandoned: int
    polls: int
    sleeps: int
    parks: int
    armed: int
    notifications: int
    watchdog_wakes: int
    lost_wakes: int
    streams: int
    streams_created: int
    events: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Figures of one stream since it was opened.

    Attributes
    ----------
    operations, launches, uploads, downloads, copies, fills
        Enqueued operations: all kinds, and by kind.
    bytes_uploaded, bytes_downloaded, bytes_copied
        Bytes of the copies, by direction.
    average_ms, p50_ms, p99_ms
        Host time from submit to resolve of the last 512 operations: mean and percentiles.
    live_bytes, peak_bytes
        Device memory allocated through this stream that is neither freed nor dropped; the largest value so far.
    """

    operations: int
    launches: int
    uploads: int
    downloads: int
    copies: int
    fills: int
    bytes_uploaded: int
    bytes_downloaded: int
    bytes_copied: int
    average_ms: float
    p50_ms: float
    p99_ms: float
    live_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Figures of the memory of one device, in bytes.

    Attributes
    ----------
    live_bytes
        Memory of buffers that are neither freed nor dropped. Dropped buffers count until a loop that uses the device
        reads the statistics.
    peak_bytes
        The largest value of ``live_bytes`` so far.
    reserved_bytes
        Memory that the pool holds, in use or not.
    by_class
        Live bytes by size class: the power of two at or above the size.
    fragmentation
        Share of the reserved bytes that is not in use, 0-1.
    """

    live_bytes: int
    peak_bytes: int
    reserved_bytes: int
    by_class: dict[int, int]
    fragmentation: float
