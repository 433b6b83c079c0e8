"""V10, P19: pipelines of any shape, however they end, on the simulated driver; a seed replays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocuda import Device, DeviceFault, Operation, Pipeline, Slot, Stage, Stream, UnsupportedError
from aiocuda.pipeline._meter import Meter
from aiocuda.testing import Upset
from tests.budget import portions
from tests.helpers import AFFINE
from tests.pipeline.many import many
from tests.pipeline.steps import assert_quiet, value
from tests.pipeline.virtual import in_virtual_time

SIZE = 16
ITEMS = 12

#: In so many programs stages are called for each item; in later programs they are captured and replayed.
LIVE = 8
SEEDS = 14


class BrokenError(Exception):
    """What a stage fails with."""


class Program:
    """Stages that fork and join at random; each has a value that follows from those of the stages before it."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.replay = seed >= LIVE  # what device stages do is captured
        self.depth = chance.randint(1, 4)
        self.fails: tuple[int, int] | None = None  # stage and item
        self.inside: dict[int, int] = {}  # which item each host stage is at
        self.passed: dict[int, list[int]] = {}
        self.busy = 0
        count = chance.randint(1, 6)
        self.before: list[tuple[int, ...]] = []
        for number in range(count):
            earlier = tuple(one for one in range(number) if chance.random() < 0.5)
            self.before.append(earlier if chance.random() < 0.4 else (number - 1,) if number else ())
        self.awaits = [chance.random() < 0.35 for _ in range(count)]
        #: Device stages that do nothing for so many items in four, and leave the work to the next stage.
        self.idle = [chance.choice([0, 0, 1, 3]) if before and not self.replay else 0 for before in self.before]
        #: Stages that work in a stream of their own, which waits for the pipeline's.
        self.elsewhere = [not self.replay and chance.random() < 0.2 for _ in range(count)]
        self.others: dict[int, Stream] = {}
        self.stages = [self._stage(number) for number in range(count)]
        self.stages.append(Stage("end", self._download, after=f"s{count - 1}"))
        device = [f"s{number}" for number in range(count) if not self.awaits[number]]
        self.streams = [chance.sample(device, 2)] if len(device) > 1 and chance.random() < 0.3 else None

    def _stage(self, number: int) -> Stage:
        name, after = f"s{number}", [f"s{one}" for one in self.before[number]]
        if self.awaits[number]:
            return Stage(name, self._host(number), after=after)
        if not self.replay:
            return Stage(name, self._device(number), after=after)

        def prepare(slot: Slot) -> None:
            self._begin(number, slot)
            slot.pinned(name, SIZE, np.uint32)[:] = slot.item

        return Stage(name, self._device(number), after=after, prepare=prepare)

    def _download(self, slot: Slot) -> Operation[Any]:
        out = slot.pinned("end", SIZE, np.uint32) if self.replay else None
        return slot.stream.download(self._buffer(slot, len(self.before) - 1), out)

    def pipeline(self, device: Device, depth: int | None = None) -> Pipeline:
        return Pipeline(device, self.stages, depth or self.depth, streams=self.streams, replay=self.replay)

    def expected(self, item: int, number: int | None = None) -> int:
        """What comes of an item."""
        number = len(self.before) - 1 if number is None else number
        before = self.before[number]
        if self._does_nothing(number, item):
            return self.expected(item, before[0])
        return 3 * (self.expected(item, before[0]) if before else item) + number

    def _does_nothing(self, number: int, item: int) -> bool:
        return not self.awaits[number] and item % 4 < self.idle[number]

    def _buffer(self, slot: Slot, number: int) -> Any:
        """Where a stage's value lies: it does nothing, where it lies already."""
        while self._does_nothing(number, slot.item):
            number = self.before[number][0]
        return _buffer(slot, number)

    def _begin(self, number: int, slot: Slot) -> None:
        self.passed.setdefault(number, []).append(slot.item)
        if self.fails == (number, slot.item):
            raise BrokenError(slot.item)

    def _device(self, number: int) -> Callable[[Slot], Any]:
        before = self.before[number]
        returns = self.chance.randrange(3)

        def function(slot: Slot) -> Any:
            if not self.replay:
                self._begin(number, slot)
            if self._does_nothing(number, slot.item):
                return (None, (), slot.stream.tail)[returns]
            own, stream = _buffer(slot, number), slot.stream
            if self.elsewhere[number]:
                stream = self._other(number, slot)
                stream.wait(slot.stream)
            if before:
                first = stream.copy(own, self._buffer(slot, before[0]))
            elif self.replay:
                first = stream.copy(own, slot.pinned(f"s{number}", SIZE, np.uint32))
            else:
                first = stream.copy(own, np.full(SIZE, slot.item, np.uint32))
            for other in before[1:]:  # the driver finds a read without an order
                stream.copy(slot.buffer(f"{number} of {other}", SIZE, np.uint32), self._buffer(slot, other))
            last = stream.launch(AFFINE, 1, 32, own, SIZE, 3, number)
            if stream is not slot.stream and not returns:
                slot.stream.wait(last)
            return (None, last, [first, last])[returns]

        return function

    def _other(self, number: int, slot: Slot) -> Stream:
        found = self.others.get(number)
        if found is None or found.closed:
            found = self.others[number] = slot.stream.device.stream()
        return found

    async def aclose(self) -> None:
        """Wait for the work in the stages' own streams, which the pipeline does not wait for."""
        for stream in self.others.values():
            await stream.aclose()

    def _host(self, number: int) -> Callable[[Slot], Awaitable[Any]]:
        before = self.before[number]
        pauses = [self.chance.choice([0.0, 1e-5, 1e-3]) for _ in range(ITEMS)]
        returns = self.chance.randrange(3)

        async def function(slot: Slot) -> Any:
            self._begin(number, slot)
            assert self.inside.setdefault(number, slot.item) == slot.item, "two items in one host stage"
            try:
                stream = slot.stream
                values = [value(await stream.download(self._buffer(slot, other))) for other in before]
                await asyncio.sleep(pauses[slot.item % ITEMS])
                assert slot.stream is stream
                array = np.full(SIZE, 3 * (values[0] if values else slot.item) + number, np.uint32)
                operation: Operation[Any] = stream.copy(_buffer(slot, number), array)
                if returns == 1:
                    await operation
                return operation if returns else None
            finally:
                del self.inside[number]

        return function


def _buffer(slot: Slot, number: int) -> Any:
    return slot.buffer(f"s{number}", SIZE, np.uint32)


async def source(upto: int) -> AsyncGenerator[int, None]:
    for number in range(upto):
        await asyncio.sleep(0 if number % 3 else 1e-4)
        yield number


def simulate(seed: int, main: Callable[[Program, Pipeline, list[int]], Awaitable[None]], **options: Any) -> None:
    """Run it, then look at what is left, and let the pipeline run again."""
    program = Program(seed)

    async def run(device: Device) -> None:
        pipeline = program.pipeline(device)
        found: list[int] = []
        await main(program, pipeline, found)
        assert found == [program.expected(item) for item in range(len(found))]
        assert pipeline.statistics().peak_busy_slots <= program.depth
        assert set(pipeline.ring.states) == {"free"}
        assert not program.inside
        assert all(passed == sorted(passed) for passed in program.passed.values())
        driver: Any = device.driver
        if driver.fault is None:
            await program.aclose()
            assert_quiet(pipeline)
        if driver.fault is None and not driver.upsets.planned:  # else it would come now
            program.fails = None
            program.passed.clear()
            again = [value(result) async for result in pipeline.run(source(4))]
            assert again == [program.expected(item) for item in range(4)]
            await program.aclose()
            assert_quiet(pipeline)
            await pipeline.aclose()
            gc.collect()
            await asyncio.sleep(0.2)  # virtual: a watchdog's tick or two
            assert device.memory.statistics().live_bytes == 0

    policy = "balanced" if seed % 4 == 0 else "efficient"
    with pytest.MonkeyPatch.context() as patch:
        # Timed stages have two more events, before and after their work.
        patch.setattr(Meter, "begin", lambda meter: program.chance.random() < 0.25)
        in_virtual_time(run, seed, policy=policy, **options)


async def consume(pipeline: Pipeline, found: list[int], pause: float = 0.0, upto: int = ITEMS) -> None:
    async with contextlib.aclosing(pipeline.run(source(upto))) as results:
        async for result in results:
            found.append(value(result))
            await asyncio.sleep(pause)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_results_in_order_whatever_takes_long(seed: int) -> None:
    """I5: a slow consumer, too."""

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        await consume(pipeline, found, program.chance.choice([0.0, 1e-3]))
        assert len(found) == ITEMS
        assert all(passed == list(range(ITEMS)) for passed in program.passed.values())

    simulate(seed, main)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_failure_in_any_stage_at_any_item(seed: int) -> None:
    """P19: it ends with that error, after what came before it."""

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        stage, item = program.chance.randrange(len(program.before)), program.chance.randrange(ITEMS)
        program.fails = stage, item
        with pytest.raises(BrokenError) as caught:
            await consume(pipeline, found)
        assert caught.value.args == (item,)
        assert caught.value.__notes__ == [f"in stage 's{stage}' of item {item}, counted from 0"]
        assert len(found) == item

    simulate(seed, main)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_consumer_that_leaves_or_is_cancelled_at_any_moment(seed: int) -> None:
    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        chance = program.chance
        if chance.random() < 0.3:
            async with contextlib.aclosing(pipeline.run(source(ITEMS))) as results:
                async for result in results:
                    found.append(value(result))
                    if chance.random() < 0.3:
                        return
        else:
            task = asyncio.create_task(consume(pipeline, found))
            await asyncio.sleep(10 ** chance.uniform(-5, -2))
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() or len(found) == ITEMS

    simulate(seed, main)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_single_iterations_that_fail_and_are_cancelled(seed: int) -> None:
    """Each call raises its own failure; the others are not affected."""

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        chance = program.chance
        program.fails = chance.randrange(len(program.before)), chance.randrange(ITEMS)

        async def one(item: int) -> int:
            return value(await pipeline.execute_iteration(item))  # which lies in the slot's memory, if it is replayed

        tasks = [asyncio.create_task(one(item)) for item in range(ITEMS)]
        await asyncio.sleep(10 ** chance.uniform(-5, -2))
        cancelled = {chance.randrange(ITEMS) for _ in range(3)}
        cancelled = {item for item in cancelled if tasks[item].cancel()}
        await asyncio.wait(tasks)
        for item, task in enumerate(tasks):
            if task.cancelled():
                assert item in cancelled
            elif task.exception() is not None:
                assert isinstance(task.exception(), BrokenError)
                assert item == program.fails[1]
            else:
                assert task.result() == program.expected(item)

    simulate(seed, main)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tickets_that_fail_and_calls_that_are_cancelled(seed: int) -> None:
    """Each ticket has the outcome of its own item, in any order; a call that is cancelled begins nothing."""

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        chance = program.chance
        program.fails = chance.randrange(len(program.before)), chance.randrange(ITEMS)
        tickets: dict[int, Any] = {}
        for item in range(ITEMS):
            call = asyncio.create_task(pipeline.submit(item))
            if chance.random() < 0.2:
                await asyncio.sleep(10 ** chance.uniform(-5, -3))
                call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                tickets[item] = call.result()
        for item in chance.sample(sorted(tickets), len(tickets)):
            try:
                assert value(await tickets[item]) == program.expected(item)
            except BrokenError:
                assert item == program.fails[1]

    simulate(seed, main)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tickets_of_a_device_that_faults(seed: int) -> None:
    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        tickets = []
        with contextlib.suppress(DeviceFault):
            for item in range(ITEMS):
                tickets.append(await pipeline.submit(item))  # noqa: PERF401 - it may raise
        outcomes = await asyncio.gather(*tickets, return_exceptions=True)
        for item, outcome in enumerate(outcomes):
            assert isinstance(outcome, DeviceFault) or value(outcome) == program.expected(item)

    simulate(seed, main, upsets=[Upset("fault", 1 + seed % 12 * 4)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_device_that_faults_at_any_moment(seed: int) -> None:
    """P3, P22: one failure, and no await hangs."""

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        with contextlib.suppress(DeviceFault):
            await consume(pipeline, found)
            assert len(found) == ITEMS
        if pipeline.device.driver.fault is not None:
            with pytest.raises(DeviceFault):
                await pipeline.execute_iteration(0)

    simulate(seed, main, upsets=[Upset("fault", 1 + seed % 12 * 4)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_driver_that_refuses_at_any_moment(seed: int) -> None:
    """Also what the stage does not return, and the waits and marks that are the pipeline's own."""
    verb = ("upload", "copy", "launch", "download", "event_record", "stream_wait")[seed % 6]

    async def main(program: Program, pipeline: Pipeline, found: list[int]) -> None:
        try:
            await consume(pipeline, found)
            assert len(found) == ITEMS
        except* UnsupportedError:  # itself, and not that something was skipped for it
            pass

    simulate(seed, main, upsets=[Upset("refuse", 1 + seed % 7, verb, code=801)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_loop_that_closes_in_the_middle(seed: int) -> None:
    """P11: running tasks are cancelled, no failure is reported, and the driver finds no violation."""
    program = Program(seed)
    left: list[Any] = []
    told: list[Any] = []

    async def main(device: Device) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        pipeline = program.pipeline(device)
        results = pipeline.run(source(ITEMS))
        left.append(results)
        for _ in range(program.chance.randint(0, 3)):
            await anext(results)
        left.append(asyncio.create_task(consume(Program(seed).pipeline(device, 2), [])))
        await asyncio.sleep(10 ** program.chance.uniform(-5, -3))
        left[1].cancel()
        if seed % 2:
            raise InterruptedError  # it leaves the device without a drain

    with contextlib.suppress(InterruptedError):
        in_virtual_time(main, seed)
    assert left[1].done()
    assert told == []


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("items", portions(5000))
def test_many_items_with_random_times_and_a_slow_consumer(items: int, replay: bool) -> None:
    """I5: the soak takes 100 000."""
    count = items * 3 // 10 if replay else items
    in_virtual_time(lambda device: many(device, count, seed=7, replay=replay), seed=7)
