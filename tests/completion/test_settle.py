"""`Operation.settle` waits until the device has finished; `Stream.tail` is the newest unfinished operation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiocuda import Device, DriverError, Stream, WrongLoopError
from tests.helpers import Latch, in_thread, open_peer, quickly
from tests.helpers import device as device
from tests.helpers import latch as latch
from tests.helpers import other as other
from tests.helpers import stream as stream

pytestmark = pytest.mark.asyncio


async def test_settle_of_an_abandoned_operation_waits_for_the_device(
    device: Device, stream: Stream, latch: Latch
) -> None:
    """P6: after that, the target of the copy may be written again."""
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


async def test_settle_of_a_submitted_and_of_a_finished_operation(stream: Stream, latch: Latch) -> None:
    latch.hold(stream)
    operation = stream.synchronize()
    settling = asyncio.create_task(operation.settle())
    await latch.held()
    assert not settling.done()
    latch.release()
    await quickly(settling)
    assert operation.state == "done"
    assert await quickly(operation.settle()) is None


async def test_settle_does_not_read_the_failure() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        peer.refuse("fill")
        failing = stream.fill(stream.empty(4), 1)
        assert await quickly(failing.settle()) is None
        assert failing.state == "failed"
        with pytest.raises(DriverError):
            await failing


async def test_settle_in_another_loop_is_refused(stream: Stream) -> None:
    operation = stream.synchronize()

    async def in_other_loop() -> None:
        with pytest.raises(WrongLoopError):
            await operation.settle()

    await asyncio.to_thread(in_thread, in_other_loop)
    assert await quickly(operation) is None


async def test_tail_is_the_newest_unfinished_operation(stream: Stream, latch: Latch) -> None:
    assert stream.tail is None
    latch.hold(stream)
    operations = [stream.synchronize() for _ in range(3)]
    assert stream.tail is operations[-1]
    operations[-1].abandon()
    assert stream.tail is operations[-1]  # the device has not finished it
    await latch.held()
    latch.release()
    await quickly(operations[-1].settle())
    assert stream.tail is None
    assert operations[0].stream_name == stream.name
    assert operations[0].part_of is None
