"""The sample of items that a pipeline times: how exact its figures are, and how little it costs."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import pytest

from aiocuda import Device, Operation, Pipeline, PipelineStats, Slot, Stage
from aiocuda.pipeline._meter import Meter
from tests.pipeline.virtual import in_virtual_time, kernel, launches

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

SHAPES: dict[str, Callable[[], tuple[Times, Sequence[Any]]]] = {
    "balanced": lambda: (constant(1, 1, 1, 1, 1, 1), CHAIN),
    "long upload": lambda: (constant(6, 0.7, 0.8, 0.4, 0.6, 1), CHAIN),
    "fork": lambda: (constant(1, 2, 3, 1.5, 2.5, 1), FORK),
    "brief": lambda: (constant(0.02, 0.03, 0.02, 0.04, 0.03, 0.02), CHAIN),
    "varying, one dominates": lambda: (varying(1, 0.5, 0.7, 4, 0.9, 0.3, 0.5), CHAIN),
    "varying fork": lambda: (varying(1, 1, 2, 3, 1.5, 2.5, 1), FORK),
}


class AllTimed(Meter):
    """A meter that times each item."""

    def begin(self) -> bool:
        super().begin()
        return True


def figures(shape: str, meter: type[Meter]) -> PipelineStats:
    """The figures of 200 items whose stages launch kernels that take these times."""

    def spins(time: Iterator[float]) -> Callable[[Slot], Operation[Any]]:
        return lambda slot: slot.stream.launch(kernel(next(time)), 1, 1, 0)

    async def main(device: Device) -> PipelineStats:
        await device.load(*{kernel(ms) for time in SHAPES[shape]()[0] for ms in itertools.islice(time, 200)})
        stages = [
            Stage(str(position), spins(time), after=before)
            for position, (time, before) in enumerate(zip(*SHAPES[shape](), strict=True))
        ]
        pipeline = Pipeline(device, stages, 3)
        pipeline._resources.meter = meter(pipeline._resources.plan)
        async for _ in pipeline.run(range(200)):
            pass
        return pipeline.statistics()

    return in_virtual_time(main)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_sample_agrees_with_full_measurement(shape: str) -> None:
    full, sampled = (figures(shape, meter) for meter in (AllTimed, Meter))
    within = 0.05 if "varying" in shape else 1e-3
    assert sampled.utilisation == pytest.approx(full.utilisation, abs=within)
    assert sampled.overlap_efficiency == pytest.approx(full.overlap_efficiency, abs=within)
    assert sampled.bottleneck().name == full.bottleneck().name


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


def calls(count: int, items: int, depth: int) -> int:
    """Calls of Python for so many items of so many stages."""

    async def main(device: Device) -> int:
        stages = [Stage(str(number), launches(1.0)) for number in range(count)]
        async with Pipeline(device, stages, depth) as pipeline:
            async for _ in pipeline.run(range(depth)):
                pass
            with Calls() as counted:
                async for _ in pipeline.run(range(items)):
                    pass
        return counted.count

    return in_virtual_time(main)


@pytest.mark.slow
@pytest.mark.parametrize("grows", ["items", "depth", "stages"])
def test_work_grows_in_proportion(grows: str) -> None:
    few, many = {
        "items": ((6, 25, 3), (6, 100, 3)),
        "depth": ((4, 32, 4), (4, 128, 16)),
        "stages": ((3, 25, 3), (12, 25, 3)),
    }[grows]
    assert calls(*many) <= 6 * calls(*few)
