"""Unified memory: the rows H of docs/reference/features.md that hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceBuffer, DeviceOutOfMemory, UnsupportedError
from aiocuda._base._types import DeviceProperties
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import ManagedAttributes
from aiocuda.memory import LimitResource, StatisticsResource, TrackingResource
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


async def test_prefetch_and_six_advices_for_devices_and_the_host() -> None:
    """H2: each is awaited, and the driver confirms it."""
    driver = HostDriver(devices=2)
    try:
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            buffer = device.unified(4096, np.uint8)

            async def told() -> ManagedAttributes:
                return await device.offload(driver.managed_attributes, buffer.address, buffer.nbytes)

            for to, place in (("device", 0), ("host", -1), (1, 1)):
                await quickly(stream.prefetch(buffer, to))
                await quickly(buffer.advise("preferred_location", to))
                await quickly(buffer.advise("accessed_by", to))
                assert await told() == ManagedAttributes(False, place, frozenset({place}), place)
                await quickly(buffer.unadvise("accessed_by", to))
            await quickly(buffer.unadvise("preferred_location"))
            await quickly(buffer.advise("read_mostly"))
            assert await told() == ManagedAttributes(read_mostly=True, last_prefetch=1)
            await quickly(buffer.unadvise("read_mostly"))
            assert await told() == ManagedAttributes(last_prefetch=1)
    finally:
        driver.close()


async def test_streams_of_every_device_use_it() -> None:
    """H5: launches, copies and fills of two devices, in their order; the memory is free after the work of both."""
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(driver=driver) as one, aiocuda.open_device(1, driver=driver) as other:
        async with one.stream() as near, other.stream() as stream:
            buffer = one.unified(1024, np.uint32)
            filled = near.fill(buffer, 2)
            await quickly(stream.wait(filled))
            launched = stream.launch(AFFINE, 1, 32, buffer, 1024, 3, 1)
            near.wait(launched)
            assert (await quickly(near.download(buffer)) == 7).all()
            assert {found.target for found in buffer.migrations()} == {0, 1}
            buffer.free()
            with pytest.raises(aiocuda.StaleHandleError):
                stream.fill(buffer, 1)
        await quickly(one.drain())
        assert one.memory.statistics().live_bytes == 0
    driver.close()


async def test_migrations_are_recorded_and_a_prefetch_is_suggested(device: Device) -> None:
    """H4: what moved where, when and how much; host write, then device read, seen twice."""
    async with device.stream() as stream:
        buffer = device.unified(4096, np.uint8)
        for seen in range(2):
            assert len(buffer.suggest_prefetch()) == 0, seen
            buffer.array[:] = seen
            await quickly(stream.download(buffer))
        there, back, again = buffer.migrations()
        assert (there.source, there.target, there.nbytes, there.asked) == ("host", 0, 4096, False)
        assert (back.source, back.target, back.operation) == (0, "host", "array")
        assert there.when <= back.when <= again.when <= device.driver.now()
        (suggestion,) = buffer.suggest_prefetch()
        assert (suggestion.to, suggestion.before, suggestion.nbytes) == (0, "download", 4096)
        buffer.array[:] = 2
        stream.prefetch(suggestion.buffer, suggestion.to)
        assert (await quickly(stream.download(buffer)) == 2).all()
        assert buffer.migrations()[-1].asked
        assert buffer.suggest_prefetch() == ()


async def test_one_limit_counts_device_and_unified_memory(device: Device) -> None:
    """H6: adaptors see unified allocations; a refusal names the limit, and freed memory does not count."""
    tracking = device.memory.use(TrackingResource)
    counts = device.memory.use(StatisticsResource)
    limit = device.memory.use(lambda upstream: LimitResource(upstream, 3000))
    async with device.stream() as stream:
        shared, plain = device.unified(1000, np.uint8), stream.empty(1500, np.uint8)
        with pytest.raises(DeviceOutOfMemory) as caught:
            device.unified(501, np.uint8)
        assert (caught.value.requested, caught.value.live) == (501, 2500)
        with pytest.raises(DeviceOutOfMemory):
            stream.empty(501, np.uint8)
        assert (limit.live_bytes, counts.statistics().live_bytes) == (2500, 2500)
        assert [allocation.kind for allocation in tracking.live()] == ["unified", "device"]
        shared.free()
        stream.empty(1500, np.uint8).free()
        plain.free()
        assert (limit.live_bytes, counts.statistics().live_bytes, tracking.live()) == (0, 0, [])


class Bare(HostDriver):
    """A device without managed memory."""

    def device_open(self, device: int) -> DeviceProperties:
        return dataclasses.replace(super().device_open(device), managed_memory=False, concurrent_managed_access=False)


async def test_what_the_device_lacks_is_known_before_it_is_used(device: Device) -> None:
    """H3: properties report the support; an unsupported call raises an error with the cure, without a driver call."""
    properties = device.properties
    assert {type(properties.managed_memory), type(properties.concurrent_managed_access)} == {bool}
    assert isinstance(properties.unified_addressing, bool)
    assert properties.memory_pools is True  # without them it could not have been opened
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
