"""Unified memory: the rows H of docs/reference/features.md that hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceBuffer, UnsupportedError
from aiocuda.driver.host import HostDriver
from aiocuda.types import DeviceProperties
from tests.helpers import AFFINE, quickly

pytestmark = pytest.mark.asyncio


async def test_one_address_for_host_and_device(device: Device) -> None:
    """H1: an array for the host, a buffer like any other for the device."""
    buffer = device.unified((16, 16), np.uint32)
    assert isinstance(buffer, DeviceBuffer)
    assert (buffer.shape, buffer.nbytes) == ((16, 16), 1024)
    assert buffer.dtype == np.uint32
    assert buffer.array.ctypes.data == buffer.address
    assert buffer[1].array.ctypes.data == buffer.address + 64
    buffer.array[:] = 4
    async with device.stream() as stream:
        await quickly(stream.launch(AFFINE, 1, 256, buffer, 256, 10, 2))
        assert (np.asarray(buffer) == 42).all()
        assert (await stream.download(buffer) == 42).all()
        await stream.fill(buffer, 1)
    assert (buffer.array == 1).all()
    buffer.free()


class Bare(HostDriver):
    """A device without managed memory."""

    def device_open(self, device: int) -> DeviceProperties:
        return dataclasses.replace(super().device_open(device), managed_memory=False, concurrent_managed_access=False)


async def test_what_the_device_lacks_is_known_before_it_is_used(device: Device) -> None:
    """H3: properties tell; asking all the same is an error that names the cure, and no driver call."""
    properties = device.properties
    assert {type(properties.managed_memory), type(properties.concurrent_managed_access)} == {bool}
    assert isinstance(properties.unified_addressing, bool)
    driver = Bare()
    try:
        async with aiocuda.open_device(driver=driver) as bare:
            assert not bare.properties.managed_memory
            calls = driver.statistics()["calls"]
            with pytest.raises(UnsupportedError, match=r"no managed memory: use stream\.empty"):
                bare.unified(16)
            assert driver.statistics()["calls"] == calls
    finally:
        driver.close()
