"""Whether another library captures a stream into a graph."""

from __future__ import annotations

from ..driver.protocol import Driver
from ..errors import BusyError

__all__ = ["is_captured"]

#: The driver's answer for a default stream while a stream that waits for it is captured.
STREAM_CAPTURE_IMPLICIT = 906


def is_captured(driver: Driver, stream: int) -> bool:
    """Return whether a stream is being captured, given the driver's name of it. From any thread."""
    try:
        return driver.stream_capturing(stream)
    except BusyError as error:
        if getattr(error, "code", 0) == STREAM_CAPTURE_IMPLICIT:
            return True
        raise
