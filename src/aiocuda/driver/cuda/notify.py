"""Verbs about clocks, threads and descriptors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...errors import ForkedProcessError
from ..port import Port, native_port, open_port
from ..protocol import notify
from ..workers import Workers
from .bell import CudaBell, bells_of
from .library import FORKED
from .streams import CudaStreams

__all__ = ["CudaNotify"]


class CudaNotify(CudaStreams):
    """`aiocuda.driver.protocol.Notify`. After a fault all but the bells go on, so that whoever waits can be told."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        # None of them starts before it is needed.
        self._workers = Workers()
        self._bells = 0

    polls_freely: Final = True

    #: Seconds, monotonic: the clock itself, since every enqueue reads it.
    now = staticmethod(time.monotonic)

    def open_port(self, wake: Callable[[], None]) -> Port:
        """A port for one event loop."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        return open_port(wake)

    def offload(self, work: Callable[[], object], port: notify.Port, tag: int) -> None:
        """Run ``work`` on one of 8 daemon threads; then put ``tag`` into the port."""
        if self._forked:
            raise ForkedProcessError(FORKED)
        self._workers.submit(work, native_port(port), tag)

    def bell_limit(self, device: int) -> int:
        """How many bells may be armed at once on a device: 24 of 32 hardware queues, 4 of 8."""
        return bells_of(self.opened(device).properties.hardware_queues)

    def bell(self, device: int, port: notify.Port) -> CudaBell:
        """A new bell, with a stream of its own."""
        bell = CudaBell(self, device, native_port(port).write_fd)
        self._bells += 1
        return bell
