"""The return values of the `statistics()` methods of a device, its streams and its memory."""

from __future__ import annotations

import dataclasses

from ._mistakes import figures

__all__ = ["DeviceStatistics", "MemoryStatistics", "StreamStatistics"]


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Figures of one device, for all its event loops."""

    in_flight: int  #: unfinished operations, on the host and on the device
    submitted: int  #: operations submitted to streams
    resolved: int  #: operations that have finished
    failed: int
    abandoned: int
    polls: int  #: queries of a stream queue
    sleeps: int  #: waits by a timer
    parks: int  #: waits by a notifier
    armed: int  #: notifiers that are armed at present
    notifications: int  #: tags read from the ports of the event loops, put there by notifiers and finished jobs
    watchdog_wakes: int  #: ticks of the watchdog
    lost_wakes: int  #: notifiers that did not report a finished event
    #: Calls of the driver that have taken more than 20 ms beside unfinished work since this device was opened, for all
    #: devices of the driver: the log event ``driver_call_waited`` names each.
    driver_calls_waited: int
    streams: int  #: open streams of this device
    #: CUDA streams created since this device was opened, for all devices of the driver. If another library has the
    #: handle of a stream, the driver keeps the stream and uses it again; that creates no stream.
    streams_created: int
    events: int  #: count of the driver, for all its devices
    threads: int  #: count of the driver, for all its devices
    core: str  #: ``"compiled"`` or ``"python"``: the form of the core, which enqueues, queries and resolves


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Figures of one stream since it was opened."""

    operations: int  #: enqueued operations of all kinds
    launches: int
    uploads: int
    downloads: int
    copies: int
    fills: int
    bytes_uploaded: int
    bytes_downloaded: int
    bytes_copied: int
    average_ms: float  #: mean host time from submit to resolve of the last 512 operations
    p50_ms: float  #: percentiles of these times
    p99_ms: float
    #: Device memory allocated through this stream that is neither freed nor dropped; and `Stream.record_memory`.
    live_bytes: int
    peak_bytes: int  #: the largest value of ``live_bytes`` so far


@figures
@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Figures of the memory of one device, in bytes."""

    #: Memory of buffers that are neither freed nor dropped. Dropped buffers count until a loop that uses the device
    #: reads the statistics.
    live_bytes: int
    peak_bytes: int  #: the largest value of ``live_bytes`` so far
    reserved_bytes: int  #: memory that the pool holds, in use or not
    by_class: dict[int, int]  #: live bytes by size class: the power of two at or above the size
    fragmentation: float  #: share of the reserved bytes that is not in use, 0-1
