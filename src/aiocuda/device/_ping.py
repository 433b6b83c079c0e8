"""PingStream: the stream on which one event loop asks a device for a sign of life."""

from __future__ import annotations

import asyncio

from .._core import DONE, Ring, StreamOperation

__all__ = ["PingStream"]


class PingStream:
    """A stream that has no work except the marker of `Device.ping`: an event that the device has to reach.

    Pings that overlap await one marker. While the device does not reach it, no other is submitted, so any number of
    pings that time out hold one event.
    """

    __slots__ = ("_marker", "_queue")

    def __init__(self, queue: Ring) -> None:
        self._queue = queue
        self._marker: StreamOperation[None] | None = None

    async def ping(self, seconds: float | None) -> float:
        """Return the seconds until the device reached the marker. `TimeoutError` after so many ``seconds``."""
        queue = self._queue
        now = queue.driver.now
        began = now()
        queue.poll()  # a marker that the device reached before this call proves nothing
        marker = self._marker
        if marker is None or marker.status >= DONE:
            marker = self._marker = queue.submit_marker()
        try:
            async with asyncio.timeout(seconds):
                await marker
        except TimeoutError:
            queue.poll()  # if another callback has blocked the loop for so long, the device may have answered in time
            if marker.status < DONE:
                raise
            marker.result()
        return now() - began
