"""A wait for the whole of a stream includes the device-side waits of that stream that no operation represents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aiocuda import (
    Device,
    InvalidArgumentError,
    Kernel,
    Operation,
    Pipeline,
    SkippedError,
    Slot,
    Stage,
    Stream,
    StreamGroup,
)
from aiocuda._core import stream_operation
from aiocuda.device.streams._joins import join
from aiocuda.driver.simulated import Upset
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


def test_a_stage_that_enqueues_nothing_for_an_item() -> None:
    """Work that waits for the stream also waits for everything that the stream waits for."""
    early: list[int] = []

    async def main(device: Device) -> None:
        uploads: dict[int, Operation[None]] = {}

        def upload(slot: Slot) -> Operation[None]:
            uploads[slot.item] = slot.stream.launch(kernel(5.0), 1, 1, 0)
            return uploads[slot.item]

        def download(slot: Slot) -> Operation[None]:
            item = slot.item
            downloaded = slot.stream.launch(kernel(1.0), 1, 1, 0)
            downloaded.add_done_callback(lambda _: _is_done(uploads[item]) or early.append(item))
            return downloaded

        stages = [Stage("upload", upload), Stage("compute", lambda slot: None), Stage("download", download)]
        async with Pipeline(device, stages) as pipeline:
            async for _ in pipeline.run(range(ITEMS)):
                pass

    in_virtual_time(main)
    assert early == []


def _is_done(operation: Operation[None]) -> bool:
    """True if the device has finished the work, whether or not the operation is resolved."""
    lease = stream_operation(operation).lease
    return operation.done() or lease is None or bool(stream_operation(operation).queue.driver.event_query(lease.handle))


def _by_wait(outside: Stream, one: Stream) -> None:
    outside.wait(one)


def _by_barrier(outside: Stream, one: Stream) -> None:
    join([outside._queue, one._queue])


@pytest.mark.parametrize("b_has", ["nothing", "work", "a failure"])
@pytest.mark.parametrize("meet", [_by_wait, _by_barrier])
def test_stream_that_waits_for_one_stream_of_a_group_after_a_barrier(
    meet: Callable[[Stream, Stream], None], b_has: str
) -> None:
    """The stream of the group waits for the others of its group, and so does every stream that waits for it.

    It may be idle, or still run work from before the barrier. If the driver refuses its next operation, that operation
    represents nothing.
    """
    early: list[bool] = []

    async def main(device: Device) -> None:
        await device.load(kernel(1.0))
        await device.load(kernel(5.0))
        async with device.stream() as outside, StreamGroup(device, ("a", "b")) as group:
            buffer = group["b"].empty(16, np.uint8)
            await group["b"].synchronize()
            long = group["a"].launch(kernel(5.0), 1, 1, 0)
            if b_has == "work":
                group["b"].launch(kernel(1.0), 1, 1, 0)
            group.barrier()
            if b_has == "a failure":
                with pytest.raises(InvalidArgumentError, match="refused"):
                    await group["b"].fill(buffer, 1)
            meet(outside, group["b"])
            behind = outside.launch(kernel(1.0), 1, 1, 0)
            behind.add_done_callback(lambda _: early.append(not _is_done(long)))
            await behind
            await long

    in_virtual_time(main, upsets=[Upset("refuse", 1, "fill", 1)])
    assert early == [False]


def test_a_standing_wait_that_was_skipped_is_made_again() -> None:
    """A failure in the dependent's own stream took it along, and what came once that was read waited for nothing."""
    early: list[bool] = []

    async def main(device: Device) -> None:
        await device.load(kernel(1.0))
        broken = Kernel("broken", source="__global__ void broken() {}")  # which cannot be run without a GPU
        array = np.ones(1 << 20, np.uint8)
        async with StreamGroup(device, ("up", "work")) as group:
            group.add_dependency("work", "up")
            target = group["up"].empty_like(array)
            failed = group["work"].launch(broken, 1, 1)
            copy = group["up"].copy(target, array)  # on the host, and so is the wait for it
            with pytest.raises(SkippedError):
                await group["work"].launch(kernel(1.0), 1, 1, 0)
            assert failed.done()
            assert not _is_done(copy)
            behind = group["work"].launch(kernel(1.0), 1, 1, 0)
            behind.add_done_callback(lambda _: early.append(not _is_done(copy)))
            await behind
            await copy

    in_virtual_time(main)
    assert early == [False]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("meet", [_by_wait, _by_barrier])
def test_a_stream_on_loan_is_waited_for_with_what_others_have_enqueued_there(
    meet: Callable[[Stream, Stream], None], own: bool
) -> None:
    early: list[bool] = []

    async def main(device: Device) -> None:
        await device.load(kernel(1.0))
        await device.load(kernel(5.0))
        async with device.stream() as outside, device.stream() as lent, device.stream() as maker:
            async with lent.lend():
                if own:
                    lent.launch(kernel(1.0), 1, 1, 0)
                long = maker.launch(kernel(5.0), 1, 1, 0)
                lease = stream_operation(long).lease
                assert lease is not None
                device.driver.stream_wait(lent._queue.handle, lease.handle)  # as another library does
                meet(outside, lent)
                behind = outside.launch(kernel(1.0), 1, 1, 0)
                behind.add_done_callback(lambda _: early.append(not _is_done(long)))
                await behind
                await long

    in_virtual_time(main)
    assert early == [False]
