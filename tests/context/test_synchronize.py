"""`ManagedContext.synchronize` and `ManagedContext.asynchronous`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, ClosedError, InvalidTypeError, ManagedContext, WrongLoopError
from tests.context.programs import SIZE, affine, everything, numbered, zeros
from tests.helpers import TRAP, Latch, Peer, in_thread, quickly, turns

pytestmark = pytest.mark.asyncio


#: The streams of a context, and one of the program.
STREAMS: dict[str, Callable[[ManagedContext], Any]] = {
    "upload": lambda context: context.stream("upload"),
    "control": lambda context: context.stream("control"),
    "pool": lambda context: context.pool.stream(exclusive=True),
    "coordinator": lambda context: context.coordinator.compute_stream,
    "own": lambda context: context.device.stream(),
}


@pytest.mark.parametrize("held", STREAMS)
@pytest.mark.parametrize("name", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_it_waits_for_every_stream(name: Any, held: str) -> None:
    async with ManagedContext(driver=name) as context:
        found = STREAMS[held](context)
        stream = await found if hasattr(found, "__await__") else found
        with Latch(context.device) as latch:
            hold = latch.hold(stream)
            others: list[Any] = [context.stream("compute").synchronize(), context.coordinator.host(int)]
            waiting = asyncio.create_task(context.synchronize())
            await quickly(latch.held())
            await quickly(others[0])
            await turns(20)
            assert not waiting.done()
            latch.release()
            await quickly(waiting)
            assert hold.done()
            assert all(other.done() for other in others)
        if held in ("pool", "own"):
            await stream.aclose()


async def test_it_waits_for_nodes_without_a_place_and_for_steps(driver: Any) -> None:
    async with ManagedContext(driver=driver) as context:
        state = await zeros(context)
        last = [context.coordinator.upload(np.ones(SIZE, np.float32)) for _ in range(200)][-1]
        for number in range(2):
            await context.triple_buffered_step(numbered(number, affine(state), ["x", "out"]))
        await quickly(context.synchronize())
        assert last.done()
        assert [telemetry.step for telemetry in await quickly(context.flush())] == [0, 1]
        await quickly(context.synchronize())
        await quickly(everything(context))


async def test_without_parts_and_twice_at_a_time(driver: Any) -> None:
    for asynchronous in (True, False):
        async with ManagedContext(driver=driver, asynchronous=asynchronous) as context:
            await quickly(context.synchronize())
            assert context.statistics().device.streams == 0  # it makes no part
            assert context.statistics().coordinator is None
            operation = context.stream("compute").synchronize()
            await quickly(asyncio.gather(context.synchronize(), context.synchronize()))
            assert operation.done()


async def test_failures_are_raised_where_they_are_awaited() -> None:
    def fails(slot: object) -> None:
        raise ZeroDivisionError

    with Peer() as peer:
        async with ManagedContext(driver=peer.driver) as context:
            stream = context.stream("compute")
            buffer = stream.empty(4)
            peer.refuse("fill")
            failing = stream.fill(buffer, 1)
            node = context.coordinator.host(fails, None)
            await context.triple_buffered_step(numbered(0, fails))
            await quickly(context.synchronize())
            with pytest.raises(aiocuda.DriverError):
                await failing
            with pytest.raises(ZeroDivisionError):
                await node
            await context.triple_buffered_step(numbered(1))
            with pytest.raises(ZeroDivisionError):
                await quickly(context.triple_buffered_step(numbered(2)))


async def test_a_device_fault_ends_the_wait() -> None:
    with Peer() as peer:
        await asyncio.to_thread(TRAP.load, peer.driver, 0)
        with pytest.raises(aiocuda.DeviceFault):
            async with ManagedContext(driver=peer.driver) as context:
                with Latch(context.device) as latch:
                    latch.hold(context.stream("upload"))
                    await latch.held()
                    node = context.coordinator.upload(np.ones(4))
                    launched = context.stream("compute").launch(TRAP, 1, 1)
                    await quickly(context.synchronize())
                assert node.done()
                await launched


async def test_cancellation_ends_only_the_wait() -> None:
    async with ManagedContext(driver="host") as context:
        with Latch(context.device) as latch:
            hold = latch.hold(context.stream("upload"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await context.synchronize()
            assert not hold.done()
            latch.release()
            await quickly(context.synchronize())
            assert hold.result() is None


async def test_before_and_after_the_block_and_in_another_loop() -> None:
    context = ManagedContext(driver="host")
    with pytest.raises(ClosedError, match="not open: use `async with"):
        await context.synchronize()
    async with context:

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError, match="belongs to another event loop"):
                await context.synchronize()

        await asyncio.to_thread(in_thread, elsewhere)
    with pytest.raises(ClosedError, match="this context has been closed"):
        await context.synchronize()


async def test_the_mode_is_known_before_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (True, False):
        context = ManagedContext(driver="host", asynchronous=asked)
        assert context.asynchronous is asked
        async with context:
            assert context.asynchronous is context.device.asynchronous is asked
        assert context.asynchronous is asked
    monkeypatch.setenv("AIOCUDA_ASYNC", "0")
    async with ManagedContext(driver="host") as context:
        assert not context.asynchronous
    with pytest.raises(InvalidTypeError, match="asynchronous is True or False, not 'no'"):
        ManagedContext(asynchronous="no")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(AttributeError):
        context.asynchronous = True  # type: ignore[misc]  # on purpose


async def test_a_coordinator_of_the_program_has_a_drain_of_its_own() -> None:
    async with ManagedContext(driver="host") as context, AsyncCoordinator(context.device) as coordinator:
        gate = coordinator.operation("kernel")
        node = coordinator.host(int, after=gate)
        await quickly(context.synchronize())
        assert not node.done()
        gate.abandon()
