"""I3, I5: stages that fork and join, on the device and on the host."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import (
    BusyError,
    Device,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    Operation,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
    StaleHandleError,
)
from aiocuda.pipeline import Launch, SlotBuffer
from tests.helpers import AFFINE, SAXPY, Latch, open_peer, quickly, refusal, until
from tests.pipeline.steps import SIZE, assert_quiet, down, held, triple, up, value, values

pytestmark = pytest.mark.asyncio


def filled(name: str, number: int) -> Callable[[Slot], Operation[Any]]:
    """Fills a buffer of its own with the item plus a number."""
    return lambda slot: slot.stream.fill(slot.buffer(name, SIZE, np.uint32), slot.item + number)


def fork() -> list[Stage]:
    """item → data; left = data, tripled; right = 7 + item; both come down."""

    def copied(slot: Slot) -> Operation[Any]:
        return slot.stream.copy(slot.buffer("left", SIZE, np.uint32), slot.buffer("data", SIZE, np.uint32))

    def both(slot: Slot) -> list[Operation[Any]]:
        return [slot.stream.download(slot.buffer(name, SIZE, np.uint32)) for name in ("left", "right")]

    def tripled(slot: Slot) -> Operation[Any]:
        return slot.stream.launch(AFFINE, 4, 256, slot.buffer("left", SIZE, np.uint32), SIZE, 3, 1)

    return [
        Stage("upload", up),
        Stage("copy", copied),
        Stage("triple", tripled),
        Stage("right", filled("right", 7), after="upload"),
        Stage("download", both, after=("triple", "right")),
    ]


async def pairs(pipeline: Pipeline, items: int, **how: Any) -> list[tuple[int, int]]:
    return [(value(left), value(right)) async for left, right in pipeline.run(range(items), **how)]


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize("streams", [None, [("copy", "triple")], [("upload", "copy", "right", "download")]])
async def test_a_fork_and_a_join(device: Device, depth: int, overlap: bool | None, streams: Any) -> None:
    pipeline = Pipeline(device, fork(), depth, streams=streams)
    assert await pairs(pipeline, 12, overlap=overlap) == [(3 * item + 1, item + 7) for item in range(12)]
    assert pipeline.statistics().peak_busy_slots == (1 if overlap is False else depth)
    assert_quiet(pipeline)


async def test_branches_go_on_side_by_side_on_the_device(device: Device, latch: Latch) -> None:
    """A held branch holds up the join, and not the other branch."""
    operations: dict[str, Operation[Any]] = {}
    joined: list[Operation[Any]] = []

    def kept(stage: Stage) -> Stage:
        def function(slot: Slot) -> Any:
            if stage.name == "triple":
                latch.hold(slot.stream)
            returned = stage.function(slot)
            if isinstance(returned, list):
                joined.extend(returned)
            else:
                operations[stage.name] = returned
            return returned

        return Stage(stage.name, function, after=stage.after)

    pipeline = Pipeline(device, [kept(stage) for stage in fork()])
    result = asyncio.create_task(pipeline.execute_iteration(1))
    await held(latch)
    await quickly(operations["right"])
    assert not operations["triple"].done()
    assert not any(operation.done() for operation in joined)
    await until(lambda: pipeline.ring.states == ("processing", "free", "free"), "the upload's end being known")
    latch.release()
    left, right = await quickly(result)
    assert (value(left), value(right)) == (4, 8)


async def test_a_stage_waits_on_the_device_for_those_that_it_names_only(device: Device, latch: Latch) -> None:
    """Two stages that begin with the item: what holds the one does not hold the other."""

    def hold(slot: Slot) -> Operation[Any]:
        latch.hold(slot.stream)
        return slot.stream.synchronize()

    other: list[Operation[Any]] = []

    def beside(slot: Slot) -> Operation[Any]:
        other.append(up(slot))
        return other[-1]

    pipeline = Pipeline(device, [Stage("held", hold), Stage("beside", beside, after=())])
    result = asyncio.create_task(pipeline.execute_iteration(1))
    await held(latch)
    await quickly(other[0])
    assert not result.done()
    latch.release()
    await quickly(result)


async def test_a_host_stage_beside_the_device(device: Device, latch: Latch) -> None:
    """It runs while the device is held, on a slot with its own stream, and the join has what both returned."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def read(slot: Slot) -> int:
        return int(slot.item)

    def upload(slot: Slot) -> Operation[Any]:
        if slot.item == 5:
            latch.hold(slot.stream)
        slot.item = slot.result("read") + 100
        return up(slot)

    async def count(slot: Slot) -> str:
        stream = slot.stream
        begun.set()
        await goes_on.wait()
        assert slot.stream is stream
        assert stream.name == "count"
        return f"{slot.result('read')} counted"

    async def report(slot: Slot) -> tuple[int, str]:
        return value(slot.result("download")), slot.result("count")

    stages = [
        Stage("read", read),
        Stage("upload", upload),
        Stage("compute", triple),
        Stage("download", down),
        Stage("count", count, after="read"),
        Stage("report", report, after=("download", "count")),
    ]
    pipeline = Pipeline(device, stages)
    result = asyncio.create_task(pipeline.execute_iteration(5))
    await held(latch)
    await quickly(begun.wait())
    latch.release()
    await until(lambda: device.statistics().in_flight == 0, "the device's work")
    assert not result.done()
    goes_on.set()
    assert await quickly(result) == (316, "5 counted")
    assert await quickly(anext(pipeline.run([6]))) == (319, "6 counted")


async def test_host_stages_of_one_item_run_at_the_same_time_each_one_item_after_the_other(device: Device) -> None:
    """I5: results come in order, whichever branch is quicker."""
    inside: dict[str, int] = {}
    order: dict[str, list[int]] = {"left": [], "right": []}
    met = asyncio.Barrier(2)

    def branch(name: str) -> Stage:
        async def function(slot: Slot) -> int:
            assert inside.setdefault(name, slot.item) == slot.item
            order[name].append(slot.item)
            await met.wait()  # neither comes back before the other has begun
            del inside[name]
            return int(slot.item)

        return Stage(name, function, after="read")

    async def read(slot: Slot) -> None: ...

    async def join(slot: Slot) -> tuple[int, int]:
        return slot.result("left"), slot.result("right")

    steps = [Stage("read", read), branch("left"), branch("right"), Stage("join", join, after=("left", "right"))]
    pipeline = Pipeline(device, steps, depth=4)
    found = await quickly(_all(pipeline, 8))
    assert found == [(item, item) for item in range(8)]
    assert order == {"left": list(range(8)), "right": list(range(8))}
    assert pipeline.statistics().peak_busy_slots == 4
    assert_quiet(pipeline)


async def _all(pipeline: Pipeline, items: int) -> list[Any]:
    return [result async for result in pipeline.run(range(items))]


async def test_what_stages_have_returned(device: Device) -> None:
    seen: list[Any] = []

    def look(slot: Slot) -> Operation[Any]:
        for name in ("compute", "nowhere"):
            with pytest.raises(
                InvalidArgumentError, match=f"no stage '{name}' has returned anything .*, only 'upload'"
            ):
                slot.result(name)
        seen.append(slot)
        return triple(slot)

    async def last(slot: Slot) -> tuple[Any, Any]:
        return slot.result("upload"), slot.result("download")

    steps = [Stage("upload", up), Stage("compute", look), Stage("download", down), Stage("last", last)]
    none, array = await Pipeline(device, steps).execute_iteration(1)
    assert (none, value(array)) == (None, 4)
    with pytest.raises(StaleHandleError, match="has ended"):
        seen[0].result("upload")
    with pytest.raises(BusyError, match="is in no pipeline"):
        Slot(0).result("upload")


async def test_what_is_not_done_has_no_result_yet(device: Device, latch: Latch) -> None:
    def hold(slot: Slot) -> Operation[Any]:
        latch.hold(slot.stream)
        return up(slot)

    def look(slot: Slot) -> None:
        with pytest.raises(BusyError, match="has not finished"):
            slot.result("upload")
        latch.release()

    await quickly(Pipeline(device, [Stage("upload", hold), Stage("look", look)]).execute_iteration(1))


# -- a kernel as a stage


async def test_a_kernel_with_its_configuration_and_buffers(device: Device) -> None:
    """I3: input and output buffers, launch configuration."""
    x, y = SlotBuffer("x", 512), SlotBuffer("y", 512)
    scale = Launch(SAXPY, (2, 1), 256, 512, lambda slot: slot.item, x, y)
    assert (scale.kernel, scale.grid, scale.block, scale.shared_bytes) == (SAXPY, (2, 1), 256, 0)
    assert (scale.inputs, scale.outputs) == (("x",), ("y",))
    assert repr(scale) == "<Launch saxpy grid=(2, 1) block=256>"

    def fill(slot: Slot) -> list[Operation[Any]]:
        return [slot.stream.fill(x.of(slot), 1.0), slot.stream.fill(y.of(slot), 0.5)]

    def download(slot: Slot) -> Operation[Any]:
        return slot.stream.download(y.of(slot))

    pipeline = Pipeline(device, [Stage("fill", fill), Stage("scale", scale), Stage("download", download)])
    found = [result[0] async for result in pipeline.run([1.0, 2.0, 3.0])]
    assert found == [1.5, 2.5, 3.5]


async def test_bad_launches_are_refused() -> None:
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match=r"launches an aiocuda\.Kernel, not int"):
        Launch(wrong, 1, 1)
    with pytest.raises(InvalidTypeError, match="takes 4 arguments, 1 given"):
        Launch(SAXPY, 1, 1, 2.0)
    with pytest.raises(InvalidTypeError, match="a string as its name, not 7"):
        SlotBuffer(wrong, 4)
    with pytest.raises(InvalidArgumentError):
        SlotBuffer("x", -1)


# -- how it ends


@pytest.mark.parametrize("where", ["upload", "copy", "triple", "right", "download"])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("overlap", [None, False])
async def test_a_failing_branch_ends_the_run(device: Device, where: str, awaits: bool, overlap: bool | None) -> None:
    """P19: what came before it is delivered; nothing is left, and the pipeline runs again."""
    broken = True
    steps = fork()
    place = [stage.name for stage in steps].index(where)
    good = steps[place]

    def function(slot: Slot) -> Any:
        if broken and slot.item == 4:
            raise ZeroDivisionError
        return good.function(slot)

    async def coroutine(slot: Slot) -> Any:
        return function(slot)

    steps[place] = Stage(good.name, coroutine if awaits else function, after=good.after)
    pipeline = Pipeline(device, steps)
    found: list[Any] = []
    with pytest.raises(ZeroDivisionError) as caught:
        async for left, right in pipeline.run(range(9), overlap=overlap):
            found.append((value(left), value(right)))
    assert found == [(3 * item + 1, item + 7) for item in range(4)]
    assert caught.value.__notes__ == [f"in stage {where!r} of item 4, counted from 0"]
    assert_quiet(pipeline)
    broken = False
    assert await pairs(pipeline, 3, overlap=overlap) == [(1, 7), (4, 8), (7, 9)]


async def test_a_branch_that_fails_stops_the_one_beside_it(device: Device) -> None:
    """The branch may clean up; the failure is raised without waiting for the branch's work."""
    begun, cleaned = asyncio.Event(), []

    async def never(slot: Slot) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(slot.item)

    async def fail(slot: Slot) -> None:
        await begun.wait()
        raise ZeroDivisionError

    pipeline = Pipeline(device, [Stage("up", up), Stage("never", never), Stage("fail", fail, after="up")])
    with pytest.raises(ZeroDivisionError):
        await quickly(values(pipeline, range(5)))
    assert cleaned == [0]
    assert_quiet(pipeline)
    cleaned.clear()
    with pytest.raises(ZeroDivisionError):
        await quickly(pipeline.execute_iteration(3))
    assert cleaned == [3]
    assert_quiet(pipeline)


async def test_branches_that_fail_together_come_as_a_group(device: Device) -> None:
    """P22"""
    both = asyncio.Barrier(2)

    def failing(name: str, error: Exception) -> Stage:
        async def fail(slot: Slot) -> None:
            await both.wait()
            raise error

        return Stage(name, fail, after="up")

    pipeline = Pipeline(device, [Stage("up", up), failing("a", KeyError("a")), failing("b", ZeroDivisionError("b"))])
    with pytest.raises(ExceptionGroup, match="2 stages of an item failed") as caught:
        await quickly(values(pipeline, [0]))
    notes = {type(error): error.__notes__ for error in caught.value.exceptions}
    assert notes == {
        KeyError: ["in stage 'a' of item 0, counted from 0"],
        ZeroDivisionError: ["in stage 'b' of item 0, counted from 0"],
    }
    assert_quiet(pipeline)


@pytest.mark.parametrize("awaits", [False, True])
async def test_a_failure_before_a_fork_is_one_failure(awaits: bool) -> None:
    """Both branches are skipped, or both fail: the error is raised once, and names the stage that caused it."""
    async with open_peer() as (peer, device):
        uploads = itertools.count()

        def second(*arguments: object) -> None:
            if next(uploads) == 1:  # memory is page-locked on a thread: when the copy is submitted is not fixed
                raise refusal()

        peer.before["upload"] = second

        async def look(slot: Slot) -> None: ...

        branch = look if awaits else triple
        steps = [
            Stage("upload", up),
            Stage("a", branch),
            Stage("b", branch, after="upload"),
            Stage("c", look, after=("a", "b")),
        ]
        pipeline = Pipeline(device, steps)
        with pytest.raises(DriverError) as caught:
            await quickly(values_of_none(pipeline, 4))
        assert caught.value.__notes__ == ["in stage 'upload' of item 1, counted from 0"]
        assert_quiet(pipeline)


async def test_two_branches_that_the_driver_refuses_come_as_a_group() -> None:
    """P22"""
    async with open_peer() as (peer, device):

        def refused(slot: Slot) -> Operation[Any]:
            peer.refuse("fill", 2)
            return up(slot)

        steps = [
            Stage("upload", refused),
            Stage("a", filled("a", 1)),
            Stage("b", filled("b", 2), after="upload"),
        ]
        pipeline = Pipeline(device, steps)
        with pytest.raises(ExceptionGroup, match="2 stages of an item failed") as caught:
            await quickly(values_of_none(pipeline, 1))
        assert [error.__notes__ for error in caught.value.exceptions] == [
            ["in stage 'a' of item 0, counted from 0"],
            ["in stage 'b' of item 0, counted from 0"],
        ]
        assert_quiet(pipeline)
        assert await values_of_none(pipeline, 0) == 0


async def values_of_none(pipeline: Pipeline, items: int) -> int:
    return len([result async for result in pipeline.run(range(items))])


async def test_a_skipped_item_is_reported_once() -> None:
    """The first item's failure poisons the stream, and both branches of the second item are skipped."""
    async with open_peer() as (peer, device):
        both = asyncio.Event()

        async def wait(slot: Slot) -> None:
            await both.wait()

        def upload(slot: Slot) -> Operation[Any]:
            if slot.item == 0:
                peer.refuse("upload")
            else:
                both.set()
            return up(slot)

        async def look(slot: Slot) -> None: ...

        steps = [
            Stage("upload", upload),
            Stage("wait", wait, after=()),
            Stage("a", look, after=("upload", "wait")),
            Stage("b", look, after=("upload", "wait")),
        ]
        pipeline = Pipeline(device, steps)
        found = await quickly(
            asyncio.gather(*(pipeline.execute_iteration(item) for item in range(2)), return_exceptions=True)
        )
        assert [type(error) for error in found] == [DriverError, SkippedError]
        assert [error.__notes__ for error in found] == [
            [f"in stage 'upload' of item {item}, counted from 0"] for item in range(2)
        ]
        assert_quiet(pipeline)


@pytest.mark.parametrize("single", [False, True])
async def test_the_consumer_leaves_a_fork(device: Device, latch: Latch, single: bool) -> None:
    """V10: cancelled while one branch is on the device and one on the host; both end before the slot is free."""
    begun, cleaned = asyncio.Event(), []

    async def never(slot: Slot) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(slot.item)

    def hold(slot: Slot) -> Operation[Any]:
        latch.hold(slot.stream)
        return triple(slot)

    steps = [
        Stage("up", up),
        Stage("held", hold),
        Stage("never", never, after="up"),
        Stage("end", down, after=("held", "never")),
    ]
    pipeline = Pipeline(device, steps)
    work: Any = pipeline.execute_iteration(0) if single else values(pipeline, range(9))
    consumer = asyncio.create_task(work)
    await held(latch)
    await quickly(begun.wait())
    consumer.cancel()
    await until(lambda: cleaned, "the host's end")
    assert not consumer.done()
    assert pipeline.ring.busy >= 1
    latch.release()
    with pytest.raises(asyncio.CancelledError):
        await quickly(consumer)
    assert_quiet(pipeline, streams=2)


async def test_a_stage_that_cancels_itself_ends_the_run(device: Device) -> None:
    """In a branch, too: the join is not reached without it."""

    async def cancelled(slot: Slot) -> None:
        raise asyncio.CancelledError

    steps = [Stage("up", up), Stage("a", cancelled), Stage("b", triple, after="up"), Stage("c", down, after=("a", "b"))]
    pipeline = Pipeline(device, steps)
    with pytest.raises(RuntimeError, match="item 0 of the pipeline, counted from 0, was cancelled"):
        await quickly(values(pipeline, range(3)))
    assert_quiet(pipeline)
