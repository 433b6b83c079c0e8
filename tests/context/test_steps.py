"""Steps, three at a time: each returns its telemetry once, in order, also after failures, cancellations and drops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from aiocuda import (
    ClosedError,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    ManagedContext,
    Operation,
    Slot,
    StepConfig,
)
from aiocuda.context import StepTelemetry
from aiocuda.pipeline import Launch, SlotBuffer
from tests.context.programs import SIZE, affine, numbered, value, zeros
from tests.helpers import AFFINE, TRAP, Latch, Peer, Reports, quickly, until
from tests.task_factories import each_factory, factory_of_tasks

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
async def context(request: pytest.FixtureRequest) -> AsyncIterator[ManagedContext]:
    """On the host driver, in both modes."""
    async with ManagedContext(driver="host", asynchronous=request.param) as opened:
        yield opened


@pytest.fixture
def latch(context: ManagedContext) -> Any:
    """What it holds ends with the test."""
    with Latch(context.device) as opened:
        yield opened


def told(telemetry: StepTelemetry | None) -> tuple[int, int] | None:
    """The step's number, and the number that it has brought."""
    return None if telemetry is None else (telemetry.step, value(*telemetry.outputs.values()))


def broken(slot: Slot) -> None:
    raise LookupError("no such thing")


async def step(context: ManagedContext, number: int, compute: Any = ()) -> tuple[int, int] | None:
    return told(await quickly(context.triple_buffered_step(numbered(number, compute))))


async def rest(context: ManagedContext) -> list[tuple[int, int] | None]:
    return [told(telemetry) for telemetry in await quickly(context.flush())]


def assert_quiet(context: ManagedContext) -> None:
    """Nothing under way, all slots free."""
    assert context.triple_buffer.states == ("free",) * 3
    assert context.device.statistics().in_flight == 0


# Three steps at a time


async def test_telemetry_of_the_step_before_the_last(driver: str) -> None:
    """J3: None for the first two; the rest by flush; state goes from step to step."""
    for asynchronous in (True, False):
        async with ManagedContext(driver=driver, asynchronous=asynchronous) as context:  # type: ignore[arg-type]
            state = await zeros(context)
            found = []
            for number in range(6):
                config = numbered(number, affine(state), ("x", "out"))
                found.append(await quickly(context.triple_buffered_step(config)))
            assert found[:2] == [None, None]
            found += await quickly(context.flush())
            done = [telemetry for telemetry in found if telemetry is not None]
            assert [telemetry.step for telemetry in done] == list(range(6))
            assert [value(telemetry.outputs["x"]) for telemetry in done] == list(range(6))
            assert [value(telemetry.outputs["out"]) for telemetry in done] == [2**n - 1 for n in range(1, 7)]
            for telemetry in done:
                assert set(telemetry.stage_ms) == {"upload", "compute", "download"}
                assert all(milliseconds > 0 for milliseconds in telemetry.stage_ms.values())
            assert await context.flush() == []
            statistics = context.statistics().steps
            assert statistics is not None
            assert statistics.iterations == 6
            assert statistics.peak_busy_slots <= 3  # fewer where the device is quicker than the host
            assert_quiet(context)


async def test_outputs_are_arrays_of_their_own(context: ManagedContext) -> None:
    """Later steps go through the same slots, and change none of them."""
    kept = [await context.triple_buffered_step(numbered(number)) for number in range(9)]
    await context.flush()
    assert [told(telemetry) for telemetry in kept[2:]] == [(number, number) for number in range(7)]


async def test_next_step_is_uploaded_while_one_computes(latch: Latch, context: ManagedContext) -> None:
    """J3: the first step is held on the device, and two others have been enqueued."""
    state = await zeros(context)

    def held(slot: Slot) -> Operation[None]:
        latch.hold(slot.stream)
        return affine(state)(slot)  # type: ignore[no-any-return]

    assert await step(context, 0, held) is None
    await quickly(latch.held())
    assert await step(context, 1) is None
    third = asyncio.create_task(step(context, 2))
    await until(lambda: context.triple_buffer.busy == 3)
    if context.device.asynchronous:  # else all work waits for the held step
        await until(lambda: context.triple_buffer.states == ("processing",) * 3, "all three uploaded")
    assert not third.done()
    latch.release()
    assert await quickly(third) == (0, 0)
    assert await rest(context) == [(1, 1), (2, 2)]


async def test_what_a_step_may_consist_of(context: ManagedContext) -> None:
    """Nothing; several functions, that return one operation, several or none; a `Launch`."""
    launch = Launch(AFFINE, 1, 256, SlotBuffer("x", SIZE, np.uint32), SIZE, 3, 0)

    def several(slot: Slot) -> list[Operation[None]]:
        return [slot.stream.launch(AFFINE, 1, 256, slot.buffer("x"), SIZE, 1, 1) for _ in range(2)]

    def silent(slot: Slot) -> None:
        slot.stream.launch(AFFINE, 1, 256, slot.buffer("x"), SIZE, 1, 5)

    assert await context.triple_buffered_step(StepConfig()) is None
    assert await step(context, 10, launch) is None
    assert (await quickly(context.triple_buffered_step(numbered(10, [launch, several, silent])))).outputs == {}
    assert await rest(context) == [(1, 30), (2, 37)]
    assert repr(numbered(1, launch)) == "<StepConfig x → 1 functions → x>"
    assert repr(StepConfig()) == "<StepConfig nothing → 0 functions → nothing>"


async def test_calls_of_several_tasks_take_turns(context: ManagedContext) -> None:
    results = await quickly(asyncio.gather(*(step(context, number) for number in range(10))))
    assert results[:2] == [None, None]
    assert sorted([*results[2:], *await rest(context)]) == [(number, number) for number in range(10)]


# Invalid arguments


class Awaits:
    async def __call__(self, slot: Slot) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"upload": [1, 2]}, InvalidTypeError, "upload maps names to arrays, not list"),
        ({"upload": {1: np.zeros(4)}}, InvalidTypeError, "has a string as its name, not 1"),
        ({"upload": {"x": object()}}, InvalidTypeError, "object"),
        ({"upload": {"x": np.zeros(8)[::2]}}, InvalidArgumentError, "ascontiguousarray"),
        ({"compute": 3}, InvalidTypeError, "compute is a function of a slot, or several, and 3 is none"),
        ({"compute": AFFINE}, InvalidTypeError, "a kernel is launched by aiocuda.pipeline.Launch"),
        ({"compute": [broken, None]}, InvalidTypeError, "and None is none"),
        ({"compute": Awaits()}, InvalidArgumentError, "is a coroutine function: await before the step"),
        ({"compute": asyncio.sleep}, InvalidArgumentError, "is a coroutine function: await before the step"),
        ({"download": "x"}, InvalidTypeError, "download is a sequence of names, not 'x'"),
        ({"download": [3]}, InvalidTypeError, "has a string as its name, not 3"),
    ],
)
async def test_bad_configuration_is_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        StepConfig(**arguments)


async def test_a_step_takes_its_configuration(context: ManagedContext) -> None:
    with pytest.raises(InvalidTypeError, match=r"a step is described by an aiocuda\.StepConfig, not dict"):
        await context.triple_buffered_step({"x": 1})  # type: ignore[arg-type]
    assert context.triple_buffer.busy == 0


async def test_a_missing_output_buffer_is_named(context: ManagedContext) -> None:
    await context.triple_buffered_step(numbered(0, (), ["y"]))
    with pytest.raises(InvalidArgumentError, match="the slot has no buffer 'y', only 'x': give its shape") as caught:
        await quickly(context.flush())
    assert caught.value.__notes__ == ["in stage 'download' of item 0, counted from 0"]
    assert_quiet(context)


# A step fails


async def test_a_failure_comes_in_its_turn_and_takes_those_behind_it_along(context: ManagedContext) -> None:
    """J3: telemetry of earlier steps is returned; the next step has the next number."""
    assert await step(context, 0) is None
    assert await step(context, 1, broken) is None
    assert await step(context, 2) == (0, 0)
    with pytest.raises(LookupError, match="no such thing") as caught:
        await step(context, 3)
    assert caught.value.__notes__ == ["in stage 'compute' of item 1, counted from 0"]
    assert_quiet(context)
    assert await rest(context) == []
    assert await step(context, 4) is None
    assert await step(context, 5) is None
    assert await step(context, 6) == (4, 4)
    assert await rest(context) == [(5, 5), (6, 6)]


async def test_flush_returns_the_steps_before_a_failure_first(context: ManagedContext) -> None:
    await step(context, 0)
    await step(context, 1, broken)
    assert await rest(context) == [(0, 0)]
    with pytest.raises(LookupError):
        await quickly(context.flush())
    assert await rest(context) == []


def breaks(error: BaseException) -> Any:
    """A step's work that raises this."""

    def compute(slot: Slot) -> None:
        raise error

    return compute


NOTE = "step {}, which began after it, has failed, too: {}: {}\nin stage 'compute' of item {}, counted from 0"


async def test_a_step_raises_its_own_failure_and_notes_those_of_later_steps() -> None:
    """J3, P22: the call for that step raises the same object; it is not raised again at the end."""
    for asynchronous in (True, False):
        first = LookupError("first")
        async with ManagedContext(driver="host", asynchronous=asynchronous) as context:
            await step(context, 0, breaks(first))
            await step(context, 1, breaks(KeyError("second")))
            with pytest.raises(LookupError) as caught:
                await step(context, 2, breaks(ValueError("third")))
            assert caught.value is first
            assert caught.value.__notes__ == [
                "in stage 'compute' of item 0, counted from 0",
                NOTE.format(1, "KeyError", "'second'", 1),
                NOTE.format(2, "ValueError", "third", 2),
            ]
            assert_quiet(context)
            assert await rest(context) == []
            assert await step(context, 3) is None
            assert await rest(context) == [(3, 3)]


async def test_flush_raises_a_steps_own_failure_and_notes_those_of_later_steps(context: ManagedContext) -> None:
    await step(context, 0)
    await step(context, 1, broken)
    assert await rest(context) == [(0, 0)]
    await step(context, 2, broken)
    with pytest.raises(LookupError, match="no such thing") as caught:
        await quickly(context.flush())
    assert caught.value.__notes__[1:] == [NOTE.format(2, "LookupError", "no such thing", 2)]
    assert await rest(context) == []


async def test_the_end_raises_an_unraised_failure_with_the_others_as_notes() -> None:
    with pytest.raises(LookupError, match="no such thing") as caught:
        async with ManagedContext(driver="host") as context:
            await step(context, 0, broken)
            await step(context, 1, breaks(KeyError("second")))
    assert caught.value.__notes__[1:] == [NOTE.format(1, "KeyError", "'second'", 1)]


async def test_a_failure_that_is_dropped_is_reported_with_the_others_as_notes(context: ManagedContext) -> None:
    await step(context, 0, broken)
    await step(context, 1, breaks(KeyError("second")))
    await until(lambda: context.triple_buffer.busy == 0)
    with Reports() as reports:
        await quickly(context.reset_pipeline())
        (error,) = reports.failures
    assert type(error) is LookupError
    assert error.__notes__[1:] == [NOTE.format(1, "KeyError", "'second'", 1)]


async def test_a_cancelled_call_reports_a_failure_with_the_others_as_notes(
    latch: Latch, context: ManagedContext
) -> None:
    def held(slot: Slot) -> None:
        latch.hold(slot.stream)
        raise KeyError("second")

    await step(context, 0, broken)
    await until(lambda: context.triple_buffer.busy == 0)  # else the step also waits for what follows on its streams
    await step(context, 1, held)
    await quickly(latch.held())
    with Reports() as reports:
        flushing = asyncio.create_task(context.flush())
        await until(lambda: not context._step_runner._running)
        flushing.cancel()
        await asyncio.sleep(0)
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(flushing)
        (error,) = reports.failures
    assert type(error) is LookupError
    assert error.__notes__[1:] == [NOTE.format(1, "KeyError", "'second'", 1)]
    assert_quiet(context)


class OutsideError(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize("error", [OutsideError("outside"), pytest.fail.Exception("failed"), GeneratorExit("left")])
async def test_an_exception_outside_of_exception_fails_its_step(context: ManagedContext, error: BaseException) -> None:
    """P32: the same object is raised; later steps end, and the next step runs."""
    await step(context, 0)
    await step(context, 1, breaks(error))
    assert await step(context, 2, breaks(OutsideError("later"))) == (0, 0)
    with pytest.raises(type(error)) as caught:
        await quickly(context.flush())
    assert caught.value is error
    assert "step 2, which began after it, has failed, too: tests.context" in caught.value.__notes__[-1]
    assert_quiet(context)
    assert await step(context, 3) is None
    assert await rest(context) == [(3, 3)]


async def test_what_the_driver_refuses_fails_its_step() -> None:
    with Peer() as peer:
        async with ManagedContext(driver=peer.driver) as context:
            state = await zeros(context)
            for number in range(3):
                await step(context, number, affine(state))
            await quickly(context.flush())
            peer.refuse("launch")
            await step(context, 3, affine(state))
            await step(context, 4, affine(state))
            with pytest.raises(DriverError, match="does not take this") as caught:
                await quickly(context.flush())
            assert len(caught.value.__notes__) == 1  # the next step was skipped because of the same failure
            assert await step(context, 5, affine(state)) is None
            (telemetry,) = await quickly(context.flush())
            assert telemetry.step == 5


async def test_a_fault_is_one_failure() -> None:
    with pytest.raises(DeviceFault):
        async with ManagedContext(driver="host") as context:
            await step(context, 0, lambda slot: slot.stream.launch(TRAP, 1, 1))
            await step(context, 1)
            with pytest.raises(DeviceFault, match="met by item") as caught:
                await quickly(context.flush())
            assert "item 0" in caught.value.__notes__[0]
            await step(context, 2)


# Cancellation


async def test_a_cancelled_call_loses_nothing(latch: Latch, context: ManagedContext) -> None:
    """J3: the step has begun, and its predecessor's telemetry comes with the next call."""
    await step(context, 0, lambda slot: latch.hold(slot.stream))
    await quickly(latch.held())
    await step(context, 1)
    waiting = asyncio.create_task(step(context, 2))
    await until(lambda: context.triple_buffer.busy == 3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    full = asyncio.create_task(step(context, 3))  # which has no slot, and so has not begun
    await until(lambda: context._step_runner._lock.locked())
    full.cancel()
    with pytest.raises(asyncio.CancelledError):
        await full
    latch.release()
    assert await step(context, 3) == (0, 0)
    assert await step(context, 4) == (1, 1)
    assert await rest(context) == [(2, 2), (3, 3), (4, 4)]
    assert await step(context, 5) is None


async def test_a_cancelled_flush_loses_nothing(latch: Latch, context: ManagedContext) -> None:
    await step(context, 0)
    await step(context, 1, lambda slot: latch.hold(slot.stream))
    await quickly(latch.held())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await context.flush()
    latch.release()
    assert await rest(context) == [(0, 0), (1, 1)]


async def test_a_failure_is_reported_if_its_caller_is_cancelled(latch: Latch, context: ManagedContext) -> None:
    """While the later steps end, the caller is cancelled: the loop's exception handler gets the failure."""
    await step(context, 0, broken)
    await until(lambda: context.triple_buffer.busy == 0)  # else the step also waits for what follows on its streams
    await step(context, 1, lambda slot: latch.hold(slot.stream))
    await quickly(latch.held())
    with Reports() as reports:
        flushing = asyncio.create_task(context.flush())
        await until(lambda: not context._step_runner._running)
        flushing.cancel()
        await asyncio.sleep(0)
        assert not flushing.done()
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(flushing)
        assert [type(error) for error in reports.failures] == [LookupError]
    assert_quiet(context)


# Steps are dropped


async def test_reset_drops_what_is_under_way(latch: Latch, context: ManagedContext) -> None:
    """J3: it waits until no work of the steps runs; waiting calls raise; the next step has number 0."""
    state = await zeros(context)
    await step(context, 7, lambda slot: [latch.hold(slot.stream), affine(state)(slot)])
    await quickly(latch.held())
    await step(context, 8)
    waiting = asyncio.create_task(step(context, 9))
    ring = context.triple_buffer
    await until(lambda: ring.busy == 3)
    resetting = asyncio.create_task(context.reset_pipeline())
    with pytest.raises(ClosedError, match="step 0 was dropped, by reset_pipeline"):
        await quickly(waiting)
    assert not resetting.done()
    assert ring.busy == 3
    latch.release()
    await quickly(resetting)
    assert ring.busy == 0
    assert context.triple_buffer is not ring
    assert_quiet(context)
    assert await rest(context) == []
    assert await step(context, 1) is None
    assert await step(context, 2) is None
    assert await step(context, 3) == (0, 1)


async def test_a_failure_that_was_dropped_is_reported(context: ManagedContext) -> None:
    await step(context, 0, broken)
    await until(lambda: context.triple_buffer.busy == 0)
    with Reports() as reports:
        await quickly(context.reset_pipeline())
        assert [type(error) for error in reports.failures] == [LookupError]
    assert await rest(context) == []


async def test_reset_with_nothing_under_way(context: ManagedContext) -> None:
    await context.reset_pipeline()
    await step(context, 0)
    await quickly(context.flush())
    await context.reset_pipeline()
    assert await step(context, 5) is None
    assert await rest(context) == [(0, 5)]


async def test_a_new_step_begins_while_others_are_dropped(latch: Latch, context: ManagedContext) -> None:
    await step(context, 0, lambda slot: latch.hold(slot.stream))
    await quickly(latch.held())
    resetting = asyncio.create_task(context.reset_pipeline())
    await until(lambda: context._step_runner._pipeline is None)
    assert await step(context, 1) is None
    latch.release()
    await quickly(resetting)
    assert await rest(context) == [(0, 1)]


async def test_slots_keep_no_memory_after_a_reset(context: ManagedContext) -> None:
    for number in range(5):
        await step(context, number)
    await quickly(context.flush())
    assert context.device.memory.statistics().live_bytes == 3 * 4 * SIZE
    await context.reset_pipeline()
    await until(lambda: context.device.memory.statistics().live_bytes == 0)


# The end


async def test_the_end_waits_for_all_steps() -> None:
    for asynchronous in (True, False):
        async with ManagedContext(driver="host", asynchronous=asynchronous) as context:
            state = await zeros(context)
            with Latch(context.device) as latch:
                await step(context, 0, lambda slot, latch=latch: latch.hold(slot.stream))
                await step(context, 1, affine(state))
                ring = context.triple_buffer
                assert ring.busy
                asyncio.get_running_loop().call_soon(latch.release)  # while the end waits
                await quickly(context.aclose())
        assert ring.states == ("free",) * 3
        with pytest.raises(ClosedError):
            await context.triple_buffered_step(numbered(2))
        with pytest.raises(ClosedError):
            await context.flush()


async def test_the_end_raises_an_unraised_failure() -> None:
    with pytest.raises(LookupError, match="no such thing"):
        async with ManagedContext(driver="host") as context:
            await step(context, 0)
            await step(context, 1, broken)


async def test_leaving_by_an_error_waits_for_the_device_only() -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with ManagedContext(driver="host") as context:
            with Latch(context.device) as latch:
                await step(context, 0, lambda slot: latch.hold(slot.stream))
                await quickly(latch.held())
                await step(context, 1, broken)  # the block ends with this error, so the step's failure is not raised
                asyncio.get_running_loop().call_later(0.01, latch.release)
                ring = context.triple_buffer
                raise ZeroDivisionError
    assert ring.states == ("free",) * 3


async def test_two_hundred_steps_leave_no_objects(context: ManagedContext) -> None:
    """P25: neither events nor streams nor tasks."""
    state = await zeros(context)

    async def run(steps: int) -> tuple[int, ...]:
        for number in range(steps):
            await step(context, number, affine(state, 1, 1))
        await quickly(context.flush())
        await asyncio.sleep(0)
        statistics = context.device.statistics()
        return statistics.events, statistics.streams, statistics.streams_created, len(asyncio.all_tasks())

    before = await run(20)
    after = await run(200)
    assert after[0] <= before[0] + 60  # those of unfinished steps; one left by each step would be 200
    assert after[1:] == before[1:]
    assert value(await context.stream("control").download(state)) == 220


@each_factory
async def test_each_task_factory_serves_steps(factory: str) -> None:
    with factory_of_tasks(factory):
        async with ManagedContext(driver="host") as context:
            telemetry = [await context.triple_buffered_step(numbered(number)) for number in range(7)]
            telemetry += await context.flush()
    assert [each.step for each in telemetry if each is not None] == list(range(7))
