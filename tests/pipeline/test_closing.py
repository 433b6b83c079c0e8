"""The end of a pipeline: interrupted, called twice, called in another loop. No stream is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aiocuda import BusyError, ClosedError, Device, Pipeline, Slot, Stage, Stream, WrongLoopError
from tests.helpers import Latch, in_thread, quickly, turns, until
from tests.pipeline.steps import stages, value, values

pytestmark = pytest.mark.asyncio


class Waiting:
    """A pipeline on one stream, whose stage waits for the test."""

    def __init__(self, device: Device) -> None:
        self.released = asyncio.Event()
        self.begun = 0
        self.streams: set[Stream] = set()
        self.pipeline = Pipeline(device, [Stage("wait", self._wait)])

    async def _wait(self, slot: Slot) -> int:
        self.begun += 1
        self.streams.add(slot.stream)
        await self.released.wait()
        return int(slot.item)

    async def begin(self) -> asyncio.Task[int]:
        """Begin an item, and return the task that waits for its result."""
        begun = self.begun
        task = asyncio.create_task(self.pipeline.execute_iteration(7))
        await until(lambda: self.begun > begun, "the stage")
        return task


@pytest_asyncio.fixture
async def waiting(device: Device) -> AsyncIterator[Waiting]:
    one = Waiting(device)
    yield one
    one.released.set()


def streams(device: Device) -> int:
    return device.statistics().streams


async def test_twenty_handlers_that_time_out_at_the_end_of_their_block_leave_no_stream(device: Device) -> None:
    device.drain_timeout = 0.05
    handlers = [Waiting(device) for _ in range(20)]
    items: list[asyncio.Task[int]] = []

    async def handle(one: Waiting) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit, one.pipeline:
                items.append(await one.begin())
                limit.reschedule(asyncio.get_running_loop().time())  # while the end of the block waits for the item

    await quickly(asyncio.gather(*map(handle, handlers)))
    assert not any(item.done() for item in items)
    for one in handlers:
        one.released.set()
    assert await quickly(asyncio.gather(*items)) == [7] * 20
    assert streams(device) == 0


async def test_a_call_that_is_cancelled_waits_for_the_items_and_then_raises(device: Device, waiting: Waiting) -> None:
    async with waiting.pipeline as pipeline:
        item = await waiting.begin()
        asyncio.get_running_loop().call_later(0.03, waiting.released.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pipeline.aclose(), 0.001)
        assert item.result() == 7
        with pytest.raises(ClosedError):
            await pipeline.execute_iteration(8)
        assert streams(device) == 0


async def test_a_call_that_is_cancelled_waits_until_the_deadline(device: Device, waiting: Waiting) -> None:
    device.drain_timeout = 0.05
    async with waiting.pipeline as pipeline:
        item = await waiting.begin()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(quickly(pipeline.aclose()), 0.001)
        assert not item.done()
        waiting.released.set()
        await quickly(item)
    assert streams(device) == 0


async def test_second_call_waits_until_the_streams_are_closed(device: Device, waiting: Waiting, latch: Latch) -> None:
    before = streams(device)
    waiting.released.set()
    async with waiting.pipeline as pipeline:
        await pipeline.execute_iteration(7)
        for stream in waiting.streams:
            latch.hold(stream)
        await latch.held()
        calls = [asyncio.create_task(pipeline.aclose()) for _ in range(3)]
        await turns(9)
        assert not any(call.done() for call in calls)
        calls[1].cancel()  # it ends its own wait alone
        await turns(9)
        assert [call.done() for call in calls] == [False, True, False]
        latch.release()
        await quickly(asyncio.gather(calls[0], calls[2]))
        assert streams(device) == before


async def test_cancelled_while_the_streams_are_closed(device: Device, waiting: Waiting, latch: Latch) -> None:
    before = streams(device)
    waiting.released.set()
    async with waiting.pipeline as pipeline:
        await pipeline.execute_iteration(7)
        for stream in waiting.streams:
            latch.hold(stream)
        await latch.held()
        closing = asyncio.create_task(pipeline.aclose())
        await turns(9)
        closing.cancel()
        await turns(9)
        assert not closing.done()
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(closing)
        assert streams(device) == before


async def test_exception_in_the_block_beside_an_item(device: Device, waiting: Waiting) -> None:
    device.drain_timeout = 0.05
    with pytest.raises(ZeroDivisionError):
        async with waiting.pipeline:
            item = await waiting.begin()
            raise ZeroDivisionError
    waiting.released.set()
    assert await quickly(item) == 7
    assert streams(device) == 0


@pytest.mark.parametrize("block", [True, False], ids=["block", "item"])
async def test_in_another_loop_it_raises_and_changes_nothing(device: Device, waiting: Waiting, block: bool) -> None:
    """The streams are open, for the block or for an item alone."""
    pipeline = waiting.pipeline
    if block:
        await pipeline.__aenter__()
    item = await waiting.begin()
    before = streams(device)

    async def elsewhere() -> None:
        for call in (pipeline.aclose, pipeline.__aenter__):
            with pytest.raises(WrongLoopError, match="this pipeline belongs to another event loop"):
                await call()

    await asyncio.to_thread(in_thread, elsewhere)
    assert streams(device) == before
    later = asyncio.create_task(pipeline.execute_iteration(8))
    await turns()
    waiting.released.set()
    await quickly(pipeline.aclose())
    assert (item.result(), later.result()) == (7, 8)
    assert streams(device) == 0


async def test_idle_pipeline_belongs_to_no_loop(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    assert await values(pipeline, range(3)) == [1, 4, 7]

    async def elsewhere() -> int:
        result = value(await pipeline.execute_iteration(3))
        await pipeline.aclose()
        return result

    assert await asyncio.to_thread(in_thread, elsewhere) == 10
    with pytest.raises(ClosedError):
        await pipeline.execute_iteration(3)
    assert streams(device) == 0


async def test_a_stage_cannot_close_its_stream(device: Device) -> None:
    """Every later item failed."""

    async def closes(slot: Slot) -> int:
        if slot.item == "close":
            await slot.stream.aclose()
        await slot.stream.synchronize()
        return 7

    async with Pipeline(device, [Stage("closes", closes)]) as pipeline:
        with pytest.raises(BusyError, match="stream 'closes' is closed by its pipeline, which still needs it"):
            await quickly(pipeline.execute_iteration("close"))
        assert await quickly(pipeline.execute_iteration("next")) == 7
    assert streams(device) == 0
