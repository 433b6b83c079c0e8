"""M2, M3: waits for work of other libraries, on the device that a loop has open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import pytest

import aiocuda
from aiocuda import ClosedError, InvalidArgumentError, NoEventLoopError
from aiocuda.completion._marks import enqueue_shared_mark
from aiocuda.completion._stream_queue import stream_queue
from aiocuda.device._resources import resources_of
from aiocuda.integrations import _waiting
from tests.helpers import Latch, open_peer, quickly


@pytest.mark.asyncio
async def test_device_that_can_be_used_comes_before_one_that_is_closing() -> None:
    for _ in range(10):
        async with aiocuda.open_device(driver="host") as closing, aiocuda.open_device(driver="host") as other:
            resources_of(closing).refuse()
            assert _waiting.open_device_for(None) is resources_of(other)
            resources_of(other).refuse()
            with pytest.raises(ClosedError):
                _waiting.wait_for_host(None)
    with pytest.raises(InvalidArgumentError, match="no device open"):
        _waiting.wait_for_host(None)


def test_without_an_event_loop() -> None:
    with pytest.raises(NoEventLoopError, match="call it in a coroutine"):
        _waiting.wait_for_host(None)


@pytest.mark.asyncio
async def test_device_of_another_loop_is_not_found() -> None:
    async with aiocuda.open_device(driver="host"):

        async def look() -> None:
            with pytest.raises(InvalidArgumentError, match="no device open"):
                _waiting.wait_for_host(None)

        await asyncio.to_thread(asyncio.run, look())


@pytest.mark.asyncio
async def test_many_waits_without_a_gpu_share_a_stream() -> None:
    async with aiocuda.open_device(driver="host") as device:
        await quickly(asyncio.gather(*[_waiting.wait_for_host(number) for number in range(300)]))
        assert device.statistics().streams == 1


@pytest.mark.asyncio
async def test_more_waits_than_a_stream_holds_share_the_last_one() -> None:
    """Of a stream of another library, on which nothing of ours may wait on the host."""
    async with open_peer() as (_, device):
        own = device.stream()
        stream = aiocuda.Stream.from_handle(device, own)
        queue = stream_queue(stream)
        with Latch(device) as latch:
            latch.hold(own)
            await latch.held()
            operations = [enqueue_shared_mark(queue, number) for number in range(1000)]
            assert len(queue.pending) <= queue.device_hot.limit + 1
            assert not any(operation.done() for operation in operations)
            latch.release()
            await quickly(asyncio.gather(*operations))


@pytest.mark.asyncio
async def test_finaliser_may_look_for_a_device() -> None:
    """The garbage collector may run at each line of the search."""

    class Looking:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with contextlib.suppress(NoEventLoopError):  # the last ones, after the test
                _waiting.open_device_for(None)

    async with aiocuda.open_device(driver="host"):
        thresholds = gc.get_threshold()
        try:
            for _ in range(3000):
                gc.set_threshold(random.randint(1, 40), 10, 10)
                Looking()
                _waiting.open_device_for(None)
        finally:
            gc.set_threshold(*thresholds)
            gc.collect()
