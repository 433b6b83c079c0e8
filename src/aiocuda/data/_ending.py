"""The loop of a loader, and its end, which runs once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from .._base._shutdown import finish_shielded
from ..device import Device
from ..errors import BusyError
from ..lowlevel import resources_of
from ._sources import AsyncReader

__all__ = ["Ending", "check_caller", "check_loop"]


def check_loop(
    loader: object, loop: asyncio.AbstractEventLoop | None, device: Device
) -> asyncio.AbstractEventLoop | None:
    """Return the running loop. Raise if the loader has a loop, that of its first use, and it is another one."""
    running = asyncio._get_running_loop()
    if running is loop or loop is None:
        return running
    cure = "close it there, and make a loader in each loop"
    raise resources_of(device).device_state.wrong_loop(loop, repr(loader), cure)


def check_caller(reader: object) -> None:
    """Raise if the code of an asynchronous source has called. The end waits for it."""
    if isinstance(reader, AsyncReader) and reader.runs_here:
        raise BusyError("a loader waits for its source when it closes: close it outside of its source")


class Ending:
    """An end that runs once. Every caller waits for it; the first one gets its error."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True from the first call of `run` on."""
        return self._task is not None

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work``, or wait until it has ended. A cancellation during the wait is raised afterwards."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(work())
            await finish_shielded(self._task)
        else:
            await finish_shielded(asyncio.wait({self._task}))
