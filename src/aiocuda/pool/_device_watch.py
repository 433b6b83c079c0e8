"""A timer that runs while tasks wait for a pool or a barrier, to notice that their device has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..device import Device
from ..errors import ClosedError
from ..lowlevel import resources_of

__all__ = ["WATCH_SECONDS", "DeviceWatch", "check_device"]

#: Seconds between two checks, and so the delay until a waiting task gets the error: the period of the reactor's
#: watchdog.
WATCH_SECONDS = 0.025


def check_device(device: Device, resources: str) -> None:
    """Raise if the device has been closed or has faulted, or was opened in the parent process.

    The message names the ``resources`` that ended with it: "streams" or "events".
    """
    device_resources = resources_of(device)
    device_resources.device_state.check_process()
    if device_resources.closed or device_resources.closing:
        raise ClosedError(f"{device.name} has been closed, and its {resources} with it")
    fault = device.driver.fault
    if fault is not None:
        raise fault.again()


class DeviceWatch:
    """A timer that runs only while tasks wait.

    It calls ``check()``, which fails the waiting tasks if their device has ended, until that returns False: no task
    waits any more. Only the timer holds ``check``, so that its owner is in no reference cycle.
    """

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        """True while another check is scheduled."""
        return self._loop is not None

    def start(self, check: Callable[[], bool]) -> None:
        """Start the timer on the running loop, unless it runs there."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # an earlier loop that was closed while tasks waited has dropped its timer
            self._loop = loop
            loop.call_later(WATCH_SECONDS, self._tick, check)

    def _tick(self, check: Callable[[], bool]) -> None:
        self._loop = None
        if check():
            self.start(check)
