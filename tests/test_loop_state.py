"""`LoopState.offload`: functions that may block, on the device's worker threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import aiocuda
from aiocuda import ClosedError, DrainTimeoutWarning
from aiocuda.device._resources import resources_of
from tests.helpers import PATIENCE, Reports, in_thread, quickly, until

pytestmark = pytest.mark.asyncio


class Held:
    """A function that blocks until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.left = False
        self._error = error

    def __call__(self) -> str:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        self.left = True
        if self._error is not None:
            raise self._error
        return "done"


@pytest.fixture
def held() -> Iterator[Held]:
    function = Held()
    yield function
    function.gate.set()


async def test_it_runs_on_another_thread_with_the_arguments_and_the_context() -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    async with aiocuda.open_device(driver="host") as device:
        variable.set("something")
        assert await device.offload(divmod, 7, 2) == (3, 1)
        assert await device.offload(threading.get_ident) != threading.get_ident()
        assert await device.offload(variable.get) == "something"
        await device.offload(variable.set, "changed in a copy")
        assert variable.get() == "something"


async def test_loop_continues_during_the_call(held: Held) -> None:
    async with aiocuda.open_device(driver="host") as device:
        running = asyncio.create_task(device.offload(held))
        await until(held.entered.is_set)
        stream = device.stream()
        await quickly(stream.synchronize())
        assert not running.done()
        held.gate.set()
        assert await quickly(running) == "done"


@pytest.mark.parametrize(("raised", "expected"), [(ValueError("why"), ValueError), (StopIteration(), RuntimeError)])
async def test_its_failure_is_the_waits(raised: BaseException, expected: type[BaseException]) -> None:
    def fail() -> None:
        raise raised

    async with aiocuda.open_device(driver="host") as device:
        with pytest.raises(expected) as caught:
            await quickly(device.offload(fail))
        assert raised in (caught.value, caught.value.__cause__)


async def test_cancelling_the_wait_does_not_stop_the_call_and_its_failure_is_reported() -> None:
    held = Held(ValueError("unheard"))
    async with aiocuda.open_device(driver="host") as device:
        with Reports() as reports:
            waiting = asyncio.create_task(device.offload(held))
            await until(held.entered.is_set)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await quickly(waiting)
            assert not held.left
            held.gate.set()
            await until(lambda: reports.failures, "the report")
        assert [str(failure) for failure in reports.failures] == ["unheard"]


async def test_closing_waits_for_it(held: Held) -> None:
    device = await aiocuda.open_device(driver="host")
    running = asyncio.create_task(device.offload(held))
    await until(held.entered.is_set)
    closing = asyncio.create_task(device.aclose())
    await until(lambda: resources_of(device).closing, "the end")
    with pytest.raises(ClosedError):
        await device.offload(held)
    assert not closing.done()
    held.gate.set()
    await quickly(closing)
    assert held.left
    assert await quickly(running) == "done"
    with pytest.raises(ClosedError, match="has been closed"):
        await device.offload(held)


async def test_leaving_by_an_exception_does_not_wait_for_ever(held: Held) -> None:
    async def leave() -> None:
        async with aiocuda.open_device(driver="host") as device:
            device.drain_timeout = 0.05
            tasks.append(asyncio.create_task(device.offload(held)))
            await until(held.entered.is_set)
            raise ZeroDivisionError

    tasks: list[asyncio.Task[Any]] = []
    with pytest.warns(DrainTimeoutWarning, match="or threads did not"), pytest.raises(ZeroDivisionError):
        await quickly(leave())
    assert not held.left
    tasks[0].cancel()
    await asyncio.wait(tasks)


async def test_each_loop_gets_its_own_results() -> None:
    async with aiocuda.open_device(driver="host") as device:

        async def elsewhere() -> tuple[int, int]:
            loop = id(asyncio.get_running_loop())
            return loop, await quickly(device.offload(lambda: loop))

        loop, found = await asyncio.to_thread(in_thread, elsewhere)
        assert found == loop != id(asyncio.get_running_loop())
        assert await device.offload(int, "12") == 12
