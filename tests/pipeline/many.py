"""Many items through stages that take as long as chance will have it, for a consumer that is slow at times."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

import numpy as np

from aiocuda import Device, Operation, Pipeline, Slot, Stage
from tests.benchmarks.kernels import nanoseconds, spin
from tests.helpers import AFFINE
from tests.pipeline.steps import assert_quiet

SIZE = 16

#: Seconds that a device stage may take besides.
TIMES = (0.0, 20e-6, 100e-6, 500e-6)


async def many(device: Device, items: int, seed: int, *, replay: bool = False) -> None:
    """Row I5: the output is that of one item after the other, three slots are busy, and nothing grows."""
    chance = random.Random(seed)
    times = [chance.choices(TIMES, (10, 4, 2, 1), k=2) for _ in range(997)]
    pauses = [chance.choices((None, 0.0, 1e-4), (10, 4, 1), k=2) for _ in range(991)]

    def delay(slot: Slot, stage: int) -> None:
        seconds = times[slot.item % len(times)][stage]
        if seconds:
            slot.stream.launch(spin(seconds), 1, 1, nanoseconds(seconds))

    def fill(slot: Slot) -> None:
        slot.pinned("in", SIZE, np.uint32)[:] = slot.item

    def upload(slot: Slot) -> Operation[None]:
        return slot.stream.copy(slot.buffer("x", SIZE, np.uint32), slot.pinned("in", SIZE, np.uint32))

    def work(slot: Slot) -> None:
        delay(slot, 0)

    async def check(slot: Slot) -> None:
        await pause(pauses[slot.item % len(pauses)][0])

    def compute(slot: Slot) -> Operation[None]:
        return slot.stream.launch(AFFINE, 1, 32, slot.buffer("x", SIZE, np.uint32), SIZE, 3, 7)

    def more(slot: Slot) -> None:
        delay(slot, 1)

    def download(slot: Slot) -> Operation[Any]:
        return slot.stream.download(slot.buffer("x", SIZE, np.uint32), slot.pinned("out", SIZE, np.uint32))

    stages = [
        Stage("upload", upload, prepare=fill),
        Stage("work", work),
        Stage("compute", compute),
        Stage("more", more),
        Stage("check", check, after="upload"),
        Stage("download", download, after="more"),
    ]
    found, expected, live = hashlib.sha256(), hashlib.sha256(), list[int]()
    async with Pipeline(device, stages, replay=["upload", "compute", "download"] if replay else False) as pipeline:
        item = 0
        async for result in pipeline.run(range(items)):
            found.update(result)
            expected.update(np.full(SIZE, 3 * item + 7, np.uint32).tobytes())
            await pause(pauses[item % len(pauses)][1])
            item += 1
            if not item % 100:
                live.append(device.memory.statistics().live_bytes)
        assert item == pipeline.statistics().iterations == items
        assert found.digest() == expected.digest(), f"seed {seed}"
        assert pipeline.statistics().peak_busy_slots == 3
        assert max(live) == live[0], f"seed {seed}"
        assert set(pipeline.ring.states) == {"free"}
    assert_quiet(pipeline)


async def pause(seconds: float | None) -> None:
    if seconds is not None:
        await asyncio.sleep(seconds)
