"""Event leases: CUDA events lent out, each loan with a generation of its own."""

from __future__ import annotations

import contextlib

from ..driver.protocol import Driver
from ..errors import ClosedError

__all__ = ["EventLeases", "Lease"]


class Lease:
    """One CUDA event. ``generation`` rises whenever it goes back, so that a stale loan can be told."""

    __slots__ = ("generation", "handle", "home", "lent", "timing")

    def __init__(self, handle: int, timing: bool, home: list[Lease]) -> None:
        self.handle = handle
        self.timing = timing
        self.home = home  # where it goes back to
        self.generation = 0
        self.lent = False  # held by a user's `Event`: the operation that recorded it does not give it back


class EventLeases:
    """The events of one device, shared by all its loops.

    Taking and giving back are single list operations, so threads need no lock. The pool grows with the number of
    operations in flight, which the queues bound, and never shrinks while the device is open: an event costs 0.4 µs
    to make and some hundred bytes.
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
        """An event that nobody else holds; new if none is idle."""
        idle = self._timed if timing else self.plain
        try:
            return idle.pop()
        except IndexError:
            pass  # and no more in here: what the driver raises would have this error, and all its frames, for a context
        self.created += 1
        return Lease(self._driver.event_create(self._device, timing), timing, idle)

    def give(self, lease: Lease) -> None:
        """Take an event back. Device-side waits already enqueued on it still hold."""
        lease.generation += 1
        lease.home.append(lease)

    def give_late(self, lease: Lease) -> None:
        """Take back what a program may have held longer than the device."""
        self.give(lease)
        if self._closed:
            with contextlib.suppress(ClosedError):  # the driver has gone, and its events with it
                self.close()

    @property
    def idle(self) -> int:
        """How many are not lent out."""
        return len(self.plain) + len(self._timed)

    def close(self) -> None:
        """Destroy what is idle."""
        self._closed = True
        for idle in (self.plain, self._timed):
            while idle:
                self._driver.event_destroy(idle.pop().handle)
