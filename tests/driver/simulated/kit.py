"""Helpers for the tests of the simulated driver."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aiocuda._base._types import Span
from aiocuda.driver.protocol import Program
from aiocuda.driver.simulated import SimulatedDriver

__all__ = ["Bench"]

_names = itertools.count()


class Bench:
    """A simulated driver without upsets, with short methods for its operations. Default device 0."""

    def __init__(self, seed: int | None = 0, **options: Any) -> None:
        self.driver = SimulatedDriver(seed, **options)
        self.trace: list[str] = []
        self.driver.trace = self.trace

    def stream(self, device: int = 0, priority: int = 0) -> int:
        return self.driver.stream_create(device, priority)

    def record(self, stream: int, device: int = 0, timing: bool = False) -> int:
        """A new event, recorded."""
        event = self.driver.event_create(device, timing)
        self.driver.event_record(event, stream)
        return event

    def pinned(self, count: int, value: int = 0, dtype: str = "u1") -> npt.NDArray[Any]:
        """Pinned memory, as an array."""
        nbytes = count * np.dtype(dtype).itemsize
        raw = (ctypes.c_uint8 * nbytes).from_address(self.driver.pinned_allocate(nbytes))
        array = np.frombuffer(memoryview(raw), dtype)
        array[:] = value
        return array

    def memory(self, stream: int, nbytes: int = 64, device: int = 0) -> int:
        """Return device memory that is allocated when this returns."""
        address = self.driver.allocate(device, nbytes, stream)
        self.finish(stream)
        return address

    def bytes_of(self, address: int, nbytes: int = 64, device: int = 0) -> npt.NDArray[np.uint8]:
        """Return the present content of device memory, without a call of the driver."""
        return self.driver._memory.view(device, address, nbytes)

    def upload(self, stream: int, target: int, source: npt.NDArray[Any]) -> None:
        self.driver.upload(stream, target, source.ctypes.data, source.nbytes)

    def download(self, stream: int, target: npt.NDArray[Any], source: int) -> None:
        self.driver.download(stream, target.ctypes.data, source, target.nbytes)

    def launch(self, stream: int, twin: Callable[..., object], *values: Any, format: str = "", device: int = 0) -> None:
        """Launch a host implementation. A `Span` is a pointer argument."""
        function = self.driver.load(device, Program(f"twin_{next(_names)}", format, host=twin))
        launch = self.driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)
        launch([self.driver.argument(value) if isinstance(value, Span) else value for value in values])

    def idle(self, *streams: int) -> bool:
        """True if the streams are idle. It calls no method of the driver, so no time passes."""
        return all(self.driver._machine.stream(stream).is_idle for stream in streams)

    def finish(self, *streams: int) -> None:
        """Run the clock until these streams are idle."""
        while not self.idle(*streams):
            assert self.driver.run_next(), f"{streams} never end"

    def ended(self) -> list[int]:
        """Return the streams of the commands that engines have ended, in order."""
        return [int(line.rpartition(" ")[2]) for line in self.trace if line.split(" ")[1] == "end"]
