"""Streams and events: what orders the device's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Streams(Protocol):
    """Verbs about order."""

    def priority_range(self, device: int) -> tuple[int, int]:
        """(least, greatest); a smaller number goes first. ``cuCtxGetStreamPriorityRange``."""

    def stream_create(self, device: int, priority: int) -> int:
        """A non-blocking stream. ``cuStreamCreateWithPriority``.

        It may be one that `stream_destroy` has kept: of the same device and priority, idle, and in no capture. Its name
        is new all the same.
        """

    def stream_default(self, device: int) -> int:
        """The device's default stream, ``CU_STREAM_LEGACY``, under a handle of its own at each call. Nothing is made.

        Others may use it, too, so calls that name it never keep the GIL. `stream_destroy` forgets that handle.
        """

    def stream_import(self, device: int, handle: int) -> None:
        """Somebody else's stream, to be used here too; calls that name it never keep the GIL.

        As often as it was imported `stream_destroy` forgets it: several openings of one device may name one stream.
        `StaleHandleError` where the driver can tell that there is no such stream.
        """

    def stream_handle(self, stream: int) -> int:
        """What others call it: the ``CUstream``. It may differ from our own handle, which is never used twice.

        Another library may use the stream from now on, for as long as the process lives: `stream_destroy` keeps it.
        """

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        """Is ``handle`` the ``CUstream`` of this stream? No other library receives it, so the stream is not kept."""

    def stream_destroy(self, stream: int) -> None:
        """Give a stream back; what it has accepted still runs. ``cuStreamDestroy``. An imported one is forgotten.

        A stream whose handle was read by `stream_handle` is not destroyed: its name is stale, and `stream_create` may
        return the stream again under a new name. It can still be imported by its handle.
        """

    def stream_priority(self, stream: int) -> int:
        """The priority in force, after clamping. ``cuStreamGetPriority``."""

    def stream_query(self, stream: int) -> bool:
        """Is everything that the stream accepted done? ``cuStreamQuery``."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait for all that the stream accepted. **May block.** ``cuStreamSynchronize``."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits, on the device, for what the event recorded last.

        ``cuStreamWaitEvent``. The event may be recorded anew as soon as this returns. An event that was
        never recorded counts as done.
        """

    def stream_capturing(self, stream: int) -> bool:
        """Is somebody capturing this stream into a graph? ``cuStreamIsCapturing``."""

    def event_create(self, device: int, timing: bool) -> int:
        """``cuEventCreate``; without timing an event costs less. Never recorded counts as done."""

    def event_destroy(self, event: int) -> None:
        """``cuEventDestroy``; waits already enqueued on it still hold."""

    def event_record(self, event: int, stream: int) -> None:
        """The event is done when all earlier work of the stream is. ``cuEventRecord``.

        Event and stream must be of one device, else `WrongDeviceError`.
        """

    def recorder(self, stream: int) -> Callable[[int], None]:
        """`event_record` bound to one stream, as a launcher is to one kernel, for those that record often."""

    def event_query(self, event: int) -> bool:
        """Has everything before the last record been done? Never blocks. ``cuEventQuery``."""

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Device time between two done timing events, in milliseconds. ``cuEventElapsedTime``."""

    def begin_queries(self) -> None:
        """Queries of this thread must not disturb somebody else's capture until `end_queries`.

        ``cuThreadExchangeStreamCaptureMode`` with ``RELAXED``.
        """

    def end_queries(self) -> None:
        """Put back what `begin_queries` changed."""
