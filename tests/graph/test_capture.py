"""The recorded steps, the tasks and streams that record, and calls that cannot be recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    BusyError,
    Device,
    Graph,
    InvalidArgumentError,
    InvalidTypeError,
    Operation,
    Stream,
    UnsupportedError,
    WrongDeviceError,
)
from aiocuda.device._resources import resources_of
from aiocuda.device.streams._stream import StreamView
from aiocuda.driver.host import HostDriver
from tests.graph.kit import N
from tests.helpers import AFFINE, open_peer, quickly, until

pytestmark = pytest.mark.asyncio


async def prepared(device: Device, stream: Stream) -> tuple[Any, Any, Any]:
    """A buffer of zeros, and pinned arrays to fill it from and to read it into."""
    buffer = stream.empty(N, np.uint32)
    up, down = await device.pinned(N, np.uint32), await device.pinned(N, np.uint32)
    up[:], down[:] = 5, 0
    await quickly(stream.fill(buffer, 0))
    return buffer, up, down


async def test_nothing_runs_before_the_launch_and_all_of_it_then(device: Device, stream: Stream) -> None:
    buffer, up, down = await prepared(device, stream)
    before = stream.statistics().operations
    with stream.capture() as graph:
        operations = [
            stream.copy(buffer, up),
            stream.launch(AFFINE, 1, 32, buffer, N, 3, 1),
            stream.copy(down, buffer),
        ]
    assert isinstance(graph, Graph)
    assert stream.statistics().operations == before
    assert all(isinstance(operation, Operation) for operation in operations)
    assert [operation.kind for operation in operations] == ["upload", "launch", "download"]
    assert {operation.state for operation in operations} == {"captured"}
    assert len(graph) == 3
    assert not down.any()
    launch = graph.launch(stream)
    assert (launch.kind, launch.stream) == ("graph", stream)
    assert await quickly(launch) is None
    assert (down == 16).all()
    up[:] = 7
    await quickly(graph.launch(stream))
    assert (down == 22).all()


async def test_left_by_async_with_it_is_ready(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    async with stream.capture() as graph:
        stream.fill(buffer, 9)
    assert await graph is graph
    await quickly(graph.launch(stream))
    assert (await quickly(stream.download(buffer)) == 9).all()


async def test_stream_works_as_before_when_the_block_has_ended(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    kinds = type(stream), type(stream._queue)
    with stream.capture():
        stream.fill(buffer, 9)
    assert (type(stream), type(stream._queue)) == kinds
    await quickly(stream.fill(buffer, 4))
    assert (await quickly(stream.download(buffer)) == 4).all()


async def test_earlier_work_continues_during_a_capture(device: Device, stream: Stream, latch: Any) -> None:
    """A staged copy still has chunks to go when the capture begins."""
    content = np.arange(3 << 20, dtype=np.uint32)
    buffer = stream.empty(content.shape, content.dtype)
    latch.hold(stream)
    copy = stream.copy(buffer, content)
    with stream.capture() as graph:
        latch.release()
        await quickly(copy)
        stream.fill(buffer[:N], 9)
    await quickly(graph.launch(stream))
    result = await quickly(stream.download(buffer))
    assert (result[:N] == 9).all()
    assert (result[N:] == content[N:]).all()


async def test_forked_stream_records_too_and_joins(device: Device, stream: Stream, other: Stream) -> None:
    first, second, third = (stream.empty(N, np.uint32) for _ in range(3))
    await quickly(stream.synchronize())
    with stream.capture() as graph:
        stream.fill(first, 2)
        other.wait(stream)  # a fork, by a stream
        other.copy(second, first)
        right = other.launch(AFFINE, 1, 32, second, N, 10, 1)
        left = stream.copy(third, first)
        stream.wait(right)  # and a join, by an operation
        stream.launch(AFFINE, 1, 32, second, N, 2, 0)
        other.wait(left)  # back again
        other.launch(AFFINE, 1, 32, third, N, 7, 0)
        stream.wait(other)
    assert [node.driver_node.after for node in graph._nodes] == [(), (0,), (1,), (0,), (2, 3), (2, 3)]
    await quickly(graph.launch(stream))
    assert (await quickly(stream.download(second)) == 42).all()
    assert (await quickly(stream.download(third)) == 14).all()


async def test_stream_that_is_not_joined_is_named(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.synchronize())
    with pytest.raises(InvalidArgumentError, match=r"capture of left ends, and does not wait for right"):
        with stream.capture() as graph:
            other.wait(stream.fill(buffer, 1))
            other.fill(buffer, 2)
    assert graph.closed
    await quickly(other.fill(buffer, 3))  # both are what they were
    await quickly(stream.fill(buffer, 4))


async def test_fork_without_work_needs_no_join(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    with stream.capture() as graph:
        fill = stream.fill(buffer, 1)
        assert other.wait(fill).state == "captured"
    assert len(graph) == 1


async def test_captured_operation_cannot_be_awaited(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    with stream.capture() as graph:
        fill = stream.fill(buffer, 1)
        for use in (
            lambda: asyncio.ensure_future(fill.wait()),
            lambda: aiocuda.gather(fill),
            lambda: asyncio.gather(fill),
            lambda: fill,
            lambda: fill.settle(),
        ):
            with pytest.raises(BusyError, match=r"recorded into a graph.*await graph\.launch\(stream\)"):
                await quickly(use())
        for call in (fill.result, fill.exception, fill.abandon, lambda: fill.add_done_callback(print)):
            with pytest.raises(BusyError, match="recorded into a graph"):
                call()
        assert fill.remove_done_callback(print) == 0
        with pytest.raises(BusyError, match="recorded into a graph"):
            await aiocuda.gather(fill)
        assert not fill.done()
    with pytest.raises(BusyError, match="recorded into a graph"):
        stream.wait(fill)  # it has ended: there is nothing that this could mean
    assert (fill.stream, fill.kind, repr(fill)) == (stream, "fill", f"<Operation {fill.id} fill on left: captured>")
    await quickly(graph.launch(stream))


REFUSED: dict[str, tuple[Callable[[Device, Stream, Any], object], type[Exception], str]] = {
    "empty": (lambda d, s, b: s.empty(4), UnsupportedError, "make the buffer before"),
    "empty_like": (lambda d, s, b: s.empty_like(b), UnsupportedError, "make the buffer before"),
    "pageable up": (lambda d, s, b: s.copy(b, np.zeros(N, np.uint32)), UnsupportedError, "device.pinned"),
    "pageable down": (lambda d, s, b: s.copy(np.zeros(N, np.uint32), b), UnsupportedError, "device.pinned"),
    "download": (lambda d, s, b: s.download(b), UnsupportedError, "out=device.pinned"),
    "wrong size": (lambda d, s, b: s.copy(b, d.pinned(N + 1, np.uint32)), InvalidArgumentError, "sizes differ"),
    "wrong value": (lambda d, s, b: s.fill(b, -1), InvalidArgumentError, "does not fit"),
    "no buffer": (lambda d, s, b: s.download(np.zeros(4)), InvalidTypeError, "takes a device buffer"),  # type: ignore[arg-type]
    "no kernel": (lambda d, s, b: s.launch(print, 1, 1), InvalidTypeError, "takes an aiocuda.Kernel"),  # type: ignore[call-overload]
    "wrong arguments": (lambda d, s, b: s.launch(AFFINE, 1, 1, b), InvalidTypeError, "takes 4 arguments"),
    "wrong block": (lambda d, s, b: s.launch(AFFINE, 1, 4096, b, N, 1, 1), InvalidArgumentError, "block"),
    "overlap": (lambda d, s, b: s.copy(b[1:], b[:-1]), InvalidArgumentError, "overlap"),
}


@pytest.mark.parametrize("verb", REFUSED)
async def test_call_that_cannot_be_recorded_names_the_cure_and_the_rest_remains(
    device: Device, stream: Stream, verb: str
) -> None:
    use, kind, cure = REFUSED[verb]
    buffer = stream.empty(N, np.uint32)
    with stream.capture() as graph:
        stream.fill(buffer, 1)
        with pytest.raises(kind, match=cure):
            use(device, stream, buffer)
        with pytest.raises(BusyError, match="leave the `async with"):
            await stream.aclose()
    assert len(graph) == 1
    await quickly(graph.launch(stream))


async def test_wait_for_what_is_not_captured_is_refused(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    event = other.record()
    with stream.capture():
        for thing in (other.fill(buffer, 1), event):
            with pytest.raises(UnsupportedError, match=r"not captured.*then launch the graph on it"):
                stream.wait(thing)
        with pytest.raises(InvalidTypeError, match="waits for an operation"):
            stream.wait(3)  # type: ignore[arg-type]
    await quickly(other.synchronize())


async def test_two_captures_do_not_mix(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.synchronize())
    async with device.stream() as third:
        with stream.capture() as first, other.capture() as second:
            mine, theirs = stream.fill(buffer, 1), other.fill(buffer, 2)
            for here, what in ((stream, theirs), (other, mine)):
                with pytest.raises(BusyError, match="only what is recorded with it"):
                    here.wait(what)
            third.wait(mine)
            with pytest.raises(BusyError, match="only what is recorded with it"):
                third.wait(theirs)
    assert (len(first), len(second)) == (1, 1)


async def test_another_task_does_not_record(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)

    async def intrude() -> None:
        stream.fill(buffer, 3)

    with stream.capture() as graph:
        stream.fill(buffer, 1)
        with pytest.raises(BusyError, match=r"being captured into a graph by .*, and intruder would"):
            await quickly(asyncio.create_task(intrude(), name="intruder"))
    assert len(graph) == 1


async def test_method_that_was_bound_before_records(device: Device, stream: Stream) -> None:
    buffer, up, _ = await prepared(device, stream)
    await quickly(stream.launch(AFFINE, 1, 32, buffer, N, 1, 0))
    launch, copy, fill, record = stream.launch, stream.copy, stream.fill, stream.record
    with stream.capture() as graph:
        launch(AFFINE, 1, 32, buffer, N, 1, 1)
        copy(buffer, up)
        fill(buffer, 1)
        with pytest.raises(UnsupportedError, match="an event cannot be part of a graph"):
            record()
    assert len(graph) == 3
    assert not (await quickly(stream.download(buffer))).any()


async def test_other_view_of_a_captured_stream_enqueues_nothing(device: Device, stream: Stream) -> None:
    """Otherwise its work would run immediately, and would be missing from the graph."""
    buffer, up, _ = await prepared(device, stream)
    await quickly(stream.launch(AFFINE, 1, 32, buffer, N, 1, 0))
    view = StreamView(stream)
    with stream.capture() as graph:
        for use in (
            lambda: view.launch(AFFINE, 1, 32, buffer, N, 1, 1),
            lambda: view.copy(buffer, up),
            lambda: view.fill(buffer, 1),
            lambda: view.record(),
        ):
            with pytest.raises(BusyError, match="would run instead of being recorded"):
                use()
    assert len(graph) == 0
    assert not (await quickly(view.download(buffer))).any()


async def test_exception_in_the_block_discards_the_recording(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.synchronize())
    with pytest.raises(ZeroDivisionError), stream.capture() as graph:
        other.wait(stream.fill(buffer, 1))
        other.fill(buffer, 2)  # not joined, and that is not what is wrong
        raise ZeroDivisionError
    with pytest.raises(aiocuda.ClosedError, match="capture it again"):
        graph.launch(stream)
    await quickly(stream.fill(buffer, 4))
    assert (await quickly(other.download(buffer)) == 4).all()


async def test_cancellation_in_the_block_discards_the_recording(device: Device, stream: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    graphs: list[Graph] = []

    async def record() -> None:
        async with stream.capture() as graph:
            graphs.append(graph)
            stream.fill(buffer, 1)
            await asyncio.Event().wait()

    task = asyncio.create_task(record())
    await asyncio.sleep(0)
    assert repr(graphs[0]) == "<Graph of left: being captured>"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert graphs[0].closed
    await quickly(stream.fill(buffer, 4))


async def test_capture_is_made_once(device: Device, stream: Stream) -> None:
    capture = stream.capture()
    with capture:
        pass
    with pytest.raises(BusyError, match=r"call stream\.capture\(\) again"):
        with capture:
            pass


async def test_capture_of_nothing_warns(device: Device, stream: Stream, other: Stream) -> None:
    buffer = stream.empty(N, np.uint32)
    await quickly(stream.synchronize())
    with pytest.warns(RuntimeWarning, match=r"has recorded nothing.*`other\.wait\(stream\)`, at the") as caught:
        async with stream.capture() as graph:
            await quickly(other.fill(buffer, 1))
    assert caught[0].filename == __file__
    assert len(graph) == 0


async def test_stream_of_another_device_does_not_take_part() -> None:
    driver = HostDriver(devices=2)
    async with (
        aiocuda.open_device(0, driver=driver) as one,
        aiocuda.open_device(1, driver=driver) as two,
        one.stream() as stream,
        two.stream() as far,
    ):
        buffer, there = stream.empty(N, np.uint32), far.empty(N, np.uint32)
        with stream.capture() as graph:
            fill = stream.fill(buffer, 1)
            with pytest.raises(WrongDeviceError, match="a graph is of one"):
                far.wait(fill)
            with pytest.raises(UnsupportedError, match="from device 1 to device 0"):
                stream.copy(buffer, there)
            with pytest.raises(WrongDeviceError, match="lives on device 1"):
                stream.fill(there, 1)
        with pytest.raises(WrongDeviceError, match="capture it on a stream of that one"):
            graph.launch(far)
        await quickly(graph.launch(stream))


async def test_closing_the_device_in_the_block_closes_the_recording() -> None:
    async with open_peer() as (_, device):
        stream = device.stream()
        buffer = stream.empty(N, np.uint32)
        with stream.capture() as graph:
            stream.fill(buffer, 1)
            await quickly(device.aclose())
            with pytest.raises(aiocuda.ClosedError):
                stream.fill(buffer, 2)
        with pytest.raises(aiocuda.ClosedError):
            await quickly(graph)


async def test_capture_makes_no_driver_call() -> None:
    async with open_peer() as (peer, device), device.stream() as stream, device.stream() as other:
        buffer, up, down = await prepared(device, stream)
        await quickly(stream.launch(AFFINE, 1, 32, buffer, N, 1, 0))
        await until(
            lambda: resources_of(device).loop_states.here().reactor._watchdog is None, "the last tick of the watchdog"
        )
        peer.calls.clear()
        with stream.capture():
            stream.copy(buffer, up)
            other.wait(stream.launch(AFFINE, 1, 32, buffer, N, 3, 1))
            other.copy(down, buffer)
            stream.wait(other)
            asked = set(peer.calls) - {"now"}
        assert asked == set()
