"""Event leases: CUDA events on loan to operations, each loan with its own generation."""

from __future__ import annotations

import contextlib

from .._core import Lease
from ..driver.protocol import Driver
from ..errors import ClosedError

__all__ = ["EventLeases"]


class EventLeases:
    """The events of one device, shared by all its loops.

    Taking and returning an event are single list operations, so threads need no lock. The number of events grows with
    the number of operations in flight, which is limited, and never shrinks while the device is open: an event takes
    0.4 µs to create and some hundred bytes.

    Attributes
    ----------
    plain : list of Lease
        The idle events without timing. `Ring.submit` takes from it directly.
    created : int
        The number of events created so far.
    """

    __slots__ = ("_closed", "_device", "_driver", "_timed", "created", "plain")

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self.plain: list[Lease] = []
        self._timed: list[Lease] = []
        self.created = 0
        self._closed = False

    def take(self, timing: bool = False) -> Lease:
        """Return an idle event; a new one if none is idle."""
        idle = self._timed if timing else self.plain
        try:
            return idle.pop()
        except IndexError:
            pass  # leave the handler: an error of the driver would get this one, with all its frames, as its context
        self.created += 1
        return Lease(self._driver.event_create(self._device, timing), timing, idle)

    def give(self, lease: Lease) -> None:
        """Return an event. Device-side waits that are enqueued on it stay valid."""
        lease.generation += 1
        lease.home.append(lease)

    def give_late(self, lease: Lease) -> None:
        """Return an event that the program may have held until after the device was closed."""
        self.give(lease)
        if self._closed:
            with contextlib.suppress(ClosedError):  # the driver is closed, and has destroyed its events
                self.close()

    @property
    def idle(self) -> int:
        """The number of idle events."""
        return len(self.plain) + len(self._timed)

    def close(self) -> None:
        """Destroy the idle events."""
        self._closed = True
        for idle in (self.plain, self._timed):
            while idle:
                lease = idle.pop()
                lease.word = 0  # a stream of another device that would wait for it finds out that it is gone
                self._driver.event_destroy(lease.handle)
