"""Stages that await: several items at a time, in order; timeouts; items that are skipped."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, DeviceFault, InvalidArgumentError, InvalidTypeError, Pipeline, Slot, Stage
from aiocuda.pipeline._resources import OrderedGate
from tests.pipeline.virtual import in_virtual_time, launches


async def passes(slot: Slot) -> Any:
    return slot.item


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"concurrency": 0}, InvalidArgumentError, "at least 1, not 0"),
        ({"concurrency": 1.5}, InvalidTypeError, "an integer, not 1.5"),
        ({"concurrency": True}, InvalidTypeError, "an integer, not True"),
        ({"timeout": -1}, InvalidArgumentError, "0 seconds or more"),
        ({"timeout": "1"}, InvalidTypeError, "a number of seconds"),
        ({"on_error": "ignore"}, InvalidArgumentError, "'raise', 'skip' or a function, not 'ignore'"),
        ({"on_error": 3}, InvalidTypeError, "'raise', 'skip' or a function, not 3"),
        ({"on_error": ValueError}, InvalidTypeError, "which raises what it does not skip"),
        ({"on_error": lambda error: None}, InvalidTypeError, "called with the exception and the item: too"),
        ({"on_error": passes}, InvalidTypeError, "pass a plain function"),
    ],
)
def test_wrong_arguments_are_refused(how: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Stage("read", passes, **how)


@pytest.mark.parametrize("how", [{"concurrency": 2}, {"timeout": 1.0}, {"on_error": "skip"}])
def test_a_stage_that_enqueues_refuses_them(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="belong to stages that await"):
        Stage("upload", lambda slot: None, **how)


# -- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_numbers_enter_in_order_and_no_more_than_the_width_are_inside(seed: int) -> None:
    """Some leave without having entered, in any order, and some are cancelled while they wait."""

    async def main() -> None:
        chance = random.Random(seed)
        width = chance.randint(1, 4)
        gate = OrderedGate(width)
        entered: list[int] = []
        inside = 0

        async def visit(number: int) -> None:
            nonlocal inside
            try:
                for _ in range(chance.randint(0, 6)):
                    await asyncio.sleep(0)
                if number % 5 == 4:
                    return  # it failed before it came here
                await gate.enter(number)
                entered.append(number)
                inside += 1
                assert inside <= width
                try:
                    for _ in range(chance.randint(0, 6)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1
            finally:
                gate.leave(number)

        visits = [asyncio.create_task(visit(number)) for number in range(30)]
        await asyncio.sleep(0)
        for task in chance.sample(visits, 3):
            task.cancel()
            await asyncio.sleep(0)
        ended = await asyncio.gather(*visits, return_exceptions=True)
        assert entered == sorted(entered)
        assert all(error is None or isinstance(error, asyncio.CancelledError) for error in ended)
        assert inside == 0

    asyncio.run(main())


# -- several items at a time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("concurrency", [1, 2, 4, 8])
def test_so_many_items_at_a_time_and_results_in_order(concurrency: int, depth: int) -> None:
    """The time is that of the item after the other, divided by the number of those at work at the same time."""
    at_work = peak = 0

    async def read(slot: Slot) -> int:
        nonlocal at_work, peak
        at_work += 1
        peak = max(peak, at_work)
        await asyncio.sleep(10e-3)
        at_work -= 1
        return int(slot.item)

    async def join(slot: Slot) -> Any:
        return slot.result("read")

    async def main(device: Device) -> float:
        stages = [Stage("read", read, concurrency=concurrency), Stage("work", launches(0.01)), Stage("join", join)]
        async with Pipeline(device, stages, depth) as pipeline:
            began = asyncio.get_running_loop().time()
            assert [result async for result in pipeline.run(range(24))] == list(range(24))
            statistics = pipeline.statistics()
            assert statistics.bottleneck().name == "read"
            assert statistics.stage_seconds["read"] == pytest.approx(24 * 10e-3 / min(concurrency, depth), rel=0.01)
            return asyncio.get_running_loop().time() - began

    seconds = in_virtual_time(main)
    assert peak == min(concurrency, depth)
    assert seconds == pytest.approx(24 * 10e-3 / peak, rel=0.05)


def test_a_quick_item_does_not_overtake_a_slow_one() -> None:
    order: list[int] = []

    async def read(slot: Slot) -> None:
        await asyncio.sleep((5 - slot.item % 5) * 1e-3)

    def enqueue(slot: Slot) -> Any:
        order.append(slot.item)
        return slot.stream.synchronize()

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", read, concurrency=5), Stage("next", enqueue)], 6) as pipeline:
            async for _ in pipeline.run(range(30)):
                pass

    in_virtual_time(main)
    assert order == list(range(30))


def test_a_slow_consumer_stops_the_source_at_the_depth() -> None:
    asked = 0

    def source() -> Any:
        nonlocal asked
        for number in range(20):
            asked += 1
            yield number

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", passes, concurrency=8)], 3) as pipeline:
            async for number in pipeline.run(source()):
                assert asked <= number + 3
                await asyncio.sleep(1e-3)

    in_virtual_time(main)


def test_a_failure_delivers_the_items_before_it_and_ends_those_after_it() -> None:
    cancelled: list[int] = []

    async def read(slot: Slot) -> int:
        try:
            await asyncio.sleep(1e-3 if slot.item == 5 else 5e-3)
        except asyncio.CancelledError:
            cancelled.append(slot.item)
            raise
        if slot.item == 5:
            raise ValueError("broken")
        return int(slot.item)

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", read, concurrency=4)], 4) as pipeline:
            results = []
            with pytest.raises(ValueError, match="broken") as caught:
                async for result in pipeline.run(range(20)):
                    results.append(result)  # noqa: PERF401 - the loop ends with an exception
            assert results == [0, 1, 2, 3, 4]
            assert "in stage 'read' of item 5, counted from 0" in caught.value.__notes__
            assert pipeline.ring.busy == 0
            assert [result async for result in pipeline.run([1, 2])] == [1, 2]

    in_virtual_time(main)
    assert cancelled == sorted(cancelled)


# -- timeouts --------------------------------------------------------------------------------------------------------


async def dawdle(slot: Slot) -> Any:
    await asyncio.sleep(slot.item * 1e-3)
    return slot.item


def test_an_item_that_exceeds_the_timeout_fails() -> None:
    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", dawdle, timeout=4.5e-3)]) as pipeline:
            with pytest.raises(TimeoutError, match=r"stage 'read' took more than its timeout of 0\.0045 s") as caught:
                async for _ in pipeline.run(range(10)):
                    pass
            assert "in stage 'read' of item 5, counted from 0" in caught.value.__notes__

    in_virtual_time(main)


def test_the_timeout_error_of_the_stage_itself_stays_as_it_is() -> None:
    own = TimeoutError("the database is slow")

    async def read(slot: Slot) -> None:
        raise own

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", read, timeout=1)]) as pipeline:
            with pytest.raises(TimeoutError) as caught:
                await pipeline.execute_iteration(1)
            assert caught.value is own

    in_virtual_time(main)


def test_items_that_exceed_the_timeout_are_skipped() -> None:
    async def main(device: Device) -> None:
        stage = Stage("read", dawdle, timeout=4.5e-3, on_error="skip", concurrency=3)
        async with Pipeline(device, [stage], 4) as pipeline:
            assert [result async for result in pipeline.run([1, 9, 2, 8, 7, 3])] == [1, 2, 3]
            assert pipeline.statistics().skipped == 3
            assert pipeline.statistics().iterations == 3

    in_virtual_time(main)


# -- items that are skipped ------------------------------------------------------------------------------------------


async def refuses_odd(slot: Slot) -> Any:
    await asyncio.sleep(1e-3)
    if slot.item % 2:
        raise ValueError(f"{slot.item} is odd")
    return slot.item


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_skipped_items_are_counted_and_reach_no_later_stage(concurrency: int, overlap: bool) -> None:
    later: list[int] = []

    def enqueue(slot: Slot) -> Any:
        later.append(slot.item)
        return slot.stream.copy(slot.buffer("x", 4), np.full(4, slot.item, np.float32))

    async def result(slot: Slot) -> Any:
        return slot.item

    async def main(device: Device) -> None:
        stages = [Stage("read", refuses_odd, concurrency=concurrency, on_error="skip"), Stage("upload", enqueue),
                  Stage("result", result)]  # fmt: skip
        async with Pipeline(device, stages, 3) as pipeline:
            assert [each async for each in pipeline.run(range(11), overlap=overlap)] == [0, 2, 4, 6, 8, 10]
            assert pipeline.statistics().skipped == 5
            assert pipeline.ring.busy == 0
            pipeline.reset_statistics()
            assert pipeline.statistics().skipped == 0

    in_virtual_time(main)
    assert later == [0, 2, 4, 6, 8, 10]


def test_a_function_gets_the_error_and_the_item() -> None:
    seen: list[tuple[str, int]] = []

    def on_error(error: Exception, item: Any) -> None:
        assert any(note.startswith("in stage 'read' of item") for note in error.__notes__)
        seen.append((str(error), item))

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", refuses_odd, on_error=on_error)]) as pipeline:
            assert [each async for each in pipeline.run(range(4))] == [0, 2]

    in_virtual_time(main)
    assert seen == [("1 is odd", 1), ("3 is odd", 3)]


def test_the_result_of_a_function_is_ignored() -> None:
    async def main(device: Device) -> None:
        stage = Stage("read", refuses_odd, on_error=lambda error, item: "raise")
        async with Pipeline(device, [stage]) as pipeline:
            assert [each async for each in pipeline.run(range(4))] == [0, 2]

    in_virtual_time(main)


def test_a_function_that_raises_ends_the_run() -> None:
    def on_error(error: Exception, item: Any) -> None:
        raise LookupError("too many")

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", refuses_odd, on_error=on_error)]) as pipeline:
            results = []
            with pytest.raises(LookupError, match="too many") as caught:
                async for result in pipeline.run(range(4)):
                    results.append(result)  # noqa: PERF401 - the loop ends with an exception
            assert results == [0]
            assert isinstance(caught.value.__context__, ValueError)

    in_virtual_time(main)


def test_all_items_skipped() -> None:
    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", refuses_odd, on_error="skip", concurrency=2)]) as pipeline:
            assert [each async for each in pipeline.run([1, 3, 5, 7, 9])] == []
            assert pipeline.statistics().skipped == 5

    in_virtual_time(main)


def test_a_single_iteration_raises_and_skips_nothing() -> None:
    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", refuses_odd, on_error="skip")]) as pipeline:
            with pytest.raises(ValueError, match="3 is odd"):
                await pipeline.execute_iteration(3)
            assert await pipeline.execute_iteration(4) == 4
            assert pipeline.statistics().skipped == 0

    in_virtual_time(main)


def test_a_branch_that_is_skipped_cancels_the_other_and_the_item_is_skipped() -> None:
    ended: list[int] = []

    async def slow(slot: Slot) -> None:
        try:
            await asyncio.sleep(50e-3)
        finally:
            ended.append(slot.item)

    async def main(device: Device) -> None:
        stages = [
            Stage("upload", lambda slot: slot.stream.copy(slot.buffer("x", 4), slot.pinned("x", 4))),
            Stage("read", refuses_odd, after="upload", on_error="skip", concurrency=2),
            Stage("slow", slow, after="upload", concurrency=2),
            Stage("join", passes, after=("read", "slow")),
        ]
        async with Pipeline(device, stages, 3) as pipeline:
            assert [each async for each in pipeline.run(range(4))] == [0, 2]
            assert pipeline.statistics().skipped == 2

    in_virtual_time(main)
    assert sorted(ended) == [0, 1, 2, 3]


def test_work_that_a_skipped_stage_has_enqueued_ends_before_the_slot_is_used_again() -> None:
    """The kernel of 20 ms writes the slot's buffer; no later item may have the slot before it has ended."""
    writing: set[int] = set()

    async def half(slot: Slot) -> None:
        assert slot.number not in writing
        if slot.item == 0:
            operation = launches(20)(slot)
            writing.add(slot.number)
            operation.add_done_callback(lambda _: writing.clear())
            raise ValueError("half-way")

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("half", half, on_error="skip")], 1) as pipeline:
            async for _ in pipeline.run(range(3)):
                pass

    in_virtual_time(main)
    assert not writing


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_no_other_exception_is_skipped(error: type[BaseException]) -> None:
    async def read(slot: Slot) -> None:
        raise error

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", read, on_error="skip")]) as pipeline:
            async for _ in pipeline.run(range(3)):
                pass

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - GeneratorExit arrives as it was raised or as a cause
        in_virtual_time(main)
    assert isinstance(caught.value, error) or isinstance(caught.value.__cause__, error)


def test_a_device_fault_is_not_skipped() -> None:
    async def read(slot: Slot) -> None:
        raise DeviceFault("gone", code=700, device=0, operation=None)

    async def main(device: Device) -> None:
        async with Pipeline(device, [Stage("read", read, on_error="skip")]) as pipeline:
            with pytest.raises(DeviceFault):
                async for _ in pipeline.run(range(3)):
                    pass

    in_virtual_time(main)


def test_leaving_a_run_while_items_are_skipped() -> None:
    async def main(device: Device) -> None:
        pipeline = Pipeline(device, [Stage("read", refuses_odd, on_error="skip", concurrency=4)], 4)
        async for each in pipeline.run(range(100)):
            if each == 10:
                break
        await pipeline.aclose()
        assert pipeline.ring.busy == 0

    in_virtual_time(main)
