"""Notifiers of one event loop: which are free, which are armed, and which have fallen silent.

A notifier rings once: it is armed from `NotifierPool.arm` until *its own* tag has been read from the port. That an
operation is resolved meanwhile, by polling say, disarms nothing: the host function is still in its side stream. Tags of
others are ignored. A notifier that stays silent for two ticks of the watchdog after its event was seen done is never
used again, and counted as a lost wake.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..driver.protocol import Driver, Notifier
from ._operation import Operation

if TYPE_CHECKING:
    from ._stream_queue import StreamQueue

__all__ = ["ArmedNotifier", "NotifierPool"]

#: Tag = index of the notifier, then a number that no other ring of this process has.
INDEX_SHIFT = 44
_sequence = itertools.count(1)


def _idle(driver: Driver) -> dict[int, list[NotifierPool]]:
    """Racks whose loop has gone, by device: notifiers are immortal, so the next loop takes them over.

    The driver itself keeps them. In a table of ours they would keep the driver alive, which its notifiers hold.
    """
    racks: dict[int, list[NotifierPool]] = driver.registry.setdefault("idle racks", {})
    return racks


class ArmedNotifier:
    """One ring that has not been heard yet."""

    __slots__ = ("index", "operation", "queue", "silent_ticks", "token")

    def __init__(self, index: int, token: int, queue: StreamQueue, operation: Operation[object]) -> None:
        self.index = index
        self.token: int | None = token
        self.queue = queue
        self.operation = operation
        self.silent_ticks = 0


class NotifierPool:
    """The notifiers of one port."""

    __slots__ = ("__weakref__", "_close", "_device", "_free", "_notifiers", "_wake", "armed", "port", "quarantined")

    def __init__(self, driver: Driver, device: int) -> None:
        self._device = device
        self._notifiers: list[Notifier] = []
        self._free: list[int] = []
        self.armed: dict[int, ArmedNotifier] = {}
        self.quarantined = 0
        self._wake: Callable[[], None] | None = None
        notifier_pool = weakref.ref(self)  # ports are immortal, and hold what they wake

        def wake() -> None:
            this = notifier_pool()
            if this is not None and this._wake is not None:
                this._wake()

        self.port = driver.open_port(wake)
        # With its driver, and once: closed a second time, the port would be taken from whom it serves by then.
        self._close = weakref.finalize(self, self.port.close)
        self._close.atexit = False

    @classmethod
    def take(cls, driver: Driver, device: int, wake: Callable[[], None]) -> NotifierPool:
        """The rack of a loop that has gone, or a new one."""
        idle = _idle(driver).get(device)
        notifier_pool = idle.pop() if idle else cls(driver, device)
        notifier_pool._wake = wake
        return notifier_pool

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
            for notifier_pool in racks:
                notifier_pool._close()
        _idle(driver).clear()

    def arm(self, queue: StreamQueue, operation: Operation[object], tokens: list[int]) -> ArmedNotifier | None:
        """Ring when the operation's event is done; None if no notifier is to be had."""
        lease = operation._lease
        if lease is None:
            return None
        try:
            token = tokens.pop()
        except IndexError:
            return None
        try:
            if not self._free:
                self._notifiers.append(queue.device_state.driver.notifier(self._device, self.port))
                self._free.append(len(self._notifiers) - 1)
            index = self._free.pop()
            tag = (index << INDEX_SHIFT) | next(_sequence)
            armed = self.armed[tag] = ArmedNotifier(index, token, queue, operation)
            try:
                self._notifiers[index].ring(lease.handle, tag)
            except BaseException:
                del self.armed[tag]
                self._free.append(index)
                raise
        except BaseException:
            tokens.append(token)
            raise
        return armed

    def heard(self, tag: int, tokens: list[int]) -> ArmedNotifier | None:
        """The tag has come: its notifier is free again. None for a tag that is nobody's."""
        armed = self.armed.pop(tag, None)
        if armed is not None:
            self._free.append(armed.index)
            if armed.token is not None:
                tokens.append(armed.token)
        return armed

    def tick(self, tokens: list[int]) -> list[ArmedNotifier]:
        """Once per tick of the watchdog: put away the notifiers that ought to have rung two ticks ago."""
        lost: list[ArmedNotifier] = []
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
