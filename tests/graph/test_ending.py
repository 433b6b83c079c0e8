"""Graphs and their launches at the end of their references, streams, loops and devices."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    ClosedError,
    Device,
    InvalidTypeError,
    Stream,
    UnsupportedError,
    WrongLoopError,
)
from tests.graph.kit import N, read
from tests.helpers import Latch, Peer, in_thread, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def test_closing_the_device_waits_for_launches_and_gives_graphs_back() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = device.stream()
            buffer, target = stream.empty(N, np.uint32), await device.pinned(N, np.uint32)
            async with stream.capture() as graph:
                stream.fill(buffer, 6)
                stream.download(buffer, out=target)
            with stream.capture():
                pass  # on its way to the driver still
            for _ in range(20):
                graph.launch(stream)
        assert (target == 6).all()
        assert peer.calls["graph_build"] == peer.calls["graph_destroy"] == 2
        assert peer.inner.statistics()["graphs"] == 0
        with pytest.raises(ClosedError):
            graph.launch(stream)


async def test_leaving_by_an_exception_gives_graphs_back() -> None:
    with Peer() as peer:
        with pytest.raises(ZeroDivisionError):
            async with aiocuda.open_device(driver=peer.driver) as device:
                stream = device.stream()
                buffer = stream.empty(N, np.uint32)
                async with stream.capture() as graph:
                    stream.fill(buffer, 6)
                launches = [graph.launch(stream) for _ in range(20)]
                raise ZeroDivisionError
        assert all(launch.done() for launch in launches)
        assert peer.inner.statistics()["graphs"] == 0


async def test_graph_without_references_is_destroyed() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        buffer = stream.empty(N, np.uint32)
        for _ in range(10):
            async with stream.capture() as graph:
                stream.fill(buffer, 6)
            await quickly(graph.launch(stream))
        assert peer.calls["graph_build"] == 10
        del graph
        gc.collect()
        with Latch(device) as latch:
            latch.hold(stream)  # so that the watchdog looks after things
            await until(lambda: peer.inner.statistics()["graphs"] == 0, "the driver has them back")


async def test_graph_does_not_wait_for_the_garbage_collector(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    gc.disable()
    try:
        async with stream.capture() as graph:
            fill = stream.fill(buffer, 6)
        for _ in range(3):
            await quickly(graph.launch(stream))
            graph.update(fill, buffer, 7)
        there = weakref.ref(graph), weakref.ref(graph._version.executable)  # type: ignore[union-attr]  # it is there
        del graph
        await quickly(stream.fill(buffer, 1))
        buffer.free()
        del buffer
        assert [reference() for reference in there] == [None, None]
    finally:
        gc.enable()
    del fill


async def test_closed_graph_is_destroyed_after_its_launches(device: Device, stream: Stream, latch: Latch) -> None:
    buffer = stream.empty(N, np.uint32)
    before = device.driver.statistics()["graphs"]
    async with stream.capture() as graph:
        stream.fill(buffer, 6)
    latch.hold(stream)
    launch = graph.launch(stream)
    graph.close()
    graph.close()
    assert graph.closed
    with pytest.raises(ClosedError, match="capture it again"):
        graph.launch(stream)
    with pytest.raises(ClosedError, match="capture it again"):
        await graph
    wakes = device.statistics().watchdog_wakes
    await until(lambda: device.statistics().watchdog_wakes > wakes + 1, "the watchdog, which sweeps")
    assert device.driver.statistics()["graphs"] == before + 1
    latch.release()
    await quickly(launch)
    assert await read(stream, buffer) == 6
    del launch
    latch.hold(stream)
    await until(lambda: gc.collect() >= 0 and device.driver.statistics()["graphs"] == before, "the driver has it back")
    latch.release()


async def test_stream_that_recorded_may_be_closed(device: Device, other: Stream) -> None:
    buffer = other.empty(N, np.uint32)
    async with device.stream() as stream:
        await quickly(other.synchronize())
        async with stream.capture() as graph:
            fill = stream.fill(buffer, 6)
    await quickly(graph.launch(other))
    graph.update(fill, buffer, 7)
    await quickly(graph.launch(other))
    assert await read(other, buffer) == 7


async def test_graph_belongs_to_its_loop(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    async with stream.capture() as graph:
        fill = stream.fill(buffer, 6)

    async def elsewhere() -> None:
        async with device.stream() as mine:
            with pytest.raises(WrongLoopError, match="capture it in that one"):
                graph.launch(mine)
        with pytest.raises(WrongLoopError):
            graph.update(fill, buffer, 3)

    in_thread(elsewhere)
    await quickly(graph.launch(stream))


async def test_loop_that_closes_with_launches_in_flight_leaves_nothing() -> None:
    with Peer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            with Latch(device) as latch:
                kept: list[Stream] = []  # as long as the device

                async def elsewhere() -> None:
                    stream = device.stream()
                    kept.append(stream)
                    buffer = stream.empty(N, np.uint32)
                    await quickly(stream.synchronize())
                    async with stream.capture() as graph:
                        stream.fill(buffer, 6)
                    latch.hold(stream)
                    graph.launch(stream)

                in_thread(elsewhere)
                latch.release()
        assert peer.inner.statistics()["graphs"] == 0


async def test_imported_stream_takes_a_graph_that_is_ready(device: Device, stream: Stream) -> None:
    async with device.stream() as owner:
        shared = Stream.from_handle(device, device.driver.stream_handle(owner._queue.handle))
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.synchronize())
        with stream.capture() as graph:
            stream.fill(buffer, 6)
        await quickly(graph)
        await quickly(graph.launch(shared))
        assert await read(stream, buffer) == 6


async def test_imported_stream_does_not_wait_for_a_graph_on_its_way() -> None:
    async with open_peer() as (peer, device), device.stream() as stream:
        shared = Stream.from_handle(device, device.driver.stream_handle(stream._queue.handle))
        buffer = stream.empty(N, np.uint32)
        await quickly(stream.synchronize())
        with peer.holding_jobs():
            with stream.capture() as graph:
                stream.fill(buffer, 6)
            with pytest.raises(BusyError, match="others enqueue on"):
                graph.launch(shared)
        await quickly(graph)
        await quickly(graph.launch(shared))


async def test_graph_is_launched_on_streams_only(device: Device, stream: Stream, other: Stream) -> None:
    with other.capture() as graph:
        with pytest.raises(BusyError, match="leave the `async with"):
            graph.launch(stream)
        with pytest.raises(BusyError, match="leave the `async with"):
            await graph
    with pytest.raises(InvalidTypeError, match="launched on an"):
        graph.launch(0)  # type: ignore[arg-type]
    with stream.capture():
        with pytest.raises(UnsupportedError, match="another graph"):
            graph.launch(stream)
    assert graph  # of no operations, and yet it is one
    await quickly(graph.launch(stream))
