"""OpenDevices: the devices that are open in this process."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from asyncio import AbstractEventLoop
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DeviceFault

if TYPE_CHECKING:
    from ..driver.protocol import Driver
    from ._resources import DeviceResources
    from .streams._checker import Checker

__all__ = ["OPEN_DEVICES", "DeviceObserver", "OpenDevices"]


class DeviceObserver(Protocol):
    """An object that is notified of every device that the process opens and closes, in all loops and threads."""

    async def opened(self, device: Any, /) -> None:
        """Called in the loop that has opened the device, before the program gets it."""

    def closing(self, device: Any, /) -> None:
        """Called when no operation is left, or when the device is abandoned; before its resources are freed."""


class OpenDevices:
    """The devices that are open, by weak references, in the order in which they were opened.

    Readers take no lock: the garbage collector may run at each line, and a finaliser may open, close or look for a
    device. A writer replaces the whole tuple, and begins again if another one was faster.
    """

    def __init__(self) -> None:
        self._opened: tuple[weakref.ref[DeviceResources], ...] = ()
        self.observers: tuple[DeviceObserver, ...] = ()
        self._replacing = threading.Lock()

    def add(self, device: DeviceResources) -> None:
        """Add a device that was opened, and forget those that were closed.

        When the interpreter exits, it waits for the work of the devices that are open. One hook serves all of them.
        """
        new = weakref.ref(device)
        while True:
            before = self._opened
            after = (*(known for known in before if (found := known()) is not None and not found.closed), new)
            with self._replacing:  # nothing in here allocates memory, so that the collector does not run
                if self._opened is before:
                    self._opened = after
                    break
        if len(after) == 1:
            atexit.unregister(self._drain)
            atexit.register(self._drain)

    def add_observer(self, observer: DeviceObserver) -> None:
        """Notify an observer of the devices that are opened from now on. For `aiocuda trace`."""
        self.observers = (*self.observers, observer)

    def remove_observer(self, observer: DeviceObserver) -> None:
        """Notify it no longer."""
        self.observers = tuple(each for each in self.observers if each is not observer)

    def on_loop(self, loop: AbstractEventLoop) -> list[DeviceResources]:
        """Return the devices that a loop has open, without those that are being closed."""
        devices = [device for known in self._opened if (device := known()) is not None]
        return [each for each in devices if not each.closing and each.loop_states.get(loop) is not None]

    def checker_of(self, driver: Driver) -> Checker | None:
        """Return the checker of the open devices of a driver; None if none of them has one."""
        for known in self._opened:
            device = known()
            if device is not None and device.driver is driver and not device.closed and device.checker is not None:
                return device.checker
        return None

    def fault(self) -> DeviceFault | None:
        """Return the fault of a device that is open, or None."""
        for known in self._opened:
            device = known()
            if device is not None and not device.closed and device.driver.fault is not None:
                return device.driver.fault
        return None

    def _drain(self) -> None:
        """Block until all work is done, its time is up, or Ctrl-C. Only at exit, where blocking is allowed."""
        began = time.monotonic()
        try:
            for known in self._opened:
                device = known()
                while device is not None and not device.closed and device.unfinished():
                    if time.monotonic() - began > device.deadline.timeout:
                        break
                    time.sleep(0.001)  # noqa: TID251 - no loop runs any more
        except KeyboardInterrupt:
            return  # the user does not want to wait for the exit; the exit code stays


#: The devices of this process.
OPEN_DEVICES = OpenDevices()
