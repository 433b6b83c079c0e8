"""Verbs about clocks, threads and descriptors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

from .. import _port as ports
from ..protocol._notify import Port
from ..software._model import NOTIFIERS, PRIORITIES
from ._core import HostCore

__all__ = ["HostBell", "Notify"]


class HostBell:
    """A side stream whose host function puts a tag into a port."""

    def __init__(self, core: HostCore, device: int, port: ports.Port) -> None:
        self._core = core
        self._port = port
        self._side = core._machine.side_stream(device, PRIORITIES[1])

    def ring(self, event: int, tag: int) -> None:
        """Put ``tag`` into the port when ``event``'s last record is done; at once if it is done already."""
        core = self._core
        core._enter()
        with core._lock:
            core._machine.wait(self._side, core._machine.event(event))
            core._submit(self._side, "call", functools.partial(self._port.put, tag))
        core._call()


class Notify(HostCore):
    """`aiocuda.driver.protocol._notify.Notify` on the host."""

    #: The runners need the GIL: an await of an empty kernel takes 190 µs by polling, 120 by parking.
    polls_freely: Final = False

    #: Seconds, monotonic: the clock itself, since every enqueue reads it.
    now = staticmethod(time.monotonic)

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop."""
        if self._farewell is not None:
            raise self._farewell.again()
        return ports.open_port(wake)

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work`` on a worker thread, then put ``tag`` into the port. A fault does not stop it."""
        if self._farewell is not None:
            raise self._farewell.again()
        self._workers.submit(work, ports.native_port(port), tag)

    def notifier_limit(self, device: int) -> int:
        """24, as on a GPU with 32 hardware queues."""
        self._device(device)
        return NOTIFIERS

    def notifier(self, device: int, port: Port) -> HostBell:
        """A new notifier. It costs a side stream, which is no stream of `statistics`."""
        self._enter()
        self._device(device)
        with self._lock:
            return HostBell(self, device, ports.native_port(port))
