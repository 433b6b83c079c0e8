"""Finish: what must be done to its end, and what the interpreter's exit gives to devices that are still at work."""

from __future__ import annotations

import asyncio
import atexit
import time
import weakref
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

__all__ = ["at_exit", "to_the_end"]

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half-way: a cancellation is raised when it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


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
