"""Whoever waits for all of a stream waits for what that one was told to wait for, where no operation says so, too."""

from __future__ import annotations

import numpy as np

from aiocuda import Device, Operation, Pipeline, Slot, Stage, StreamGroup
from tests.pipeline.virtual import in_virtual_time, kernel

ITEMS = 24


def test_a_stage_that_works_in_a_stream_that_waits_for_its_own() -> None:
    """After 16 items, which are timed, its own stream has no operation of the item: only a wait for the one before."""
    early: list[int] = []

    async def main(device: Device) -> None:
        other = device.stream()
        uploads: dict[int, Operation[None]] = {}

        def upload(slot: Slot) -> Operation[None]:
            slot.buffer("data", 16, np.uint8)
            uploads[slot.item] = slot.stream.launch(kernel(5.0), 1, 1, 0)
            return uploads[slot.item]

        def compute(slot: Slot) -> Operation[None]:
            item = slot.item
            other.wait(slot.stream)
            computed = other.launch(kernel(1.0), 1, 1, 0)
            computed.add_done_callback(lambda _: _is_done(uploads[item]) or early.append(item))
            return computed

        async with Pipeline(device, [Stage("upload", upload), Stage("compute", compute)]) as pipeline:
            async for _ in pipeline.run(range(ITEMS)):
                pass
        await other.aclose()

    in_virtual_time(main)
    assert early == []


def _is_done(operation: Operation[None]) -> bool:
    """Has the device done it, whether we have been told or not?"""
    lease = operation._lease
    return operation.done() or lease is None or bool(operation._lane._driver.event_query(lease.handle))


def test_a_stream_that_waits_for_one_of_a_group_behind_a_barrier() -> None:
    """That one has been given nothing since; it waits for the others of its group, and so does whoever waits for it."""
    early: list[bool] = []

    async def main(device: Device) -> None:
        outside = device.stream()
        async with StreamGroup(device, ("a", "b")) as group:
            await device.load(kernel(1.0))
            await device.load(kernel(5.0))
            long = group["a"].launch(kernel(5.0), 1, 1, 0)
            group.barrier()
            outside.wait(group["b"])
            behind = outside.launch(kernel(1.0), 1, 1, 0)
            behind.add_done_callback(lambda _: early.append(not _is_done(long)))
            await behind
            await long
        await outside.aclose()

    in_virtual_time(main)
    assert early == [False]
