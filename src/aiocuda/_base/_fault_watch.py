"""FaultWatch: calls a method on an event loop when a device of the process has faulted."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from ..errors import DeviceFault
from ._faults import FAULTS

__all__ = ["FaultWatch"]


class FaultWatch:
    """Calls a method on an event loop when any device of the process has faulted, until it is stopped or dropped.

    It does not keep the object of the method alive.

    Attributes
    ----------
    fault : DeviceFault or None
        The newest fault; set before the method is called. At first it is the one that the program has passed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, method: Callable[[], object], fault: DeviceFault | None = None
    ) -> None:
        self.fault = fault
        self._loop = loop
        self._method = weakref.WeakMethod(method)
        FAULTS.add(self)

    def stop(self) -> None:
        """Stop calling the method. Idempotent."""
        FAULTS.remove(self)

    def on_fault(self, fault: DeviceFault) -> None:
        """Call the method in the loop's next iteration. Any thread, for `FAULTS`."""
        self.fault = fault
        try:
            self._loop.call_soon_threadsafe(self._call)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop serves nothing
                raise

    def _call(self) -> None:
        method = self._method()
        if method is not None:
            method()
