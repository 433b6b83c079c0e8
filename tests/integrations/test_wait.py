"""`aiocuda.wait` for work of PyTorch, CuPy and cuda.core on a GPU, without a device of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import aiocuda
from aiocuda import Device, UnsupportedError
from tests.helpers import PATIENCE, Latch, quickly, turns
from tests.integrations.libraries import library, requires

torch, cupy, core = library("torch"), library("cupy"), library("cuda.core")

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio]


class Adapter:
    """The adapter of the page, for a library that aiocuda does not know."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class Library(NamedTuple):
    """What the tests need of a library."""

    name: str

    def stream(self, handle: int) -> Any:
        """Return the library's object for a stream."""
        if self.name == "torch":
            return torch.cuda.ExternalStream(handle)
        if self.name == "cupy":
            return cupy.cuda.Stream.from_external(Adapter(handle))
        return core.Stream.from_handle(handle)

    def event(self, stream: Any) -> Any:
        """Return an event after all work of a stream."""
        return stream.record_event() if self.name == "torch" else stream.record()


LIBRARIES = [
    pytest.param(Library(name), id=name, marks=requires("cuda.core" if name == "core" else name))
    for name in ("torch", "cupy", "core")
]


@contextlib.contextmanager
def held(device: Device, stream: Any) -> Iterator[Latch]:
    with Latch(device) as latch:
        latch.hold(stream)
        yield latch


@pytest.mark.parametrize("library", LIBRARIES)
async def test_streams_and_events(library: Library) -> None:
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as ours, device.stream() as free:
        theirs, other = (library.stream(each.__cuda_stream__()[1]) for each in (ours, free))
        with held(device, ours) as latch:
            await latch.held()
            waits = [aiocuda.wait(theirs), aiocuda.wait(library.event(theirs)), aiocuda.wait([theirs, other])]
            tasks = [asyncio.ensure_future(one.wait()) for one in waits]
            await quickly(aiocuda.wait([other, library.event(other)]))
            await turns()
            assert not any(task.done() for task in tasks)
            with pytest.raises(TimeoutError):
                await aiocuda.wait(theirs, timeout=0.01)
            latch.release()
            await quickly(asyncio.gather(*tasks))
        await quickly(aiocuda.wait(theirs))


@pytest.mark.parametrize("library", LIBRARIES[:2])  # an event of cuda.core is recorded once
async def test_event_that_is_recorded_again_meanwhile(library: Library) -> None:
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as first, device.stream() as second:
        streams = [library.stream(each.__cuda_stream__()[1]) for each in (first, second)]
        with held(device, first) as latch, held(device, second) as other:
            await latch.held()
            await other.held()
            event = library.event(streams[0])
            waiting = aiocuda.wait(event)
            event.record(streams[1])
            latch.release()
            await quickly(waiting)
            other.release()


@pytest.mark.parametrize("library", LIBRARIES)
async def test_many_waits_of_several_loops(library: Library) -> None:
    # With the streams of notifiers, more than 64: CUDA makes some of them only when no kernel runs.
    async with aiocuda.open_device(driver="cuda", streams_ahead=256) as device:
        streams = [device.stream() for _ in range(64)]
        theirs = [library.stream(each.__cuda_stream__()[1]) for each in streams]

        async def elsewhere() -> None:
            await asyncio.gather(*[aiocuda.wait(each).wait() for each in theirs for _ in range(3)])

        await quickly(elsewhere())  # nothing runs
        with Latch(device) as latch:
            # One kernel: beside several, streams that share a hardware queue with one of them would wait, too.
            first = latch.hold(streams[0])
            await latch.held()
            for stream in streams[1:]:
                stream.wait(first)
            threads = [asyncio.ensure_future(asyncio.to_thread(asyncio.run, elsewhere())) for _ in range(4)]
            tasks = [asyncio.ensure_future(aiocuda.wait(each).wait()) for each in theirs]
            await turns()
            assert not any(task.done() for task in (*tasks, *threads))
            latch.release()
            await quickly(asyncio.gather(*tasks, *threads))
        for stream in streams:
            await stream.aclose()


@requires("torch")
async def test_wait_outlives_the_device() -> None:
    x = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    async with aiocuda.open_device(driver="cuda"):
        for _ in range(20):
            x = x @ x / 4096
        event = torch.cuda.current_stream().record_event()
        waiting = aiocuda.wait(x)
        task = asyncio.ensure_future(waiting.wait())
        await turns(2)
    await quickly(task)
    assert event.query()
    assert waiting.done()


@requires("torch")
async def test_work_that_is_enqueued_later_is_not_waited_for() -> None:
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as ours:
        theirs = torch.cuda.ExternalStream(ours.__cuda_stream__()[1])
        waiting = aiocuda.wait(theirs)
        with held(device, ours) as latch:
            await quickly(waiting)
            latch.release()


@requires("torch")
async def test_captured_stream() -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        for thing in (torch.cuda.current_stream(), x):
            with pytest.raises(UnsupportedError, match="captured"):
                aiocuda.wait(thing)
    graph.replay()
    await quickly(aiocuda.wait(x))
    assert x.tolist() == [2.0] * 3


FAULT = """
import asyncio, torch, aiocuda

async def main():
    x, bad = torch.zeros(10, device="cuda"), torch.full((10,), 1 << 40, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    early, theirs = torch.cuda.current_stream().record_event(), torch.cuda.Stream()
    unawaited = aiocuda.wait(theirs)
    with torch.cuda.stream(theirs):
        x[bad]
    event = theirs.record_event()
    things = [theirs, event, torch.cuda.default_stream(), x]

    async def one(thing):
        await aiocuda.wait(thing)  # the call itself raises if the fault has been seen

    results = await asyncio.wait_for(asyncio.gather(*map(one, things), return_exceptions=True), 30)
    failed = [isinstance(each, aiocuda.DeviceFault) for each in results]
    print(sum(failed) >= 2, failed[0])
    for thing in (early, event, theirs):
        try:
            await aiocuda.wait(thing)
        except aiocuda.DeviceFault:
            print("fault")
    try:
        await unawaited
    except aiocuda.DeviceFault:
        print("fault")

asyncio.run(main())
"""


@pytest.mark.slow
@requires("torch")
async def test_fault_reaches_every_waiter() -> None:
    program = [sys.executable, "-c", textwrap.dedent(FAULT)]
    ended = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=PATIENCE * 2)
    assert ended.stdout.split() == ["True", "True", *["fault"] * 4], ended.stderr


async def test_adapter_with_the_stream_protocol() -> None:
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as stream:
        theirs = Adapter(stream.__cuda_stream__()[1])  # refused while the kernel of the latch is being loaded
        waiting = aiocuda.wait(theirs)
        with held(device, stream) as latch:
            await latch.held()
            await quickly(waiting)
            later = asyncio.ensure_future(aiocuda.wait([theirs, Adapter(0)]).wait())
            await turns()
            assert not later.done()
            latch.release()
            await quickly(later)
