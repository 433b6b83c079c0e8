"""Awaiting a kernel by a raw host callback: the least that a loop can do without a library.

``cuLaunchHostFunc`` calls a function in C, which writes an eventfd. The loop reads the eventfd. Each stream has one
descriptor, and one kernel at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .peers.raw import Raw

__all__ = ["RawWaits", "raw_waits"]


class RawWaits:
    """A stream of the bare driver, whose kernels are awaited by host callbacks."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._loop = asyncio.get_running_loop()
        self._stream = raw.stream()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._call_back = raw.callback(self._stream, self._descriptor)
        self._loop.add_reader(self._descriptor, self._ready)
        self._waiter: asyncio.Future[None] | None = None

    async def spin(self, seconds: float) -> None:
        """Launch a kernel of so many seconds, and await it."""
        self._waiter = self._loop.create_future()
        self._raw.launcher(self._stream, seconds)()
        self._call_back()
        await self._waiter

    def _ready(self) -> None:
        os.eventfd_read(self._descriptor)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the descriptor. No kernel is running any more."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


@contextmanager
def raw_waits(raw: Raw, streams: int) -> Iterator[list[RawWaits]]:
    """Open so many streams of the bare driver; at the end of the block, close their descriptors."""
    with ExitStack() as stack:
        waits = [RawWaits(raw) for _ in range(streams)]
        for one in waits:
            stack.callback(one.close)
        yield waits
