"""Real programs for the checker: some have a race that this run may not show, the others are correct."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    DeviceBuffer,
    EventPool,
    ManagedContext,
    Pipeline,
    Slot,
    Stage,
    Stream,
    StreamBarrier,
    StreamGroup,
    StreamPool,
    TripleBuffer,
    UnorderedAccessWarning,
)
from aiocuda.stream import Conflict
from tests.helpers import AFFINE, quickly

__all__ = ["CORRECT", "HOST_ARRAYS", "RACES", "TWO_DEVICES", "N", "Program", "World", "world_of"]

N = 64
HALF = N // 2


@dataclasses.dataclass(frozen=True)
class World:
    """Two devices of a driver, with the streams and the buffers that programs use. No work is unfinished."""

    device: Device
    left: Stream
    right: Stream
    x: DeviceBuffer
    y: DeviceBuffer
    far: Stream  #: of the second device
    z: DeviceBuffer  #: on the second device

    @property
    def conflicts(self) -> list[Conflict]:
        assert self.device.checker is not None
        return self.device.checker.conflicts

    def affine(self, stream: Stream, buffer: Any) -> Any:
        return stream.launch(AFFINE, 1, N, buffer, N, 3, 1)


Program = Callable[[World], Awaitable[object]]


@contextlib.asynccontextmanager
async def world_of(driver: Any) -> AsyncIterator[World]:
    """A world on a driver with two devices. Its warnings are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnorderedAccessWarning)
        async with (
            aiocuda.open_device(0, driver=driver, check=True) as device,
            aiocuda.open_device(1, driver=driver, check=True) as second,
            device.stream(name="left") as left,
            device.stream(name="right") as right,
            second.stream(name="far") as far,
        ):
            await device.load(AFFINE)
            x, y, z = [await stream.upload(np.ones(N, np.uint32)) for stream in (left, left, far)]
            yield World(device, left, right, x, y, far, z)


# -- races -----------------------------------------------------------------------------------------------------------


async def upload_without_an_event_before_the_launch(world: World) -> None:
    world.left.copy(world.x, np.zeros(N, np.uint32))
    world.affine(world.right, world.x)


async def download_before_the_end_of_the_launch(world: World) -> None:
    world.affine(world.left, world.x)
    world.right.download(world.x)


async def two_streams_write(world: World) -> None:
    world.left.fill(world.x, 1)
    world.right.fill(world.x, 2)


async def write_while_another_stream_reads(world: World) -> None:
    world.left.download(world.x)
    world.right.fill(world.x, 2)


async def views_that_overlap(world: World) -> None:
    world.left.fill(world.x[: HALF + 1], 1)
    world.right.fill(world.x[HALF:], 2)


async def event_recorded_before_the_write(world: World) -> None:
    event = world.left.record()
    world.left.fill(world.x, 1)
    world.right.wait(event)
    world.right.download(world.x)


async def wait_for_the_wrong_operation(world: World) -> None:
    first = world.left.fill(world.y, 1)
    world.left.fill(world.x, 1)
    world.right.wait(first)
    world.right.copy(world.y, world.x)


async def wait_after_the_use(world: World) -> None:
    world.left.fill(world.x, 1)
    world.right.download(world.x)
    world.right.wait(world.left)


async def event_that_is_recorded_again_after_the_wait(world: World) -> None:
    pool = EventPool(world.device, 4)
    event = await pool.acquire()
    world.left.record(event=event)
    world.right.wait(event)
    world.left.fill(world.x, 1)
    world.left.record(event=event)
    world.right.download(world.x)
    event.release()


async def copy_of_a_buffer_that_is_filled(world: World) -> None:
    world.left.copy(world.y, world.x)
    world.right.fill(world.x, 2)


async def await_of_an_earlier_operation(world: World) -> None:
    await world.left.fill(world.x, 1)
    world.affine(world.left, world.x)
    world.right.download(world.x)


async def chain_through_a_third_stream_that_waits_too_early(world: World) -> None:
    async with world.device.stream() as third:
        third.wait(world.left)
        world.left.fill(world.x, 1)
        world.right.wait(third)
        world.right.download(world.x)


async def group_without_a_dependency(world: World) -> None:
    async with StreamGroup(world.device, 3) as group:
        group.add_dependency(1, 0)
        group[0].fill(world.x, 1)
        group[2].download(world.x)


async def barrier_without_one_of_the_streams(world: World) -> None:
    async with StreamGroup(world.device, 2) as group:
        group[0].fill(world.x, 1)
        group.barrier()
        world.right.download(world.x)


async def two_leases_of_a_pool(world: World) -> None:
    async with StreamPool(world.device, 2, 2) as pool:
        first, second = await pool.stream(exclusive=True), await pool.stream(exclusive=True)
        first.fill(world.x, 1)
        second.fill(world.x, 2)
        first.release()
        second.release()


async def function_of_another_library(world: World) -> None:
    world.left.submit(lambda buffer: None, world.x)
    world.right.fill(world.x, 2)


async def coordinator_beside_a_stream(world: World) -> None:
    async with AsyncCoordinator(world.device) as coordinator:
        coordinator.compute(AFFINE, 1, N, world.x, N, 2, 1)
        world.right.download(world.x)


async def stages_that_share_a_buffer(world: World) -> None:
    def write(slot: Slot) -> Any:
        return slot.stream.fill(world.x, 1)

    def read(slot: Slot) -> Any:
        return slot.stream.download(world.x, out=slot.pinned("out", N, np.uint32))

    async with Pipeline(world.device, [Stage("write", write), Stage("read", read)]) as pipeline:
        async for _ in pipeline.run(range(8)):
            pass


async def managed_memory_of_two_streams(world: World) -> None:
    shared = world.device.unified(N, np.uint32)
    world.left.fill(shared, 1)
    world.affine(world.right, shared)


RACES: list[Program] = [
    upload_without_an_event_before_the_launch,
    download_before_the_end_of_the_launch,
    two_streams_write,
    write_while_another_stream_reads,
    views_that_overlap,
    event_recorded_before_the_write,
    wait_for_the_wrong_operation,
    wait_after_the_use,
    event_that_is_recorded_again_after_the_wait,
    copy_of_a_buffer_that_is_filled,
    await_of_an_earlier_operation,
    chain_through_a_third_stream_that_waits_too_early,
    group_without_a_dependency,
    barrier_without_one_of_the_streams,
    two_leases_of_a_pool,
    function_of_another_library,
    coordinator_beside_a_stream,
    stages_that_share_a_buffer,
    managed_memory_of_two_streams,
]


async def copy_to_another_device_without_a_wait(world: World) -> None:
    world.left.copy(world.z, world.x)
    world.far.download(world.z)


async def source_on_another_device_is_overwritten(world: World) -> None:
    world.far.fill(world.z, 1)
    world.left.copy(world.x, world.z)


async def wait_of_the_wrong_device(world: World) -> None:
    world.left.copy(world.z, world.x)
    world.left.wait(world.far)
    world.far.fill(world.z, 1)


TWO_DEVICES: list[Program] = [
    copy_to_another_device_without_a_wait,
    source_on_another_device_is_overwritten,
    wait_of_the_wrong_device,
]


# -- host arrays that the program writes while an operation reads them -------------------------------------------------


async def small_array_is_written_after_the_copy(world: World) -> None:
    host = np.zeros(N, np.uint32)
    copied = world.left.copy(world.x, host)
    host[-1] = 1
    await quickly(copied)


async def large_array_is_written_after_the_upload(world: World) -> None:
    host = np.zeros((512, 512), np.float32)
    uploaded = world.left.upload(host)
    host[3, 4] = 1
    await quickly(uploaded)


async def bytes_are_written_after_the_upload(world: World) -> None:
    host = bytearray(1000)
    uploaded = world.left.upload(host)
    host[10] = 1
    await quickly(uploaded)


async def pinned_array_is_written_for_the_next_item(world: World) -> None:
    host = await quickly(world.device.pinned(N, np.uint32))
    copied: Any = None
    for item in range(3):
        host[:] = item
        copied = world.left.copy(world.x, host)
    await quickly(copied)


async def array_is_written_before_a_stream_that_waits_is_awaited(world: World) -> None:
    host = np.zeros(N, np.uint32)
    world.left.copy(world.x, host)
    world.right.wait(world.left)
    read = world.right.download(world.x)
    host[:] = 1
    await quickly(read)


async def source_of_a_graph_is_written_after_the_launch(world: World) -> None:
    host = await quickly(world.device.pinned(N, np.uint32))
    host[:] = 0
    with world.left.capture() as graph:
        world.left.copy(world.x, host)
    launched = graph.launch(world.left)
    host[0] = 1
    await quickly(launched)


HOST_ARRAYS: list[Program] = [
    small_array_is_written_after_the_copy,
    large_array_is_written_after_the_upload,
    bytes_are_written_after_the_upload,
    pinned_array_is_written_for_the_next_item,
    array_is_written_before_a_stream_that_waits_is_awaited,
    source_of_a_graph_is_written_after_the_launch,
]


# -- correct programs ------------------------------------------------------------------------------------------------


async def events(world: World) -> None:
    world.left.copy(world.x, np.zeros(N, np.uint32))
    world.right.wait(world.left.record())
    world.affine(world.right, world.x)
    done = world.right.record()
    world.left.wait(done)
    await quickly(world.left.download(world.x))


async def operations_and_streams(world: World) -> None:
    world.right.wait(world.left.fill(world.x, 1))
    world.affine(world.right, world.x)
    world.left.wait(world.right)
    world.left.fill(world.x, 2)


async def awaits(world: World) -> None:
    await quickly(world.left.fill(world.x, 1))
    await quickly(world.affine(world.right, world.x))
    first, second = world.left.download(world.x), world.right.fill(world.y, 1)
    await quickly(aiocuda.gather(first, second))
    world.right.fill(world.x, 2)
    world.left.wait(world.right)
    world.left.fill(world.y, 2)


async def barriers(world: World) -> None:
    barrier = StreamBarrier(2)
    world.left.fill(world.x, 1)
    world.right.fill(world.y, 1)
    await quickly(asyncio.gather(barrier.wait(world.left), barrier.wait(world.right)))
    world.left.copy(world.x, world.y)
    await quickly(StreamBarrier(1).wait(world.left, world.right))
    world.right.fill(world.x, 3)


async def groups(world: World) -> None:
    async with StreamGroup(world.device, 3) as group:
        group.add_dependency(1, 0)
        group.add_dependency(2, 1)
        group[0].fill(world.x, 1)
        world.affine(group[1], world.x)
        group[2].download(world.x)
        group.barrier()
        group[0].fill(world.x, 2)
        group.barrier()
        for index in range(3):
            group[index].download(world.x)
        await quickly(group.barrier())
        world.left.fill(world.x, 3)


async def coordinators(world: World) -> None:
    async with AsyncCoordinator(world.device) as coordinator:
        up = coordinator.upload(np.ones(N, np.uint32), world.x)
        coordinator.compute(AFFINE, 1, N, world.x, N, 2, 1, after=up)
        coordinator.compute(AFFINE, 1, N, world.y, N, 2, 1)
        first, second = coordinator.download(world.x), coordinator.download(world.y)
        coordinator.upload(np.ones(N, np.uint32), world.x)
        await quickly(asyncio.gather(first, second))
        await quickly(coordinator.drain())
        world.left.fill(world.x, 1)


def stages(world: World) -> list[Stage]:
    def fill(slot: Slot) -> None:
        slot.pinned("source", N, np.uint32)[:] = slot.item

    def upload(slot: Slot) -> Any:
        return slot.stream.copy(slot.buffer("data", N, np.uint32), slot.pinned("source", N, np.uint32))

    def compute(slot: Slot) -> Any:
        return world.affine(slot.stream, slot.buffer("data", N, np.uint32))

    def download(slot: Slot) -> Any:
        return slot.stream.download(slot.buffer("data", N, np.uint32), out=slot.pinned("result", N, np.uint32))

    return [Stage("upload", upload, prepare=fill), Stage("compute", compute), Stage("download", download)]


async def pipelines(world: World) -> None:
    async with Pipeline(world.device, stages(world)) as pipeline:
        assert [result[0] async for result in pipeline.run(range(9))] == [3 * item + 1 for item in range(9)]


async def pipelines_that_replay(world: World) -> None:
    async with Pipeline(world.device, stages(world), replay=True) as pipeline:
        assert [result[0] async for result in pipeline.run(range(9))] == [3 * item + 1 for item in range(9)]


async def graphs(world: World) -> None:
    with world.left.capture() as graph:
        start = world.left.fill(world.x, 1)
        world.right.wait(start)
        world.right.fill(world.y, 2)
        world.affine(world.left, world.x)
        world.left.wait(world.right)
        world.left.copy(world.y, world.x)
    for stream in (world.left, world.right, world.left):
        graph.launch(stream)
    world.right.wait(world.left)
    await quickly(world.right.download(world.y))


async def leases(world: World) -> None:
    async with StreamPool(world.device, 1, 3) as pool:
        async with pool.stream(exclusive=True) as first, pool.stream(exclusive=True) as second:
            second.wait(first.fill(world.x, 1))
            world.affine(second, world.x)
            end = second.record()
        world.left.wait(end)
        world.left.fill(world.x, 2)


async def callbacks_on_the_host(world: World) -> None:
    called: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(_: object) -> None:
        world.right.fill(world.x, 2)
        called.set_result(None)

    world.left.fill(world.x, 1)
    world.left.add_callback(go_on)
    await quickly(called)


async def views_that_do_not_overlap(world: World) -> None:
    world.left.fill(world.x[:HALF], 1)
    world.right.fill(world.x[HALF:], 2)
    world.left.download(world.x[:HALF])
    world.right.copy(world.y[:HALF], world.x[HALF:])


async def reading_at_the_same_time(world: World) -> None:
    world.right.wait(world.left.fill(world.x, 1))
    for stream in (world.left, world.right) * 40:
        stream.download(world.x)
    world.right.copy(world.y, world.x)
    world.left.wait(world.right)
    world.left.fill(world.x, 1)


async def two_devices_with_an_event_between_them(world: World) -> None:
    world.affine(world.left, world.x)
    world.left.copy(world.z, world.x)
    world.far.wait(world.left.record())
    world.far.fill(world.z[:HALF], 4)
    world.left.wait(world.far)
    world.left.copy(world.x, world.z)
    await quickly(world.left.synchronize())
    world.far.fill(world.z, 5)


async def collectives(world: World) -> None:
    async with AsyncCoordinator(world.device) as coordinator:
        for _ in range(2):
            coordinator.all_reduce([world.x, world.y, world.z])
            coordinator.broadcast(world.z, [world.x, world.y])
        await quickly(coordinator.drain())
    world.left.fill(world.x, 1)


async def contexts(world: World) -> None:
    async with ManagedContext(driver=world.device.driver) as context:
        field = await quickly(context.stream("upload").upload(np.ones(N, np.uint32)))
        context.stream("compute").fill(field, 2)
        await quickly(context.synchronize())
        await quickly(context.stream("download").download(field))


async def triple_buffers(world: World) -> None:
    items = [np.full(N, number, np.uint32) for number in range(5)]
    async with TripleBuffer(buffers={"x": (N, np.uint32)}, device=world.device) as ring:
        while items or ring.busy:
            work: list[Any] = []
            if items and (slot := ring.upload_slot()):
                work.append(world.left.copy(slot.buffer("x"), items.pop(0)))
                slot.enter("uploading", until=work[-1])
            if slot := ring.compute_slot():
                work.append(world.affine(world.right, slot.buffer("x")))
                slot.enter("processing", until=work[-1])
            if slot := ring.download_slot():
                work.append(world.left.download(slot.buffer("x")))
                slot.enter("downloading", until=work[-1])
            await quickly(asyncio.gather(*work))
            ring.advance()


async def buffers_that_are_freed_and_allocated_again(world: World) -> None:
    for _ in range(3):
        buffer = world.left.empty(N, np.uint32)
        world.left.fill(buffer, 1)
        world.right.wait(world.left)
        world.right.download(buffer)
        buffer.free()
        other = world.right.empty(N, np.uint32)
        world.right.fill(other, 2)


async def host_arrays_that_are_written_after_an_await(world: World) -> None:
    """Of the copy, of later work of its stream, or of a stream that waits for it: the host knows that it has ended."""

    async def copy(host: Any) -> None:
        await quickly(world.left.copy(world.x, host))

    async def later_work(host: Any) -> None:
        world.left.copy(world.x, host)
        await quickly(world.left.fill(world.y, 1))

    async def event(host: Any) -> None:
        world.left.copy(world.x, host)
        await quickly(world.left.record())

    async def another_stream(host: Any) -> None:
        world.right.wait(world.left.copy(world.x, host))
        await quickly(world.right.download(world.x))

    async def event_of_a_third_stream(host: Any) -> None:
        world.right.wait(world.left.copy(world.x, host))
        world.far.wait(world.right)
        await quickly(world.far.record())

    async def barrier(host: Any) -> None:
        world.left.copy(world.x, host)
        await quickly(StreamBarrier(1).wait(world.right, world.left))

    async def group(host: Any) -> None:
        async with StreamGroup(world.device, [world.right, world.left]) as streams:
            world.left.copy(world.x, host)
            await quickly(streams.barrier())

    async def drained(host: Any) -> None:
        world.left.copy(world.x, host)
        await quickly(world.device.drain())

    arrays = [np.zeros(N, np.uint32), await quickly(world.device.pinned(N, np.uint32))]
    for ways in range(3):
        for way in (copy, later_work, event, another_stream, event_of_a_third_stream, barrier, group, drained):
            for host in arrays:
                host[:] = ways + 1
                await way(host)
                host[:] = 0


async def host_arrays_that_streams_write_in_order(world: World) -> None:
    host = await quickly(world.device.pinned(N, np.uint32))
    host[:] = 0
    world.left.copy(world.y, host)
    world.left.download(world.x, out=host)
    world.left.copy(world.y, host)
    world.affine(world.left, host)  # the kernel writes pinned memory
    world.left.copy(world.y, host)
    world.left.submit(lambda: np.add(host, 1, out=host) if world.device.driver.name == "host" else None)
    world.left.copy(world.y, host)
    with world.right.capture() as graph:
        world.right.copy(world.y, host)
        world.affine(world.right, host)
        world.right.download(world.x, out=host)
    await quickly(world.left.synchronize())
    world.right.copy(world.y, host)
    graph.launch(world.right)
    graph.launch(world.right)
    await quickly(world.device.drain())


async def host_arrays_that_several_streams_read(world: World) -> None:
    host, constant = np.arange(N, dtype=np.uint32), bytes(100)
    work: list[Any] = [world.left.copy(world.x, host), world.right.copy(world.y, host), world.far.copy(world.z, host)]
    work += [stream.upload(constant) for stream in (world.left, world.right)]
    await quickly(asyncio.gather(*work))
    host[:] = 0


CORRECT: list[Program] = [
    events,
    operations_and_streams,
    awaits,
    barriers,
    groups,
    coordinators,
    pipelines,
    pipelines_that_replay,
    graphs,
    leases,
    callbacks_on_the_host,
    views_that_do_not_overlap,
    reading_at_the_same_time,
    two_devices_with_an_event_between_them,
    collectives,
    contexts,
    triple_buffers,
    buffers_that_are_freed_and_allocated_again,
    host_arrays_that_are_written_after_an_await,
    host_arrays_that_streams_write_in_order,
    host_arrays_that_several_streams_read,
]
