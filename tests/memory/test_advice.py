"""Advice about managed memory: given on a thread, read back from the driver, and taken back with the memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    Device,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    UnifiedBuffer,
    UnsupportedError,
    WrongDeviceError,
)
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import ManagedAttributes
from tests.helpers import PATIENCE, Peer, open_peer, quickly, until
from tests.memory.test_guard import Guarding
from tests.memory.test_managed import lent_again

pytestmark = pytest.mark.asyncio


async def attributes(buffer: UnifiedBuffer) -> ManagedAttributes:
    """The driver's attributes of the memory."""
    device: Device = buffer.device
    return await device.offload(device.driver.managed_attributes, buffer.address, buffer.nbytes)


async def test_each_advice_is_set_and_taken_back(device: Device) -> None:
    buffer = device.unified(1 << 16, np.uint8)
    nothing = ManagedAttributes()
    assert await attributes(buffer) == nothing
    assert await buffer.advise("read_mostly") is None
    assert await attributes(buffer) == ManagedAttributes(read_mostly=True)
    await buffer.unadvise("read_mostly")
    places: list[tuple[Any, int]] = [(None, 0), ("device", 0), (device, 0), (0, 0), ("host", -1)]
    for to, place in places:
        await buffer.advise("preferred_location", to)
        assert await attributes(buffer) == ManagedAttributes(preferred_location=place)
        await buffer.unadvise("preferred_location")
        await buffer.advise("accessed_by", to)
        assert await attributes(buffer) == ManagedAttributes(accessed_by=frozenset({place}))
        await buffer.unadvise("accessed_by", to)
        assert await attributes(buffer) == nothing


async def test_another_device_is_an_accessor() -> None:
    with Peer(HostDriver(devices=2)) as peer:
        async with (
            aiocuda.open_device(driver=peer.driver) as device,
            aiocuda.open_device(1, driver=peer.driver) as second,
            second.stream() as stream,
        ):
            buffer = device.unified(4096, np.uint8)
            for to in (1, second):
                await buffer.advise("accessed_by", to)
                assert (await attributes(buffer)).accessed_by == {1}
                await stream.fill(buffer, 1)
                await buffer.unadvise("accessed_by", to)
                assert (await attributes(buffer)).accessed_by == frozenset()


async def test_memory_of_another_device_as_the_preferred_location() -> None:
    driver = HostDriver(devices=2)
    try:
        async with aiocuda.open_device(driver=driver) as device:
            buffer = device.unified(4096, np.uint8)
            await buffer.advise("preferred_location", 1)
            assert (await attributes(buffer)).preferred_location == 1
            await buffer.unadvise("preferred_location")
            await asyncio.gather(buffer.advise("accessed_by"), buffer.advise("accessed_by", "host"))
            assert (await attributes(buffer)).accessed_by == {-1, 0}
            await buffer.unadvise("accessed_by")
            assert (await attributes(buffer)).accessed_by == {-1}
    finally:
        driver.close()


async def test_advice_for_a_part(device: Device) -> None:
    whole = device.unified(1 << 18, np.uint8)
    part = whole[1 << 16 : 1 << 17]
    await part.advise("read_mostly")
    assert (await attributes(part)).read_mostly
    assert not (await attributes(whole)).read_mostly
    await whole[:0].advise("read_mostly")
    assert not (await attributes(whole[: 1 << 16])).read_mostly


@pytest.mark.parametrize(
    ("advice", "to", "error", "match"),
    [
        ("read_often", None, InvalidArgumentError, "there are read_mostly, preferred_location, accessed_by"),
        (None, None, InvalidArgumentError, "no advice None"),
        ("read_mostly", "host", InvalidArgumentError, "names no place"),
        ("accessed_by", "disk", InvalidArgumentError, "'disk'"),
        ("preferred_location", 99, InvalidArgumentError, "no device 99"),
        ("preferred_location", -1, InvalidArgumentError, "no device -1"),
        ("accessed_by", 1.0, InvalidTypeError, "not 1.0"),
        ("accessed_by", True, InvalidTypeError, "not True"),
    ],
)
async def test_advice_that_there_is_none(
    device: Device, advice: Any, to: object, error: type[Exception], match: str
) -> None:
    buffer = device.unified(4)
    calls = device.driver.statistics()["calls"]
    with pytest.raises(error, match=match):
        await buffer.advise(advice, to)
    assert device.driver.statistics()["calls"] - calls <= 1  # how many devices there are


async def test_taking_back_a_preferred_location_names_no_place(device: Device) -> None:
    with pytest.raises(InvalidArgumentError, match=r"taking back .* names no place"):
        await device.unified(4).unadvise("preferred_location", "host")


async def test_advice_for_a_device_of_another_driver(device: Device) -> None:
    async with open_peer() as (_, other):
        with pytest.raises(WrongDeviceError):
            await device.unified(4).advise("accessed_by", other)


async def test_advice_about_freed_memory(device: Device) -> None:
    buffer = device.unified(4)
    buffer.free()
    with pytest.raises(StaleHandleError):
        await buffer.advise("read_mostly")


async def test_a_device_without_concurrent_access_takes_none() -> None:
    async with open_peer(Guarding()) as (_, device):
        buffer = device.unified(4)
        for advice in ("preferred_location", "accessed_by"):
            with pytest.raises(UnsupportedError, match=r"device\.properties\.concurrent_managed_access"):
                await buffer.advise(advice)
        await buffer.advise("read_mostly")
        await buffer.advise("accessed_by", "host")


async def test_advice_is_given_on_a_thread() -> None:
    async with open_peer() as (peer, device):
        threads: list[int] = []
        peer.before["advise"] = lambda *arguments: threads.append(threading.get_ident())
        await device.unified(4).advise("read_mostly")
        assert len(threads) == 1
        assert threading.get_ident() not in threads


async def test_refused_advice_is_its_error_and_the_next_works() -> None:
    async with open_peer() as (peer, device):
        buffer = device.unified(4)
        peer.refuse("advise")
        with pytest.raises(DriverError):
            await buffer.advise("read_mostly")
        await buffer.advise("read_mostly")
        assert (await attributes(buffer)).read_mostly


async def test_advice_does_not_outlive_its_buffer() -> None:
    """The next buffer over the same memory must not be read-mostly by surprise."""
    async with open_peer() as (peer, device):
        buffer = device.unified(1 << 16, np.uint8)
        address = buffer.address
        await buffer.advise("read_mostly")
        await buffer[: 1 << 12].advise("preferred_location", "host")
        await buffer.advise("accessed_by", "host")
        await buffer.advise("accessed_by")
        del buffer
        gc.collect()
        threads: list[int] = []
        peer.before["advise"] = lambda *arguments: threads.append(threading.get_ident())
        again = await lent_again(device, address, 1 << 16)
        assert await attributes(again) == ManagedAttributes()
        assert len(threads) == 4
        assert threading.get_ident() not in threads


async def test_memory_is_not_given_on_while_a_thread_advises() -> None:
    """Also where the await is cancelled: the thread goes on."""
    async with open_peer() as (peer, device):
        begun, go_on = threading.Event(), threading.Event()

        def hold(*arguments: object) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)

        peer.before["advise"] = hold
        buffer = device.unified(1000, np.uint8)
        address = buffer.address
        waiter = asyncio.create_task(buffer.unadvise("read_mostly"))  # nothing has to be taken back afterwards
        await until(begun.is_set, "the thread")
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        buffer.free()
        try:
            assert device.unified(1000, np.uint8).address != address
        finally:
            del peer.before["advise"]
            go_on.set()
        await lent_again(device, address, 1000)


async def test_advice_while_the_device_is_closed() -> None:
    with Peer() as peer:
        device = await aiocuda.open_device(driver=peer.driver)
        buffer = device.unified(4)
        with peer.holding_jobs():
            waiter = asyncio.create_task(buffer.advise("read_mostly"))
            await until(lambda: waiter.done() or buffer._managed.advising, "the job")
        closing = asyncio.create_task(device.aclose())
        await quickly(waiter)
        await quickly(closing)
        with pytest.raises((ClosedError, StaleHandleError)):
            await buffer.advise("read_mostly")
        assert peer.calls["managed_deallocate"] == 1
