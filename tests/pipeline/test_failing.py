"""A stage or the source fails: what the consumer gets, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    Device,
    DeviceFault,
    DriverError,
    InvalidTypeError,
    Kernel,
    Operation,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
)
from aiocuda.pipeline._failures import combine
from tests.helpers import TRAP, Latch, Reports, open_peer, quickly, until
from tests.pipeline.steps import SIZE, assert_quiet, held, stages, triple, up, value, values

pytestmark = pytest.mark.asyncio


async def collected(results: AsyncIterator[Any]) -> tuple[list[Any], Exception]:
    """What came before the error, and the error."""
    found: list[Any] = []
    try:
        async for result in results:
            found.append(value(result))  # noqa: PERF401 - what came before the error counts
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return found, error
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("overlap", [None, False])
async def test_a_stage_that_raises_ends_the_run(device: Device, place: int, awaits: bool, overlap: bool | None) -> None:
    """I5: what came before it is delivered, then its error; nothing is left, and the pipeline runs again."""
    steps = stages()
    good = steps[place]
    broken = True

    def function(slot: Slot) -> Any:
        if broken and slot.item == 4:
            raise ZeroDivisionError(f"item {slot.item}")
        return good.function(slot)

    async def coroutine(slot: Slot) -> Any:
        return await function(slot)

    steps[place] = Stage(good.name, coroutine if awaits else function)
    pipeline = Pipeline(device, steps)
    found, error = await collected(pipeline.run(range(9), overlap=overlap))
    assert found == [1, 4, 7, 10]
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == [f"in stage {good.name!r} of item 4, counted from 0"]
    assert_quiet(pipeline)
    broken = False
    assert await values(pipeline, range(6), overlap=overlap) == [1, 4, 7, 10, 13, 16]


async def test_what_is_under_way_is_waited_for(device: Device, latch: Latch) -> None:
    """The error comes when the device has let go of all slots, not before."""

    failed = asyncio.Event()

    def hold(slot: Slot) -> Operation[None]:
        if slot.item == 1:
            latch.hold(slot.stream)
            return slot.stream.synchronize()
        if slot.item == 2:
            failed.set()
            raise ZeroDivisionError
        return up(slot)

    pipeline = Pipeline(device, [Stage("upload", hold)])
    results = pipeline.run(range(3))
    assert await quickly(anext(results)) is None
    second = asyncio.ensure_future(anext(results))
    await quickly(failed.wait())
    await until(lambda: pipeline.ring.busy == 2, "the first slot's release")
    assert not second.done()  # so the third item's failure has not been raised, and its slot is still taken
    latch.release()
    assert await quickly(second) is None
    with pytest.raises(ZeroDivisionError):
        await anext(results)
    assert_quiet(pipeline, streams=2)


async def test_what_a_stage_has_abandoned_is_waited_for(device: Device, latch: Latch) -> None:
    """P6: it is finished, but the device has yet to write the slot's memory."""

    def abandon(slot: Slot) -> Operation[None]:
        latch.hold(slot.stream)
        up(slot).abandon()
        raise ZeroDivisionError

    pipeline = Pipeline(device, [Stage("upload", abandon)])
    consumer = asyncio.create_task(values(pipeline, [1]))
    await held(latch)
    wakes = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
    assert pipeline.ring.busy == 1
    assert not consumer.done()
    latch.release()
    with pytest.raises(ZeroDivisionError):
        await quickly(consumer)
    assert_quiet(pipeline, streams=2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("overlap", [None, False])
async def test_a_source_that_raises(device: Device, asynchronous: bool, overlap: bool | None) -> None:
    def source() -> Iterator[int]:
        yield from range(4)
        raise OSError("no more")

    async def coroutine() -> AsyncGenerator[int, None]:
        for item in source():
            yield item

    pipeline = Pipeline(device, stages())
    found, error = await collected(pipeline.run(coroutine() if asynchronous else source(), overlap=overlap))
    assert found == [1, 4, 7, 10]
    assert isinstance(error, OSError)
    assert error.__notes__ == ["in the source of the pipeline, at item 4, counted from 0"]
    assert_quiet(pipeline)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_source_that_raises_one_object_again_and_again(device: Device, asynchronous: bool) -> None:
    """The object gets its note once."""
    error = OSError("no more")

    def source() -> Iterator[int]:
        raise error
        yield 0

    async def coroutine() -> AsyncGenerator[int, None]:
        for item in source():
            yield item

    async with Pipeline(device, stages()) as pipeline:
        for _ in range(3):
            assert (await collected(pipeline.run(coroutine() if asynchronous else source())))[1] is error
    assert error.__notes__ == ["in the source of the pipeline, at item 0, counted from 0"]


class NotelessError(OSError):
    add_note = None  # type: ignore[assignment]


async def test_a_source_whose_exception_takes_no_notes(device: Device) -> None:
    def source() -> Iterator[int]:
        raise NotelessError
        yield 0

    async with Pipeline(device, stages()) as pipeline:
        assert isinstance((await collected(pipeline.run(source())))[1], NotelessError)


@pytest.mark.parametrize("wrong", [7, "text", [7]])
async def test_a_stage_that_returns_nothing_to_wait_for(device: Device, wrong: object) -> None:
    pipeline = Pipeline(device, [Stage("odd", lambda slot: wrong)])
    with pytest.raises(InvalidTypeError, match="stage 'odd' is a plain function") as caught:
        await values(pipeline, range(3))
    assert caught.value.__notes__ == ["in stage 'odd' of item 0, counted from 0"]
    assert_quiet(pipeline)


async def test_a_plain_function_that_returns_a_coroutine(device: Device) -> None:
    async def work(slot: Slot) -> None: ...

    pipeline = Pipeline(device, [Stage("late", lambda slot: work(slot))])
    with pytest.raises(InvalidTypeError, match="declare it `async def`"):
        await values(pipeline, range(3))


async def test_what_the_driver_refuses_names_the_stage_that_asked() -> None:
    """An operation's own failure: later stages are skipped, and this failure is raised."""
    async with open_peer() as (peer, device):
        pipeline = Pipeline(device, stages())
        assert await values(pipeline, range(2)) == [1, 4]  # loaded from here on

        def compute(slot: Slot) -> Operation[None]:
            if slot.item == 2:
                peer.refuse("launch")
            return triple(slot)

        pipeline = Pipeline(device, [stages()[0], Stage("compute", compute), stages()[2]])
        found, error = await collected(pipeline.run(range(6)))
        assert found == [1, 4]
        assert isinstance(error, DriverError)
        assert error.__notes__ == ["in stage 'compute' of item 2, counted from 0"]
        assert_quiet(pipeline)
        assert await values(pipeline, [7]) == [22]


async def test_what_has_failed_before_the_next_stage_is_enqueued() -> None:
    """The failure is known while the stages are still being called: they are called, and do nothing."""
    async with open_peer() as (peer, device):

        def upload(slot: Slot) -> Operation[None]:
            peer.refuse("upload")
            return up(slot)

        def compute(slot: Slot) -> Operation[None]:
            return triple(slot)

        async def look(slot: Slot) -> None:
            raise AssertionError("the host waits for what has failed")

        for last in (stages()[2], Stage("look", look)):
            pipeline = Pipeline(device, [Stage("upload", upload), Stage("compute", compute), last])
            found, error = await collected(pipeline.run([0]))
            assert found == []
            assert isinstance(error, DriverError)
            assert error.__notes__ == ["in stage 'upload' of item 0, counted from 0"]
            assert peer.calls["launch"] == 0
            assert_quiet(pipeline)


async def test_a_kernel_that_cannot_be_loaded(device: Device) -> None:
    broken = Kernel("nope", source='extern "C" __global__ void nope(unsigned int *x) { return undeclared; }')

    def compute(slot: Slot) -> Operation[None]:
        return slot.stream.launch(broken, 1, 1, slot.buffer("data", SIZE, np.uint32))

    pipeline = Pipeline(device, [stages()[0], Stage("compute", compute), stages()[2]])
    with pytest.raises(RuntimeError) as caught:
        await values(pipeline, range(6))
    assert "in stage 'compute' of item 0, counted from 0" in caught.value.__notes__
    assert_quiet(pipeline)


async def test_several_failures_come_as_a_group(device: Device) -> None:
    """P22"""
    ready = asyncio.Event()

    async def fail(slot: Slot) -> None:
        if slot.item == 2:
            ready.set()
            raise KeyError("second")

    async def first(slot: Slot) -> None:
        if slot.item == 1:
            await ready.wait()
            raise ZeroDivisionError("first")

    pipeline = Pipeline(device, [Stage("a", fail), Stage("b", first)])
    with pytest.raises(ExceptionGroup, match="2 items of the pipeline failed") as caught:
        async for _ in pipeline.run(range(5)):
            pass
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, KeyError]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["in stage 'b' of item 1, counted from 0"],
        ["in stage 'a' of item 2, counted from 0"],
    ]
    assert_quiet(pipeline)


async def test_a_devices_fault_is_one_failure() -> None:
    async with aiocuda.open_device(driver="host") as device:
        pipeline = Pipeline(device, [stages()[0], Stage("compute", lambda slot: slot.stream.launch(TRAP, 1, 1))])
        with pytest.raises(DeviceFault, match="on purpose") as caught:
            async for _ in pipeline.run(range(6)):
                pass
        assert caught.value.__notes__ == ["met by item 0, counted from 0; which stage faulted is not known"]
        assert pipeline.ring.states == ("free",) * 3
        with pytest.raises(DeviceFault):
            await pipeline.execute_iteration(1)


async def test_one_iteration_that_fails_leaves_the_others(device: Device) -> None:
    async def check(slot: Slot) -> Any:
        if slot.item == 1:
            raise ZeroDivisionError
        return slot.item

    pipeline = Pipeline(device, [*stages(), Stage("check", check)])
    found = await quickly(
        asyncio.gather(*(pipeline.execute_iteration(item) for item in range(6)), return_exceptions=True)
    )
    assert [result for item, result in enumerate(found) if item != 1] == [0, 2, 3, 4, 5]
    assert isinstance(found[1], ZeroDivisionError)
    assert found[1].__notes__ == ["in stage 'check' of item 1, counted from 0"]
    assert_quiet(pipeline)


async def test_a_failure_after_the_consumer_left_is_reported(device: Device) -> None:
    failed = asyncio.Event()

    async def fail(slot: Slot) -> int:
        if slot.item == 1:
            failed.set()
            raise ZeroDivisionError
        return 0

    pipeline = Pipeline(device, [Stage("a", fail)])
    with Reports() as reports:
        results = pipeline.run(range(5))
        assert await quickly(anext(results)) == 0
        await failed.wait()
        await until(lambda: all(not task.get_name().startswith("aiocuda") for task in asyncio.all_tasks()))
        await results.aclose()
    (error,) = reports.failures
    assert isinstance(error, ZeroDivisionError)
    assert_quiet(pipeline)


async def ticking(error: Exception, begun: asyncio.Event) -> AsyncGenerator[int, None]:
    """One item; then it waits, and fails when it is cancelled."""
    try:
        yield 0
        begun.set()
        await asyncio.Event().wait()
    finally:
        raise error


async def test_a_source_that_fails_while_the_run_is_left_is_reported(device: Device) -> None:
    begun, failure = asyncio.Event(), OSError("while cleaning up")
    pipeline = Pipeline(device, stages())
    with Reports() as reports:
        async with contextlib.aclosing(pipeline.run(ticking(failure, begun))) as results:
            async for _ in results:
                await quickly(begun.wait())
                break
        assert reports.failures == [failure]
    assert failure.__notes__ == ["in the source of the pipeline, at item 1, counted from 0"]
    assert_quiet(pipeline)


async def test_a_source_that_fails_as_well_comes_in_the_group(device: Device) -> None:
    """P22"""
    begun, failure = asyncio.Event(), OSError("while cleaning up")

    async def fail(slot: Slot) -> None:
        await begun.wait()
        raise ZeroDivisionError

    pipeline = Pipeline(device, [Stage("fail", fail)])
    with pytest.raises(ExceptionGroup) as caught:
        await quickly(values(pipeline, ticking(failure, begun)))
    first, second = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    assert second is failure
    assert_quiet(pipeline)


async def test_failures_that_are_one() -> None:
    """P22: skipped items do not count as failures, and a device fault is one failure."""
    skipped = [SkippedError("first"), SkippedError("second")]
    faults = [DeviceFault("one"), DeviceFault("the same")]
    error, other = ZeroDivisionError(), KeyError()
    assert combine([skipped[0], error, skipped[1]], "items") is error
    assert combine(skipped, "items") is skipped[0]
    assert combine([error, error], "items") is error
    assert combine(faults, "items") is faults[0]
    group = combine([error, faults[0], other, faults[1]], "items")
    assert isinstance(group, ExceptionGroup)
    assert str(group) == "3 items failed (3 sub-exceptions)"
    assert group.exceptions == (error, faults[0], other)
