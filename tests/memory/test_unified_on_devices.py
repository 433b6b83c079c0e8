"""Unified memory on the streams of several devices."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import AsyncCoordinator, Device, WrongDeviceError
from aiocuda.driver.host import HostDriver
from tests.driver.several import SEVERAL_DEVICES, open_driver
from tests.helpers import AFFINE, Latch, quickly

pytestmark = pytest.mark.asyncio

ITEMS = 2048


@pytest_asyncio.fixture(params=SEVERAL_DEVICES)
async def two(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Device, Device]]:
    driver = open_driver(request.param, 2)
    async with aiocuda.open_device(driver=driver) as one, aiocuda.open_device(1, driver=driver) as other:
        yield one, other
    driver.close()


async def test_every_verb_of_another_device_takes_it(two: tuple[Device, Device]) -> None:
    one, other = two
    async with other.stream() as stream:
        buffer = one.unified(ITEMS, np.uint32)
        await quickly(stream.fill(buffer, 2))
        await quickly(stream.launch(AFFINE, 1, 32, buffer, ITEMS, 3, 1))
        assert (await quickly(stream.download(buffer)) == 7).all()
        await quickly(stream.copy(buffer, np.full(ITEMS, 5, np.uint32)))
        near = stream.empty(ITEMS, np.uint32)
        await quickly(stream.copy(near, buffer))
        assert (await quickly(stream.download(near)) == 5).all()
        await quickly(stream.fill(near, 6))
        await quickly(stream.copy(buffer, near))
        assert (np.asarray(buffer) == 6).all()
        await quickly(stream.prefetch(buffer, 0))
        await quickly(stream.prefetch(buffer, other))


async def test_copy_between_three_devices() -> None:
    """Managed memory counts as that of the stream: the copy needs no stream of its own device."""
    driver = HostDriver(devices=3)
    async with (
        aiocuda.open_device(driver=driver) as home,
        aiocuda.open_device(1, driver=driver) as one,
        aiocuda.open_device(2, driver=driver) as other,
        one.stream() as stream,
        other.stream() as distant,
    ):
        buffer, far = home.unified(ITEMS, np.uint32), distant.empty(ITEMS, np.uint32)
        await quickly(stream.fill(buffer, 4))
        await quickly(stream.copy(far, buffer))
        assert (await quickly(distant.download(far)) == 4).all()
    driver.close()


async def test_memory_is_used_again_after_the_work_of_all_devices(two: tuple[Device, Device]) -> None:
    one, other = two
    async with one.stream() as near, other.stream() as stream:
        buffer = one.unified(ITEMS, np.uint32)
        address = buffer.address
        await quickly(near.fill(buffer, 1))
        await other.load(AFFINE)
        with Latch(other) as latch:
            latch.hold(stream)
            await latch.held()
            launched = stream.launch(AFFINE, 1, 32, buffer, ITEMS, 1, 1)
            buffer.free()
            assert one.unified(ITEMS, np.uint32).address != address
            latch.release()
            await quickly(launched)
        await quickly(one.drain())
        later = [one.unified(ITEMS, np.uint32) for _ in range(3)]
        assert address in {each.address for each in later}


async def test_dropped_memory_is_used_again_after_the_work_of_all_devices(two: tuple[Device, Device]) -> None:
    one, other = two
    async with other.stream() as stream:
        before = one.memory.statistics().live_bytes
        with Latch(other) as latch:
            latch.hold(stream)
            await latch.held()
            filled = stream.fill(one.unified(ITEMS, np.uint32), 1)
            await quickly(one.drain())
            assert one.memory.statistics().live_bytes > before
            latch.release()
            await quickly(filled)
        del filled
        await quickly(other.drain())
        await quickly(one.drain())
        assert one.memory.statistics().live_bytes == before


async def test_free_on_a_stream_of_another_device(two: tuple[Device, Device]) -> None:
    one, other = two
    async with other.stream() as stream:
        buffer = one.unified(ITEMS, np.uint32)
        stream.fill(buffer, 1)
        buffer.free(stream)
        await quickly(stream.synchronize())


async def test_end_of_its_device_waits_for_the_others() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(1, driver=driver) as other, other.stream() as stream:
        async with aiocuda.open_device(driver=driver) as one:
            buffer = one.unified(ITEMS, np.uint32)
            with Latch(other) as latch:
                latch.hold(stream)
                await latch.held()
                filled = stream.fill(buffer, 1)
                latch.release()
        assert filled.done()
        with pytest.raises(aiocuda.StaleHandleError):
            stream.fill(buffer, 2)
    driver.close()


async def test_migrations_name_the_device(two: tuple[Device, Device]) -> None:
    one, other = two
    async with one.stream() as near, other.stream() as stream:
        buffer = one.unified(ITEMS, np.uint32)
        buffer.array[:] = 1
        await quickly(near.launch(AFFINE, 1, 32, buffer, ITEMS, 1, 1))
        await quickly(stream.launch(AFFINE, 1, 32, buffer, ITEMS, 1, 1))
        assert [(found.source, found.target) for found in buffer.migrations()] == [("host", 0), (0, 1)]
        await quickly(buffer.advise("accessed_by", other))
        await quickly(buffer.unadvise("accessed_by", 1))


async def test_coordinators_take_it(two: tuple[Device, Device]) -> None:
    one, other = two
    buffer = one.unified(ITEMS, np.uint32)
    async with AsyncCoordinator(other) as coordinator:
        coordinator.upload(np.full(ITEMS, 2, np.uint32), buffer)
        coordinator.compute(AFFINE, 1, 32, buffer, ITEMS, 3, 1)
        assert (await quickly(coordinator.download(buffer)) == 7).all()


@pytest.mark.parametrize("lacking", [0, 1])
async def test_without_concurrent_managed_access_the_error_names_the_device(
    lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HostDriver(devices=2)
    properties = driver.device_open

    def limited(index: int) -> Any:
        found = properties(index)
        return dataclasses.replace(found, concurrent_managed_access=index != lacking, name=f"device {index}")

    monkeypatch.setattr(driver, "device_open", limited)
    async with aiocuda.open_device(driver=driver) as one, aiocuda.open_device(1, driver=driver) as other:
        async with other.stream() as stream:
            buffer = one.unified(ITEMS, np.uint32)
            calls: list[Any] = [
                lambda: stream.fill(buffer, 1),
                lambda: stream.launch(AFFINE, 1, 32, buffer, ITEMS, 1, 1),
                lambda: stream.download(buffer),
                lambda: buffer.free(stream),
            ]
            for call in calls:
                with pytest.raises(WrongDeviceError, match=f"device {lacking} has no concurrent .*stream\\.copy"):
                    call()
            near = stream.empty(ITEMS, np.uint32)
            buffer.array[:] = 7
            await quickly(stream.copy(near, buffer))  # the cure
            assert (await quickly(stream.download(near)) == 7).all()
    driver.close()


async def test_graphs_take_it(two: tuple[Device, Device]) -> None:
    one, other = two
    async with other.stream() as stream:
        buffer = one.unified(ITEMS, np.uint32)
        with stream.capture() as graph:
            stream.fill(buffer, 3)
        await quickly(graph.launch(stream))
        assert (np.asarray(buffer) == 3).all()
