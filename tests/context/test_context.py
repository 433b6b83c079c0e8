"""The managed context as a whole: its parts, how it begins and how it ends."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import tracemalloc
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    ClosedError,
    InvalidArgumentError,
    ManagedContext,
    Pipeline,
    Stage,
    StepConfig,
    StreamPool,
    TripleBuffer,
    WrongLoopError,
)
from aiocuda.lowlevel import OPEN_DEVICES
from tests.context.programs import SIZE, everything, numbered, value
from tests.helpers import PATIENCE, Latch, Peer, in_thread, quickly, turns
from tests.project.tree import ROOT

pytestmark = pytest.mark.asyncio

#: KB of host memory, the figure of J6; and the bytes that are measured. The objects of Python 3.14 are larger.
MOST_KB = 35
MOST_BYTES = MOST_KB * 1000 + (5_000 if sys.version_info >= (3, 14) else 0)

PURPOSES = ("upload", "compute", "download", "telemetry", "control")


async def test_never_entered() -> None:
    """The warning names the context. It does not name the device that the context would have opened."""
    cure = "use `async with aiocuda.ManagedContext() as context`, or `context = await aiocuda.ManagedContext()`"
    with pytest.warns(RuntimeWarning) as told:
        line = sys._getframe().f_lineno + 1
        ManagedContext(driver="host")
        gc.collect()
    (warning,) = told
    assert str(warning.message) == f"ManagedContext() was never awaited: {cure}"
    assert (warning.filename, warning.lineno) == (__file__, line)


async def test_parts_are_made_once_and_end_with_it() -> None:
    """J1: one object; and what is in it is what it is elsewhere."""
    async with ManagedContext(driver="host") as context:
        assert context.statistics().device.streams == 0
        assert (context.statistics().pool, context.statistics().coordinator, context.statistics().steps) == (None,) * 3
        assert isinstance(context.pool, StreamPool)
        assert isinstance(context.coordinator, AsyncCoordinator)
        assert isinstance(context.triple_buffer, TripleBuffer)
        assert context.triple_buffer.depth == 3
        pipelines = [context.pipeline([Stage("only", lambda slot: None)], depth) for depth in (1, 2)]
        assert context.pipelines == tuple(pipelines)
        assert [pipeline.ring.depth for pipeline in pipelines] == [1, 2]
        assert context.pool is context.pool
        assert context.coordinator is context.coordinator
        assert context.triple_buffer is context.triple_buffer
        await quickly(everything(context))
        statistics = context.statistics()
        assert (statistics.driver, statistics.asynchronous) == ("host", True)
        assert statistics.pool is not None
        assert statistics.pool.leased == 2
        assert statistics.coordinator is not None
        assert statistics.steps is not None
        assert statistics.steps.iterations == 7
        assert [pipeline.iterations for pipeline in statistics.pipelines] == [0, 0, 7]
        assert statistics.device == context.device.statistics()
    assert context.device.closed
    for use in (
        lambda: context.pool.has_ready(),
        lambda: context.coordinator.upload(np.zeros(4)),
        lambda: context.stream("compute"),
        lambda: context.pipeline([Stage("only", lambda slot: None)]),
    ):
        with pytest.raises(ClosedError):
            use()
    for pipeline in context.pipelines:
        with pytest.raises(ClosedError):
            await pipeline.execute_iteration(1)


async def test_streams_by_purpose() -> None:
    """J4: one each, of a priority that suits it; another one when the program has closed it."""
    async with ManagedContext(driver="host") as context:
        streams = {purpose: context.stream(purpose) for purpose in PURPOSES}  # type: ignore[arg-type]
        assert len({stream._queue.handle for stream in streams.values()}) == 5
        assert [streams[purpose].priority for purpose in PURPOSES] == ["normal"] * 3 + ["low", "high"]
        assert [streams[purpose].name for purpose in PURPOSES] == list(PURPOSES)
        assert context.stream("compute") is streams["compute"]
        await streams["compute"].aclose()
        assert context.stream("compute") is not streams["compute"]
        await quickly(context.stream("compute").fill(context.stream("compute").empty(4), 1))


@pytest.mark.parametrize("purpose", ["uploads", "", None, 3, ["compute"]])
async def test_a_purpose_that_there_is_not_is_named(purpose: Any) -> None:
    async with ManagedContext(driver="host") as context:
        with pytest.raises(InvalidArgumentError, match="upload, compute, download, telemetry, control, and not for"):
            context.stream(purpose)


async def test_it_is_awaited_or_entered_and_once() -> None:
    context = ManagedContext(driver="host")
    assert repr(context) == "<ManagedContext, not open>"
    for use in (lambda: context.device, lambda: context.pool, lambda: context.stream("compute"), context.statistics):
        with pytest.raises(ClosedError, match="this context is not open: use `async with ManagedContext"):
            use()
    with pytest.raises(ClosedError, match="not open"):
        await context.triple_buffered_step(StepConfig())
    assert await context is context
    assert repr(context) == "<ManagedContext on <Device host:0 host 0>, asynchronous>"
    with pytest.raises(ClosedError, match="entered before: make another one"):
        await context
    await quickly(everything(context))
    await context.aclose()
    await context.aclose()
    assert context.device.closed
    with pytest.raises(ClosedError, match="entered before: make another one"):
        async with context:
            pass


async def test_it_belongs_to_one_loop() -> None:
    async with ManagedContext(driver="host") as context:

        async def elsewhere() -> None:
            for use in (lambda: context.device, lambda: context.coordinator, lambda: context.stream("compute")):
                with pytest.raises(WrongLoopError, match="this context belongs to another event loop"):
                    use()
            with pytest.raises(WrongLoopError):
                await context.triple_buffered_step(numbered(1))
            with pytest.raises(WrongLoopError, match="this context belongs to another event loop"):
                await context.aclose()

        assert context.pool.has_ready()
        pipeline = context.pipeline([Stage("only", lambda slot: None)])
        streams = context.device.statistics().streams
        await asyncio.get_running_loop().run_in_executor(None, in_thread, elsewhere)
        assert context.device.statistics().streams == streams
        assert await quickly(pipeline.execute_iteration(4)) is None
        await quickly(everything(context))  # nothing refuses new work
    assert context.device.closed
    assert context.device.statistics().streams == 0


async def test_it_ends_after_its_loop() -> None:
    """Parts of a closed loop raise; the device is closed nevertheless."""

    async def opened() -> ManagedContext:
        context = await ManagedContext(driver="host")
        assert context.pool.has_ready()
        return context

    context = await asyncio.to_thread(in_thread, opened)
    with pytest.raises(ClosedError, match="the event loop of this pool has been closed"):
        await quickly(context.aclose())
    await quickly(context.aclose())
    assert "closed" in repr(context)


async def test_a_device_that_does_not_open_leaves_a_context_that_is_not_open() -> None:
    context = ManagedContext(7, driver="host")
    with pytest.raises(InvalidArgumentError, match="there is no device 7"):
        await context
    with pytest.raises(ClosedError, match="not open"):
        assert context.device


async def test_while_it_opens_it_is_not_open_yet() -> None:
    with Peer() as peer:
        context = ManagedContext(driver=peer.driver)
        with peer.holding_jobs():
            opening = asyncio.ensure_future(context)
            await asyncio.sleep(0)
            for use in (lambda: context.device, lambda: context.pool):
                with pytest.raises(ClosedError, match="not open"):
                    use()
            with pytest.raises(ClosedError, match="entered before"):
                await context
        assert await quickly(opening) is context
        await context.aclose()


async def test_it_shares_the_driver_of_an_open_device(driver: str) -> None:
    """A buffer of the one may be used by a stream of the other; each ends by itself."""
    async with aiocuda.open_device(driver=driver) as device, device.stream() as theirs:  # type: ignore[arg-type]
        for asynchronous in (True, False):
            async with ManagedContext(driver=device.driver, asynchronous=asynchronous) as context:
                ours = context.stream("compute")
                buffer = await theirs.upload(np.full(SIZE, 5, np.uint32))
                assert value(await quickly(ours.download(buffer))) == 5
                own = await ours.upload(np.full(SIZE, 6, np.uint32))
                assert value(await quickly(theirs.download(own))) == 6
                await quickly(everything(context))
            assert not device.closed
            await quickly(theirs.fill(buffer, 1))


async def test_work_under_way_ends_before_the_device() -> None:
    """J1: each part, in whatever order they were made."""
    for parts in (("pool", "coordinator"), ("coordinator", "pool")):
        async with ManagedContext(driver="host") as context:
            for part in parts:
                getattr(context, part)
            with Latch(context.device) as latch:
                latch.hold(context.stream("compute"))
                await quickly(latch.held())
                asyncio.get_running_loop().call_soon(latch.release)
            node = context.coordinator.upload(np.ones(SIZE, np.float32))
            last = context.coordinator.download(node)
            async with context.pool.stream() as leased:
                filled = leased.fill(leased.empty(SIZE), 1)
            await context.triple_buffered_step(numbered(3))
        assert (last.result() == 1).all()
        assert filled.done()


async def test_failures_that_no_call_raised_are_raised_at_the_end() -> None:
    """A part's failure ends the others and the device, too."""
    with Peer() as peer:
        with pytest.raises(aiocuda.DriverError, match="does not take this"):
            async with ManagedContext(driver=peer.driver) as context:
                buffer = context.stream("compute").empty(SIZE)
                peer.refuse("upload")
                context.coordinator.upload(np.zeros(SIZE, np.float32), buffer)
                assert context.pool.has_ready()
        assert context.device.closed


async def test_leaving_by_an_error_ends_everything() -> None:
    pipeline: Pipeline
    with pytest.raises(ZeroDivisionError):
        async with ManagedContext(driver="host") as context:
            await everything(context)
            (pipeline,) = context.pipelines
            await context.triple_buffered_step(numbered(3))
            raise ZeroDivisionError
    assert context.device.closed
    assert set(pipeline.ring.states) == {"free"}
    assert context.device.statistics().streams == 0


async def test_cancelling_ends_everything() -> None:
    entered = asyncio.Event()
    contexts: list[ManagedContext] = []

    async def main() -> None:
        async with ManagedContext(driver="host") as context:
            contexts.append(context)
            await everything(context)
            await context.triple_buffered_step(numbered(3))
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(main())
    await quickly(entered.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    assert contexts[0].device.closed


async def holding(context: ManagedContext, latch: Latch) -> None:
    """Hold the stream of a lease, whose pool is closed before the device."""
    lease = await context.pool.stream()
    latch.hold(lease)
    await quickly(latch.held())


async def test_second_call_waits_for_the_same_end() -> None:
    context = await ManagedContext(driver="host")
    with Latch(context.device) as latch:
        await holding(context, latch)
        calls = [asyncio.create_task(context.aclose()) for _ in range(3)]
        await turns(9)
        assert not any(call.done() for call in calls)
        calls[1].cancel()  # it ends its own wait alone
        await turns(9)
        assert [call.done() for call in calls] == [False, True, False]
        assert not context.device.closed
        latch.release()
        await quickly(calls[2])
        assert context.device.closed
        await quickly(calls[0])
    assert context.device.statistics().streams == 0


async def test_time_limit_of_the_end_ends_everything() -> None:
    context = await ManagedContext(driver="host")
    context.device.drain_timeout = PATIENCE
    with Latch(context.device) as latch:
        await holding(context, latch)
        asyncio.get_running_loop().call_later(0.01, latch.release)
        with pytest.raises(TimeoutError):
            await quickly(asyncio.wait_for(context.aclose(), 0.001))
        assert context.device.closed
        await context.aclose()
    assert context.device.statistics().streams == 0


async def test_exception_in_the_block_beside_a_call_ends_both() -> None:
    """The call waits for a stage that never ends. An exception limits the wait for it."""

    async def never(slot: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    context = ManagedContext(driver="host")
    with pytest.raises(ZeroDivisionError):
        async with context:
            context.device.drain_timeout = 0.05
            item = asyncio.create_task(context.pipeline([Stage("never", never)]).execute_iteration(1))
            await quickly(begun.wait())
            call = asyncio.create_task(context.aclose())
            await turns(9)
            raise ZeroDivisionError
    assert context.device.closed
    assert context.device.statistics().streams == 0
    item.cancel()
    with pytest.raises((asyncio.CancelledError, ClosedError)):
        await quickly(item)
    await quickly(call)


async def bytes_taken(driver: Any, asynchronous: bool, *parts: str) -> int:
    """Return the host memory that an entered context takes beside an open device, with these parts of it."""
    taken: list[int] = []
    for _ in range(5):  # the first makes what is made once for all; meanwhile other threads may allocate, too
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            async with ManagedContext(driver=driver, asynchronous=asynchronous) as context:
                for part in parts:
                    getattr(context, part)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        taken.append(after - before)
    return min(taken)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_memory_that_a_context_and_its_parts_take(name: Any, asynchronous: bool) -> None:
    """J6: the context, its pool, its coordinator and its ring, on the driver of an open device."""
    async with aiocuda.open_device(driver=name) as device:
        taken = await bytes_taken(device.driver, asynchronous, "pool", "coordinator", "triple_buffer")
    assert taken <= MOST_BYTES


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["host", "simulated"])
async def test_memory_that_entering_takes_with_a_driver_of_its_own(name: Any, asynchronous: bool) -> None:
    """J6: beside an open device, by name: each has a driver of its own."""
    async with aiocuda.open_device(driver=name):
        assert await bytes_taken(name, asynchronous) <= MOST_BYTES


async def test_pages_name_the_memory_that_a_context_takes() -> None:
    """J6: the row and the page name the one figure that the tests measure, and no other one."""
    row = (ROOT / "docs/reference/features.md").read_text(encoding="utf-8").partition("\n| J6 |")[2].partition("\n")[0]
    page = (ROOT / "docs/how-to/context.md").read_text(encoding="utf-8").partition("\n## What it costs\n")[2]
    for text in (row, page):
        assert {*re.findall(r"[\d.]+ KB", text.partition(" From Python 3.14 on")[0])} == {f"{MOST_KB} KB"}


async def _error_of(ending: Coroutine[Any, Any, None]) -> type[BaseException] | None:
    try:
        await ending
    except WrongLoopError as error:
        return type(error)
    return None


async def test_a_context_that_is_closed_while_it_opens_stays_closed() -> None:
    loop = asyncio.get_running_loop()
    context = ManagedContext(driver="host")
    opening = asyncio.ensure_future(context.__aenter__())
    await asyncio.sleep(0)
    assert not opening.done()
    assert in_thread(lambda: _error_of(context.aclose())) is WrongLoopError  # and changes nothing
    await quickly(context.aclose())
    with pytest.raises(ClosedError, match="closed while it was being opened"):
        await quickly(opening)
    assert not list(OPEN_DEVICES.on_loop(loop))
    with pytest.raises(ClosedError):
        await context.__aenter__()
