"""Finish: what the interpreter's exit gives to devices that are still at work."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Protocol

__all__ = ["at_exit"]


class Drained(Protocol):
    """A device, as the end of the process sees it."""

    drain_timeout: float
    closed: bool

    def _unfinished(self) -> bool: ...


_open: weakref.WeakSet[Drained] = weakref.WeakSet()


def at_exit(device: Drained) -> None:
    """Give the device's work its time before the interpreter goes. One hook for all devices."""
    if not _open:
        atexit.unregister(_drain_all)
        atexit.register(_drain_all)
    _open.add(device)


def _drain_all() -> None:
    """No loop runs any more, so this one place may block: until the work is done, or its time is up."""
    began = time.monotonic()
    for device in list(_open):
        while not device.closed and device._unfinished():
            if time.monotonic() - began > device.drain_timeout:
                break
            time.sleep(0.001)  # noqa: TID251 - no loop runs any more
