"""Faults: the fault that has ended CUDA in this process, and the watches that are told of each new fault."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..errors import DeviceFault

if TYPE_CHECKING:
    from ._fault_watch import FaultWatch

__all__ = ["FAULTS", "Faults"]


class Faults:
    """The device faults of this process. Drivers report a fault here when they latch it.

    There is no lock: each step is one operation of a list. A fault may be reported on any thread that calls a driver.
    """

    __slots__ = ("_watches", "of_process")

    def __init__(self) -> None:
        self.of_process: DeviceFault | None = None  #: the fault that has ended CUDA; it stays when devices are closed
        self._watches: list[weakref.ref[FaultWatch]] = []

    @property
    def watches(self) -> list[FaultWatch]:
        """The watches that are told of a fault."""
        return [watch for watch in (reference() for reference in list(self._watches)) if watch is not None]

    def add(self, watch: FaultWatch) -> None:
        """Call ``watch.on_fault`` with each new fault, on the thread that finds it, while the watch is alive."""
        self._watches.append(weakref.ref(watch, self._remove))

    def remove(self, watch: FaultWatch) -> None:
        """Tell the watch of no further fault. Idempotent."""
        self._remove(weakref.ref(watch))

    def _remove(self, reference: weakref.ref[FaultWatch]) -> None:
        """Remove the reference. References to a living watch are equal; one to a dead watch equals only itself."""
        if reference in self._watches:
            self._watches.remove(reference)

    def report(self, fault: DeviceFault, *, ends_process: bool) -> None:
        """Report the first fault of a driver. ``ends_process`` is False for a driver that can be opened again."""
        if ends_process and self.of_process is None:
            self.of_process = fault
        for watch in self.watches:
            watch.on_fault(fault)


#: The faults of this process.
FAULTS = Faults()
