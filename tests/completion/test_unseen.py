"""The end of a block raises the failure of an operation that no code has awaited."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, DeviceFault, ManagedContext, Operation, Stream, StreamGroup, StreamPool
from tests.helpers import TRAP, Latch, Peer, Reports, open_peer, quickly, turns, until_gone

pytestmark = pytest.mark.asyncio


class OwnError(Exception):
    """An error of a submitted function."""


def fails(stream: Stream) -> Operation[Any]:
    def function() -> None:
        raise OwnError("of the function")

    return stream.submit(function)


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return note


Block = Callable[[Device], contextlib.AbstractAsyncContextManager[Stream]]


@contextlib.asynccontextmanager
async def group(device: Device) -> AsyncIterator[Stream]:
    async with StreamGroup(device, 2) as group:
        yield group[1]


@contextlib.asynccontextmanager
async def pool(device: Device) -> AsyncIterator[Stream]:
    async with StreamPool(device, maximum=2) as pool:
        async with pool.stream() as stream:
            yield stream
        await turns(5)


@contextlib.asynccontextmanager
async def coordinator(device: Device) -> AsyncIterator[Stream]:
    async with AsyncCoordinator(device) as coordinator:
        yield coordinator.compute_stream


@contextlib.asynccontextmanager
async def context(device: Device) -> AsyncIterator[Stream]:
    async with ManagedContext(driver=device.driver) as context:
        yield context.stream("compute")


@contextlib.asynccontextmanager
async def context_pool(device: Device) -> AsyncIterator[Stream]:
    async with ManagedContext(driver=device.driver) as context:
        yield await context.pool.stream()


@contextlib.asynccontextmanager
async def another_device(device: Device) -> AsyncIterator[Stream]:
    async with aiocuda.open_device(driver=device.driver) as another:
        yield another.stream()


@contextlib.asynccontextmanager
async def closed_in_another_device(device: Device) -> AsyncIterator[Stream]:
    async with aiocuda.open_device(driver=device.driver) as another:
        stream = another.stream()
        yield stream
        await stream.aclose()  # is no block


@contextlib.asynccontextmanager
async def stream_of(device: Device) -> AsyncIterator[Stream]:
    async with device.stream() as stream:
        yield stream


BLOCKS = [stream_of, group, pool, coordinator, context, context_pool, another_device, closed_in_another_device]


@pytest.mark.parametrize("driver", ["host", "simulated"])
@pytest.mark.parametrize("block", BLOCKS)
async def test_block_raises_a_failure_that_nothing_has_seen(block: Block, driver: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:  # does not raise it again
        with Reports():
            with pytest.raises(OwnError, match="of the function") as caught:
                async with block(device) as stream:
                    fails(stream)
                    stream.synchronize()
            assert note_of(caught.value).startswith("aiocuda: <Operation")
            assert stream.name in note_of(caught.value)


@pytest.mark.parametrize("block", BLOCKS)
async def test_block_raises_what_the_driver_has_refused(block: Block) -> None:
    async with open_peer() as (peer, device):
        with Reports(), pytest.raises(aiocuda.DriverError, match="does not take this") as caught:
            async with block(device) as stream:
                buffer = stream.empty(4)
                peer.refuse("fill")
                stream.fill(buffer, 1)
        assert "fill" in note_of(caught.value)


async def _await(operation: Operation[Any]) -> None:
    with pytest.raises(OwnError):
        await quickly(operation)


async def _result(operation: Operation[Any]) -> None:
    await asyncio.wait([operation])  # type: ignore[type-var]
    with pytest.raises(OwnError):
        operation.result()


async def _exception(operation: Operation[Any]) -> None:
    while not operation.done():
        await asyncio.sleep(0)
    assert isinstance(operation.exception(), OwnError)


async def _callback(operation: Operation[Any]) -> None:
    operation.add_done_callback(lambda ended: None)


async def _late_callback(operation: Operation[Any]) -> None:
    while not operation.done():
        await asyncio.sleep(0)
    operation.add_done_callback(lambda ended: None)


async def _gather(operation: Operation[Any]) -> None:
    assert [type(each) for each in await aiocuda.gather(operation, return_exceptions=True)] == [OwnError]


async def _skipped(operation: Operation[Any]) -> None:
    with pytest.raises(aiocuda.SkippedError):
        await quickly(operation.stream.synchronize())


async def _abandon(operation: Operation[Any]) -> None:
    operation.abandon()


async def _task(operation: Operation[Any]) -> None:
    task = asyncio.create_task(operation.wait())
    task.add_done_callback(lambda task: task.exception())
    await asyncio.sleep(0)


@pytest.mark.parametrize("driver", ["host", "simulated"])
@pytest.mark.parametrize(
    "see", [_await, _result, _exception, _callback, _late_callback, _gather, _skipped, _abandon, _task]
)
async def test_failure_that_was_seen_is_not_raised_by_a_block(
    see: Callable[[Operation[Any]], Awaitable[None]], driver: Any
) -> None:
    with Reports():
        async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
            await see(fails(stream))


class Used:
    """A local variable of the code that sees a failure."""


@pytest.mark.parametrize("see", [_await, _result, _exception, _late_callback, _gather])
@pytest.mark.parametrize("is_closed", [False, True])
async def test_failure_that_was_seen_holds_nothing_of_the_program(
    see: Callable[[Operation[Any]], Awaitable[None]], is_closed: bool
) -> None:
    async def request(stream: Stream) -> weakref.ref[Used]:
        used = Used()
        operation = fails(stream)
        if is_closed:
            await stream.aclose()
        await see(operation)
        with contextlib.suppress(OwnError):
            operation.result()  # the frame of this call is in the traceback, with the local variables
        return weakref.ref(used)

    with Reports():
        async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
            held = await request(device.stream() if is_closed else stream)
            await quickly(stream.submit(lambda: 1))
            await until_gone([held])  # the thread of a closed stream may still be in the call that has failed


async def test_block_of_a_stream_that_skips_does_not_raise() -> None:
    """The block of the stream whose operation has failed does."""
    async with aiocuda.open_device(driver="host") as device:
        with Reports(), pytest.raises(OwnError):
            async with device.stream() as first:
                async with device.stream() as second:
                    second.wait(fails(first))
                    second.synchronize()
                    await second.aclose()


async def test_only_the_first_failure_of_a_stream_is_raised() -> None:
    async with aiocuda.open_device(driver="host") as device:
        with Reports(), pytest.raises(ZeroDivisionError) as caught:
            async with device.stream() as stream:
                stream.submit(lambda: 1 / 0)
                fails(stream)
        assert caught.value.__context__ is None


async def test_exception_that_leaves_the_block_stays() -> None:
    async with aiocuda.open_device(driver="host") as device:
        with Reports(), pytest.raises(KeyError):
            async with device.stream() as stream:
                fails(stream)
                raise KeyError


async def test_aclose_raises_no_failure() -> None:
    with Reports():
        device = await aiocuda.open_device(driver="host")
        stream = device.stream()
        fails(stream)
        await stream.aclose()
        await device.aclose()


@pytest.mark.parametrize("is_read", [False, True])
async def test_fault_is_raised_unless_it_was_raised_before(is_read: bool) -> None:
    with Peer() as peer, Reports(), contextlib.nullcontext() if is_read else pytest.raises(DeviceFault) as caught:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            async with device.stream() as other:
                await stream.synchronize()
                with Latch(device) as latch:
                    latch.hold(other)
                    await latch.held()
                    other.synchronize()
                    operation = stream.launch(TRAP, 1, 1)
                    if is_read:
                        with pytest.raises(DeviceFault):
                            await quickly(operation)
    if caught is not None:
        assert "failed, and no code has awaited" in note_of(caught.value)
