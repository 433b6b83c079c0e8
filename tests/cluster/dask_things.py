"""Classes that the tests of the engine "dask" create in workers."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np

import aiocuda
from aiocuda.cluster import current_replica
from tests.helpers import TRAP

__all__ = ["Gone", "Service"]


class Gone(BaseException):
    """Is not an Exception: Dask does not carry it."""


class Service:
    """Methods that return, raise, wait, and end their process.

    Parameters
    ----------
    folder
        For files that the tests read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.counts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._write("left")

    def _write(self, name: str) -> None:
        (self.folder / f"{name}-{os.getpid()}").touch()

    async def process(self) -> int:
        return os.getpid()

    async def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    async def info(self) -> Any:
        return current_replica()

    async def echo(self, value: Any) -> Any:
        return value

    async def double(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values *= 2  # in the memory of the message
        return values

    async def fail(self, text: str) -> None:
        raise ValueError(text)

    async def exit(self) -> None:
        raise Gone("not an Exception")

    async def unpicklable(self) -> Any:
        return (each for each in "abc")

    async def count(self, name: str) -> int:
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]

    async def wait(self, name: str) -> None:
        """Wait until it is cancelled."""
        self._write(f"{name}-began")
        try:
            await asyncio.Event().wait()
        finally:
            self._write(f"{name}-ended")

    def block(self, name: str) -> None:
        """Block the thread of the object, for as long as a test lasts."""
        self._write(f"{name}-began")
        threading.Event().wait(600)

    async def once(self, name: str) -> int:
        """End the process at the first call of all; return its id in the second."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return os.getpid()
        os._exit(3)

    async def trap(self) -> None:
        """Raise a device fault."""
        async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
            await stream.launch(TRAP, 1, 1)
