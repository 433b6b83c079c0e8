"""The baselines over the host driver's waist, so that every row can be run, and mended, without a GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocuda.driver.protocol import Driver, Program

from ..kernels import nanoseconds

MIB = 1 << 20


class RawHost:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._empty = driver.load(0, Program("empty", "", host=lambda: None))
        self._spins: dict[float, int] = {}

    def _spin(self, seconds: float) -> int:
        if seconds not in self._spins:
            program = Program("spin", "Q", host=lambda nanoseconds: None, host_seconds=seconds)
            self._spins[seconds] = self._driver.load(0, program)
        return self._spins[seconds]

    def stream(self) -> int:
        return self._driver.stream_create(0, 0)

    def launcher(self, stream: Any, seconds: float) -> Callable[[], None]:
        one = (1, 1, 1)
        if seconds:
            launch = self._driver.launcher(stream, self._spin(seconds), one, one, 0)
            return partial(launch, (nanoseconds(seconds),))
        return partial(self._driver.launcher(stream, self._empty, one, one, 0), ())

    def synchronize(self, stream: Any) -> None:
        self._driver.stream_synchronize(stream)

    def event(self, timing: bool = False) -> int:
        return self._driver.event_create(0, timing)

    def record(self, event: Any, stream: Any) -> None:
        self._driver.event_record(event, stream)

    def done(self, event: Any) -> bool:
        return self._driver.event_query(event)

    def wait(self, stream: Any, event: Any) -> None:
        self._driver.stream_wait(stream, event)

    def callback(self, stream: Any, descriptor: int) -> Callable[[], None]:
        return self.host_function(stream, lambda: os.eventfd_write(descriptor, 1))

    def host_function(self, stream: Any, function: Callable[[], object]) -> Callable[[], None]:
        program = self._driver.load(0, Program("function", "", host=function))
        one = (1, 1, 1)
        return partial(self._driver.launcher(stream, program, one, one, 0), ())

    def elapsed(self, start: Any, end: Any) -> float:
        return self._driver.event_elapsed_ms(start, end) / 1e3

    def device_memory(self, nbytes: int) -> int:
        return self._driver.allocate(0, nbytes, self.stream())

    def keep_freed(self) -> None:
        """It always does."""

    def allocate(self, stream: Any, nbytes: int) -> int:
        return self._driver.allocate(0, nbytes, stream)

    def free(self, stream: Any, address: int) -> None:
        self._driver.deallocate(address, stream)

    def fill(self, stream: Any, address: int, nbytes: int) -> None:
        self._driver.fill(stream, address, b"\x01", nbytes)

    def pinned(self, nbytes: int) -> int:
        return self._driver.pinned_allocate(nbytes)

    def upload(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        self._driver.upload(stream, target, source, nbytes)

    def download(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        self._driver.download(stream, target, source, nbytes)

    def pageable(self, direction: str, device: int, array: NDArray[np.uint8], stream: Any) -> None:
        """Through one pinned block: the waist takes no pageable memory."""
        block = self.pinned(array.nbytes)
        if direction == "up":
            ctypes.memmove(block, array.ctypes.data, array.nbytes)
            self.upload(stream, device, block, array.nbytes)
            self.synchronize(stream)
        else:
            self.download(stream, block, device, array.nbytes)
            self.synchronize(stream)
            ctypes.memmove(array.ctypes.data, block, array.nbytes)
        self._driver.pinned_deallocate(block)

    def waiting_calls(self, scale: float) -> Mapping[str, Callable[[], object]]:
        """Those that this driver has."""
        driver, stream, made = self._driver, self.stream(), dict[str, int]()
        array, small, large = np.ones(round(256 * MIB * scale), np.uint8), MIB, round(4096 * MIB * scale)
        address, program = array.ctypes.data, Program("new", "", host=lambda: None)
        return {
            "kernel_function": lambda: driver.load(0, program),
            "host_alloc_1mb": lambda: made.update(pinned=driver.pinned_allocate(small)),
            "host_free_1mb": lambda: driver.pinned_deallocate(made["pinned"]),
            "host_register_256mb": lambda: driver.pin(address, array.nbytes),
            "host_unregister": lambda: driver.unpin(address),
            "managed_alloc": lambda: made.update(managed=driver.managed_allocate(0, small)),
            "managed_free": lambda: driver.managed_deallocate(made["managed"]),
            "pool_alloc_4gb": lambda: made.update(pool=driver.allocate(0, large, stream)),
            "pool_free": lambda: driver.deallocate(made["pool"], stream),
            "pool_trim": lambda: driver.pool_trim(0, 0),
            "streams_60": lambda: [driver.stream_create(0, 0) for _ in range(60)],
        }

    def peer_calls(self) -> Mapping[str, Callable[[], object]]:
        """The copy itself: this driver enables nothing."""
        driver, stream, there = self._driver, self.stream(), self._driver.stream_create(1, 0)
        target, source = driver.allocate(0, MIB, stream), driver.allocate(1, MIB, there)
        driver.fill(there, source, b"\x01", MIB)
        driver.stream_synchronize(there)
        driver.stream_synchronize(stream)
        return {"copy_peer": lambda: driver.copy_peer(stream, target, 0, source, 1, MIB)}
