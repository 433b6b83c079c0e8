"""Watch: whoever waits for something to come back hears of a device that was closed or has faulted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .._device import Device
from ..errors import ClosedError

__all__ = ["WATCH_SECONDS", "Watch", "check_device"]

#: How soon those who wait hear of a device that was closed or has faulted: as soon as by the reactor's watchdog.
WATCH_SECONDS = 0.025


def check_device(device: Device, what: str) -> None:
    """`ClosedError`, `DeviceFault` or `ForkedProcessError` if nothing lent, ``what``, can come back any more."""
    device._device_state.check_process()
    if device.closed or device._closing:
        raise ClosedError(f"{device.name} has been closed, and its {what} with it")
    fault = device.driver.fault
    if fault is not None:
        raise fault.again()


class Watch:
    """A timer that runs while anybody waits, and only then.

    Parameters
    ----------
    look
        Called every 25 ms: tells those who wait of an end, and says whether anybody still waits.
    """

    __slots__ = ("_look", "_loop")

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        """Is it going to look?"""
        return self._loop is not None

    def start(self) -> None:
        """Somebody waits, on the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a loop that ended while somebody waited has taken its timer along
            self._loop = loop
            loop.call_later(WATCH_SECONDS, self._tick)

    def _tick(self) -> None:
        self._loop = None
        if self._look():
            self.start()
