"""StreamGroup: standing dependencies, barriers, one function over all streams."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    CycleError,
    Device,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    SkippedError,
    Stream,
    StreamGroup,
    WrongLoopError,
)
from aiocuda.completion import METHODS
from aiocuda.coordination import GroupStream
from tests.helpers import SAXPY, TRAP, Latch, in_thread, open_peer, quickly, turns, until
from tests.stream.methods import ARGUMENTS, World, methods_of
from tests.task_factories import each_factory, factory_of_tasks

pytestmark = pytest.mark.asyncio


# Standing dependencies


async def test_each_submission_waits_for_the_prerequisites_newest_work(device: Device, latch: Latch) -> None:
    """C1: what is new there is waited for each time, on the device, and by whatever verb."""
    x = np.ones(4, np.float32)
    async with StreamGroup(device, ("first", "second", "free")) as group:
        first, second, free = group
        buffer, other = await second.upload(x), await free.upload(x)
        group.add_dependency("second", "first")
        for _ in range(2):
            latch.hold(first)
            await latch.held()
            behind = [
                second.launch(SAXPY, 1, 4, 4, 1.0, buffer, buffer),
                second.copy(buffer, x),
                second.upload(x),
                second.download(buffer),
                second.fill(buffer, 1),
                second.synchronize(),
                second.add_callback(lambda operation: None),
                second.record().operation,
            ]
            await quickly(free.fill(other, 2))
            assert not any(operation.done() for operation in behind)
            latch.release()
            await quickly(aiocuda.gather(*behind))
            del behind


async def test_launch_of_a_graph_waits_for_the_prerequisites(device: Device, latch: Latch) -> None:
    async with StreamGroup(device, ("first", "second", "free")) as group:
        first, second, free = group
        buffer = await second.upload(np.ones(4, np.float32))
        async with second.capture() as graph:
            second.fill(buffer, 2)
        group.add_dependency("second", "first")
        latch.hold(first)
        await latch.held()
        launched = graph.launch(second)
        for _ in range(3):
            await quickly(free.synchronize())
        assert not launched.done()
        latch.release()
        await quickly(launched)
        assert (await second.download(buffer) == 2).all()


@pytest.mark.parametrize("verb", [name for name in ARGUMENTS if METHODS[name].submits])
async def test_any_verb_waits(device: Device, latch: Latch, verb: str) -> None:
    """C1: each method by itself, so that no method relies on the wait of another one."""
    async with StreamGroup(device, 2) as group:
        first, second = group
        run = methods_of(await World.make(device, second, first)).get(verb)
        if run is None:
            return  # the device has no such method
        group.add_dependency(second, first)
        latch.hold(first)
        await latch.held()
        waiting = run()
        passed = device.stream()
        await quickly(passed.fill(passed.empty(4), 1))
        wakes = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > wakes, "a look at everything")
        assert not waiting.done()
        latch.release()
        await quickly(waiting.wait())
        await passed.aclose()


async def test_data_goes_through_a_standing_dependency(device: Device) -> None:
    """C1: a copy in one stream, a kernel in the next and a copy back in a third, again and again, right each time."""
    async with StreamGroup(device, ("up", "compute", "down")) as group:
        up, compute, down = group
        for dependent, prerequisite in (("compute", "up"), ("down", "compute")):
            group.add_dependency(dependent, prerequisite)
        results = []
        buffers = [up.empty(1 << 16) for _ in range(4)]
        ones = await device.pinned(1 << 16)
        ones[:] = 1
        for number in range(4):
            up.copy(buffers[number], ones)
            compute.launch(SAXPY, 64, 1024, 1 << 16, float(number), buffers[number], buffers[number])
            results.append(down.download(buffers[number]))
        for number, result in enumerate(results):
            assert (await result == number + 1).all()


async def test_nothing_new_to_wait_for_costs_no_wait() -> None:
    async with open_peer() as (peer, device), StreamGroup(device, 2) as group:
        first, second = group
        buffer = second.empty(4)
        group.add_dependency(second, first)
        with Latch(device) as latch:
            latch.hold(first)
            await latch.held()
            before = peer.calls["stream_wait"]
            for _ in range(10):
                second.fill(buffer, 1)
            assert peer.calls["stream_wait"] == before + 1
        await second.synchronize()
        await first.synchronize()
        before = peer.calls["stream_wait"]
        second.fill(buffer, 1)
        assert peer.calls["stream_wait"] == before


async def test_dependent_stream_runs_nothing_until_the_failure_is_read() -> None:
    """C1: as after a wait: the dependent runs nothing until the failure has been read."""
    async with open_peer() as (peer, device), StreamGroup(device, 2) as group:
        first, second = group
        one, two = first.empty(4), second.empty(4)
        await second.synchronize()
        group.add_dependency(second, first)
        peer.refuse("fill")
        failed = first.fill(one, 1)
        await until(failed.done, "the failure")
        skipped = second.fill(two, 1)
        with pytest.raises(SkippedError) as caught:
            await quickly(skipped)
        assert isinstance(caught.value.__cause__, DriverError)
        with pytest.raises(DriverError):
            await failed
        await quickly(second.fill(two, 1))


async def test_cycles_are_refused_with_the_path(device: Device) -> None:
    """C1."""
    async with StreamGroup(device, ("a", "b", "c", "d")) as group:
        group.add_dependency("b", "a")
        group.add_dependency("c", "b")
        group.add_dependency("d", "a")
        with pytest.raises(CycleError, match=r"a cannot depend on c: a → c → b → a, each waiting") as caught:
            group.add_dependency("a", "c")
        assert caught.value.path == ("a", "c", "b", "a")
        with pytest.raises(CycleError, match="a → a"):
            group.add_dependency("a", "a")
        group.add_dependency("d", "c")  # a diamond is none
        group.add_dependency("d", "c")
        first, last = group["a"], group["d"]
        assert isinstance(first, GroupStream)
        assert isinstance(last, GroupStream)
        assert [stream.name for stream in last.prerequisites] == ["a", "c"]
        assert first.prerequisites == ()
        with pytest.raises(CycleError, match="a → d"):
            first.depend_on(last)


async def test_streams_by_name_by_number_and_themselves(device: Device) -> None:
    async with StreamGroup(device, ("a", "b")) as group, StreamGroup(device, 2) as another:
        assert group["a"] is group[0] is group[group["a"]]
        assert group[-1] is group["b"]
        assert (len(group), group.names, another.names) == (2, ("a", "b"), ("0", "1"))
        operation = group["a"].synchronize()
        assert operation.stream is group["a"]
        for key in ("c", 2):
            with pytest.raises(InvalidArgumentError, match="there are a, b"):
                group[key]
        with pytest.raises(InvalidArgumentError, match="is not in <StreamGroup a, b on"):
            group.add_dependency("a", another[0])
        with pytest.raises(InvalidTypeError):
            group[1.0]  # type: ignore[index]  # that is the point


@pytest.mark.parametrize(
    ("streams", "error"),
    [
        (0, InvalidArgumentError),
        (-1, InvalidArgumentError),
        ([], InvalidArgumentError),
        (["a", "a"], InvalidArgumentError),
        ([1, 2], InvalidTypeError),
        ("ab", InvalidTypeError),
        (True, InvalidTypeError),
        (None, InvalidTypeError),
    ],
)
async def test_names_that_are_none(device: Device, streams: Any, error: type[Exception]) -> None:
    before = device.statistics().streams_created
    with pytest.raises(error):
        StreamGroup(device, streams)
    assert device.statistics().streams_created == before


async def test_group_that_fails_to_be_made_leaves_nothing() -> None:
    """P24."""
    async with open_peer() as (peer, device):
        calls = []

        def third(*arguments: object) -> None:
            calls.append(arguments)
            if len(calls) == 3:
                raise DriverError("no more", code=2, call="cuStreamCreate")

        peer.before["stream_create"] = third
        with pytest.raises(DriverError):
            StreamGroup(device, 4)
        assert device.statistics().streams == 0


# Barriers


@pytest.mark.parametrize("count", [2, 16])
async def test_barrier_costs_steps_in_proportion(count: int) -> None:
    """C2, F1: one record, and two waits for each stream but one."""
    async with open_peer() as (peer, device), StreamGroup(device, count) as group:
        with Latch(device) as latch:
            for stream in group:
                latch.hold(stream)
            await latch.held()
            before = peer.calls.copy()
            joined = group.barrier()
            assert peer.calls["stream_wait"] - before["stream_wait"] == 2 * (count - 1)
            assert peer.calls["event_record"] - before["event_record"] == 1
            assert peer.calls["event_query"] == before["event_query"]
            latch.release()
            await quickly(joined)


async def test_nothing_passes_a_barrier(device: Device, latch: Latch) -> None:
    """C2: each stream's later work waits for each stream's earlier work."""
    async with StreamGroup(device, 3) as group:
        buffers = [stream.empty(4) for stream in group]
        for held in group:
            latch.hold(held)
            await latch.held()
            joined = group.barrier()
            later = [stream.fill(buffer, 1) for stream, buffer in zip(group, buffers, strict=True)]
            await until(lambda: device.statistics().in_flight == 5, "all that is not held")
            assert not any(operation.done() for operation in [joined, *later])
            latch.release()
            await quickly(joined)
            await quickly(aiocuda.gather(*later))


async def test_barrier_over_one_idle_stream(device: Device) -> None:
    async with StreamGroup(device, 1) as group:
        joined = group.barrier()
        assert await quickly(joined) is None
        assert joined.done()
        assert group[0].statistics().operations == 1  # and no wait for itself


async def test_failure_before_a_barrier_skips_later_work() -> None:
    async with open_peer() as (peer, device), StreamGroup(device, 3) as group:
        buffers = [stream.empty(4) for stream in group]
        await group.barrier()
        peer.refuse("fill")
        failed = group[1].fill(buffers[1], 1)
        joined = group.barrier()
        later = group[2].fill(buffers[2], 1)
        for operation in (joined, later):
            with pytest.raises(SkippedError):
                await quickly(operation)
        with pytest.raises(DriverError):
            await failed
        await quickly(group.barrier())


# One function over all


async def test_run_over_all_streams_side_by_side(device: Device) -> None:
    """C3: functions that enqueue, and coroutines; results in the order of the streams."""
    together = asyncio.Barrier(3)

    async def meet(stream: Stream) -> str:
        await together.wait()
        return stream.name

    async with StreamGroup(device, ("a", "b", "c")) as group:
        assert await quickly(group.run(meet)) == ["a", "b", "c"]
        results = await group.run(lambda stream: stream.upload(np.ones(4, np.float32)))
        assert [(await group[0].download(buffer)).sum() for buffer in results] == [4, 4, 4]
        assert await group.run(lambda stream: len(stream.name)) == [1, 1, 1]


async def test_failure_names_its_stream(device: Device) -> None:
    """C3: one as itself, several as a group; the others run to their end."""
    ended: list[str] = []

    async def work(stream: Stream) -> None:
        if stream.name in failing:
            raise ValueError(stream.name)
        await stream.synchronize()
        ended.append(stream.name)

    async with StreamGroup(device, ("a", "b", "c")) as group:
        failing = {"b"}
        with pytest.raises(ValueError, match="b") as one:
            await group.run(work)
        assert one.value.__notes__ == ["in stream 'b' of a group of 3"]
        assert ended == ["a", "c"]
        failing = {"a", "c"}
        with pytest.raises(ExceptionGroup, match="2 of 3 streams of a group failed") as several:
            await group.run(work)
        assert [(str(error), error.__notes__) for error in several.value.exceptions] == [
            (name, [f"in stream {name!r} of a group of 3"]) for name in ("a", "c")
        ]
        assert ended == ["a", "c", "b"]


async def test_function_that_raises_in_its_call_stops_no_other_function(device: Device) -> None:
    started: list[str] = []

    def enqueue(stream: Stream) -> Any:
        started.append(stream.name)
        if stream.name == "0":
            raise KeyError("at once")
        return stream.synchronize()

    async with StreamGroup(device, 3) as group:
        with pytest.raises(KeyError):
            await group.run(enqueue)
    assert started == ["0", "1", "2"]


async def test_cancelled_run_cancels_all(device: Device) -> None:
    left: list[str] = []

    async def work(stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            left.append(stream.name)

    async with StreamGroup(device, 3) as group:
        task = asyncio.create_task(group.run(work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
        assert left == ["0", "1", "2"]


async def test_fault_is_one_failure() -> None:
    async with open_peer() as (_, device):
        group = StreamGroup(device, 3)
        with pytest.raises(DeviceFault):
            await quickly(group.run(lambda stream: stream.launch(TRAP, 1, 1)))
        with pytest.raises(DeviceFault):
            group.barrier()
        await group.aclose()


async def test_callbacks_of_each_stream(device: Device, latch: Latch) -> None:
    """C4: once each, when the stream's own work has ended, in whatever order the streams end."""
    told: list[str] = []
    async with StreamGroup(device, ("a", "b", "c")) as group:
        latch.hold(group["a"])
        await latch.held()
        operations = group.add_callback(lambda operation: told.append(operation.stream.name))
        await until(lambda: len(told) == 2, "those that are not held")
        assert sorted(told) == ["b", "c"]
        latch.release()
        await quickly(aiocuda.gather(*operations))
        await until(lambda: len(told) == 3, "the one that was held")
    assert told[2] == "a"


# The end


async def test_closing_waits_for_the_work(device: Device, latch: Latch) -> None:
    before = device.statistics().streams
    async with StreamGroup(device, 2) as group:
        held = latch.hold(group[1])
        await latch.held()
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        latch.release()
        await quickly(closing)
        assert held.done()
        with pytest.raises(ClosedError):
            group.barrier()
        with pytest.raises(ClosedError):
            group[0].synchronize()
    assert device.statistics().streams == before


@pytest.mark.parametrize("how", ["exception", "cancelled"])
async def test_left_waits_for_nothing(device: Device, latch: Latch, how: str) -> None:
    before = device.statistics().streams
    group = StreamGroup(device, 2)
    held = [latch.hold(stream) for stream in group]
    await latch.held()
    if how == "exception":
        with pytest.raises(ZeroDivisionError):
            async with group:
                raise ZeroDivisionError
    else:
        task = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await quickly(task)
    assert all(stream.closed for stream in group)
    latch.release()
    for operation in held:
        await quickly(operation)
    await until(lambda: device.statistics().streams == before, "the streams' end")


async def test_group_that_has_ended_is_not_entered_again(device: Device) -> None:
    groups = [StreamGroup(device, 2) for _ in range(3)]
    async with groups[0]:
        await groups[0][0].aclose()
    await groups[1].aclose()
    with pytest.raises(ZeroDivisionError):
        async with groups[2]:
            raise ZeroDivisionError
    for group in groups:
        with pytest.raises(ClosedError, match="this group has been closed: make another one"):
            await group.__aenter__()
        await group.aclose()
    assert device.statistics().streams == 0


async def test_group_of_which_a_stream_is_closed_is_entered(device: Device) -> None:
    group = StreamGroup(device, 2)
    await group[0].aclose()
    async with group:
        await quickly(group[1].synchronize())
    assert device.statistics().streams == 0


async def test_group_belongs_to_one_loop(device: Device) -> None:
    """The error names the group and not its first stream, and nothing has changed."""
    group = StreamGroup(device, 2)

    async def elsewhere() -> None:
        uses: list[Callable[[], Any]] = [
            group.barrier,
            lambda: group.add_callback(print),
            lambda: group.run(print),
            group.aclose,
            group.__aenter__,
        ]
        for use in uses:
            with pytest.raises(WrongLoopError, match="this group belongs to another event loop: make a group in each"):
                await use()

    await asyncio.to_thread(in_thread, elsewhere)
    assert device.statistics().streams == 2
    assert not any(stream.closed for stream in group)
    await quickly(group.barrier())
    await group.aclose()
    assert device.statistics().streams == 0


async def test_second_call_waits_for_the_same_end(device: Device, latch: Latch) -> None:
    before = device.statistics().streams
    group = StreamGroup(device, 2)
    latch.hold(group[1])
    await latch.held()
    calls = [asyncio.create_task(group.aclose()) for _ in range(2)]
    await turns(9)
    assert not any(call.done() for call in calls)
    latch.release()
    await quickly(asyncio.gather(*calls))
    assert device.statistics().streams == before


async def test_edges_in_any_order_are_refused_only_where_they_close_a_cycle() -> None:
    chance = random.Random(17)
    async with aiocuda.open_device(driver="host") as device:
        for _ in range(30):
            async with aiocuda.StreamGroup(device, 8) as group:
                behind: dict[str, set[str]] = {name: set() for name in group.names}
                for _ in range(30):
                    one, other = chance.choice(group.names), chance.choice(group.names)
                    reached, left = {other}, [other]
                    while left:
                        new = behind[left.pop()] - reached
                        reached |= new
                        left += new
                    if one not in reached:
                        group.add_dependency(one, other)
                        behind[one].add(other)
                        continue
                    with pytest.raises(CycleError) as caught:
                        group.add_dependency(one, other)
                    path = caught.value.path
                    assert (path[0], path[1], path[-1]) == (one, other, one)
                    assert all(after in behind[before] for before, after in itertools.pairwise(path[1:]))


@pytest.mark.slow
async def test_chain_of_a_thousand_streams_refuses_the_edge_that_closes_it() -> None:
    async with aiocuda.open_device(driver="host") as device, aiocuda.StreamGroup(device, 1000) as group:
        for number in range(1, 1000):
            group.add_dependency(number, number - 1)
        with pytest.raises(CycleError) as caught:
            group.add_dependency(0, 999)
        assert caught.value.path == ("0", *map(str, reversed(range(1000))))


# Task factories


@each_factory
async def test_each_task_factory_serves_groups_and_coordinators(device: Device, factory: str) -> None:
    async def coroutine(number: int) -> int:
        await asyncio.sleep(0)
        return number

    with factory_of_tasks(factory):
        async with StreamGroup(device, 3) as group:
            assert await group.run(lambda stream: coroutine(1)) == [1, 1, 1]
            assert await group.run(lambda stream: 2) == [2, 2, 2]
        async with AsyncCoordinator(device) as coordinator:
            for number in range(5):
                first = coordinator.host(coroutine, number)
                second = coordinator.host(lambda: 7, after=first)
                assert (await first, await second) == (number, 7)
