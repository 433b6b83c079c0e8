from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda.errors import DriverError
from tests.helpers import Latch, open_peer, quickly


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[aiocuda.Device]:
    async with aiocuda.open_device(driver=request.param) as device:
        yield device


@pytest.mark.asyncio
async def test_no_work_after_a_held_kernel_is_done(device: aiocuda.Device) -> None:
    async with device.stream() as stream:
        buffer = await stream.upload(np.zeros(16, "u4"))
        with Latch(device) as latch:
            held = latch.hold(stream)
            filled = stream.fill(buffer, 7)
            await latch.held()
            assert latch.running == 1
            assert not held.done()
            assert not filled.done()
            latch.release()
            await filled
            assert held.done()
            assert latch.running == 0
        assert (await stream.download(buffer) == 7).all()


@pytest.mark.asyncio
async def test_other_streams_go_on(device: aiocuda.Device) -> None:
    async with device.stream() as stream, device.stream() as free:
        with Latch(device) as latch:
            held = latch.hold(stream)
            await latch.held()
            assert (await free.download(await free.upload(np.arange(9)))).sum() == 36
            assert latch.running == 1
            assert not held.done()


@pytest.mark.asyncio
async def test_one_latch_holds_several_streams(device: aiocuda.Device) -> None:
    async with device.stream() as first, device.stream() as second:
        with Latch(device) as latch:
            operations = [latch.hold(stream) for stream in (first, second)]
            await latch.held()
            assert latch.running == 2
            latch.release()
            await aiocuda.gather(*operations)


@pytest.mark.asyncio
async def test_leaving_the_block_releases(device: aiocuda.Device) -> None:
    async with device.stream() as stream:
        with Latch(device) as latch:
            operation = latch.hold(stream)
            await latch.held()
        await operation
        with pytest.raises(aiocuda.ClosedError):
            latch.hold(stream)


@pytest.mark.asyncio
async def test_released_latch_holds_again(device: aiocuda.Device) -> None:
    async with device.stream() as stream:
        with Latch(device) as latch:
            for _ in range(100):  # more often than it has places
                operation = latch.hold(stream)
                latch.release()
                await operation
            operation = latch.hold(stream)
            await latch.held()
            assert not operation.done()


@pytest.mark.asyncio
async def test_latch_has_64_places(device: aiocuda.Device) -> None:
    async with device.stream() as stream:
        with Latch(device) as latch:
            operations = [latch.hold(stream) for _ in range(64)]
            with pytest.raises(aiocuda.BusyError):
                latch.hold(stream)
            latch.release()
            await aiocuda.gather(*operations)
            operation = latch.hold(stream)
            latch.release()
            await operation


@pytest.mark.slow
@pytest.mark.asyncio
async def test_hold_that_ends_by_itself_raises(device: aiocuda.Device) -> None:
    latch = Latch(device, seconds=0.3)
    async with device.stream() as stream:
        await latch.hold(stream)
        with pytest.raises(AssertionError, match=r"ended by itself after 0\.3 s"):
            await latch.held()
        with pytest.raises(AssertionError, match=r"ended by itself after 0\.3 s"):
            latch.release()


@pytest.mark.asyncio
async def test_kernel_that_will_never_run_raises() -> None:
    """Its launch is refused after the call has returned: the kernel was being loaded."""
    async with open_peer() as (peer, device), device.stream() as stream:
        peer.refuse("launch")
        with Latch(device) as latch:
            latch.hold(stream)
            with pytest.raises(DriverError):
                await quickly(latch.held())


@pytest.mark.asyncio
async def test_unused_latch_is_left_alone(device: aiocuda.Device) -> None:
    with Latch(device) as latch:
        await latch.held()
        assert latch.running == 0
        latch.release()


@pytest.mark.asyncio
async def test_failing_test_does_not_wait_for_the_held_kernel(device: aiocuda.Device) -> None:
    """The block of the stream ends before that of the latch, which belongs to a fixture."""
    with Latch(device) as latch:  # as in the fixture, which gets no exception of the test
        with pytest.raises(ZeroDivisionError):
            async with device.stream() as stream:
                held = latch.hold(stream)
                later = stream.synchronize()
                await latch.held()
                raise ZeroDivisionError
        assert latch.running == 1
    await quickly(aiocuda.gather(held, later))
