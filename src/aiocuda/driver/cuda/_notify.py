"""Verbs about clocks, threads and descriptors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...errors import ForkedProcessError
from .._port import Port, native_port, open_port
from .._workers import Workers
from ..protocol import _notify
from ._library import FORKED
from ._notifier import CudaNotifier, notifiers_of
from ._streams import CudaStreams

__all__ = ["CudaNotify"]


class CudaNotify(CudaStreams):
    """`aiocuda.driver.protocol.Notify`. After a fault all but the notifiers work, so that waiters can be woken."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        # None of them starts before it is needed.
        self._workers = Workers()
        self._notifiers = 0

    polls_freely: Final = True

    #: Seconds, monotonic: the clock itself, since every enqueue reads it.
    now = staticmethod(time.monotonic)

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        return open_port(wake)

    def offload(self, work: Callable[[], object], port: _notify.Port, tag: int) -> None:
        """Run ``work`` on one of 8 daemon threads; then put ``tag`` into the port."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        self._workers.submit(work, native_port(port), tag)

    def notifier_limit(self, device: int) -> int:
        """How many notifiers may be armed at once on a device: 24 of 32 hardware queues, 4 of 8."""
        return notifiers_of(self.opened(device).properties.hardware_queues)

    def notifier(self, device: int, port: _notify.Port) -> CudaNotifier:
        """A new notifier, with a stream of its own."""
        notifier = CudaNotifier(self, device, native_port(port).write_fd)
        self._notifiers += 1
        return notifier
