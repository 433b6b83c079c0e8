"""E10: the checker: no report where all is in order, a report with both places where an edge is missing."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import random
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    InvalidArgumentError,
    Stream,
    StreamBarrier,
    StreamGroup,
    StreamPool,
    UnorderedAccessWarning,
)
from aiocuda._base._types import SourceLine
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.stream import Conflict
from aiocuda.testing import SimulatedLoop
from tests.coordination.graphs import BLEND, BUMP, ITEMS, Part, Step, by_chance, compare
from tests.helpers import Latch, in_thread

ONES = np.ones(ITEMS, np.uint32)
HERE = Path(__file__).name


@contextlib.asynccontextmanager
async def checked() -> AsyncIterator[tuple[Device, Stream, Stream]]:
    async with (
        aiocuda.open_device(driver="host", check=True) as device,
        device.stream(name="left") as left,
        device.stream(name="right") as right,
    ):
        yield device, left, right


@pytest.mark.asyncio
async def test_both_places_are_named() -> None:
    async with checked() as (device, left, right):
        buffer = left.empty(ITEMS, np.uint32)
        left.fill(buffer, 1)
        with pytest.warns(
            UnorderedAccessWarning, match=rf"fill on left at .*{HERE}:\d+, and download on right"
        ) as told:
            await right.download(buffer)
        assert device.checker is not None
        (conflict,) = device.checker.conflicts
        first, second = (int(place.rpartition(":")[2]) for place in (conflict.first, conflict.second))
        assert "left.fill(buffer, 1)" in linecache.getline(__file__, first)
        assert "right.download(buffer)" in linecache.getline(__file__, second)
        assert told[0].filename.endswith(HERE)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["operation", "event", "stream", "through a third", "await"])
async def test_each_way_to_put_in_order_is_one(way: str) -> None:
    async with checked() as (device, left, right), device.stream() as third:
        buffer = left.empty(ITEMS, np.uint32)
        operation = left.fill(buffer, 1)
        if way == "operation":
            right.wait(operation)
        elif way == "event":
            right.wait(left.record())
        elif way == "stream":
            right.wait(left)
        elif way == "await":
            await operation
        else:
            third.wait(left)
            right.wait(third)
        await right.download(buffer)
        right.fill(buffer, 2)
        assert device.checker is not None
        assert device.checker.conflicts == []


@pytest.mark.asyncio
async def test_disjoint_slices_and_reads_do_not_conflict() -> None:
    async with checked() as (device, left, right):
        buffer = left.empty(ITEMS, np.uint32)
        left.fill(buffer[:6], 1)
        right.fill(buffer[6:], 2)
        both = [stream.download(buffer[half]) for stream, half in ((left, slice(0, 6)), (right, slice(6, ITEMS)))]
        await asyncio.gather(*both)
        left.download(buffer)
        right.download(buffer)
        assert device.checker is not None
        assert device.checker.conflicts == []
        with pytest.warns(UnorderedAccessWarning, match="download on right"):
            left.fill(buffer[5:7], 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["lease", "group", "group's barrier", "barrier", "a stream of others"])
async def test_accesses_by_leases_and_group_streams_are_checked(way: str) -> None:
    """Accesses of group streams are checked; their waits give an order, also to streams that wait for them."""
    async with checked() as (device, left, right), contextlib.AsyncExitStack() as stack:
        assert device.checker is not None
        buffer = left.empty(ITEMS, np.uint32)
        with Latch(device) as latch:
            latch.hold(left)
            await latch.held()
            left.fill(buffer, 1)
            parties: list[asyncio.Task[float]] = []
            between: Stream
            if way == "lease":
                between = await StreamPool(device, 1, 1).any_ready()
                stack.callback(between.release)
                between.wait(left)
            elif way == "a stream of others":
                theirs = await stack.enter_async_context(device.stream())
                between = Stream.from_handle(device, device.driver.stream_handle(theirs._queue.handle))
                between.wait(left)
            elif way == "barrier":
                between = await stack.enter_async_context(device.stream())
                parties = [asyncio.create_task(StreamBarrier(1).wait(left, between))]
                await asyncio.sleep(0)
            else:
                group = await stack.enter_async_context(StreamGroup(device, 3))
                group[0].wait(left)
                if way == "group":
                    group.add_dependency(1, 0)
                    group.add_dependency(2, 1)
                    group[1].synchronize()
                else:
                    group.barrier()
                between = group[2]
            between.fill(buffer, 2)
            right.wait(between)
            done = right.download(buffer)
            assert device.checker.conflicts == []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnorderedAccessWarning)
                left.fill(buffer, 3)
                between.fill(buffer, 4)
            streams = {(one.first_stream, one.second_stream) for one in device.checker.conflicts}
            assert streams == {(between.name, "left"), ("right", "left"), ("left", between.name)}
            assert all(HERE in one.first and HERE in one.second for one in device.checker.conflicts)
            latch.release()
            await asyncio.gather(done, *parties)


class Raw:
    """Graphs on three raw streams of one device, each of them once the one before is done."""

    def __init__(self, device: Device, streams: list[Stream], buffers: list[Any]) -> None:
        self.checker = device.checker
        self.device = device
        self.streams = streams
        self.buffers = buffers

    @classmethod
    def run(cls, body: Callable[[Raw], Awaitable[None]]) -> None:
        async def main() -> None:
            async with aiocuda.open_device(driver=SimulatedDriver(0), check=True) as device:
                await device.load(BUMP)
                await device.load(BLEND)
                streams = [device.stream() for _ in range(3)]
                buffers = [await streams[0].upload(np.zeros(ITEMS, np.uint32)) for _ in range(3)]
                await body(cls(device, streams, buffers))

        with asyncio.Runner(loop_factory=SimulatedLoop) as runner, warnings.catch_warnings():
            warnings.simplefilter("ignore", UnorderedAccessWarning)
            runner.run(main())

    async def graph(self, steps: list[Step], without: int | None) -> tuple[int, bool]:
        """One of its needed edges left out: how many conflicts were found, and was there such an edge?"""
        assert self.checker is not None
        chance = random.Random(len(steps))
        uses = [chance.randrange(3) for _ in steps]
        edges = needed(steps, uses)
        removed = without is not None and bool(edges)
        if removed:
            assert without is not None
            del edges[without % len(edges)]
        operations: list[Any] = []
        for index, step in enumerate(steps):
            stream = self.streams[uses[index]]
            for before, behind in edges:
                if behind == index:
                    stream.wait(operations[before])
            operations.append(enqueue(stream, step, self.buffers))
        found = len(self.checker.conflicts)
        self.checker.conflicts.clear()
        await self.device.drain()
        return found, removed


def enqueue(stream: Stream, step: Step, buffers: list[Any]) -> Any:
    def of(part: Part) -> Any:
        return buffers[part.buffer][part.start : part.stop]

    if step.kind == "download":
        return stream.download(of(step.sources[0]))
    assert step.target is not None
    target = of(step.target)
    if step.kind == "upload":
        return stream.copy(target, np.full(target.shape, step.value, np.uint32))
    if step.kind == "bump":
        return stream.launch(BUMP, 1, 32, target, step.value, target.size)
    if step.kind == "blend":
        return stream.launch(BLEND, 1, 32, target, of(step.sources[0]), of(step.sources[1]), target.size)
    return stream.fill(target, step.value)


def needed(steps: list[Step], uses: list[int]) -> list[tuple[int, int]]:
    """Edges without any one of which two accesses that conflict were not in order."""

    def touches(step: Step) -> list[tuple[Part, bool]]:
        written = [(step.target, True)] if step.target is not None else []
        sources = step.sources if step.kind != "bracket" else ()
        return written + [(part, False) for part in sources]

    def conflict(one: Step, other: Step) -> bool:
        return any(
            (writes or also) and a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
            for a, writes in touches(one)
            for b, also in touches(other)
        )

    before: list[set[int]] = []
    edges: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        known: set[int] = set()
        if uses[index] in last:
            known = before[last[uses[index]]] | {last[uses[index]]}
        for other in reversed(range(index)):  # the nearest first: their own prerequisites need not be named
            if other not in known and conflict(steps[other], step):
                edges.append((other, index))
                known = known | before[other] | {other}
        before.append(known)
        last[uses[index]] = index
    return edges


def plain(seed: int) -> list[Step]:
    chance = random.Random(seed)
    return by_chance(chance, chance.randint(2, 12), broken=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_ordered_graphs_are_not_reported(block: int) -> None:
    async def body(raw: Raw) -> None:
        for seed in range(block * 500, block * 500 + 500):
            found, _ = await raw.graph(plain(seed), None)
            assert found == 0, f"seed {seed}"

    Raw.run(body)


@pytest.mark.slow
def test_every_missing_edge_is_reported() -> None:
    async def body(raw: Raw) -> None:
        reported = seed = 0
        while reported < 500:
            seed += 1
            found, removed = await raw.graph(plain(seed), seed)
            if removed:
                assert found > 0, f"seed {seed}"
                reported += 1

    Raw.run(body)


@pytest.mark.slow
def test_a_coordinator_is_never_reported() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        steps = by_chance(chance, 25)

        async def main(steps: list[Step] = steps, seed: int = seed) -> None:
            async with aiocuda.open_device(driver=SimulatedDriver(seed), check=True) as device:
                await compare(device, steps, max_in_flight=6)
                assert device.checker is not None
                assert device.checker.conflicts == []

        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(main())


@pytest.mark.asyncio
async def test_conflict_of_a_coordinator_and_a_raw_stream_names_both_lines() -> None:
    async with checked() as (device, left, _), AsyncCoordinator(device) as coordinator:
        up = coordinator.upload(ONES)
        with pytest.warns(UnorderedAccessWarning, match=rf"copy on upload-normal-0 at .*{HERE}:\d+, and fill on left"):
            left.fill(up.buffer, 1)
        await coordinator.drain()


@pytest.mark.asyncio
async def test_a_coordinator_can_turn_it_on(device: Device) -> None:
    async with device.stream() as unchecked:
        assert type(unchecked) is Stream
    async with AsyncCoordinator(device, check=True) as coordinator, device.stream() as stream:
        buffer = coordinator.compute_stream.empty(ITEMS, np.uint32)
        async with coordinator.operation("kernel", writes=[buffer]) as bracket:
            assert bracket.stream is not None
        with pytest.warns(UnorderedAccessWarning, match="kernel on compute-normal-0"):
            stream.fill(buffer, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(("value", "check", "checks"), [("1", None, True), ("0", None, False), ("", True, True),
                                                        ("1", False, False)])  # fmt: skip
async def test_environment_answers_for_none(
    monkeypatch: pytest.MonkeyPatch, value: str, check: bool | None, checks: bool
) -> None:
    monkeypatch.setenv("AIOCUDA_CHECK", value)
    async with aiocuda.open_device(driver="host", check=check) as device:
        assert (device.checker is not None) == checks


def test_invalid_value_of_the_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_CHECK", "yes")
    with pytest.raises(InvalidArgumentError, match="it takes 1 or 0"):
        aiocuda.open_device(driver="host")


def test_accesses_of_a_slice_replace_covered_accesses() -> None:
    from aiocuda.lowlevel import Accesses

    chance = random.Random(7)
    for _ in range(300):
        record: Accesses[int] = Accesses()
        writers: list[int | None] = [None] * 20
        readers: list[set[int]] = [set() for _ in range(20)]
        for who in range(15):
            start = chance.randrange(20)
            stop = chance.randint(start + 1, 20)
            assert set(record.last_writers(start, stop)) == {w for w in writers[start:stop] if w is not None}
            assert set(record.readers_since(start, stop)) == set().union(*readers[start:stop])
            if chance.random() < 0.5:
                record.write(start, stop, who)
                writers[start:stop] = [who] * (stop - start)
                readers[start:stop] = [set() for _ in range(start, stop)]
            elif chance.random() < 0.9:
                record.read(start, stop, who)
                for at in range(start, stop):
                    readers[at].add(who)
            else:
                gone = chance.randrange(15)
                record.forget(gone, 0, 20)
                writers = [None if w == gone else w for w in writers]
                for reading in readers:
                    reading.discard(gone)


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", [HostDriver, SimulatedDriver])
async def test_devices_of_one_driver_share_it_while_they_are_open(driver: Callable[..., Any]) -> None:
    with contextlib.closing(driver(devices=3)) as made:
        async with aiocuda.open_device(0, driver=made, check=True) as first:
            async with (
                aiocuda.open_device(1, driver=made) as unchecked,
                aiocuda.open_device(2, driver=made, check=True) as second,
            ):
                assert unchecked.checker is None
                async with AsyncCoordinator(unchecked, check=True):
                    pass
                assert first.checker is not None
                assert first.checker is second.checker is unchecked.checker
            async with aiocuda.open_device(driver="host", check=True) as other:
                assert other.checker is not first.checker
        async with aiocuda.open_device(0, driver=made, check=True) as again:
            assert again.checker is not first.checker
            assert again.checker is not None


@pytest.mark.asyncio
async def test_operation_that_is_done_stands_for_all_before_it() -> None:
    """The host knows that they are done, also those of streams that it has not queried."""
    async with checked() as (device, left, right):
        assert device.checker is not None
        buffer = left.empty(ITEMS, np.uint32)
        left.fill(buffer, 1)
        right.wait(left)
        kept = right.synchronize()
        await kept
        right.fill(buffer, 2)  # it does not conflict with the first one: `right` has waited for that
        await StreamBarrier(1).wait(right, left)
        left.fill(buffer, 3)
        assert device.checker.conflicts == []
        with Latch(device) as latch, pytest.warns(UnorderedAccessWarning, match="fill on left"):
            latch.hold(left)
            left.fill(buffer, 4)
            await right.synchronize()
            right.fill(buffer, 5)


def test_declarations_are_those_of_one_thread() -> None:
    """A coordinator's loop declares accesses, while another thread enqueues on a device of the same driver."""
    driver = HostDriver(devices=2)

    async def race() -> list[Conflict]:
        async with (
            aiocuda.open_device(1, driver=driver, check=True) as device,
            device.stream(name="one") as one,
            device.stream(name="two") as two,
        ):
            buffer = one.empty(ITEMS, np.uint32)
            one.fill(buffer, 1)
            two.fill(buffer, 2)
            assert device.checker is not None
            return device.checker.conflicts

    async def main() -> None:
        async with aiocuda.open_device(0, driver=driver, check=True) as device:
            assert device.checker is not None
            with device.checker.acting_for(SourceLine.of_caller(), ()):
                (conflict,) = await asyncio.to_thread(in_thread, race)
            assert (conflict.first_stream, conflict.second_stream) == ("one", "two")

    with warnings.catch_warnings(), contextlib.closing(driver):
        warnings.simplefilter("ignore", UnorderedAccessWarning)
        asyncio.run(main())
