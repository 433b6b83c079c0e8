"""P34: a stream whose handle another library has received is never destroyed. It is used again only when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, Stream, StreamPool
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from tests.helpers import TRAP, Latch, in_thread, quickly, until
from tests.memory.others import Producer
from tests.memory.others import handle as handle_of

DRIVERS: dict[str, Callable[[], Any]] = {"host": HostDriver, "simulated": SimulatedDriver}


@pytest.fixture(params=sorted(DRIVERS))
def driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A driver that outlives its devices, as CUDA's does."""
    made = DRIVERS[request.param]()
    yield made
    made.close()


def destroyed(driver: Any) -> int:
    """How many driver streams were destroyed so far."""
    counts = driver.statistics()
    made: int = counts["streams_created"] - counts["streams"] - counts["streams_kept"]
    return made


def is_alive(driver: Any, handle: int) -> bool:
    """True if a stream with this handle still exists. `StaleHandleError` otherwise."""
    driver.stream_import(0, handle)
    driver.stream_destroy(handle)  # which forgets the import
    return True


# Ways to the handle


async def by_lend(stream: Stream) -> int:
    async with stream.lend() as handle:
        return handle


async def by_stream_protocol(stream: Stream) -> int:
    return stream.__cuda_stream__()[1] if stream.device.driver.name == "cuda" else handle_of(stream)


async def by_adopting(stream: Stream) -> int:
    """The producer of an array gets the consumer's handle."""
    buffer = stream.empty(4, np.uint32)
    await stream.fill(buffer, 1)
    producer = Producer(buffer)
    stream.adopt(producer).free()
    handle: int = producer.asked[0]["stream"]
    return handle


async def by_array_interface(stream: Stream) -> int:
    """The dictionary names the stream that is still at work on the buffer."""
    buffer = stream.empty(4, np.uint32)
    stream.fill(buffer, 1)
    handle: int = stream.device.memory.exports.interface(buffer)["stream"]
    return handle


async def by_importing(stream: Stream) -> int:
    """An import of a stream of aiocuda reads the handle as another library does."""
    imported = Stream.from_handle(stream.device, stream)
    handle = handle_of(imported)
    await imported.aclose()
    return handle


EXPORTS: list[Callable[[Stream], Awaitable[int]]] = [
    by_lend, by_stream_protocol, by_adopting, by_array_interface, by_importing,
]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("export", EXPORTS)
async def test_stream_is_not_destroyed_once_its_handle_was_read(driver: Any, export: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:
        async with device.stream() as stream:
            handle = await export(stream)
            assert driver.stream_has_handle(stream._queue.handle, handle)
        assert is_alive(driver, handle)
        assert device.statistics().streams == 0
    assert is_alive(driver, handle)
    assert driver.statistics()["streams_kept"] == 1


@pytest.mark.asyncio
async def test_stream_whose_handle_stayed_here_is_destroyed(driver: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:
        async with device.stream() as stream, device.stream() as other:
            await stream.synchronize()
            other.wait(stream)
        assert destroyed(driver) == 2
    assert driver.statistics()["streams_kept"] == 0


# Ways to the end


@contextlib.asynccontextmanager
async def opened(driver: Any) -> AsyncIterator[tuple[Device, Stream, int]]:
    """A stream whose handle another library has received."""
    device = await aiocuda.open_device(driver=driver)
    stream = device.stream()
    try:
        yield device, stream, handle_of(stream)
    finally:
        await device.aclose()


async def closed(device: Device, stream: Stream) -> None:
    await stream.aclose()


async def left(device: Device, stream: Stream) -> None:
    """The stream is left by an exception, with work in flight. It is kept after that work."""
    with Latch(device) as latch:
        with contextlib.suppress(ZeroDivisionError):
            async with stream:
                latch.hold(stream)
                raise ZeroDivisionError
        assert stream.closed
    await until(lambda: device.statistics().streams == 0, "the stream's end")


async def closed_with_device(device: Device, stream: Stream) -> None:
    await device.aclose()


async def left_with_device(device: Device, stream: Stream) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with device:
            raise ZeroDivisionError


async def left_while_lent(device: Device, stream: Stream) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with stream.lend():
            async with stream:
                raise ZeroDivisionError
    await until(lambda: device.statistics().streams == 0, "the stream's end")


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [closed, left, closed_with_device, left_with_device, left_while_lent])
async def test_exported_stream_outlives_every_end(driver: Any, end: Any) -> None:
    async with opened(driver) as (device, stream, handle):
        await quickly(end(device, stream))
        assert destroyed(driver) == 0
        assert is_alive(driver, handle)
    assert destroyed(driver) == 0
    assert driver.statistics()["streams"] == 0
    assert is_alive(driver, handle)


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
async def test_exported_stream_outlives_its_garbage(driver: Any) -> None:
    async with opened(driver) as (device, stream, handle):
        del stream
        gc.collect()
        await device.drain()
    assert destroyed(driver) == 0
    assert is_alive(driver, handle)


@pytest.mark.asyncio
async def test_exported_stream_outlives_its_pool() -> None:
    driver = HostDriver()
    async with aiocuda.open_device(driver=driver) as device:
        async with StreamPool(device, 1, 2) as pool, pool.stream() as first, pool.stream(exclusive=True) as second:
            handles = [handle_of(stream) for stream in (first, second)]
            assert handles[0] != handles[1]
        assert destroyed(driver) == 0
        assert all(is_alive(driver, handle) for handle in handles)
    driver.close()


@pytest.mark.filterwarnings("ignore:unclosed <Stream:ResourceWarning")
def test_exported_stream_outlives_its_loop() -> None:
    """Another loop of the device releases the streams of a closed loop."""
    driver = HostDriver()
    kept: list[Any] = []

    async def leave() -> None:
        device = await aiocuda.open_device(driver=driver)
        stream = device.stream()
        kept.extend((device, stream, handle_of(stream)))

    async def take_back() -> None:
        device, _, handle = kept
        await device.aclose()
        assert destroyed(driver) == 0
        assert is_alive(driver, handle)

    asyncio.run(leave())
    asyncio.run(take_back())
    driver.close()


# Serving again


@pytest.mark.asyncio
async def test_repeated_loans_create_no_more_streams_than_are_open_together(driver: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:
        for _ in range(50):
            async with contextlib.AsyncExitStack() as block:
                for _ in range(3):
                    stream = await block.enter_async_context(device.stream())
                    await block.enter_async_context(stream.lend())
        counts = device.statistics()
        assert (counts.streams, counts.streams_created) == (0, 3)
        assert (
            resources_of(device).device_state.budget.streams == 0
        )  # kept streams take no places in the hardware queues


@pytest.mark.asyncio
async def test_device_that_is_opened_later_uses_the_streams_that_are_kept(driver: Any) -> None:
    async with opened(driver) as (device, stream, handle):
        await stream.synchronize()
    async with aiocuda.open_device(driver=driver) as device:
        assert device.statistics().streams_created == 0
        stream = device.stream()
        assert handle_of(stream) == handle
        buffer = stream.empty(4, np.uint32)
        stream.fill(buffer, 5)
        assert (await stream.download(buffer) == 5).all()
        assert (device.statistics().streams, device.statistics().streams_created) == (1, 0)


@pytest.mark.asyncio
async def test_stream_of_another_priority_does_not_serve(driver: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:
        for _ in range(3):
            handles = {}
            async with device.stream("high") as high, device.stream("low") as low, device.stream() as normal:
                for stream in (high, low, normal):
                    handles[stream] = handle_of(stream)
                priorities = [driver.stream_priority(stream._queue.handle) for stream in (high, normal, low)]
                assert priorities == [-5, -2, 0]
        assert device.statistics().streams_created == 3


@pytest.mark.asyncio
async def test_busy_stream_does_not_serve() -> None:
    """Another library has enqueued work on the stream after its end."""
    driver = HostDriver()
    async with opened(driver) as (device, stream, handle):
        with Latch(device) as latch:  # loads its kernel
            latch.hold(stream)
        await stream.aclose()
        imported = Stream.from_handle(device, handle)  # the other library
        with Latch(device) as latch:
            hold = latch.hold(imported)
            await latch.held()
            async with device.stream() as other:
                assert handle_of(other) != handle
                await quickly(other.fill(other.empty(4, np.uint32), 1))
            latch.release()
            await quickly(hold)
        await imported.aclose()
    driver.close()


@pytest.mark.asyncio
async def test_stream_that_is_lent_beyond_its_device_serves_only_after_the_loan(driver: Any) -> None:
    device = await aiocuda.open_device(driver=driver)
    stream = device.stream()
    loan = stream.lend()
    handle = await loan.__aenter__()
    await device.aclose()
    async with aiocuda.open_device(driver=driver) as later:
        async with later.stream() as other:
            assert handle_of(other) != handle
            await loan.__aexit__(None, None, None)
            async with later.stream() as again:
                assert handle_of(again) == handle
    assert destroyed(driver) == 0


@pytest.mark.asyncio
async def test_loan_may_end_after_the_driver_was_closed() -> None:
    device = await aiocuda.open_device(driver="host")
    stream = device.stream()
    loan = stream.lend()
    await loan.__aenter__()
    await device.aclose()
    await loan.__aexit__(None, None, None)
    assert stream.closed


def test_threads_that_share_a_device_create_no_more_streams_than_they_have_open() -> None:
    driver = HostDriver()

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:

            async def often() -> None:
                for _ in range(50):
                    async with device.stream() as stream:
                        handle_of(stream)

            await asyncio.gather(*[asyncio.to_thread(in_thread, often) for _ in range(4)])
            assert device.statistics().streams_created <= 4
            assert destroyed(driver) == 0

    asyncio.run(main())
    driver.close()


@pytest.mark.asyncio
async def test_no_stream_serves_after_a_device_fault() -> None:
    driver = HostDriver()
    device = await aiocuda.open_device(driver=driver)
    async with device.stream() as stream:
        handle_of(stream)
    other = device.stream()
    with pytest.raises(DeviceFault):
        await quickly(other.launch(TRAP, 1, 1))
    kept = driver.statistics()["streams_kept"]
    with pytest.raises(DeviceFault):
        device.stream()
    assert driver.statistics()["streams_kept"] == kept
    with contextlib.suppress(DeviceFault):
        await device.aclose()
    driver.close()
