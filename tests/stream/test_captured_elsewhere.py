"""Another library captures a stream that is shared: each enqueue asks the driver first, and the capture is not
disturbed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, Device, Stream
from aiocuda.completion._foreign_work import STREAM_CAPTURE_IMPLICIT
from aiocuda.device._resources import resources_of
from aiocuda.memory import SizeClassResource
from tests.helpers import AFFINE, Latch, Peer, Reports, quickly, until
from tests.memory.others import Interfaced, handle, sweep
from tests.stream.methods import World, methods_of

N = 64

#: What reaches a stream. Each of them would become part of a capture, or spoil it.
ON_A_STREAM = {
    *("upload", "download", "copy", "fill", "launch", "graph_launch", "prefetch", "allocate", "deallocate"),
    *("event_record", "stream_wait"),
}


class Capturer(Peer):
    """A driver with streams that another library captures. It records the calls that reach them meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: set[int] = set()
        self.disturbed: list[str] = []
        self.implicit = False  # as of CUDA's default stream, while a stream that waits for it is captured

    def stream_capturing(self, stream: int) -> bool:
        self.inner.stream_query(stream)
        self.calls["stream_capturing"] += 1
        if self.implicit and stream in self.captured:
            raise BusyError("what waits for a default stream is captured", code=STREAM_CAPTURE_IMPLICIT)
        return stream in self.captured

    def meet(self, name: str, *arguments: Any) -> None:
        super().meet(name, *arguments)
        on = {"event_record": arguments[1:2], "allocate": arguments[2:3], "deallocate": arguments[1:2]}
        stream = on.get(name, arguments[:1])
        if name in ON_A_STREAM and name != "launch" and stream and stream[0] in self.captured:
            self.disturbed.append(name)

    def launcher(self, stream: int, *bound: Any) -> Callable[[Any], None]:
        launch = super().launcher(stream, *bound)

        def watched(values: Any) -> None:
            if stream in self.captured:
                self.disturbed.append("launch")
            launch(values)

        return watched


@contextlib.asynccontextmanager
async def shared(lend: bool) -> AsyncIterator[tuple[Capturer, Device, Stream]]:
    """A stream that others use: imported, or lent."""
    with Capturer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream(name="ours") as own:
            if lend:
                async with own.lend():
                    yield peer, device, own
                    peer.captured.clear()
            else:
                yield peer, device, Stream.from_handle(device, own._queue.handle)
                peer.captured.clear()


@pytest.mark.asyncio
@pytest.mark.parametrize("lend", [False, True], ids=["imported", "lent"])
async def test_no_method_reaches_a_stream_that_another_library_captures(lend: bool) -> None:
    async with shared(lend) as (peer, device, stream), device.stream() as other:
        buffer, target = other.empty(N, np.uint32), await device.pinned(N, np.uint32)
        more = other.empty(N, np.uint32)
        await device.load(AFFINE)
        await quickly(other.fill(more, 0))
        async with other.capture() as graph:
            other.fill(more, 3)
        await quickly(stream.launch(AFFINE, 1, 32, buffer, N, 0, 7))
        elsewhere = other.record()
        peer.captured.add(stream._queue.handle)
        verbs: dict[str, Callable[[], object]] = {
            **methods_of(World(device, stream, other, buffer, target, device.unified(N, np.uint32))),
            "empty": lambda: stream.empty(4),
            "copy between buffers": lambda: stream.copy(buffer, more),
            "copy, staged": lambda: stream.copy(buffer, np.zeros(N, np.uint32)),
            "launch with new memory": lambda: stream.launch(AFFINE, 1, 32, more, N, 1, 1),
            "launch with another grid": lambda: stream.launch(AFFINE, 2, 32, buffer, N, 1, 1),
            "launch that was bound": lambda: stream.launch(AFFINE, 1, 32, buffer, N, 1, 1),
            "wait for an event": lambda: stream.wait(elsewhere),
            "wait for it": lambda: other.wait(stream),
            "free in its order": lambda: more.free(stream),
            "graph": lambda: graph.launch(stream),
        }
        for name, verb in verbs.items():
            with pytest.raises(BusyError, match=r"is being captured into a graph by another library.*end that capture"):
                verb()
                raise AssertionError(f"{name} was accepted")
        assert peer.disturbed == []
        assert not more.freed
        peer.captured.clear()
        stream.launch(AFFINE, 1, 32, buffer, N, 2, 1)
        stream.download(buffer, out=target)
        await quickly(graph.launch(stream))
        assert (target == 15).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("lend", [False, True], ids=["imported", "lent"])
async def test_earlier_work_is_awaited_and_released_during_the_capture(lend: bool) -> None:
    async with shared(lend) as (peer, device, stream):
        buffer, down = stream.empty(N, np.uint32), await device.pinned(N, np.uint32)
        fill, last = stream.fill(buffer, 7), stream.download(buffer, out=down)
        peer.captured.add(stream._queue.handle)
        await quickly(last)
        await quickly(fill)
        assert (down == 7).all()
        freed = peer.calls["deallocate"]
        buffer.free()  # its own stream is taken: it goes back in the order of another one
        assert peer.calls["deallocate"] == freed + 1
        assert peer.disturbed == []


@pytest.mark.asyncio
async def test_dropped_memory_is_freed_on_another_stream_during_the_capture() -> None:
    async with shared(False) as (peer, device, stream), device.stream() as other:
        buffer = stream.empty(N, np.uint32)
        peer.captured.add(stream._queue.handle)
        del buffer
        gc.collect()
        await until(lambda: (other.synchronize(), device.memory.live_bytes)[-1] == 0)
        assert peer.disturbed == []


@pytest.mark.asyncio
async def test_device_drains_during_a_capture_by_another_library() -> None:
    """The drain waits for no work that was enqueued after the begin of the capture."""
    with Capturer() as peer:
        owner = peer.inner.stream_create(0, 0)
        async with aiocuda.open_device(driver=peer.driver) as device:
            stream = Stream.from_handle(device, owner)
            buffer = stream.empty(N, np.uint32)
            for _ in range(50):
                stream.fill(buffer, 7)
            peer.captured.add(owner)
        assert peer.disturbed == []


@pytest.mark.asyncio
async def test_capture_has_to_end_before_the_loan_does() -> None:
    with Capturer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            buffer = stream.empty(N, np.uint32)
            await quickly(stream.synchronize())
            with pytest.raises(BusyError, match="by another library"):
                async with stream.lend():
                    peer.captured.add(stream._queue.handle)
            assert peer.disturbed == []
            peer.captured.clear()
            asked = peer.calls["stream_capturing"]
            await quickly(stream.fill(buffer, 3))
            assert peer.calls["stream_capturing"] == asked  # it is ours again


@pytest.mark.asyncio
async def test_stream_of_our_own_is_never_asked() -> None:
    with Capturer() as peer:
        async with aiocuda.open_device(driver=peer.driver) as device, device.stream() as stream:
            buffer = await quickly(stream.upload(np.zeros(N, np.uint32)))
            stream.launch(AFFINE, 1, 32, buffer, N, 1, 1)
            await quickly(stream.download(buffer))
            buffer.free()
        assert peer.calls["stream_capturing"] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("lend", [False, True], ids=["imported", "lent"])
@pytest.mark.parametrize("implicit", [False, True], ids=["itself", "default stream"])
async def test_arrays_that_cross_leave_a_captured_stream_alone(lend: bool, implicit: bool) -> None:
    """No stream waits for work of the capture, and the memory is freed when the capture has ended."""
    async with shared(True) as (peer, device, stream), device.stream() as other:
        if not lend:
            stream = Stream.from_handle(device, peer.inner.stream_create(0, 0))
        peer.implicit = implicit
        theirs = handle(stream)
        busy, idle = other.empty(N, np.uint32), other.empty(N, np.uint32)
        await quickly(other.synchronize())
        with Latch(device) as latch, Reports() as reports:
            latch.hold(other)
            await quickly(latch.held())
            capsule = idle.__dlpack__(stream=theirs)
            other.fill(busy, 1)
            peer.captured.add(stream._queue.handle)
            with pytest.raises(BusyError, match="is being captured"):
                busy.__dlpack__(stream=theirs)
            with pytest.raises(BusyError, match="is being captured"):
                other.adopt(Interfaced(idle, stream=theirs))
            idle.free()
            del capsule
            sweep(other)
            assert not any("another library" in str(context) for context in reports.contexts)
            latch.release()
            await quickly(other.synchronize())
            sweep(other)
            assert device.memory.live_bytes == 2 * busy.nbytes  # the driver cannot query a stream during a capture
            assert peer.disturbed == []
        peer.captured.clear()
        sweep(other)
        await until(lambda: (sweep(other), device.memory.live_bytes)[-1] == busy.nbytes)


@pytest.mark.asyncio
async def test_memory_kept_for_a_stream_that_is_captured_is_not_trimmed() -> None:
    async with shared(True) as (peer, device, stream), device.stream() as other:
        kept = device.memory.use(SizeClassResource)
        for each in (stream, other):
            each.empty(N, np.uint32).free()
        await quickly(other.synchronize())
        before = kept.kept_bytes
        peer.captured.add(stream._queue.handle)
        await quickly(device.memory.trim())
        assert peer.disturbed == []
        assert kept.kept_bytes == before / 2
        peer.captured.clear()
        await quickly(device.memory.trim())
        assert kept.kept_bytes == 0


# -- for real ----------------------------------------------------------------------------------------------------------


def begin(handle: int, mode: int) -> None:
    assert _libcuda().cuStreamBeginCapture_v2(ctypes.c_void_p(handle), mode) == 0


def end(handle: int) -> int:
    """How many nodes came of it; fails if it was spoilt."""
    graph, count = ctypes.c_void_p(), ctypes.c_size_t()
    assert _libcuda().cuStreamEndCapture(ctypes.c_void_p(handle), ctypes.byref(graph)) == 0
    assert _libcuda().cuGraphGetNodes(graph, None, ctypes.byref(count)) == 0
    assert _libcuda().cuGraphDestroy(graph) == 0
    return count.value


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@pytest.mark.gpu
@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
async def test_real_capture_on_an_imported_stream_stays_valid(mode: int) -> None:
    """Also while our own streams are at work, awaited, watched and captured by us."""
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as own, device.stream() as other:
        resources_of(device).device_state.hot.guarded = True  # as with any library that captures: queries take care
        handle = device.driver.stream_handle(own._queue.handle)
        stream = Stream.from_handle(device, handle)
        buffer, down = other.empty(N, np.uint32), await device.pinned(N, np.uint32)
        await device.load(AFFINE)
        async with other.capture() as graph:
            other.launch(AFFINE, 1, 32, buffer, N, 2, 1)
            other.download(buffer, out=down)
        await quickly(other.fill(buffer, 7))
        await quickly(stream.synchronize())
        begin(handle, mode)
        try:
            for verb in (lambda: stream.fill(buffer, 1), lambda: stream.empty(4), lambda: graph.launch(stream)):
                with pytest.raises(BusyError, match="by another library"):
                    verb()
            await quickly(graph.launch(other))
        finally:
            nodes = end(handle)
        assert nodes == 0
        assert (down == 15).all()
        await quickly(graph.launch(stream))


@pytest.mark.gpu
@pytest.mark.asyncio
async def test_capture_by_torch_on_a_lent_stream_stays_valid() -> None:
    torch = pytest.importorskip("torch")
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as stream, device.stream() as other:
        buffer = other.empty(N, np.uint32)
        await quickly(other.fill(buffer, 7))
        async with stream.lend() as handle:
            theirs = torch.cuda.ExternalStream(handle)
            x = torch.zeros(N, device="cuda")
            with torch.cuda.stream(theirs):
                x += 1
            theirs.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=theirs):
                x += 1
                with pytest.raises(BusyError, match="by another library"):
                    stream.fill(buffer, 1)
                await quickly(other.fill(buffer, 8))
            with torch.cuda.stream(theirs):
                graph.replay()
            theirs.synchronize()
            assert (x.cpu() == 2).all()
        await quickly(stream.fill(buffer, 9))
