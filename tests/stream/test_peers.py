"""Two devices, and two drivers: what may go where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import ClosedError, Device, WrongDeviceError
from aiocuda.device._resources import resources_of
from aiocuda.driver import DriverName
from aiocuda.driver.host import HostDriver
from tests.helpers import SAXPY, Latch, quickly, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def two() -> AsyncIterator[tuple[Device, Device]]:
    """Two devices of one driver."""
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(0, driver=driver) as first, aiocuda.open_device(1, driver=driver) as second:
        yield first, second
    driver.close()


@pytest.mark.parametrize("to_here", [True, False])
async def test_a_copy_between_devices_opens_no_door_to_a_launch(two: tuple[Device, Device], to_here: bool) -> None:
    here, there = two
    async with here.stream() as stream, there.stream() as other:
        own = await stream.upload(np.ones(8, np.float32))
        foreign = await other.upload(np.full(8, 3, np.float32))
        await stream.launch(SAXPY, 1, 8, 8, 1.0, own, own)
        with Latch(here) as latch:
            latch.hold(stream)
            await latch.held()
            copied = stream.copy(own, foreign) if to_here else stream.copy(foreign, own)
            for verb in (
                lambda: stream.launch(SAXPY, 1, 8, 8, 1.0, foreign, own),
                lambda: stream.fill(foreign, 1),
                lambda: stream.download(foreign),
            ):
                with pytest.raises(WrongDeviceError, match="lives on device 1, the stream is on device 0"):
                    verb()
            latch.release()
            await quickly(copied)
        assert (await other.download(foreign) == (3 if to_here else 2)).all()


async def test_what_a_peer_copies_is_not_freed_before(two: tuple[Device, Device]) -> None:
    here, there = two
    async with here.stream() as stream, there.stream() as other:
        own, foreign = stream.empty(1 << 20), await other.upload(np.full(1 << 20, 3, np.float32))
        with Latch(here) as latch:
            latch.hold(stream)
            await latch.held()
            copied = stream.copy(own, foreign)
            foreign.free()
            overwritten = other.fill(other.empty(1 << 20), 9)
            latch.release()
            await quickly(copied)
            await quickly(overwritten)
        assert (await stream.download(own) == 3).all()
        stays = await other.upload(np.zeros(4, np.float32))
        for _ in range(40):
            async with here.stream() as passing:
                await passing.copy(passing.empty(4), stays)
        assert len(stays._block.peers or ()) <= 9


@pytest.mark.parametrize("name", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_device_that_was_opened_twice_closes_after_the_work_of_the_other_opening(name: DriverName) -> None:
    async with aiocuda.open_device(driver=name) as stays:
        goes = await aiocuda.open_device(driver=stays.driver)
        home = goes.stream()
        async with stays.stream() as stream, stays.stream() as late:
            lent = await home.upload(np.ones(8, np.float32))
            with Latch(stays) as latch:
                latch.hold(stream)
                await latch.held()
                brought = stream.download(lent)
                closing = asyncio.ensure_future(goes.aclose())
                await until(lambda: resources_of(goes).device_state.closing, "closing")
                with pytest.raises(ClosedError, match="is being closed"):
                    late.fill(lent, 1)
                assert not closing.done()
                latch.release()
                await quickly(closing)
            assert (await quickly(brought) == 1).all()


async def test_buffer_of_another_driver_is_refused_with_the_reason() -> None:
    async with aiocuda.open_device(driver="host") as first, aiocuda.open_device(driver="host") as second:
        async with first.stream() as stream, second.stream() as other:
            buffer = await stream.upload(np.ones(4, np.float32))
            own = other.empty(4)
            verbs: list[Callable[[], object]] = [
                lambda: other.fill(buffer, 1),
                lambda: other.copy(own, buffer),
                lambda: other.copy(buffer, own),
                lambda: other.launch(SAXPY, 1, 1, 4, 1.0, own, buffer),
            ]
            for verb in verbs:
                with pytest.raises(WrongDeviceError, match=r"another driver.*download it.*or open both"):
                    verb()


async def test_a_stream_waits_for_nothing_of_another_driver_whether_that_is_busy_or_idle() -> None:
    async with aiocuda.open_device(driver="host") as first, aiocuda.open_device(driver="host") as second:
        async with first.stream() as stream, second.stream() as other:
            done, event = stream.synchronize(), stream.record()
            await event
            assert stream.tail is None
            for thing in (done, event, stream):
                with pytest.raises(WrongDeviceError, match="another driver: await it"):
                    other.wait(thing)
