"""Stages and items that the tests of pipelines share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

import numpy as np

from aiocuda import Device, Operation, Pipeline, Slot, Stage
from tests.helpers import AFFINE, Latch, until

SIZE = 1024


def up(slot: Slot) -> Operation[None]:
    """The item, as so many integers, to the device."""
    source = slot.pinned("source", SIZE, np.uint32)
    source[:] = slot.item
    return slot.stream.copy(slot.buffer("data", SIZE, np.uint32), source)


def triple(slot: Slot) -> Operation[None]:
    """x → 3x + 1."""
    return slot.stream.launch(AFFINE, 4, 256, slot.buffer("data", SIZE, np.uint32), SIZE, 3, 1)


def down(slot: Slot) -> Operation[Any]:
    """An array of its own."""
    return slot.stream.download(slot.buffer("data", SIZE, np.uint32))


def stages() -> list[Stage]:
    return [Stage("upload", up), Stage("compute", triple), Stage("download", down)]


def value(result: Any) -> int:
    """The one number that a result consists of."""
    (only,) = np.unique(result)
    return int(only)


async def values(pipeline: Pipeline, source: Iterable[Any] | AsyncIterable[Any], **how: Any) -> list[int]:
    return [value(result) async for result in pipeline.run(source, **how)]


def assert_quiet(pipeline: Pipeline, streams: int = 0) -> None:
    """Check that no work is unfinished, all slots are free, and only the test's streams are open."""
    device: Device = pipeline.device
    statistics = device.statistics()
    assert set(pipeline.ring.states) == {"free"}
    assert pipeline.ring.busy == 0
    assert statistics.in_flight == 0
    assert statistics.streams == streams


async def held(latch: Latch) -> None:
    """A kernel of the latch runs."""
    await until(lambda: latch.running == 1, "a held kernel")


async def counting(upto: int, told: list[int] | None = None) -> AsyncGenerator[int, None]:
    """Numbers from 0, and which of them were asked for."""
    for number in range(upto):
        if told is not None:
            told.append(number)
        yield number
