"""The sample of items that a pipeline of many stages times: how exact its figures are, and how little it costs."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import pytest

from aiocuda import Device, Operation, Pipeline, PipelineStats, Slot, Stage
from aiocuda.pipeline._meter import Meter, WindowMeter, WindowSchedule, meter_of
from aiocuda.pipeline._plan import Plan
from tests.budget import spread
from tests.pipeline.virtual import in_virtual_time, kernel, launches

#: How far a figure of the sample may be from full measurement.
WITHIN = 0.02

#: An endless sequence of milliseconds for each stage.
Times = Sequence[Iterator[float]]


def constant(*ms: float) -> Times:
    return [itertools.repeat(one) for one in ms]


def varying(seed: int, *ms: float, share: float = 0.2) -> Times:
    """Each time differs from the given one by up to so much, as a share."""
    chance = random.Random(seed)
    return [itertools.cycle([round(one * chance.uniform(1 - share, 1 + share), 2) for _ in range(997)]) for one in ms]


CHAIN = (None,) * 6

#: A fork after the first stage, and a join.
FORK = (None, "0", "0", ("1", "2"), None, None)

SHAPES: dict[str, Callable[[int], tuple[Times, Sequence[Any]]]] = {
    "balanced": lambda seed: (constant(1, 1, 1, 1, 1, 1), CHAIN),
    "one dominates": lambda seed: (constant(0.5, 0.7, 4, 0.9, 0.3, 0.5), CHAIN),
    "long upload": lambda seed: (constant(6, 0.7, 0.8, 0.4, 0.6, 1), CHAIN),
    "brief": lambda seed: (constant(0.02, 0.03, 0.02, 0.04, 0.03, 0.02), CHAIN),
    "fork": lambda seed: (constant(1, 2, 3, 1.5, 2.5, 1), FORK),
    "varying": lambda seed: (varying(seed, 1, 1.2, 1, 0.9, 1.1, 1), CHAIN),
    "varying, one dominates": lambda seed: (varying(seed, 0.5, 0.7, 4, 0.9, 0.3, 0.5), CHAIN),
    "varying, long upload": lambda seed: (varying(seed, 4, 0.5, 0.8, 0.4, 0.6, 1), CHAIN),
    "varying fork": lambda seed: (varying(seed, 1, 2, 3, 1.5, 2.5, 1), FORK),
    "brief, varying": lambda seed: (varying(seed, 0.1, 0.12, 0.1, 0.09, 0.11, 0.1), CHAIN),
    "brief, varying fork": lambda seed: (varying(seed, 0.1, 0.2, 0.3, 0.15, 0.25, 0.1), FORK),
    "brief, varying, long upload": lambda seed: (varying(seed, 0.4, 0.05, 0.08, 0.04, 0.06, 0.1), CHAIN),
}


class At:
    """A timing event of the model."""

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def elapsed_ms(self, end: At) -> float:
        return end._ms - self._ms


def computed(
    shape: str, depth: int, items: int, seed: int = 1, pauses: Callable[[int], float] = lambda item: 0.0
) -> tuple[PipelineStats, PipelineStats]:
    """The figures of full measurement and of the sample, of a pipeline that is computed and not run.

    A stage begins with an item when it has ended the one before, the stages before it have ended the item, and a slot
    is free. ``pauses`` returns for how many milliseconds the consumer has an item's result.
    """
    times, after = SHAPES[shape](seed)
    plan = Plan([Stage(str(position), lambda slot: None, after=before) for position, before in enumerate(after)])
    full, sampled = meter_of(plan, depth), meter_of(plan, depth)
    assert isinstance(full, WindowMeter)
    full._windows.end = items
    ended = [0.0] * len(times)  # by each stage
    released = [0.0] * items
    spans: list[list[tuple[float, float]]] = []
    in_sample: list[bool] = []
    seconds: list[float] = []

    def end(item: int) -> None:
        for meter in (full, sampled):
            if meter is full or in_sample[item]:
                for position, (begin, upto) in enumerate(spans[item]):
                    meter.add_device_time(position, item, At(begin), At(upto))  # type: ignore[arg-type]
            meter.add_item(seconds[item])

    for item in range(items):
        if item >= depth:
            end(item - depth)
        full.begin()
        in_sample.append(sampled.begin())
        spans.append([])
        for position, time in enumerate(times):
            before = [spans[item][one][1] for one in plan.prerequisites[position]]
            begin = max([released[item - depth] if item >= depth else 0.0, ended[position], *before])
            ended[position] = begin + next(time)
            spans[item].append((begin, ended[position]))
        result = max(released[item - 1], *(upto for _, upto in spans[item]))
        seconds.append((result - (released[item - depth] if item >= depth else 0.0)) * 1e-3)
        released[item] = result + pauses(item)
    for item in range(max(0, items - depth), items):
        end(item)
    ring: Any = SimpleNamespace(busy_seconds=released[-1] * 1e-3, peak_busy=depth)
    return full.statistics(ring), sampled.statistics(ring)


def assert_agree(full: PipelineStats, sampled: PipelineStats) -> None:
    assert sampled.utilisation == pytest.approx(full.utilisation, abs=WITHIN)
    assert sampled.overlap_efficiency == pytest.approx(full.overlap_efficiency, abs=WITHIN)


@pytest.mark.parametrize("depth", [1, 3, 6, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_sample_of_six_stages_agrees_with_full_measurement(shape: str, depth: int) -> None:
    for items in (400,) if "varying" in shape else (1, 24, 40, 150):
        full, sampled = computed(shape, depth, items)
        assert_agree(full, sampled)
        if shape.endswith(("one dominates", "long upload")):
            assert sampled.bottleneck().name == full.bottleneck().name


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3, 6, 16])
@pytest.mark.parametrize("shape", spread([shape for shape in SHAPES if shape.startswith("brief")]))
def test_rare_sample_of_brief_items_agrees_with_full_measurement(shape: str, depth: int) -> None:
    assert_agree(*computed(shape, depth, 4000))


@pytest.mark.parametrize("shape", ["balanced", "varying", "brief", "brief, varying"])
@pytest.mark.parametrize("every", [10, 97])
def test_pauses_of_the_consumer_are_no_work(shape: str, every: int) -> None:
    """Also pauses that come between the windows. A window that has one counts too much: many items level that."""
    full, sampled = computed(shape, 3, 2000, pauses=lambda item: 0.0 if item % every else 0.5 * every)
    assert full.utilisation < 0.98
    assert_agree(full, sampled)


def test_items_that_recur_with_a_period_are_not_counted_too_often() -> None:
    """Each period of the windows begins with such an item, and each window lies elsewhere in its period."""
    windows = WindowSchedule(3)
    begins, first = [], windows.end
    for _ in range(100):
        windows.advance()
        begins.append((windows.begin - first) % 64)
        assert windows.end - windows.begin == 8
    assert len(set(begins)) > 20


@pytest.mark.parametrize("depth", [1, 3, 10, 100])
def test_one_item_in_eight_is_timed_and_windows_have_room_between_them(depth: int) -> None:
    windows = WindowSchedule(depth)
    first = end = windows.end
    timed = 0
    for _ in range(100):
        windows.advance()
        assert windows.begin >= end + depth  # then the items of the window before have ended
        timed += windows.end - windows.begin
        end = windows.end
    assert timed / (end - first) == pytest.approx(1 / 8, rel=0.02)


def timed_items(milliseconds: Sequence[float], depth: int = 3) -> list[int]:
    """The numbers of the items that are timed, of items that take so long in each of six stages."""
    plan = Plan([Stage(str(position), lambda slot: None) for position in range(6)])
    meter = meter_of(plan, depth)
    timed: list[int] = []
    begin = 0.0
    for number, time in enumerate(milliseconds):
        if meter.begin():
            timed.append(number)
            for position in range(6):
                at = begin + position * time
                meter.add_device_time(position, number, At(at), At(at + time))  # type: ignore[arg-type]
        meter.add_item(max(6, depth) * time * 1e-3)
        begin += time
    return timed


def test_one_item_in_64_is_timed_while_items_are_brief() -> None:
    """As in a pipeline of three stages, whose meter times single items."""
    timed = timed_items([0.01] * 20_000)
    assert len([item for item in timed if item < 400]) == pytest.approx(24 + 376 / 8, abs=8)
    assert len([item for item in timed if item >= 4000]) == pytest.approx(16_000 / 64, abs=8)
    timed = timed_items([1.0] * 20_000)
    assert len([item for item in timed if item >= 4000]) == pytest.approx(16_000 / 8, abs=8)


def test_windows_of_brief_items_are_spread_evenly() -> None:
    """Items that recur with the period of the windows are not counted too often."""
    begins = [item for item in timed_items([0.01] * 40_000) if item >= 4000][::8]
    phases = sorted((item - 24) % 64 for item in begins)
    assert max(after - before for before, after in itertools.pairwise(phases)) <= 4


def test_items_that_become_slow_are_timed_soon() -> None:
    """The next windows are not left out, so the figures do not stay those of the brief items."""
    timed = timed_items([0.01] * 10_000 + [5.0] * 1000)
    assert min(item for item in timed if item >= 10_003) < 10_003 + 2 * 64
    assert len([item for item in timed if item >= 10_000]) == pytest.approx(1000 / 8, abs=16)


class Compared(WindowMeter):
    """A meter that times all items, and gives another one those that it would time."""

    def __init__(self, sampled: Meter) -> None:
        super().__init__(sampled._plan, sampled._depth, sampled._processing)
        self.sampled = sampled
        self._windows.end = 1 << 60
        self._in_sample: list[bool] = []  # by the item's number

    def begin(self) -> bool:
        self._in_sample.append(self.sampled.begin())
        return super().begin()

    def add_device_time(self, position: int, number: int, start: Any, end: Any) -> None:
        super().add_device_time(position, number, start, end)
        if self._in_sample[number]:
            self.sampled.add_device_time(position, number, start, end)

    def add_item(self, seconds: float) -> None:
        super().add_item(seconds)
        self.sampled.add_item(seconds)


def launching(shape: str) -> list[Stage]:
    """Stages with kernels that take these times."""
    times, after = SHAPES[shape](1)

    def spins(time: Iterator[float]) -> Callable[[Slot], Operation[Any]]:
        return lambda slot: slot.stream.launch(kernel(next(time)), 1, 1, 0)

    return [
        Stage(str(position), spins(time), after=before)
        for position, (time, before) in enumerate(zip(times, after, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["balanced", "varying, one dominates", "varying fork"])
def test_sample_agrees_with_full_measurement_of_the_same_run(shape: str) -> None:
    async def main(device: Device) -> None:
        pipeline = Pipeline(device, launching(shape), 3)
        full = pipeline._resources.meter = Compared(pipeline._resources.meter)
        async for _ in pipeline.run(range(200)):
            pass
        ring = pipeline._resources.ring
        assert_agree(full.statistics(ring), full.sampled.statistics(ring))
        assert sum(full._in_sample) < 64

    in_virtual_time(main)


# -- what it costs


class Calls:
    """Counts Python's calls, of functions written in C as well."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def calls(count: int, items: int, depth: int, ms: float = 1.0, before: int = 0) -> tuple[int, int]:
    """Calls of Python, and events recorded, for so many items of so many stages, after ``before`` other items."""

    async def main(device: Device) -> tuple[int, int]:
        driver: Any = device.driver
        records = 0
        record = driver.event_record

        def recorded(*arguments: Any, **named: Any) -> Any:
            nonlocal records
            records += 1
            return record(*arguments, **named)

        driver.event_record = recorded  # before the pipeline opens its streams, which keep the driver's functions
        stages = [Stage(str(number), launches(ms)) for number in range(count)]
        async with Pipeline(device, stages, depth) as pipeline:
            async for _ in pipeline.run(range(depth)):
                pass
            pipeline.reset_statistics()
            meter = pipeline._resources.meter
            for _ in range(before):
                meter.begin()
                meter.add_item(ms * 1e-3)
            records = 0
            with Calls() as counted:
                async for _ in pipeline.run(range(items)):
                    pass
        assert records >= count * items
        return counted.count, records

    return in_virtual_time(main)


@pytest.mark.slow
@pytest.mark.parametrize("ms", [0.05, 1.0])
def test_item_and_stage_of_six_stages_costs_little_more_than_of_three(ms: float) -> None:
    three, six = (calls(count, 100, 3, ms) for count in (3, 6))
    for few, many in zip(three, six, strict=True):
        assert many / 6 <= 1.3 * few / 3


@pytest.mark.slow
def test_brief_item_and_stage_of_four_stages_costs_no_more_than_of_three() -> None:
    three, four = (calls(count, 512, 3, 0.05, before=4000) for count in (3, 4))
    for few, many in zip(three, four, strict=True):
        assert many / 4 <= 1.05 * few / 3


@pytest.mark.slow
@pytest.mark.parametrize("grows", ["items", "depth", "stages"])
def test_work_grows_in_proportion(grows: str) -> None:
    few, many = {
        "items": ((6, 25, 3), (6, 100, 3)),
        "depth": ((4, 32, 4), (4, 128, 16)),
        "stages": ((3, 25, 3), (12, 25, 3)),
    }[grows]
    assert calls(*many)[0] <= 6 * calls(*few)[0]
