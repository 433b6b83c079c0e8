"""Reports: what `statistics()` returns. Snapshots, counted where things happen."""

from __future__ import annotations

import dataclasses

__all__ = ["DeviceStatistics", "MemoryStatistics", "StreamStatistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device, all its loops.

    Attributes
    ----------
    in_flight
        Operations that have not finished, on the host or on the device.
    submitted, resolved, failed, abandoned
        Operations given to streams, and how they ended.
    polls, sleeps, parks
        Looks at a queue; waits slept through by a timer; waits left to a notifier.
    armed
        Notifiers that are to ring.
    notifications
        Tags read from the ports: notifiers and finished jobs.
    watchdog_wakes, lost_wakes
        Ticks of the watchdog; notifiers that never rang although their event was done.
    streams
        Open, of those that this device has made.
    streams_created, events, threads
        Of the driver, all its devices, as it counts them. ``streams_created`` counts the CUDA streams that were made
        since this device was opened; a stream that other libraries know, and that serves again, is not made.
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
    """One stream since it was opened. Times are host time from submit to resolve, of the last 512 operations.

    Attributes
    ----------
    operations, launches, uploads, downloads, copies, fills
        Operations enqueued, by kind; ``operations`` counts all kinds.
    bytes_uploaded, bytes_downloaded, bytes_copied
        Bytes of those, by direction.
    average_ms, p50_ms, p99_ms
        Submit to resolve.
    live_bytes, peak_bytes
        Device memory allocated through this stream: neither freed nor dropped, and the most that it has been.
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
    """One device's memory, in bytes.

    Attributes
    ----------
    live_bytes
        Handed out, and neither freed nor dropped. What was dropped is taken back where a loop that uses the device
        asks; asked elsewhere, it counts until such a loop looks.
    peak_bytes
        The most that ``live_bytes`` has been.
    reserved_bytes
        Held by the pool, handed out or not.
    by_class
        Live bytes by size class: the power of two at or above the size.
    fragmentation
        Share of the reserved bytes that is not handed out, 0-1.
    """

    live_bytes: int
    peak_bytes: int
    reserved_bytes: int
    by_class: dict[int, int]
    fragmentation: float
