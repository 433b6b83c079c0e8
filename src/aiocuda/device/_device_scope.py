"""DeviceScope: the life of a device, which several event loops share."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from asyncio import _get_running_loop
from typing import Any

from .._base._owner import Owner
from .._base._scope import Scope

__all__ = ["DeviceScope"]

#: Seconds between two looks at an end that runs in another event loop.
TICK = 0.001

#: Seconds that the loop of another call has beyond the deadline, before this call ends the device in its place.
LATE = 0.2


class DeviceScope(Scope):
    """The life of a device. A call in any loop ends it; a call in another loop waits for that end.

    If the loop of the end has stopped, or does not end a device that is left in time, the waiting call ends the device
    in its place.
    """

    __slots__ = ("_claim", "_ending_loop")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._claim = threading.Lock()  # held while a call decides whether its loop ends the device
        self._ending_loop: asyncio.AbstractEventLoop | None = None

    async def aclose(
        self, owner: Owner, seconds: float | None = None, *, left: bool = False, error: BaseException | None = None
    ) -> None:
        """End the device: see `Scope.aclose`."""
        here, waited_for = _get_running_loop(), None
        while here is not None and not self.closed:
            with self._claim:
                if self._ending_loop is waited_for:
                    self._ending_loop, self._end = here, None
                there = self._ending_loop
            if there is here or there is None:
                break
            await self._wait_for(there, owner, left=left)
            waited_for = there
        try:
            await super().aclose(owner, seconds, left=left, error=error)
        finally:
            if not self.closing:  # the call has raised an error, and changed nothing
                self._ending_loop = None

    async def _wait_for(self, there: asyncio.AbstractEventLoop, owner: Owner, *, left: bool) -> None:
        """Wait until the other loop has ended the device, or does not end it."""
        loop, until = asyncio.get_running_loop(), math.inf
        if left:
            with contextlib.suppress(RuntimeError):  # it has been closed
                there.call_soon_threadsafe(self.hurry, owner)
            until = loop.time() + LATE + (0.0 if self.drain_seconds is None else self.drain_seconds())
        while not self.closed and there.is_running() and loop.time() < until:  # noqa: ASYNC110 - of another loop
            await asyncio.sleep(TICK)
