"""Closing inside a cancelled anyio scope, which cancels its tasks again in every iteration of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aiocuda
from aiocuda import Device, ManagedContext, Operation, Pipeline, Stage, Stream, StreamGroup
from aiocuda._base._shutdown import end_tasks, finish_shielded, finish_within
from aiocuda.context import StepConfig
from aiocuda.coordination import AsyncCoordinator
from aiocuda.pool import StreamPool
from aiocuda.testing import SimulatedLoop
from tests.helpers import SPIN, UVLOOP, quickly

#: Seconds of virtual time for which the device is held.
HELD = 0.1

#: Most steps of tasks and callbacks during that time. A turn of the loop takes 3 µs of virtual time: a wait that spins
#: takes 100 000 steps, and a wait that polls every millisecond some hundreds.
MOST_STEPS = 1500

Exit = Callable[[Device, anyio.CancelScope], Awaitable[None]]
EXITS: dict[str, Exit] = {}


def _exit(case: Exit) -> Exit:
    EXITS[case.__name__] = case
    return case


def _hold(stream: Stream) -> Operation[None]:
    return stream.launch(SPIN, 1, 1, int(HELD * 1e9))


@_exit
async def pin(device: Device, scope: anyio.CancelScope) -> None:
    array = np.zeros(100, np.float32)
    async with device.stream() as stream, device.pin(array) as pinned:
        buffer = stream.empty(100)
        _hold(stream)
        used = stream.copy(buffer, pinned)
        scope.cancel()
        try:
            await asyncio.sleep(0)
        finally:
            assert not used.done()


@_exit
async def lend(device: Device, scope: anyio.CancelScope) -> None:
    async with device.stream() as stream, stream.lend():
        _hold(stream)
        scope.cancel()
        await asyncio.sleep(0)


async def _closed(thing: Any, scope: anyio.CancelScope) -> None:
    scope.cancel()
    await thing.aclose()


@_exit
async def stream(device: Device, scope: anyio.CancelScope) -> None:
    one = device.stream()
    _hold(one)
    await _closed(one, scope)


@_exit
async def stream_group(device: Device, scope: anyio.CancelScope) -> None:
    group = StreamGroup(device, 2)
    _hold(group[0])
    await _closed(group, scope)


@_exit
async def run_of_a_group(device: Device, scope: anyio.CancelScope) -> None:
    """The functions of a group run on for a while after their cancellation."""

    async def function(stream: Stream) -> None:
        await finish_shielded(_hold(stream).wait())

    async with StreamGroup(device, 2) as group:
        asyncio.get_running_loop().call_later(HELD / 10, scope.cancel)
        await group.run(function)


@_exit
async def stream_pool(device: Device, scope: anyio.CancelScope) -> None:
    pool = StreamPool(device)
    _hold(await pool.stream())
    await _closed(pool, scope)


@_exit
async def lease(device: Device, scope: anyio.CancelScope) -> None:
    async with StreamPool(device) as pool:
        one = await pool.stream()
        _hold(one)
        await _closed(one, scope)


@_exit
async def coordinator(device: Device, scope: anyio.CancelScope) -> None:
    one = AsyncCoordinator(device)
    one.compute(SPIN, 1, 1, int(HELD * 1e9))
    await _closed(one, scope)


@_exit
async def bracket(device: Device, scope: anyio.CancelScope) -> None:
    async with AsyncCoordinator(device) as one, one.operation("kernel") as block:
        assert block.stream is not None
        _hold(block.stream)
        scope.cancel()
        await asyncio.sleep(0)


@_exit
async def another_device(device: Device, scope: anyio.CancelScope) -> None:
    one = await aiocuda.open_device(driver=device.driver)
    kept = one.stream()
    _hold(kept)
    await _closed(one, scope)


@_exit
async def block_of_another_device(device: Device, scope: anyio.CancelScope) -> None:
    async with aiocuda.open_device(driver=device.driver) as one:
        kept = one.stream()
        _hold(kept)
        scope.cancel()
        await asyncio.sleep(0)


def _pipeline(device: Device) -> Pipeline:
    return Pipeline(device, [Stage("work", lambda slot: _hold(slot.stream))], depth=2)


@_exit
async def run_of_a_pipeline(device: Device, scope: anyio.CancelScope) -> None:
    async with _pipeline(device) as one:
        asyncio.get_running_loop().call_later(HELD / 10, scope.cancel)
        async for _ in one.run(range(5)):
            pass


@_exit
async def item_of_a_pipeline(device: Device, scope: anyio.CancelScope) -> None:
    async with _pipeline(device) as one:
        asyncio.get_running_loop().call_later(HELD / 10, scope.cancel)
        await one.execute_iteration(None)


@_exit
async def context(device: Device, scope: anyio.CancelScope) -> None:
    one = await ManagedContext(driver=device.driver)
    config = StepConfig({}, lambda step: _hold(step.stream), [])
    for _ in range(2):
        await one.triple_buffered_step(config)
    await asyncio.sleep(HELD / 10)
    await _closed(one, scope)


@pytest.mark.parametrize("name", EXITS)
def test_an_end_in_a_cancelled_scope_does_not_spin(name: str) -> None:
    """The device is held. Closing ends when the device has finished, and the cancellation stays in its scope."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        async with aiocuda.open_device(driver="simulated") as device:
            await device.load(SPIN)
            began = loop.time()
            with anyio.CancelScope() as scope:
                steps = loop.steps
                await EXITS[name](device, scope)
            assert scope.cancelled_caught
        assert loop.time() - began >= HELD
        assert loop.steps - steps < MOST_STEPS

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


class Work:
    """Work that ends after 0.05 s, even if its waiters are cancelled."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, self.ended.set)

    async def run(self) -> str:
        await self.ended.wait()
        return "done"


async def _to_the_end() -> object:
    return await finish_shielded(Work().run())


async def _at_most() -> object:
    ended, cancelled = await finish_within(5.0, Work().run())
    if cancelled is not None:
        raise cancelled
    return ended


async def _all_ended() -> object:
    async def stubborn() -> str:
        return await finish_shielded(Work().run())

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks({task}, 0.0)
    return "done"


WAITS = pytest.mark.parametrize("wait", [_to_the_end, _at_most, _all_ended])


@WAITS
@pytest.mark.parametrize(
    "factory",
    [asyncio.SelectorEventLoop, pytest.param(UVLOOP, marks=pytest.mark.skipif(not UVLOOP, reason="no uvloop"))],
)
def test_a_shielded_wait_uses_no_core(wait: Callable[[], Awaitable[object]], factory: Any) -> None:
    async def main() -> None:
        ended: object = None
        with anyio.CancelScope() as scope:

            async def cancel() -> None:
                for _ in range(10):  # so that the shielded wait has begun
                    await asyncio.sleep(0)
                scope.cancel()

            cancelling = asyncio.create_task(cancel())
            began = time.thread_time()
            ended = await wait()
            used = time.thread_time() - began
            await asyncio.sleep(0)  # the scope cancels this task
            pytest.fail("the scope was left behind")
        await cancelling
        assert (ended, scope.cancelled_caught) == ("done", True)
        assert used < 0.02  # a wait that spins uses 0.05 s

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@WAITS
def test_a_native_cancellation_in_a_scope_is_raised_once(wait: Callable[[], Awaitable[object]]) -> None:
    """A timeout around the wait raises `TimeoutError`, and leaves no further cancellation."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        with anyio.CancelScope() as scope:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await wait()
                    await asyncio.sleep(0)
                    await asyncio.Event().wait()
            assert task.cancelling() == 0
            await asyncio.sleep(0)
        assert not scope.cancelled_caught
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(_fail())
                with anyio.CancelScope() as inner:
                    inner.cancel()
                    await quickly(wait())
                await asyncio.Event().wait()
        assert caught.group_contains(ZeroDivisionError)
        assert task.cancelling() == 0

    asyncio.run(main())


async def _fail() -> None:
    await asyncio.sleep(0.001)
    raise ZeroDivisionError
