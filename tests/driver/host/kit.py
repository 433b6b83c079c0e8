"""Helpers for the tests of the host driver."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiocuda._base._types import Span
from aiocuda.driver._port import Port, open_port
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Program

__all__ = ["PATIENCE", "Gate", "Mailbox", "Rig", "address_of"]

#: Seconds after which a test that waits for something gives up.
PATIENCE = 60.0


class Gate:
    """A host implementation that holds its stream until the gate is opened."""

    def __init__(self) -> None:
        self._running = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self._running.set()
        assert self._open.wait(PATIENCE), "the gate was never opened"

    def wait_running(self) -> None:
        """Return once the stream is held."""
        assert self._running.wait(PATIENCE), "the gate's kernel does not run"

    def open(self) -> None:
        """Let the stream go on."""
        self._open.set()


class Mailbox:
    """A port, and a thread's way to wait for its tags."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.port: Port = open_port(self._woken.set, watchable=False)
        self.tags: list[int] = []

    def wait(self, count: int) -> list[int]:
        """Return once ``count`` tags have come, with all of them."""
        while len(self.look()) < count:
            assert self._woken.wait(PATIENCE), f"only {self.tags} came"
            self._woken.clear()
        return self.tags

    def look(self) -> list[int]:
        """The tags that have come."""
        self.tags += self.port.drain()
        return self.tags


class Rig:
    """A host driver whose transfers take no time, with short methods for its operations. Default device 0."""

    def __init__(self, driver: HostDriver | None = None) -> None:
        self.driver = HostDriver(devices=2, bandwidth=math.inf, latency=0.0) if driver is None else driver

    def stream(self, device: int = 0, priority: int = 0) -> int:
        return self.driver.stream_create(device, priority)

    def event(self, device: int = 0, timing: bool = False) -> int:
        return self.driver.event_create(device, timing)

    def record(self, stream: int, device: int = 0, timing: bool = False) -> int:
        """A new event, recorded."""
        event = self.event(device, timing)
        self.driver.event_record(event, stream)
        return event

    def finish(self, *streams: int) -> None:
        """Wait for all that these streams have accepted."""
        for stream in streams:
            self.driver.stream_synchronize(stream)

    def launch(
        self,
        stream: int,
        twin: Callable[..., object],
        *values: Any,
        format: str = "",
        device: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Launch a host implementation. A `Span` is a pointer argument."""
        program = Program(getattr(twin, "__name__", "gate"), format, host=twin, host_seconds=seconds)
        function = self.driver.load(device, program)
        launch = self.driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)
        launch([self.driver.argument(value) if isinstance(value, Span) else value for value in values])

    def hold(self, stream: int, device: int = 0) -> Gate:
        """Hold a stream; it is held when this returns."""
        gate = Gate()
        self.launch(stream, gate, device=device)
        gate.wait_running()
        return gate

    def pinned(self, content: Sequence[int] | npt.NDArray[Any], dtype: str = "u1") -> npt.NDArray[Any]:
        """Pinned memory with some content, as an array."""
        values = np.asarray(content, dtype)
        address = self.driver.pinned_allocate(values.nbytes)
        raw = (ctypes.c_uint8 * values.nbytes).from_address(address)
        array = np.frombuffer(memoryview(raw), dtype).reshape(values.shape)
        array[...] = values
        return array

    def uploaded(self, stream: int, content: Sequence[int] | npt.NDArray[Any], dtype: str = "u1") -> int:
        """Device memory with some content, in the order of a stream of device 0."""
        source = self.pinned(content, dtype)
        address = self.driver.allocate(0, source.nbytes, stream)
        self.driver.upload(stream, address, address_of(source), source.nbytes)
        return address

    def download(self, stream: int, address: int, count: int, dtype: str = "u1") -> npt.NDArray[Any]:
        """Return the content of device memory after all work that the stream has accepted."""
        target = self.pinned(np.zeros(count, dtype), dtype)
        self.driver.download(stream, address_of(target), address, target.nbytes)
        self.finish(stream)
        return target


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array begins."""
    return int(array.ctypes.data)
