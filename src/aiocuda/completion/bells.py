"""Bells of one event loop: which are free, which are armed, and which have fallen silent.

A bell rings once: it is armed from `Rack.arm` until *its own* tag has been read from the port. That an operation is
resolved meanwhile, by polling say, disarms nothing: the host function is still in its side stream. Tags of others are
ignored. A bell that stays silent for two ticks of the watchdog after its event was seen done is never used again, and
counted as a lost wake.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..driver.protocol import Driver
from ..driver.protocol.notify import Bell
from .operation import Operation

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["Armed", "Rack"]

#: Tag = index of the bell, then a number that no other ring of this process has.
INDEX_SHIFT = 44
_sequence = itertools.count(1)


def _idle(driver: Driver) -> dict[int, list[Rack]]:
    """Racks whose loop has gone, by device: bells are immortal, so the next loop takes them over.

    The driver itself keeps them. In a table of ours they would keep the driver alive, which its bells hold.
    """
    racks: dict[int, list[Rack]] = driver.shelf.setdefault("idle racks", {})
    return racks


class Armed:
    """One ring that has not been heard yet."""

    __slots__ = ("index", "lane", "operation", "silent_ticks", "token")

    def __init__(self, index: int, token: int, lane: Lane, operation: Operation[object]) -> None:
        self.index = index
        self.token: int | None = token
        self.lane = lane
        self.operation = operation
        self.silent_ticks = 0


class Rack:
    """The bells of one port."""

    __slots__ = ("__weakref__", "_bells", "_close", "_device", "_free", "_wake", "armed", "port", "quarantined")

    def __init__(self, driver: Driver, device: int) -> None:
        self._device = device
        self._bells: list[Bell] = []
        self._free: list[int] = []
        self.armed: dict[int, Armed] = {}
        self.quarantined = 0
        self._wake: Callable[[], None] | None = None
        rack = weakref.ref(self)  # ports are immortal, and hold what they wake

        def wake() -> None:
            this = rack()
            if this is not None and this._wake is not None:
                this._wake()

        self.port = driver.open_port(wake)
        # With its driver, and once: closed a second time, the port would be taken from whom it serves by then.
        self._close = weakref.finalize(self, self.port.close)
        self._close.atexit = False

    @classmethod
    def take(cls, driver: Driver, device: int, wake: Callable[[], None]) -> Rack:
        """The rack of a loop that has gone, or a new one."""
        idle = _idle(driver).get(device)
        rack = idle.pop() if idle else cls(driver, device)
        rack._wake = wake
        return rack

    def give(self, driver: Driver, tokens: list[int]) -> None:
        """The loop has gone: what is armed stays armed, but counts against nobody any more."""
        self._wake = None
        for armed in self.armed.values():
            if armed.token is not None:
                tokens.append(armed.token)
                armed.token = None
        _idle(driver).setdefault(self._device, []).append(self)

    def silence(self, tokens: list[int]) -> None:
        """The device has faulted: nothing rings any more, and nothing is armed again."""
        tokens += [armed.token for armed in self.armed.values() if armed.token is not None]
        self.armed.clear()

    @staticmethod
    def dismiss(driver: Driver) -> None:
        """The driver is closed: its ports serve others."""
        for racks in _idle(driver).values():
            for rack in racks:
                rack._close()
        _idle(driver).clear()

    def arm(self, lane: Lane, operation: Operation[object], tokens: list[int]) -> Armed | None:
        """Ring when the operation's event is done; None if no bell is to be had."""
        lease = operation._lease
        if lease is None:
            return None
        try:
            token = tokens.pop()
        except IndexError:
            return None
        try:
            if not self._free:
                self._bells.append(lane.hub.driver.bell(self._device, self.port))
                self._free.append(len(self._bells) - 1)
            index = self._free.pop()
            tag = (index << INDEX_SHIFT) | next(_sequence)
            armed = self.armed[tag] = Armed(index, token, lane, operation)
            try:
                self._bells[index].ring(lease.handle, tag)
            except BaseException:
                del self.armed[tag]
                self._free.append(index)
                raise
        except BaseException:
            tokens.append(token)
            raise
        return armed

    def heard(self, tag: int, tokens: list[int]) -> Armed | None:
        """The tag has come: its bell is free again. None for a tag that is nobody's."""
        armed = self.armed.pop(tag, None)
        if armed is not None:
            self._free.append(armed.index)
            if armed.token is not None:
                tokens.append(armed.token)
        return armed

    def tick(self, tokens: list[int]) -> list[Armed]:
        """Once per tick of the watchdog: put away the bells that ought to have rung two ticks ago."""
        lost: list[Armed] = []
        for tag, armed in list(self.armed.items()):
            if not armed.operation._passed:
                continue
            armed.silent_ticks += 1
            if armed.silent_ticks > 2:
                del self.armed[tag]
                self.quarantined += 1
                if armed.token is not None:
                    tokens.append(armed.token)
                lost.append(armed)
        return lost
