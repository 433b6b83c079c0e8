"""Drivers with several devices for tests; `SharedGpu`: one GPU as several devices, where there is one GPU."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from aiocuda.driver.cuda._abi import CUmemLocation
from aiocuda.driver.cuda._core import OpenDevice
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._library import Library
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver
from aiocuda.testing import SimulatedDriver

__all__ = ["SEVERAL_DEVICES", "SharedGpu", "open_driver", "shared_gpu"]

#: How many devices GPU 0 is.
DEVICES = 3

#: Parameters of a fixture that passes them to `open_driver`.
SEVERAL_DEVICES = (
    "host",
    "simulated",
    pytest.param("one-gpu", marks=pytest.mark.gpu),
    pytest.param("cuda", marks=pytest.mark.gpu(2)),
)


class SharedGpu(CudaDriver):
    """A CUDA driver of which each device is GPU 0, with a memory pool of its own.

    Copies between two devices are peer copies of CUDA within one context. What CUDA says of managed memory names GPU 0
    for all devices.
    """

    def device_count(self) -> int:
        super().device_count()  # loads libcuda
        return DEVICES

    def _open(self, library: Library, device: int) -> OpenDevice:
        return dataclasses.replace(super()._open(library, 0), index=device)

    def _enable_peers(self, one: OpenDevice, other: OpenDevice) -> None:
        self._peers |= {(one.index, other.index), (other.index, one.index)}  # both are in one context

    def _location(self, device: int) -> CUmemLocation:
        return super()._location(min(device, 0))


@functools.cache
def shared_gpu() -> SharedGpu:
    """Return the one of this process."""
    return SharedGpu()


def open_driver(name: str, devices: int) -> Driver:
    """Return a driver with several devices, which the caller closes: one of `SEVERAL_DEVICES`."""
    match name:
        case "host":
            return HostDriver(devices=devices)
        case "simulated":
            return SimulatedDriver(devices=devices)
        case "one-gpu":
            return shared_gpu()
    return CudaDriver.get()
