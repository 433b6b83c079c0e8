"""Launches of a graph: operations like any other, one after the other."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    Graph,
    Kernel,
    StaleHandleError,
    Stream,
)
from tests.graph.kit import N, affine, read
from tests.helpers import Latch, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_launches_in_flight_keep_their_order_and_their_arguments(
    device: Device, stream: Stream, latch: Latch
) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.fill(buffer, 0))
    async with stream.capture() as graph:
        digit = affine(stream, buffer, 10, 1)
    latch.hold(stream)
    launches = []
    for value in (1, 2, 3, 4):
        graph.update(digit, buffer, N, 10, value)
        launches.append(graph.launch(stream))
    assert not any(launch.done() for launch in launches)
    graph.update(digit, buffer, N, 10, 9)  # of no launch
    latch.release()
    await quickly(aiocuda.gather(*launches))
    assert await read(stream, buffer) == 1234


async def test_launch_waits_in_its_place_until_the_graph_is_ready() -> None:
    kernel = Kernel("late", source="__global__ void late(unsigned* x) {}", host=lambda x: x.__iadd__(np.uint32(1)))
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.fill(buffer, 0))
        with peer.holding_jobs():
            with stream.capture() as graph:
                added = stream.launch(kernel, 1, 1, buffer)
            launch = graph.launch(stream)
            behind = affine(stream, buffer, 10, 0)
            graph.update(added, buffer)
            again = graph.launch(stream)
            assert launch.state == behind.state == again.state == "queued"
            assert peer.calls["graph_build"] == 0
        await quickly(again)
        assert await read(stream, buffer) == 11
        assert peer.calls["graph_build"] == 1


async def test_other_streams_wait_for_a_launch_and_it_for_them(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.fill(buffer, 0))
    async with stream.capture() as graph:
        affine(stream, buffer, 10, 1)
    latch.hold(other)
    stream.wait(affine(other, buffer, 10, 2))
    launch = graph.launch(stream)
    other.wait(launch)
    last = affine(other, buffer, 10, 3)
    assert not launch.done()
    latch.release()
    await quickly(last)
    assert await read(stream, buffer) == 213


async def test_launches_on_several_streams_come_one_after_the_other(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.fill(buffer, 0))
    async with stream.capture() as graph:
        digit = affine(stream, buffer, 10, 1)
    latch.hold(stream)
    graph.launch(stream)
    graph.update(digit, buffer, N, 10, 2)
    second = graph.launch(other)
    latch.release()
    await quickly(second)
    assert await read(other, buffer) == 12


async def test_first_use_of_a_buffer_waits_for_its_allocation_in_another_stream(
    device: Device, stream: Stream, other: Stream, latch: Latch
) -> None:
    """The launch waits on the device for an allocation in another stream, as any first use does."""
    latch.hold(other)
    await latch.held()
    buffer = other.empty(N, np.uint32)
    async with stream.capture() as graph:
        stream.fill(buffer, 7)
    launch = graph.launch(stream)
    assert not launch.done()
    latch.release()
    await quickly(launch)
    assert await read(stream, buffer) == 7


async def test_graph_holds_its_memory_and_a_launch_its_graph(device: Device, stream: Stream, latch: Latch) -> None:
    target = await device.pinned(N, np.uint32)
    live = device.memory.live_bytes

    def record() -> Graph:
        buffer = stream.empty(N, np.uint32)
        with stream.capture() as graph:
            stream.fill(buffer, 6)
            stream.download(buffer, out=target)
        return graph

    graph = record()
    await quickly(graph)
    gc.collect()
    assert device.memory.live_bytes > live
    latch.hold(stream)
    launch = graph.launch(stream)
    del graph
    gc.collect()
    latch.release()
    await quickly(launch)
    assert (target == 6).all()
    del launch
    await until(lambda: (stream.synchronize(), gc.collect(), device.memory.live_bytes)[-1] == live)


async def test_memory_that_was_freed_is_not_launched_upon(device: Device, stream: Stream) -> None:
    buffer, other = stream.empty(N, np.uint32), stream.empty(N, np.uint32)
    async with stream.capture() as graph:
        fill = stream.fill(buffer, 6)
    await quickly(graph.launch(stream))
    buffer.free()
    with pytest.raises(StaleHandleError, match="has been freed") as caught:
        graph.launch(stream)
    assert "graph.update" in caught.value.__notes__[0]
    with pytest.raises(StaleHandleError, match="has been freed"):
        graph.update(fill, buffer, 7)
    graph.update(fill, other, 7)  # and then it lives again
    await quickly(graph.launch(stream))
    assert await read(stream, other) == 7


async def test_free_waits_for_the_launch_in_flight() -> None:
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        buffer = other.empty(N, np.uint32)
        await quickly(other.synchronize())
        async with stream.capture() as graph:
            stream.fill(buffer, 6)
        with Latch(device) as latch:
            latch.hold(stream)
            await until(lambda: latch.running == 1)
            launch = graph.launch(stream)
            waits = peer.calls["stream_wait"]
            buffer.free()
            assert peer.calls["stream_wait"] == waits + 1  # its own stream waits for the launch, on the device
            latch.release()
            await quickly(launch)


async def test_array_that_a_launch_writes_is_claimed(device: Device, stream: Stream, latch: Latch) -> None:
    buffer, target = stream.empty(N, np.uint32), await device.pinned(N, np.uint32)
    await quickly(stream.fill(buffer, 6))
    async with stream.capture() as graph:
        down = stream.download(buffer, out=target)
    async with stream.capture() as second:
        stream.download(buffer, out=target)
    latch.hold(stream)
    launches = [graph.launch(stream), graph.launch(stream)]  # one after the other, so they do no harm
    with pytest.raises(BusyError, match="is writing this"):
        stream.download(buffer, out=target)
    with pytest.raises(BusyError, match="is writing an array that"):
        second.launch(stream)
    graph.update(down, target[1:], buffer[1:])
    with pytest.raises(BusyError, match="is writing an array that"):
        graph.launch(stream)  # the launches before write all of it
    latch.release()
    await quickly(aiocuda.gather(*launches))
    await quickly(graph.launch(stream))
    await quickly(second.launch(stream))
    await quickly(stream.download(buffer, out=target))


async def test_many_launches(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.fill(buffer, 0))
    async with stream.capture() as graph:
        for _ in range(4):
            affine(stream, buffer, 1, 1)
    for _ in range(500):
        launch = graph.launch(stream)
    await quickly(launch)
    assert await read(stream, buffer) == 2000
    assert device.statistics().in_flight == 0


async def test_steps_in_flight_are_limited() -> None:
    """A graph's steps may take places of the hardware queue; past the limit a launch waits on the host."""
    async with open_peer(max_in_flight=50) as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.fill(buffer, 0))
        async with stream.capture() as graph:
            for _ in range(10):
                affine(stream, buffer, 1, 1)
        async with stream.capture() as large:
            for _ in range(60):
                affine(stream, buffer, 1, 1)
        with Latch(device) as latch:
            latch.hold(stream)
            await until(lambda: latch.running == 1)
            launches = [graph.launch(stream) for _ in range(12)] + [large.launch(stream)]
            assert peer.calls["graph_launch"] == 5
            assert launches[5].state == "queued"
            latch.release()
            await quickly(aiocuda.gather(*launches))
        assert await read(stream, buffer) == 180
