from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    Operation,
    Pipeline,
    Slot,
    Stage,
    Stream,
)
from tests.helpers import Latch, open_peer, quickly, turns, until
from tests.pipeline.many import many
from tests.pipeline.steps import SIZE, assert_quiet, counting, down, held, stages, triple, up, value, values
from tests.pipeline.virtual import in_virtual_time, launches

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
async def test_results_come_in_order(device: Device, depth: int) -> None:
    """I2, I5: a ring of any depth; results in submission order; all slots free at the end."""
    pipeline = Pipeline(device, stages(), depth=depth)
    assert await values(pipeline, range(12)) == [3 * item + 1 for item in range(12)]
    assert_quiet(pipeline)
    assert pipeline.statistics().peak_busy_slots == depth


async def test_it_runs_again_over_any_source(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    assert await values(pipeline, counting(4)) == [1, 4, 7, 10]
    assert await values(pipeline, iter([5])) == [16]
    assert await values(pipeline, []) == []
    assert await values(pipeline, {1: "a", 2: "b"}, overlap=False) == [4, 7]
    assert_quiet(pipeline)


async def test_one_after_the_other(device: Device) -> None:
    """Without overlap each step is done before anything else is begun."""
    seen: list[tuple[str, int]] = []
    operations: list[Operation[Any]] = []

    def noted(stage: Stage) -> Stage:
        def function(slot: Slot) -> Any:
            assert all(operation.done() for operation in operations)
            seen.append((stage.name, slot.item))
            operations.append(stage.function(slot))
            return operations[-1]

        return Stage(stage.name, function)

    pipeline = Pipeline(device, [noted(stage) for stage in stages()])
    assert await values(pipeline, range(3), overlap=False) == [1, 4, 7]
    assert seen == [(name, item) for item in range(3) for name in ("upload", "compute", "download")]
    assert pipeline.statistics().peak_busy_slots == 1


@pytest.mark.parametrize("overlap", [None, False])
async def test_items_that_give_the_device_nothing_let_others_run(device: Device, overlap: bool | None) -> None:
    """There is nothing to wait for in such a run, and its source may be endless."""
    pipeline = Pipeline(device, [Stage("look", lambda slot: None)])
    seen = 0

    async def other() -> None:
        nonlocal seen
        while True:
            seen += 1
            await asyncio.sleep(0)

    async with contextlib.aclosing(pipeline.run(itertools.count(), overlap=overlap)) as results:
        await anext(results)
        task = asyncio.create_task(other())
        for _ in range(100):
            await anext(results)
        task.cancel()
    assert seen >= 100 // 3


async def test_the_device_is_fed_ahead(device: Device, latch: Latch) -> None:
    """All stages of all slots are enqueued while the first upload is held; the host waits for a free slot only."""
    called: list[tuple[str, int]] = []
    first_seen: list[int] = []

    def hold_first(slot: Slot) -> Operation[None]:
        if not first_seen:
            first_seen.append(slot.item)
            latch.hold(slot.stream)
        called.append(("upload", slot.item))
        return up(slot)

    def compute(slot: Slot) -> Operation[None]:
        called.append(("compute", slot.item))
        return triple(slot)

    asked: list[int] = []
    pipeline = Pipeline(device, [Stage("upload", hold_first), Stage("compute", compute), Stage("download", down)])
    results = pipeline.run(counting(5, asked))
    first = asyncio.ensure_future(anext(results))
    await held(latch)
    await until(lambda: len(called) == 6)
    assert called == [(name, item) for item in range(3) for name in ("upload", "compute")]
    assert asked == [0, 1, 2]  # the source is not asked before a slot is free
    assert pipeline.ring.states == ("uploading",) * 3
    assert not first.done()
    latch.release()
    assert [value(await quickly(first)), *[value(result) async for result in results]] == [1, 4, 7, 10, 13]


async def test_stages_overlap(device: Device, latch: Latch) -> None:
    """I1: while one item is processed, the next ones are uploaded, and no download of it has begun."""
    operations: dict[tuple[str, int], Operation[Any]] = {}

    def kept(name: str, slot: Slot, operation: Operation[Any]) -> Operation[Any]:
        operations[name, slot.item] = operation
        return operation

    def hold_first(slot: Slot) -> Any:
        if slot.item == 0:
            latch.hold(slot.stream)
        return kept("compute", slot, triple(slot))

    pipeline = Pipeline(
        device,
        [
            Stage("upload", lambda slot: kept("upload", slot, up(slot))),
            Stage("compute", hold_first),
            Stage("download", lambda slot: kept("download", slot, down(slot))),
        ],
    )
    results = pipeline.run(range(4))
    first = asyncio.ensure_future(anext(results))
    await held(latch)
    await quickly(aiocuda.gather(*(operations["upload", item] for item in range(3))))
    await until(lambda: pipeline.ring.states == ("processing",) * 3)
    assert not operations["compute", 0].done()
    assert not operations["download", 0].done()
    assert ("upload", 3) not in operations
    latch.release()
    assert value(await quickly(first)) == 1
    assert [value(result) async for result in results] == [4, 7, 10]


async def test_a_slow_consumer_bounds_what_is_under_way(device: Device) -> None:
    """I5, P19: its result's slot stays its own until it asks for the next one."""
    asked: list[int] = []

    def into_the_slot(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("result", SIZE, np.uint32))

    item = 0

    def fed() -> bool:
        return len(asked) >= min(8, item + 3)

    pipeline = Pipeline(device, [*stages()[:2], Stage("download", into_the_slot)])
    async for result in pipeline.run(counting(8, asked)):
        item = (value(result) - 1) // 3
        await until(fed)
        await device.drain()
        assert len(asked) == min(8, item + 3)
        assert pipeline.ring.busy == min(3, 8 - item)
        assert value(result) == 3 * item + 1
    assert asked == list(range(8))


async def test_stages_that_await_take_items_in_order_and_one_at_a_time(device: Device) -> None:
    """I3, I5: host work before, between and after device stages; each sees the device's results before it."""
    inside: list[str] = []
    order: list[tuple[str, int]] = []
    let_go = {item: asyncio.Event() for item in range(6)}

    async def read(slot: Slot) -> None:
        assert inside.count("read") == 0
        inside.append("read")
        await let_go[slot.item].wait()
        slot.pinned("source", SIZE, np.uint32)[:] = slot.item
        inside.remove("read")
        order.append(("read", slot.item))

    def upload(slot: Slot) -> Operation[None]:
        return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), slot.pinned("source", SIZE, np.uint32))

    async def check(slot: Slot) -> None:
        assert value(await slot.stream.download(slot.buffer("data", SIZE, np.uint32))) == slot.item
        order.append(("check", slot.item))

    async def report(slot: Slot) -> tuple[int, int]:
        order.append(("report", slot.item))
        return slot.item, value(await down(slot))

    steps = [
        Stage("read", read), Stage("upload", upload), Stage("check", check), Stage("compute", triple),
        Stage("report", report),
    ]  # fmt: skip
    pipeline = Pipeline(device, steps, depth=4)
    for item in reversed(range(1, 6)):
        let_go[item].set()
    results = pipeline.run(range(6))
    first = asyncio.ensure_future(anext(results))
    await until(lambda: inside == ["read"])
    assert order == []  # the first one holds up the others
    let_go[0].set()
    assert await quickly(first) == (0, 1)
    assert [result async for result in results] == [(item, 3 * item + 1) for item in range(1, 6)]
    for name in ("read", "check", "report"):
        assert [item for stage, item in order if stage == name] == list(range(6))


async def test_work_that_a_stage_does_not_return_is_waited_for_too(device: Device, latch: Latch) -> None:
    """All work on the stage's stream counts: the next stage waits for it, and the slot is free only after it."""

    def first_of_two(slot: Slot) -> Operation[None]:
        operation = up(slot)
        latch.hold(slot.stream)
        slot.stream.fill(slot.buffer("data", SIZE, np.uint32), 7)
        return operation

    def nothing(slot: Slot) -> None:
        triple(slot)

    pipeline = Pipeline(device, [Stage("upload", first_of_two), Stage("compute", nothing), Stage("download", down)], 1)
    results = pipeline.run([5])
    first = asyncio.ensure_future(anext(results))
    await held(latch)
    assert pipeline.ring.states == ("uploading",)
    latch.release()
    assert value(await quickly(first)) == 22
    await results.aclose()


@pytest.mark.parametrize("count", [1, 3])
async def test_enter_changes_nothing_inside_a_pipeline(device: Device, count: int) -> None:
    """The state follows from the item's progress; and a slot that has an item is not free."""

    def enters(slot: Slot) -> Operation[None]:
        before = slot.state
        slot.enter("downloading")
        assert slot.state == before
        return slot.stream.synchronize()

    ahead = [Stage(f"stage {number}", triple_of_nothing) for number in range(count - 1)]
    pipeline = Pipeline(device, [*ahead, Stage("last", enters)])
    async for _ in pipeline.run(range(2)):
        pass
    assert_quiet(pipeline)


async def test_results_of_every_shape(device: Device) -> None:
    def several(slot: Slot) -> list[Operation[Any]]:
        return [down(slot), slot.stream.synchronize(), down(slot)]

    async def listing(slot: Slot) -> list[int]:
        return [slot.item]

    def event(slot: Slot) -> aiocuda.Event:
        down(slot)
        return slot.stream.record()

    async def last(stage: Any) -> Any:
        (result,) = [result async for result in Pipeline(device, [*stages()[:2], Stage("last", stage)]).run([1])]
        return result

    one, none, other = await last(several)
    assert (value(one), none, value(other)) == (4, None, 4)
    assert await last(lambda slot: None) is None
    assert await last(lambda slot: []) == []
    assert await last(event) is None
    assert await last(listing) == [1]
    assert [result async for result in Pipeline(device, [Stage("only", listing)]).run(range(3))] == [[0], [1], [2]]


async def test_statistics(device: Device) -> None:
    """I4"""
    pipeline = Pipeline(device, stages())
    assert pipeline.statistics() == type(pipeline.statistics())(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, dict.fromkeys(
        ("upload", "compute", "download"), 0.0))  # fmt: skip
    for how in ({}, {"overlap": False}):
        pipeline.reset_statistics()
        await values(pipeline, range(40), **how)
        found = pipeline.statistics()
        assert found.iterations == 40
        assert 0 < found.p50_ms <= found.p99_ms
        assert 0 < found.average_ms <= found.p99_ms
        assert found.throughput == pytest.approx(40 / found.wall_seconds)
        assert 0 < found.utilisation <= found.overlap_efficiency <= 1
        assert set(found.stage_seconds) == {"upload", "compute", "download"}
        assert all(seconds > 0 for seconds in found.stage_seconds.values())
        assert found.peak_busy_slots == (1 if how else 3)
    assert sum(found.stage_seconds.values()) <= found.wall_seconds


async def test_busy_time_is_the_devices_own(latch: Latch, device: Device) -> None:
    """I4: a stage counts as busy while the device works for it, not while it waits for the stage before."""

    def hold(slot: Slot) -> Operation[None]:
        latch.hold(slot.stream)
        return slot.stream.synchronize()

    pipeline = Pipeline(
        device, [Stage("first", hold), Stage("second", triple_of_nothing), Stage("third", hold_nothing)]
    )
    results = pipeline.run([0])
    first = asyncio.ensure_future(anext(results))
    await held(latch)
    begun = time.monotonic()
    await until(lambda: time.monotonic() > begun + 0.05, "the hold's length")
    latch.release()
    await quickly(first)
    busy = pipeline.statistics().stage_seconds
    assert busy["first"] > 0.05
    await results.aclose()


async def test_busy_time_is_that_of_each_stage() -> None:
    async def main(device: Device) -> None:
        times = {"first": 50.0, "second": 2.0, "third": 1.0}
        async with Pipeline(device, [Stage(name, launches(ms)) for name, ms in times.items()]) as pipeline:
            assert len([result async for result in pipeline.run(range(2))]) == 2
            busy = pipeline.statistics().stage_seconds
        assert busy == pytest.approx({name: 2 * ms * 1e-3 for name, ms in times.items()}, rel=0.02)

    await asyncio.to_thread(in_virtual_time, main)


def triple_of_nothing(slot: Slot) -> Operation[None]:
    return slot.stream.synchronize()


def hold_nothing(slot: Slot) -> None:
    """No work at all."""


async def test_streams_stay_open_inside_a_block(device: Device) -> None:
    async with Pipeline(device, stages()) as pipeline:
        await values(pipeline, range(2))
        assert device.statistics().streams == 3
        made = device.statistics().streams_created
        await values(pipeline, range(2))
        await pipeline.execute_iteration(1)
        assert (device.statistics().streams, device.statistics().streams_created) == (3, made)
    assert device.statistics().streams == 0
    with pytest.raises(ClosedError, match="make another"):
        await values(pipeline, range(2))
    with pytest.raises(ClosedError):
        await pipeline.execute_iteration(1)
    with pytest.raises(ClosedError):
        await pipeline.__aenter__()
    await pipeline.aclose()
    await until(lambda: device.memory.statistics().live_bytes == 0, "the slots' buffers going back")


async def test_one_run_at_a_time(device: Device) -> None:
    pipeline = Pipeline(device, stages())
    results = pipeline.run(range(9))
    assert value(await anext(results)) == 1
    with pytest.raises(BusyError):
        await anext(pipeline.run(range(3)))
    with pytest.raises(BusyError):
        await pipeline.execute_iteration(3)
    assert value(await anext(results)) == 4
    await results.aclose()
    assert await values(pipeline, range(2)) == [1, 4]


async def test_a_free_slot_is_filled_right_where_it_becomes_free(device: Device) -> None:
    """I6: with a synchronous source, the next item begins without a turn of the loop: the device does not idle."""
    turned: list[int] = []
    late: list[int] = []

    def upload(slot: Slot) -> Operation[None]:
        late.extend(turned)
        return up(slot)

    pipeline = Pipeline(device, [Stage("upload", upload), *stages()[1:]])
    found = []
    async for result in pipeline.run(range(9)):
        found.append(value(result))
        turned.clear()
        asyncio.get_running_loop().call_soon(turned.append, len(found))
    assert found == [3 * item + 1 for item in range(9)]
    assert late == []


async def test_a_large_ring_is_filled_in_several_turns(device: Device, latch: Latch) -> None:
    """P20: the loop is not held for as long as it takes to begin an item for each slot."""
    turns = [0]
    began: list[int] = []

    def turn() -> None:
        turns[0] += 1
        if len(began) < 100:
            loop.call_soon(turn)

    def upload(slot: Slot) -> Operation[None]:
        if not began:
            latch.hold(slot.stream)
        began.append(turns[0])
        return slot.stream.synchronize()

    loop = asyncio.get_running_loop()
    pipeline = Pipeline(device, [Stage("upload", upload)], depth=100)
    results = pipeline.run(range(120))
    first = asyncio.ensure_future(anext(results))
    loop.call_soon(turn)
    await until(lambda: len(began) == 100, "all slots being busy")
    assert max(Counter(began).values()) <= 16
    latch.release()
    await quickly(first)
    assert len([result async for result in results]) == 119


async def test_an_item_makes_only_the_driver_calls_that_it_needs() -> None:
    """I6: an event for each operation, a wait for each edge; and two timing events for each stage of the sample."""
    async with open_peer() as (peer, device):
        memory = [device.pinned(SIZE, np.uint32) for _ in range(3)]

        def into_the_slot(slot: Slot) -> Operation[Any]:
            return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=memory[slot.number])

        steps = [*stages()[:2], Stage("download", into_the_slot)]
        async with Pipeline(device, steps) as pipeline:
            await values(pipeline, range(3))  # the kernel, the slots' buffers
            # The first 16 are timed; the next one may be, depending on their times; those after it are not.
            for items, timed in ((range(3, 16), {13}), (range(16, 17), {0, 1}), (range(17, 32), {0})):
                peer.calls.clear()
                await values(pipeline, items)
                operations = 3 * len(items)
                assert peer.calls["upload"] + peer.calls["launch"] + peer.calls["download"] == operations
                assert peer.calls["event_record"] - operations in {6 * each for each in timed}
                assert peer.calls["stream_wait"] == 2 * len(items)
                assert peer.calls["event_create"] == 0


async def test_work_in_another_stream_does_not_show_that_earlier_stages_are_done(
    device: Device, other: Stream, latch: Latch
) -> None:
    """Its own stream waits for them. Work in another stream does not."""
    before: list[Operation[Any]] = []
    elsewhere: list[Operation[Any]] = []

    def upload(slot: Slot) -> Operation[Any]:
        if slot.item == 17:
            latch.hold(slot.stream)
        before.append(slot.stream.fill(slot.buffer("data", SIZE, np.uint32), 1))
        return before[-1]

    def compute(slot: Slot) -> Operation[Any]:
        elsewhere.append(other.fill(buffer, 1))
        latch.hold(other)  # so that it is not the last in there
        return elsewhere[-1]

    buffer = other.empty(SIZE, np.uint32)
    async with Pipeline(device, [Stage("upload", upload), Stage("compute", compute)]) as pipeline:
        for item in range(17):  # the kernel is loaded then, and the next item has no timing events in its streams
            result = asyncio.ensure_future(pipeline.execute_iteration(item))
            await held(latch)
            latch.release()
            await quickly(result)
            await device.drain()
        result = asyncio.ensure_future(pipeline.execute_iteration(17))
        await until(lambda: latch.running == 2, "both kernels of the latch")
        await until(elsewhere[-1].done, "the end of what is elsewhere")
        await turns(10)
        assert not before[-1].done()
        assert not result.done()
        latch.release()
        await quickly(result)


async def test_a_run_waits_while_other_users_have_the_slots(device: Device) -> None:
    """The run waits for a slot, and does not ask the source before."""
    pipeline = Pipeline(device, stages(), depth=2)
    taken = [await pipeline.ring.acquire() for _ in range(2)]
    asked: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(5):
            asked.append(number)
            yield number

    results = asyncio.create_task(values(pipeline, numbers()))
    await until(lambda: not pipeline._resources.ring.free)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == []
    for slot in taken:
        pipeline.ring.release(slot)
    assert await quickly(results) == [3 * item + 1 for item in range(5)]
    assert asked == list(range(5))
    assert_quiet(pipeline)


async def test_iterations_by_themselves(device: Device, latch: Latch) -> None:
    """I3: concurrent calls overlap and keep their order; the ring limits them."""
    called: list[int] = []

    def hold(slot: Slot) -> Operation[None]:
        called.append(slot.item)
        if slot.item == 0:
            latch.hold(slot.stream)
        return up(slot)

    pipeline = Pipeline(device, [Stage("upload", hold), *stages()[1:]])
    tasks = [asyncio.create_task(pipeline.execute_iteration(item)) for item in range(6)]
    await held(latch)
    assert called == [0, 1, 2]
    with pytest.raises(BusyError):
        await anext(pipeline.run([1]))
    latch.release()
    assert [value(result) for result in await quickly(asyncio.gather(*tasks))] == [1, 4, 7, 10, 13, 16]
    assert called == list(range(6))
    assert_quiet(pipeline, streams=2)
    assert pipeline.statistics().iterations == 6
    assert await values(pipeline, [1, 2]) == [4, 7]


async def test_bad_pipelines_are_refused(device: Device) -> None:
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match=r"an aiocuda\.Device, not on int"):
        Pipeline(wrong, stages())
    with pytest.raises(InvalidArgumentError, match="at least one stage"):
        Pipeline(device, [])
    with pytest.raises(InvalidTypeError, match="one of them is 7"):
        Pipeline(device, [*stages(), wrong])
    alone: Any = stages()[0]
    for nothing in (wrong, alone):
        with pytest.raises(InvalidTypeError, match="stages is a sequence"):
            Pipeline(device, nothing)
    with pytest.raises(InvalidArgumentError, match="'upload', 'compute', 'download', 'upload'"):
        Pipeline(device, [*stages(), stages()[0]])
    for depth in (0, -3, 10**9):
        with pytest.raises(InvalidArgumentError, match="depth is from 1"):
            Pipeline(device, stages(), depth=depth)
    with pytest.raises(InvalidTypeError, match="depth"):
        Pipeline(device, stages(), depth=wrong * 1.0)
    pipeline = Pipeline(device, stages(), depth=1)
    with pytest.raises(InvalidArgumentError, match="depth 1 cannot overlap"):
        pipeline.run([1], overlap=True)
    with pytest.raises(InvalidTypeError, match="overlap is True, False or None"):
        pipeline.run([1], overlap=wrong)
    with pytest.raises(InvalidTypeError, match="not int"):
        pipeline.run(wrong)
    assert repr(pipeline) == "<Pipeline upload → compute → download, 0 of 1 slots busy>"


@pytest.mark.parametrize("seed", range(8))
async def test_any_stages_any_depth(device: Device, no_blocking_calls: None, seed: int) -> None:
    """I2, I5, P19, P20: whatever the stages are, items pass in order, and no call blocks the loop."""
    chance = random.Random(seed)
    depth = chance.randint(1, 5)
    passed: list[list[int]] = []

    def enqueues(place: int) -> Any:
        def function(slot: Slot) -> Operation[None]:
            passed[place].append(slot.item)
            return triple(slot)

        return function

    def awaits(place: int) -> Any:
        async def function(slot: Slot) -> None:
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            passed[place].append(slot.item)
            operation = triple(slot)
            if chance.random() < 0.5:
                await operation

        return function

    middle = [
        Stage(f"stage {place}", chance.choice([enqueues, awaits])(place)) for place in range(chance.randint(0, 5))
    ]
    passed += [[] for _ in middle]
    expected = list(range(20))
    for _ in middle:
        expected = [3 * item + 1 for item in expected]
    pipeline = Pipeline(device, [Stage("up", up), *middle, Stage("down", down)], depth)
    assert await values(pipeline, counting(20)) == expected, f"seed {seed}"
    assert passed == [list(range(20)) for _ in middle], f"seed {seed}"
    assert pipeline.statistics().peak_busy_slots <= depth
    assert_quiet(pipeline)


async def test_a_closed_device_is_named(device: Device) -> None:
    async with aiocuda.open_device(driver="host") as short:
        pipeline = Pipeline(short, stages())
    with pytest.raises(ClosedError, match="closed"):
        await values(pipeline, range(2))
    assert pipeline.ring.states == ("free",) * 3


@pytest.mark.slow
async def test_many_items_with_random_times_and_a_slow_consumer(device: Device) -> None:
    """I5: as many as the soak takes a hundred times over, on each driver."""
    await many(device, 1000, seed=5)
