"""When the device is done with an operation, whatever became of it; and a stream's newest one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiocuda import Device, DriverError, Stream, WrongLoopError
from aiocuda.testing import Latch
from tests.helpers import device as device
from tests.helpers import in_thread, open_peer, quickly
from tests.helpers import latch as latch
from tests.helpers import other as other
from tests.helpers import stream as stream

pytestmark = pytest.mark.asyncio


async def test_an_abandoned_operation_is_finished_before_the_device_is_done_with_it(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """P6: its target may be written again once it has settled."""
    buffer = await stream.upload(np.full(1024, 7, np.uint32))
    target = device.pinned(1024, np.uint32)
    target[:] = 0
    latch.hold(stream)
    operation = stream.copy(target, buffer)
    await latch.held()
    operation.abandon()
    settling = asyncio.create_task(operation.settle())
    await asyncio.sleep(0)
    assert operation.done()
    assert not settling.done()
    latch.release()
    assert await quickly(settling) is None
    target[:] = 1
    await quickly(stream.synchronize())
    assert (target == 1).all()


async def test_one_that_is_under_way_or_done(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    operation = stream.synchronize()
    settling = asyncio.create_task(operation.settle())
    await latch.held()
    assert not settling.done()
    latch.release()
    await quickly(settling)
    assert operation.state == "done"
    assert await quickly(operation.settle()) is None


async def test_a_failure_is_left_for_others_to_read() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        assert await quickly(failing.settle()) is None
        assert failing.state == "failed"
        with pytest.raises(DriverError):
            await failing


async def test_in_another_loop(stream: Stream) -> None:
    operation = stream.synchronize()

    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            await operation.settle()

    await asyncio.to_thread(in_thread, elsewhere)
    assert await quickly(operation) is None


async def test_the_tail_is_the_newest_operation_under_way(stream: Stream, latch: Latch) -> None:
    assert stream.tail is None
    latch.hold(stream)
    operations = [stream.synchronize() for _ in range(3)]
    assert stream.tail is operations[-1]
    operations[-1].abandon()
    assert stream.tail is operations[-1]  # the device has not come to it
    await latch.held()
    latch.release()
    await quickly(operations[-1].settle())
    assert stream.tail is None
    assert operations[0].stream_name == stream.name
    assert operations[0].part_of is None
