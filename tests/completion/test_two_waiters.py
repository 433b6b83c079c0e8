"""Each way to wait × each end of the wait, on each kind of loop. A second waiter always gets its result."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DriverError, Operation
from tests.helpers import PATIENCE, UVLOOP, Latch, Peer, quickly

Wait = Callable[["Operation[Any]"], Coroutine[Any, Any, Any]]
Scenario = Callable[[Device, Peer, Wait], Coroutine[Any, Any, None]]

#: The counts of a device at the end; see `counts_of`.
Counts = tuple[int, int]

WAITS: dict[str, Wait] = {}


def way(name: str) -> Callable[[Wait], Wait]:
    def register(wait: Wait) -> Wait:
        WAITS[name] = wait
        return wait

    return register


@way("await")
async def plain(operation: Operation[Any]) -> Any:
    return await operation


@way("wait_for")
async def wait_for(operation: Operation[Any]) -> Any:
    return await asyncio.wait_for(operation, PATIENCE)


@way("timeout")
async def timeout(operation: Operation[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await operation


@way("gather")
async def gather(operation: Operation[Any]) -> Any:
    found, nothing = await asyncio.gather(operation, asyncio.sleep(0))
    assert nothing is None
    return found


@way("gather under timeout")
async def gather_under_timeout(operation: Operation[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return (await asyncio.gather(operation, operation))[1]


@way("wait")
async def wait(operation: Operation[Any]) -> Any:
    task = asyncio.create_task(operation.wait())
    try:
        done, _ = await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        raise
    return done.pop().result()


@way("as_completed")
async def as_completed(operation: Operation[Any]) -> Any:
    for each in asyncio.as_completed([operation]):
        return await each


@way("shield")
async def shield(operation: Operation[Any]) -> Any:
    return await asyncio.shield(operation)


@way("TaskGroup")
async def task_group(operation: Operation[Any]) -> Any:
    error: Exception
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(operation.wait())
    except* DriverError as errors:
        (error,) = errors.exceptions
    else:
        return task.result()
    raise error


@way("aiocuda.gather")
async def aiocuda_gather(operation: Operation[Any]) -> Any:
    return (await aiocuda.gather(operation, operation))[0]


async def beside_a_second_waiter(
    device: Device, wait: Wait, end: Callable[[asyncio.Task[Any]], Awaitable[None]]
) -> None:
    """Await one operation twice. ``end`` ends the first wait; the second wait and a later one get the result."""
    content = np.arange(100, dtype=np.float32)
    async with device.stream() as stream:
        buffer = await stream.upload(content)
        with Latch(device) as latch:
            latch.hold(stream)
            operation = stream.download(buffer)
            first = asyncio.create_task(wait(operation))
            second = asyncio.create_task(operation.wait())
            await latch.held()
            await end(first)
            assert not second.done()
            assert not operation.done()
            latch.release()
        assert np.array_equal(await quickly(second), content)
        assert np.array_equal(await quickly(operation), content)
        assert await quickly(stream.fill(buffer, 1)) is None


async def cancelled(device: Device, peer: Peer, wait: Wait) -> None:
    async def end(first: asyncio.Task[Any]) -> None:
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    await beside_a_second_waiter(device, wait, end)


async def timed_out(device: Device, peer: Peer, wait: Wait) -> None:
    async def end(first: asyncio.Task[Any]) -> None:
        assert not first.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.002)

    await beside_a_second_waiter(device, wait, end)


async def failing(device: Device, peer: Peer, wait: Wait) -> None:
    async with device.stream() as stream:
        buffer = stream.empty(100)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            peer.refuse_here("fill")
            operation = stream.fill(buffer, 1)
            first = asyncio.create_task(wait(operation))
            second = asyncio.create_task(operation.wait())
            await asyncio.sleep(0)
            assert not operation.done()  # it fails in its turn, after the held kernel
            latch.release()
        for waiter in (first, second):
            with pytest.raises(DriverError) as caught:
                await quickly(waiter)
            assert caught.value.code == 1
        assert first.exception() is not second.exception()  # each has its own traceback
        assert await quickly(stream.fill(buffer, 1)) is None  # the failure was read, so the stream works again


ENDS: dict[str, Scenario] = {"cancelled": cancelled, "timed out": timed_out, "failing": failing}


def run_in(factory: Callable[[], asyncio.AbstractEventLoop] | None, main: Coroutine[Any, Any, Counts]) -> Counts:
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def on_default(scenario: Scenario, wait: Wait, inner: object) -> Counts:
    return run_in(None, opened(scenario, wait, inner))


def on_polling_loop(scenario: Scenario, wait: Wait, inner: object) -> Counts:
    """Run with a driver on which queries are cheap, as on a GPU: the loop polls before it parks."""
    return run_in(None, opened(scenario, wait, inner, polls_freely=True))


def on_uvloop(scenario: Scenario, wait: Wait, inner: object) -> Counts:
    assert UVLOOP is not None
    return run_in(UVLOOP, opened(scenario, wait, inner))


def on_eager_tasks(scenario: Scenario, wait: Wait, inner: object) -> Counts:
    def factory() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]  # since Python 3.12
        return loop

    return run_in(factory, opened(scenario, wait, inner))


def on_three_threads(scenario: Scenario, wait: Wait, inner: object) -> Counts:
    """Run the scenario on one device in three loops at the same time: the one that opened it, and two in threads."""
    barrier = threading.Barrier(3)
    errors: list[BaseException] = []

    async def share(device: Device, peer: Peer) -> None:
        await asyncio.get_running_loop().run_in_executor(None, barrier.wait, PATIENCE)
        await scenario(device, peer, wait)
        await device.drain()

    def thread(device: Device, peer: Peer) -> None:
        try:
            asyncio.run(share(device, peer))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    async def main() -> Counts:
        with Peer(inner) as peer:
            async with aiocuda.open_device(driver=peer.driver) as device:
                threads = [threading.Thread(target=thread, args=(device, peer)) for _ in range(2)]
                for each in threads:
                    each.start()
                with contextlib.ExitStack() as stack:
                    for each in threads:
                        stack.callback(each.join, PATIENCE)
                    await share(device, peer)
                assert not any(each.is_alive() for each in threads)
                counts = counts_of(device)
        for error in errors:
            raise error
        return counts

    return run_in(None, main())


def counts_of(device: Device) -> Counts:
    """Return the numbers of unfinished operations, and of submitted operations that have ended in no counted way."""
    counts = device.statistics()
    return counts.in_flight, counts.submitted - counts.resolved - counts.failed - counts.abandoned


async def opened(scenario: Scenario, wait: Wait, inner: object, polls_freely: bool | None = None) -> Counts:
    with Peer(inner, polls_freely=polls_freely) as peer:
        async with aiocuda.open_device(driver=peer.driver) as device:
            await scenario(device, peer, wait)
            await device.drain()
            return counts_of(device)


LOOPS = {
    "default": on_default,
    "polling": on_polling_loop,
    "threads": on_three_threads,
}
if UVLOOP is not None:
    LOOPS["uvloop"] = on_uvloop
if sys.version_info >= (3, 12):
    LOOPS["eager tasks"] = on_eager_tasks


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_second_waiter_gets_its_result_however_the_first_wait_ends(loop: str, end: str, how: str) -> None:
    assert LOOPS[loop](ENDS[end], WAITS[how], None) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("loop", [loop for loop in ("default", "uvloop") if loop in LOOPS])
def test_second_waiter_gets_its_result_on_a_gpu(loop: str, end: str, how: str) -> None:
    from aiocuda.driver.cuda import CudaDriver

    assert LOOPS[loop](ENDS[end], WAITS[how], CudaDriver.get()) == (0, 0)
