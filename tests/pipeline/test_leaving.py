"""The consumer leaves: by break, aclose, cancellation or a time limit; and what will not end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    DrainTimeoutWarning,
    InvalidTypeError,
    Operation,
    Pipeline,
    Slot,
    Stage,
)
from aiocuda.pipeline import _item, _ring, _run, _slot
from tests.completion.interrupts import sweep
from tests.helpers import Latch, Reports, quickly, turns, until
from tests.pipeline.steps import assert_quiet, counting, stages, up, value, values

pytestmark = pytest.mark.asyncio


class Unusual(BaseException):
    """No `Exception`."""


async def test_break_ends_the_run(device: Device) -> None:
    """I5: the next run waits until the one before has been closed by Python."""
    pipeline = Pipeline(device, stages())
    for _ in range(3):
        async for result in pipeline.run(counting(100)):
            if value(result) == 7:
                break
        assert await values(pipeline, range(3)) == [1, 4, 7]
    assert_quiet(pipeline)


@pytest.mark.parametrize("overlap", [None, False])
async def test_new_run_closes_a_held_run_that_was_left_by_break(device: Device, overlap: bool | None) -> None:
    pipeline = Pipeline(device, stages())
    results = pipeline.run(counting(100), overlap=overlap)
    async for _ in results:
        break
    assert await values(pipeline, range(3), overlap=overlap) == [1, 4, 7]
    with pytest.raises(ClosedError, match="left by `break`"):
        await anext(results)
    await results.aclose()
    assert_quiet(pipeline)


async def test_one_iteration_closes_a_held_run_that_was_left_by_break(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    results = pipeline.run(range(100))
    async for _ in results:
        break
    assert value(await quickly(pipeline.execute_iteration(2))) == 7
    del results


async def test_run_that_was_left_by_break_goes_on_until_another_begins(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    results = pipeline.run(range(5))
    async for result in results:
        assert value(result) == 1
        break
    assert value(await anext(results)) == 4
    with pytest.raises(BusyError, match=r"contextlib\.aclosing"):  # it is held, and no loop over it was left since
        await values(pipeline, range(3))
    assert [value(result) async for result in results] == [7, 10, 13]
    assert_quiet(pipeline)


async def test_closing_the_pipeline_ends_a_held_run_that_was_left_by_break(device: Device) -> None:
    async with Pipeline(device, stages()) as pipeline:
        results = pipeline.run(counting(100))
        async for _ in results:
            break
    assert_quiet(pipeline)
    with pytest.raises(ClosedError):
        await anext(results)


async def test_run_that_a_task_iterates_is_not_closed(device: Device) -> None:
    """Neither in the body of its loop nor while it waits for a result."""
    pipeline = Pipeline(device, stages())
    found = []
    async for result in pipeline.run(range(3)):
        found.append(value(result))
        with pytest.raises(BusyError, match=r"contextlib\.aclosing\(pipeline\.run\(source\)\)"):
            await values(pipeline, range(3))
        with pytest.raises(BusyError, match="aclosing"):
            await pipeline.execute_iteration(3)
    assert found == [1, 4, 7]
    gate, waits = asyncio.Event(), asyncio.Event()

    async def gated(_slot: Slot) -> int:
        waits.set()
        await gate.wait()
        return int(_slot.item)

    pipeline = Pipeline(device, [Stage("gated", gated)])
    results = pipeline.run(range(3))
    consumer = asyncio.create_task(anext(results))
    await quickly(waits.wait())
    with pytest.raises(BusyError, match="aclosing"):
        await anext(pipeline.run(range(3)))
    gate.set()
    assert await quickly(consumer) == 0
    assert [result async for result in results] == [1, 2]


async def test_new_run_begins_when_the_items_of_the_left_one_have_ended(device: Device, latch: Latch) -> None:
    """P19: the items have the slots. Cancelling the new run's consumer does not stop the end of the old run."""

    def hold_second(_slot: Slot) -> Operation[None]:
        if _slot.item == 1:
            latch.hold(_slot.stream)
        called.append(_slot.item)
        return up(_slot)

    called: list[int] = []
    pipeline = Pipeline(device, [Stage("upload", hold_second), *stages()[1:]])
    results = pipeline.run(range(100))
    async for _ in results:
        break
    await until(lambda: latch.running == 1, "the held kernel")
    began = len(called)
    consumers = [asyncio.create_task(values(pipeline, [50 + number])) for number in range(2)]
    await turns(20)
    assert len(called) == began
    assert pipeline.ring.busy == 3
    consumers[0].cancel()
    await asyncio.wait({consumers[0]})
    assert consumers[0].cancelled()
    assert pipeline.ring.busy == 3
    latch.release()
    assert await quickly(consumers[1]) == [3 * 51 + 1]
    assert_quiet(pipeline, streams=2)
    del results


async def test_two_new_runs_close_a_left_one_once(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    results = pipeline.run(counting(100))
    async for _ in results:
        break
    first, second = await asyncio.gather(values(pipeline, range(3)), values(pipeline, range(2)), return_exceptions=True)
    assert first == [1, 4, 7]
    assert isinstance(second, BusyError)
    del results


@pytest.mark.parametrize("failure", [OSError("while it is closed"), Unusual("while it is closed")])
async def test_source_that_fails_while_a_new_run_closes_it_is_reported(device: Device, failure: BaseException) -> None:
    async def source() -> AsyncGenerator[int, None]:
        try:
            for number in range(100):
                yield number
        finally:
            raise failure

    pipeline = Pipeline(device, stages())
    with Reports() as reports:
        results = pipeline.run(source())
        async for _ in results:
            break
        assert await quickly(values(pipeline, range(3))) == [1, 4, 7]
        del results
        await until(lambda: reports.contexts, "the report")
        assert reports.failures == [failure]
    assert_quiet(pipeline)


async def test_iterating_or_awaiting_a_run_in_the_wrong_way_names_the_cure(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    _run: Any = pipeline.run(range(3))
    cure = r"async for result in pipeline\.run\(source\)"
    with pytest.raises(InvalidTypeError, match=cure):
        await _run
    with pytest.raises(InvalidTypeError, match=cure):
        list(_run)
    with pytest.raises(InvalidTypeError, match=cure):
        await asyncio.wait_for(_run, 1)
    assert [value(result) async for result in _run] == [1, 4, 7]
    assert isinstance(_run, AsyncIterator)


async def test_break_then_one_iteration(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    async for _ in pipeline.run(range(100)):
        break
    assert value(await quickly(pipeline.execute_iteration(2))) == 7


@pytest.mark.parametrize("overlap", [None, False])
async def test_a_generator_is_let_go_of_when_the_run_ends(device: Device, overlap: bool | None) -> None:
    ended: list[int] = []

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.append(1)

    pipeline = Pipeline(device, stages())
    async with contextlib.aclosing(pipeline.run(source(), overlap=overlap)) as results:
        assert value(await anext(results)) == 1
        assert ended == []
    assert ended == [1]
    assert_quiet(pipeline)


@pytest.mark.parametrize("overlap", [None, False])
async def test_closing_the_iterator_ends_the_run(device: Device, overlap: bool | None) -> None:
    pipeline = Pipeline(device, stages())
    asked: list[int] = []
    async with contextlib.aclosing(pipeline.run(counting(100, asked), overlap=overlap)) as results:
        async for result in results:
            if value(result) == 7:
                break
    assert_quiet(pipeline)
    assert len(asked) <= 6
    assert await values(pipeline, range(3)) == [1, 4, 7]


async def test_leaving_the_device_right_after_break() -> None:
    async with aiocuda.open_device(driver="host") as device:
        pipeline = Pipeline(device, stages())
        async for _ in pipeline.run(counting(100)):
            break
    await until(lambda: pipeline.ring.busy == 0)
    assert pipeline.ring.states == ("free",) * 3


async def test_leaving_the_pipeline_right_after_break(device: Device) -> None:
    async with Pipeline(device, stages()) as pipeline:
        async for _ in pipeline.run(counting(100)):
            break
    assert_quiet(pipeline)


async def test_a_run_of_a_closed_pipeline(device: Device) -> None:
    async with Pipeline(device, stages()) as pipeline:
        results = pipeline.run(counting(100))
        assert value(await anext(results)) == 1
    assert pipeline.ring.states == ("free",) * 3
    with pytest.raises(ClosedError, match="closed while it ran"):
        await anext(results)
    assert_quiet(pipeline)


async def test_closing_the_pipeline_under_a_consumer_is_no_cancellation(device: Device) -> None:
    begun = asyncio.Event()

    async def never(_slot: Slot) -> None:
        begun.set()
        await asyncio.Event().wait()

    pipeline = Pipeline(device, [Stage("never", never)])
    consumer = asyncio.create_task(values(pipeline, range(3)))
    await quickly(begun.wait())
    await quickly(pipeline.aclose())
    with pytest.raises(ClosedError, match="item 0 of the pipeline, counted from 0, was cancelled"):
        await quickly(consumer)
    assert_quiet(pipeline)


async def held_run(device: Device, latch: Latch) -> tuple[Pipeline, asyncio.Task[list[int]], list[Operation[Any]]]:
    """A consumer of a run that the device holds."""
    operations: list[Operation[Any]] = []

    def hold(_slot: Slot) -> Operation[None]:
        latch.hold(_slot.stream)
        operations.append(up(_slot))
        return operations[-1]

    pipeline = Pipeline(device, [Stage("upload", hold), *stages()[1:]])
    consumer = asyncio.create_task(values(pipeline, counting(100)))
    await until(lambda: latch.running == 1)
    return pipeline, consumer, operations


async def test_cancelling_the_consumer(device: Device, latch: Latch) -> None:
    """Submitted work runs to its end, then the slots are free; a second cancellation does not shorten the wait."""
    pipeline, consumer, operations = await held_run(device, latch)
    consumer.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    consumer.cancel()
    await asyncio.wait({consumer}, timeout=0.05)
    assert not consumer.done()
    assert pipeline.ring.busy == 3
    latch.release()
    with pytest.raises(asyncio.CancelledError):
        await quickly(consumer)
    assert all(operation.state == "done" for operation in operations)
    assert_quiet(pipeline, streams=2)
    del operations[:]
    latch.release()


async def test_a_time_limit(device: Device, latch: Latch) -> None:
    """Row 63: a stage that never ends."""
    pipeline, consumer, _ = await held_run(device, latch)
    consumer.cancel()

    async def limited() -> None:
        async with asyncio.timeout(0.01):
            await values(Pipeline(device, [Stage("never", never)]), range(3))

    async def never(_slot: Slot) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await quickly(limited())
    latch.release()
    with pytest.raises(asyncio.CancelledError):
        await quickly(consumer)
    assert_quiet(pipeline, streams=2)


async def test_stages_that_await_are_cancelled_and_may_clean_up(device: Device) -> None:
    begun, cleaned = asyncio.Event(), []

    async def clean(_slot: Slot) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(_slot.item)

    pipeline = Pipeline(device, [*stages(), Stage("clean", clean)])
    consumer = asyncio.create_task(values(pipeline, range(9)))
    await quickly(begun.wait())
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(consumer)
    assert cleaned == [0]
    assert_quiet(pipeline)


async def test_cancelling_one_iteration(device: Device, latch: Latch) -> None:
    async def wait(_slot: Slot) -> int:
        if _slot.item == 1:
            await asyncio.Event().wait()
        return int(_slot.item)

    pipeline = Pipeline(device, [*stages(), Stage("wait", wait)])
    tasks = [asyncio.create_task(pipeline.execute_iteration(item)) for item in range(5)]
    assert await quickly(tasks[0]) == 0
    tasks[1].cancel()
    assert await quickly(asyncio.gather(*tasks[2:])) == [2, 3, 4]
    await asyncio.wait({tasks[1]})
    assert tasks[1].cancelled()
    assert_quiet(pipeline, streams=2)


@pytest.mark.slow
async def test_late_items_are_warned_of_and_their_memory_stays(device: Device, latch: Latch) -> None:
    """P6: the slots are free again, with new memory; the device may still write the old."""
    device.drain_timeout = 0.2
    pipeline, consumer, operations = await held_run(device, latch)
    slots = [pipeline.ring._slots[number] for number in range(3)]
    buffers = [_slot._contents.memory.buffers["data"] for _slot in slots]
    consumer.cancel()
    with pytest.warns(DrainTimeoutWarning, match="3 items of a pipeline did not end within 0.2 s") as told:
        await asyncio.wait({consumer})
    assert [warning.filename for warning in told] == [values.__code__.co_filename]  # the caller of `run`
    assert consumer.cancelled()
    assert pipeline.ring.states == ("free",) * 3
    assert not any(operation.done() for operation in operations)
    assert not any(buffer.freed for buffer in buffers)
    assert not set(slots) & set(pipeline.ring._slots)
    latch.release()
    assert await quickly(values(pipeline_again(pipeline), range(3))) == [1, 4, 7]
    await quickly(device.drain())
    assert all(operation.state == "done" for operation in operations)


async def test_leaving_a_run_after_its_device(latch_device: tuple[Device, Latch]) -> None:
    """The run ends with its device, and memory that may still be written is not reused."""
    device, latch = latch_device
    pipeline, consumer, operations = await held_run(device, latch)
    slots = [pipeline.ring._slots[number] for number in range(3)]
    consumer.cancel()
    # It has read its time limit before this.
    await until(lambda: any("settle" in str(task.get_coro()) for task in asyncio.all_tasks()), "the leaving")
    device.drain_timeout = 0.02
    with pytest.warns(DrainTimeoutWarning):
        await device.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
    await quickly(asyncio.wait({consumer}))
    assert consumer.cancelled()
    assert pipeline.ring.states == ("free",) * 3
    assert not set(slots) & set(pipeline.ring._slots)
    latch.release()
    del operations


@pytest_asyncio.fixture
async def latch_device() -> AsyncIterator[tuple[Device, Latch]]:
    """A device that the test leaves by itself, and its latch."""
    device = await aiocuda.open_device(driver="host")
    with Latch(device) as latch:
        yield device, latch


def pipeline_again(pipeline: Pipeline) -> Pipeline:
    """The same slots, without the stage that holds."""
    pipeline._resources.plan.stages = tuple(stages())
    return pipeline


class Slow:
    """A source of one item, which then waits, and cleans up until it is let go or cancelled once more."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.cleaning, self.gate, self.ended = (asyncio.Event() for _ in range(4))
        self._error = error

    async def items(self) -> AsyncGenerator[int, None]:
        yield 0
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            try:
                await self.gate.wait()
            finally:
                self.ended.set()
                if self._error is not None:
                    raise self._error


async def left(pipeline: Pipeline, source: Slow) -> None:
    """Leave a run while its source waits."""
    async with contextlib.aclosing(pipeline.run(source.items())) as results:
        async for _ in results:
            await quickly(source.begun.wait())
            break


async def test_a_source_that_cleans_up_is_waited_for(device: Device) -> None:
    source = Slow()
    pipeline = Pipeline(device, stages())
    leaving = asyncio.create_task(left(pipeline, source))
    await quickly(source.cleaning.wait())
    assert not leaving.done()
    source.gate.set()
    await quickly(leaving)
    assert source.ended.is_set()
    assert_quiet(pipeline)


async def test_a_late_source_is_warned_of(device: Device) -> None:
    """It has `drain_timeout`, as all else that is under way; what it fails with later is reported."""
    device.drain_timeout = 0.05
    source = Slow(OSError("too late"))
    pipeline = Pipeline(device, stages())
    with Reports() as reports:
        with pytest.warns(DrainTimeoutWarning, match=r"the source of a pipeline did not end within 0\.05 s") as told:
            await quickly(left(pipeline, source))
        assert_quiet(pipeline)
        await quickly(source.ended.wait())
        await until(lambda: reports.contexts, "the report")
        assert [str(failure) for failure in reports.failures] == ["too late"]
    assert [warning.filename for warning in told] == [__file__]
    assert await values(pipeline, range(3)) == [1, 4, 7]


async def test_a_source_that_swallows_the_cancellation(device: Device) -> None:
    """An item that it yields then is not processed."""
    begun, asked = asyncio.Event(), []

    async def stubborn() -> AsyncGenerator[int, None]:
        for number in range(100):
            asked.append(number)
            if number == 1:
                begun.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            yield number

    pipeline = Pipeline(device, stages())
    async with contextlib.aclosing(pipeline.run(stubborn())) as results:
        async for _ in results:
            await quickly(begun.wait())
            break
    assert asked == [0, 1]
    assert_quiet(pipeline)


@pytest.mark.python_core
async def test_interrupted_while_an_item_is_begun_it_gives_its_slot_back() -> None:
    """Ctrl-C, wherever it comes but in the instructions that hand the slot over: in a notebook the ring goes on."""
    hands_over = ("TripleBuffer._take", "PipelineRing.take", "ActiveRun._feed_now")
    async with aiocuda.open_device(driver="host") as device:
        for interrupt in sweep(_item, _ring, _run, _slot, least=20):
            async with Pipeline(device, [Stage("only", lambda _slot: _slot.stream.synchronize())], depth=1) as pipeline:
                of_one = _run.ActiveRun(pipeline._resources, [1])
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    of_one.next_item_nowait(None)
                await of_one.close()
                assert pipeline.ring.busy == 0, interrupt.where
                if not (interrupt.where or "").startswith(hands_over):
                    assert await quickly(pipeline.execute_iteration(2)) is None, interrupt.where
