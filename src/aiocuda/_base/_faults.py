"""Faults: the fault that has ended CUDA in this process, and functions that are called for each new fault."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DeviceFault

__all__ = ["FAULTS", "Faults"]


class Faults:
    """The device faults of this process. Drivers report a fault here when they latch it.

    There is no lock: each step is one operation of a list. A fault may be reported on any thread that calls a driver.
    """

    __slots__ = ("_listeners", "of_process")

    def __init__(self) -> None:
        self.of_process: DeviceFault | None = None  #: the fault that has ended CUDA; it stays when devices are closed
        self._listeners: list[Callable[[DeviceFault], object]] = []

    def add_listener(self, listener: Callable[[DeviceFault], object]) -> None:
        """Call a function with each new fault, on the thread that finds it. The function must not block or raise."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[DeviceFault], object]) -> None:
        """Remove a function that `add_listener` has added."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def report(self, fault: DeviceFault, *, ends_process: bool) -> None:
        """Report the first fault of a driver. ``ends_process`` is False for a driver that can be opened again."""
        if ends_process and self.of_process is None:
            self.of_process = fault
        for listener in tuple(self._listeners):
            listener(fault)


#: The faults of this process.
FAULTS = Faults()
