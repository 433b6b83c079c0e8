"""I7: a pipeline captures what its stages give the device, once for each slot, and replays it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    Kernel,
    Operation,
    Pipeline,
    Slot,
    Stage,
    UnsupportedError,
)
from aiocuda.pipeline import Launch, SlotBuffer
from tests.benchmarks.kernels import nanoseconds, spin
from tests.helpers import AFFINE, Latch, Peer, in_thread, open_peer, quickly, refusal, until
from tests.pipeline.steps import SIZE, assert_quiet, counting, held, triple, value, values
from tests.pipeline.virtual import in_virtual_time, measure, three

ITEMS = 12


def fill(slot: Slot) -> None:
    """The item, into the slot's pinned memory."""
    slot.pinned("source", SIZE, np.uint32)[:] = slot.item


def copy_in(slot: Slot) -> Operation[None]:
    return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), slot.pinned("source", SIZE, np.uint32))


def copy_out(slot: Slot) -> Operation[Any]:
    return slot.stream.download(slot.buffer("data", SIZE, np.uint32), out=slot.pinned("result", SIZE, np.uint32))


def steps() -> list[Stage]:
    return [Stage("upload", copy_in, prepare=fill), Stage("compute", triple), Stage("download", copy_out)]


def numbers(upto: int) -> list[int]:
    """What comes of so many items."""
    return [3 * item + 1 for item in range(upto)]


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("overlap", [None, False])
async def test_results_are_those_of_the_stages_themselves(device: Device, depth: int, overlap: bool | None) -> None:
    for replay in (False, True, ("compute",), ()):
        pipeline = Pipeline(device, steps(), depth, replay=replay)
        assert await values(pipeline, range(ITEMS), overlap=overlap) == numbers(ITEMS)
        assert await values(pipeline, counting(5), overlap=overlap) == numbers(5)
        assert_quiet(pipeline)
        await pipeline.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_one_operation_after_the_other_on_the_default_stream(driver: str) -> None:
    """J2: a device that was opened with ``asynchronous=False`` replays the same."""
    opening: Any = aiocuda.open_device(driver=driver, asynchronous=False)  # type: ignore[arg-type]
    async with opening as device:
        for replay in (False, True):
            async with Pipeline(device, steps(), replay=replay) as pipeline:
                assert await values(pipeline, range(ITEMS)) == numbers(ITEMS)
        assert device.statistics().streams_created == 0


@pytest.mark.asyncio
async def test_a_stage_is_called_once_for_each_slot_and_prepares_each_item() -> None:
    called: Counter[str] = Counter()

    def noted(stage: Stage) -> Stage:
        def function(slot: Slot) -> Any:
            called[stage.name] += 1
            return stage.function(slot)

        def prepare(slot: Slot) -> None:
            called[f"before {stage.name}"] += 1
            fill(slot)

        return Stage(stage.name, function, prepare=prepare if stage.prepare else None)

    async with open_peer() as (peer, device):
        async with Pipeline(device, [noted(stage) for stage in steps()], replay=True) as pipeline:
            assert await values(pipeline, range(ITEMS)) == numbers(ITEMS)
            assert called == {"upload": 3, "compute": 3, "download": 3, "before upload": ITEMS}
            assert peer.calls["graph_build"] == 9
            assert peer.calls["graph_launch"] == 3 * ITEMS
            assert peer.calls["graph_update"] == 0
            assert peer.calls["upload"] == peer.calls["launch"] == peer.calls["download"] == 0
            assert await values(pipeline, range(3)) == numbers(3)
            assert called["upload"] == 3
        await until(lambda: peer.inner.statistics()["graphs"] == 0, "the graphs going back")
        await until(lambda: device.memory.statistics().live_bytes == 0, "the slots' buffers going back")


@pytest.mark.asyncio
async def test_arguments_of_a_launch_that_follow_from_the_item() -> None:
    async with open_peer() as (peer, device):
        data = SlotBuffer("data", SIZE, np.uint32)
        compute = Launch(AFFINE, 4, 256, data, SIZE, lambda slot: slot.item // 4, 1)
        stages = [steps()[0], Stage("compute", compute), steps()[2]]
        async with Pipeline(device, stages, 1, replay=True) as pipeline:
            found = await values(pipeline, range(ITEMS))
        assert found == [item * (item // 4) + 1 for item in range(ITEMS)]
        assert peer.calls["graph_update"] == 2  # and not where it stays the same


@pytest.mark.asyncio
async def test_an_argument_that_changes_its_sign_only(device: Device) -> None:
    source = 'extern "C" __global__ void sign(float* out, float number) { *out = copysignf(1.0f, number); }'
    sign = Kernel("sign", source=source, host=lambda out, number: np.copysign(np.float32(1), number, out=out))
    out = SlotBuffer("out", 1)

    def into_the_slot(slot: Slot) -> Operation[Any]:
        return slot.stream.download(out.of(slot), out=slot.pinned("out", 1))

    compute = Launch(sign, 1, 1, out, lambda slot: slot.item)
    async with Pipeline(device, [Stage("sign", compute), Stage("download", into_the_slot)], 1, replay=True) as pipeline:
        found = [float(result[0]) async for result in pipeline.run([0.0, -0.0, 0.0])]
    assert found == [1.0, -1.0, 1.0]


@pytest.mark.asyncio
async def test_stages_on_the_host_between_those_that_are_replayed(device: Device) -> None:
    """They run between the graphs, and get the results of the stages before them."""
    seen: list[tuple[int, int]] = []

    async def look(slot: Slot) -> int:
        await asyncio.sleep(0)
        seen.append((slot.item, value(slot.result("check"))))
        return int(slot.item)

    check, again = Stage("check", copy_out), Stage("again", triple)
    stages = [*steps()[:2], check, Stage("look", look), again, steps()[2]]
    pipeline = Pipeline(device, stages, 4, replay=True)
    assert await values(pipeline, range(ITEMS)) == [3 * number + 1 for number in numbers(ITEMS)]
    assert seen == list(enumerate(numbers(ITEMS)))
    assert_quiet(pipeline)


@pytest.mark.asyncio
async def test_results_of_every_shape(device: Device) -> None:
    async def last(stage: Any) -> Any:
        (result,) = [
            result async for result in Pipeline(device, [*steps()[:2], Stage("last", stage)], replay=True).run([1])
        ]
        return result

    one, none = await last(lambda slot: [copy_out(slot), slot.stream.synchronize()])
    assert (value(one), none) == (4, None)
    assert await last(triple) is None

    def nothing(slot: Slot) -> None:
        copy_out(slot)

    assert await last(nothing) is None


@pytest.mark.asyncio
async def test_a_result_lasts_until_the_next_is_asked_for(device: Device) -> None:
    """I5: a slot that the consumer still looks at is not written, and the source is not asked."""
    asked: list[int] = []
    pipeline = Pipeline(device, steps(), replay=True)
    item = 0

    def fed() -> bool:
        return len(asked) >= min(8, item + 3)

    async for result in pipeline.run(counting(8, asked)):
        item = (value(result) - 1) // 3
        await until(fed)
        await device.drain()
        assert len(asked) == min(8, item + 3)
        assert value(result) == 3 * item + 1
    assert pipeline.statistics().peak_busy_slots == 3


@pytest.mark.asyncio
async def test_slot_states_are_the_same_as_without_replay(device: Device, latch: Latch) -> None:
    """I1: a graph for each stage: the slot is uploading until that one is done."""
    pipeline = Pipeline(device, steps(), replay=True)
    assert await values(pipeline, range(3)) == numbers(3)
    async with pipeline:
        upload = pipeline._resources.streams[0]
        latch.hold(upload)
        results = pipeline.run(range(5))
        first = asyncio.ensure_future(anext(results))
        await held(latch)
        assert pipeline.ring.states == ("uploading",) * 3
        latch.release()
        assert value(await quickly(first)) == 1
        assert [value(result) async for result in results] == numbers(5)[1:]


# -- what cannot be replayed


@pytest.mark.asyncio
async def test_stages_that_cannot_be_captured_are_refused(device: Device) -> None:
    async with device.stream() as other:
        elsewhere = other.empty(SIZE, np.uint32)

        def uploads(slot: Slot) -> Operation[Any]:
            return slot.stream.upload(np.zeros(SIZE, np.uint32))

        def pageable(slot: Slot) -> Operation[Any]:
            return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), np.zeros(SIZE, np.uint32))

        def on_another_stream(slot: Slot) -> Operation[Any]:
            copy_out(slot)
            return other.fill(elsewhere, 0)

        def looks(slot: Slot) -> Operation[Any]:
            operation = copy_out(slot)
            operation.result()
            return operation

        for stage, kind, message in (
            (uploads, UnsupportedError, "make it before the `with` block"),
            (pageable, UnsupportedError, r"device\.pinned\(\(1024,\), 'uint32'\)"),
            (lambda slot: slot.stream.download(slot.buffer("other", 4)), UnsupportedError, "for each download"),
            (on_another_stream, UnsupportedError, r"not enqueued on slot\.stream"),
            (lambda slot: None, UnsupportedError, "nothing to replay"),
            (looks, BusyError, "does not run by itself"),
        ):
            pipeline = Pipeline(device, [*steps()[:2], Stage("last", stage)], replay=True)
            with pytest.raises(kind, match=message) as caught:
                await values(pipeline, range(5))
            notes = caught.value.__notes__
            assert "in stage 'last' of item 0, counted from 0" in notes
            assert any("replay=(…) names those that can be" in note for note in notes) is (kind is UnsupportedError)
            await other.synchronize()
            assert_quiet(pipeline, streams=1)
            live = Pipeline(device, [*steps()[:2], Stage("last", copy_out)], replay=["upload", "compute"])
            assert await values(live, range(5)) == numbers(5)
            await pipeline.aclose()
            await live.aclose()


@pytest.mark.asyncio
async def test_bad_arguments_are_refused(device: Device) -> None:
    async def host(slot: Slot) -> None: ...

    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="replay is True, False or a sequence of stages' names, not 7"):
        Pipeline(device, steps(), replay=wrong)
    with pytest.raises(InvalidTypeError, match="not 'upload'"):
        Pipeline(device, steps(), replay="upload")
    with pytest.raises(InvalidArgumentError, match="replay names the stage 'up', and there are 'upload', 'compute'"):
        Pipeline(device, steps(), replay=["up"])
    with pytest.raises(InvalidArgumentError, match="works on the host"):
        Pipeline(device, [Stage("host", host), *steps()], replay=["host"])
    with pytest.raises(InvalidTypeError, match="prepare is a function of a slot, not int"):
        Stage("upload", copy_in, prepare=wrong)
    with pytest.raises(InvalidArgumentError, match="make it a stage"):
        Stage("upload", copy_in, prepare=host)
    with pytest.raises(InvalidArgumentError, match="its own function can"):
        Stage("host", host, prepare=fill)


# -- how it ends


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("item", [0, 2, 3, 7])
async def test_a_failure_in_any_stage_at_any_item(device: Device, number: int, item: int) -> None:
    """Failures while the first items are captured, and while later ones are replayed."""

    def prepare(slot: Slot) -> None:
        fill(slot)
        if slot.item == item and fails:
            raise ZeroDivisionError(item)

    fails = True
    stages = [Stage(one.name, one.function, prepare=prepare if at == number else one.prepare)
              for at, one in enumerate(steps())]  # fmt: skip
    pipeline = Pipeline(device, stages, replay=True)
    found: list[int] = []
    with pytest.raises(ZeroDivisionError) as caught:
        async for result in pipeline.run(range(ITEMS)):
            found += [value(result)]
    assert caught.value.__notes__ == [f"in stage '{stages[number].name}' of item {item}, counted from 0"]
    assert found == numbers(item)
    assert_quiet(pipeline)
    fails = False
    assert await values(pipeline, range(5)) == numbers(5)


@pytest.mark.asyncio
@pytest.mark.parametrize("nth", [1, 2, 9, 10, 20])
async def test_a_launch_that_the_driver_refuses(nth: int) -> None:
    async with open_peer() as (peer, device):
        left = iter(range(nth - 1))

        def refuse(*arguments: object) -> None:
            if next(left, None) is None:
                peer.before.clear()
                raise refusal()

        peer.before["graph_launch"] = refuse
        pipeline = Pipeline(device, steps(), replay=True)
        with pytest.raises(DriverError) as caught:
            await values(pipeline, range(ITEMS))
        assert any(note.startswith("in stage") for note in caught.value.__notes__)
        assert_quiet(pipeline)
        assert await values(pipeline, range(5)) == numbers(5)


@pytest.mark.asyncio
async def test_a_graph_that_cannot_be_built_is_captured_anew() -> None:
    async with open_peer() as (peer, device):
        peer.refuse("graph_build")
        pipeline = Pipeline(device, steps(), replay=True)
        with pytest.raises(DriverError):
            await values(pipeline, range(ITEMS))
        assert_quiet(pipeline)
        assert await values(pipeline, range(ITEMS)) == numbers(ITEMS)


@pytest.mark.asyncio
async def test_a_consumer_that_is_cancelled(device: Device, latch: Latch) -> None:
    pipeline = Pipeline(device, steps(), replay=True)
    assert await values(pipeline, range(4)) == numbers(4)
    async with pipeline:
        latch.hold(pipeline._resources.streams[1])
        task = asyncio.create_task(values(pipeline, range(9)))
        await held(latch)
        task.cancel()
        await asyncio.sleep(0)
        latch.release()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        assert_quiet(pipeline, streams=3 + 2)  # the latch needs some
        assert await values(pipeline, range(5)) == numbers(5)


def test_another_event_loop_captures_anew() -> None:
    """A graph belongs to one loop; the loop that it was captured in has gone."""
    pipelines: list[Pipeline] = []
    calls: list[int] = []
    with Peer() as peer:

        async def first() -> list[int]:
            device = await aiocuda.open_device(driver=peer.driver)
            pipelines.append(Pipeline(device, steps(), replay=True))
            return await values(pipelines[0], range(4))

        async def second() -> list[int]:
            found = await values(pipelines[0], range(ITEMS))
            calls.append(peer.calls["graph_build"])
            await pipelines[0].aclose()
            await pipelines[0].device.aclose()
            return found

        assert in_thread(first) == numbers(4)
        assert in_thread(second) == numbers(ITEMS)
        assert calls == [18]
        assert peer.inner.statistics()["graphs"] == 0


# -- figures


@pytest.mark.parametrize("times", [(2, 5, 2), (5, 5, 5), (10, 1, 10)])
def test_replay_has_the_same_throughput_and_statistics(times: Sequence[float]) -> None:
    """I4, I6: in virtual time; the timing events enclose each stage's launch, so they measure the same."""

    async def main(device: Device) -> list[Any]:
        found = []
        for replay in (False, True):
            async with Pipeline(device, three(times), 4, replay=replay) as pipeline:
                seconds = await measure(pipeline, 50)
                found.append((seconds, pipeline.statistics(), pipeline.advice()))
        return found

    (live, before, advice), (replayed, after, same) = in_virtual_time(main)
    assert replayed <= live * 1.001
    for name in before.stage_seconds:
        assert after.stage_seconds[name] == pytest.approx(before.stage_seconds[name], rel=1e-3)
    assert after.utilisation == pytest.approx(before.utilisation, rel=2e-3)
    assert after.overlap_efficiency == pytest.approx(before.overlap_efficiency, rel=2e-3)
    assert same.depth == advice.depth


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_figures_on_a_gpu() -> None:
    """I4: the events around a graph's launch measure its kernel, and the copies overlap with it."""

    def compute(slot: Slot) -> Operation[None]:
        return slot.stream.launch(spin(5e-3), 1, 1, nanoseconds(5e-3))

    stages = [steps()[0], Stage("compute", compute), steps()[2]]
    async with aiocuda.open_device(driver="cuda") as device, Pipeline(device, stages, replay=True) as pipeline:
        async for _ in pipeline.run(range(3)):
            pass
        pipeline.reset_statistics()
        async for _ in pipeline.run(range(40)):
            pass
        statistics = pipeline.statistics()
    assert statistics.stage_seconds["compute"] == pytest.approx(40 * 5e-3, rel=0.05)
    assert statistics.utilisation > 0.95
